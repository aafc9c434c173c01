"""The example scripts run as a reader would run them, without a warning, and show what they promise."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.smollm2 import load_once

EXAMPLES = Path(__file__).parents[2] / "examples"


Printed = Callable[[str], str]


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    """Runs a script in an empty folder: what it prints. A warning is an error here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    load_once(monkeypatch)

    def run(name: str) -> str:
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return run


def numbers(line: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*", line)]


def test_every_example_is_in_the_list() -> None:
    listed = re.findall(r"\]\((\S+)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))


def test_dispersion(printed: Printed, tmp_path: Path) -> None:
    out = printed("dispersion.py")
    n, possible, softmax, log_length, target = numbers(next(line for line in out.splitlines() if "65,536" in line))
    assert n == 65536
    assert softmax <= possible < 0.001
    assert min(log_length, target) > 0.9
    assert "beyond 55 items" in out
    assert (tmp_path / "dispersion.png").read_bytes().startswith(b"\x89PNG")


def test_sharpen_model(printed: Printed) -> None:
    *_, few, many = printed("sharpen_model.py").splitlines()
    names, plain, sharp = numbers(few)
    assert names == 8
    assert plain <= sharp <= 4
    names, plain, sharp = numbers(many)
    assert names == 20
    assert plain < sharp <= 4


def test_probe_heads(printed: Printed) -> None:
    out = printed("probe_heads.py")
    assert out.startswith("30 layers, a column each; 9 heads, a row each\n")
    maps = re.findall(r"^head \d  (.*)$", out, re.MULTILINE)
    assert [len(line) for line in maps] == [60] * 9
    steep, of = numbers(next(line for line in out.splitlines() if "above one half" in line))
    assert of == 270
    assert 30 < steep < 135
    *_, first, last = numbers(out.splitlines()[-1])
    assert last > 3 * first


def test_own_policy(printed: Printed) -> None:
    out = printed("own_policy.py")
    assert '"kind": "example-top-weight"' in out
    lines = {line[:11].strip(): numbers(line[11:]) for line in out.splitlines()[-3:]}
    assert list(lines) == ["plain", "top weight", "paper"]
    assert all(line[0] > 90 for line in lines.values())
    # The law of its own pays at sizes far from training.
    assert lines["top weight"][2] > lines["plain"][2] + 3
    assert lines["top weight"][3] > lines["plain"][3]


def test_train_from_scratch(printed: Printed, tmp_path: Path) -> None:
    _, plain, clipped, *rest = printed("train_from_scratch.py").splitlines()
    accuracy, largest = numbers(plain.partition("accuracy")[2])[:2]
    accuracy_clipped, largest_clipped, times = numbers(clipped.partition("accuracy")[2])
    assert accuracy_clipped > accuracy
    assert largest > 1000
    assert largest_clipped < 60
    assert times > 0
    assert len([line for line in rest if line.startswith("layer")]) == 8
    assert (tmp_path / "training" / "results.json").is_file()
