"""What commands show while they work, where there is no terminal."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sharpmax.cli import terminal
from sharpmax.results import load


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds since the start, as the commands see them; the test moves them."""
    now = [100.0]
    monkeypatch.setattr(terminal, "monotonic", lambda: now[0])
    return now


def test_steps_are_plain_lines_at_most_every_ten_seconds(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with terminal.steps_shown() as tell:
        for step in range(1, 31):
            tell("learning", step, 30, f"loss {1 / step:.2f}")
            clock[0] += 1
        tell("checking", 1, 0, "")
    assert capsys.readouterr().err.splitlines() == [
        "learning: 1 of 30 (3%) loss 1.00",
        "learning: 11 of 30 (37%) loss 0.09",
        "learning: 21 of 30 (70%) loss 0.05",
        "checking",
    ]


def test_bars_and_stages_are_plain_lines(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.progress() as note:
        note("loading smollm2")
        note("loading smollm2")
    with terminal.bar("evaluating", 4) as advance:
        advance(1, "kv")
        clock[0] += 10
        advance(2, "kv")
    out = capsys.readouterr()
    assert out.err.splitlines() == ["loading smollm2", "evaluating: 1 of 4 (25%) kv", "evaluating: 3 of 4 (75%) kv"]
    assert out.out == ""


def test_a_command_reports_its_progress(home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    line = ["evaluate", home / "model", "--task", home / "letters.py", "--sizes", "4", "--prompts", "2", "--no-text"]
    outcome = sharpmax_command(*line, "--no-draw", "--out", tmp_path)
    assert outcome.code == 0
    first, *rest = outcome.err.splitlines()
    assert first == f"loading {home / 'model'}"
    assert any(line.startswith("evaluating: ") and "%" in line for line in rest)


def test_a_model_in_this_folder_has_the_name_of_the_folder(
    home: Path, tmp_path: Path, sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home / "model")
    line = ["evaluate", ".", "--task", home / "letters.py", "--sizes", "4", "--prompts", "2", "--no-text", "--no-draw"]
    assert sharpmax_command(*line, "--out", tmp_path).code == 0
    assert load(tmp_path).tables["setting"]["model"] == "model"


def test_a_wide_table_becomes_several_that_fit_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = ["variant", *(f"n = {2**power}" for power in range(4, 15))]
    rows = [[name, *(f"{power}.5" for power in range(11))] for name in ("softmax, published", "entropy-target")]
    terminal.print_table("Accuracy (%)", columns, rows)
    piped = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in piped if "entropy-target" in line] == [["entropy-target", *rows[1][1:]]]
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "dumb"), ("COLUMNS", "80"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    terminal.print_table("Accuracy (%)", columns, rows)
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80
    first, second = (line.split()[1:] for line in lines if "entropy-target" in line)
    assert first + second == rows[1][1:]


def test_what_a_row_is_stands_in_each_part_of_a_wide_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "dumb"), ("COLUMNS", "40"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    columns = ["algorithm", "size", *(f"variant {number}" for number in range(4))]
    terminal.print_table("Right", columns, [["minimum", "15", *("1.0", "2.0", "3.0", "4.0")]], labels=2)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    parts = [line for line in lines if "minimum" in line]
    assert [line[:2] for line in parts] == [["minimum", "15"]] * len(parts)
    assert [cell for line in parts for cell in line[2:]] == ["1.0", "2.0", "3.0", "4.0"]
