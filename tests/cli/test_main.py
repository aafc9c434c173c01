"""What all commands share: exit codes, one-line errors, `--json`, files named in results."""

from __future__ import annotations

import hashlib
import io
import json
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import sharpmax
from sharpmax.cli import env, main
from sharpmax.errors import ArgumentError
from sharpmax.experiments import reproduce as tables
from sharpmax.experiments.benchmarks import cpu as cpu_bench
from sharpmax.experiments.run_folder import writing
from sharpmax.policies.basic import Constant
from sharpmax.policies.registry import load_policy
from tests.cli.lines import is_one_error_line, saved


def test_version_and_help(sharpmax_command: Any) -> None:
    for words in (["--version"], ["--version", "reproduce"]):
        outcome = sharpmax_command(*words)
        assert (outcome.code, outcome.out, outcome.err) == (0, f"sharpmax {sharpmax.__version__}\n", "")
    outcome = sharpmax_command()
    assert outcome.code == 2
    assert "Example: sharpmax reproduce" in outcome.out


def test_out_is_a_file_or_cannot_be_written(
    sharpmax_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for out in (file, file / "below"):
        assert "--out" in sharpmax_command.refused("reproduce", "--out", out)
    assert file.read_text() == "mine"
    # A folder without the right to write would stop everybody but root, so the refusal is made up.
    monkeypatch.setattr("tempfile.TemporaryFile", failing(PermissionError(13, "Permission denied")))
    assert "Permission denied" in sharpmax_command.refused("bench", "--out", tmp_path)


def test_a_folder_that_another_run_writes_to_is_refused(sharpmax_command: Any, tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    with writing(tmp_path):
        error = sharpmax_command.refused("explore", "--no-open", "--out", tmp_path)
        assert f"another run is writing to {str(tmp_path)!r} now" in error
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    sharpmax_command.ok("explore", "--no-open", "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["explore.html"]


def failing(problem: BaseException) -> Any:
    def fail(*arguments: Any, **more: Any) -> None:
        raise problem

    return fail


def test_errors_are_one_line_and_debug_shows_the_traceback(
    sharpmax_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "reproduce_tables", failing(ArgumentError("two\nlines")))
    assert sharpmax_command("reproduce", "--out", tmp_path).err == "sharpmax: error: two lines\n"
    for words in (["reproduce", "--out", tmp_path, "--debug"], ["--debug", "reproduce", "--out", tmp_path]):
        outcome = sharpmax_command(*words)
        assert outcome.code == 2
        assert "Traceback" in outcome.err
    monkeypatch.setattr(tables, "reproduce_tables", failing(KeyboardInterrupt()))
    outcome = sharpmax_command("reproduce", "--out", tmp_path)
    assert (outcome.code, outcome.err) == (130, "")
    monkeypatch.setattr(tables, "reproduce_tables", failing(ZeroDivisionError("ours")))
    outcome = sharpmax_command("reproduce", "--out", tmp_path)
    assert outcome.code == 1
    assert "ZeroDivisionError: ours" in outcome.err
    assert outcome.err.splitlines()[-1].startswith("sharpmax: internal error")


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        (OSError(28, "No space left on device", "big.json"), "No space left on device: big.json; the disk is full"),
        (OSError(5, "Input/output error"), "Input/output error; --debug shows more"),
        (MemoryError(), "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory (CUDA out of memory); use smaller sizes"),
    ],
)
def test_what_the_machine_cannot_do_is_one_line_and_exit_code_1(
    problem: Exception, says: str, sharpmax_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "reproduce_tables", failing(problem))
    outcome = sharpmax_command("reproduce", "--out", tmp_path)
    assert outcome.code == 1
    assert is_one_error_line(outcome.err)
    assert says in outcome.err


def test_without_typer_the_error_names_the_extra(sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    assert "pip install 'rich>=13.9' 'typer>=0.15'" in sharpmax_command.refused("reproduce")


def test_help_and_env_import_nothing_slow() -> None:
    heavy = ["transformers", "scipy", "jax", "ray", "altair", "lm_eval"]
    script = (
        "import sys; from sharpmax.cli import main; main(['--help']); assert 'torch' not in sys.modules;"
        f"main(['env']); print('heavy:', [name for name in {heavy} if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(sharpmax.__file__).parents[1]), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert "Usage" in done.stdout
    assert ["extra", "hf", "installed"] in [line.split() for line in done.stdout.splitlines()]
    assert done.stdout.endswith("heavy: []\n")


def test_env_as_json(sharpmax_command: Any) -> None:
    found = json.loads(sharpmax_command("env", "--json").out)
    assert found["versions"]["sharpmax"] == sharpmax.__version__
    assert found["devices"][0] == "cpu"
    assert found["extras"]["cli"] == {"installed": True, "missing": [], "install": None}
    assert {"hf", "report", "ray", "clrs"} <= set(found["extras"])
    assert not {"dev", "docs"} & set(found["extras"])


@pytest.mark.parametrize(
    ("missing", "line"),
    [
        (["dm-clrs"], "pip install --no-deps dm-clrs==2.0.3"),
        (["attrs", "dm-clrs"], "pip install 'attrs>=24.2' && pip install --no-deps dm-clrs==2.0.3"),
    ],
)
def test_env_says_how_to_install_what_is_missing(
    missing: list[str], line: str, sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "installed_version", lambda name: None if name in missing else "1")
    assert env.describe()["extras"]["clrs"] == {"installed": False, "missing": missing, "install": line}
    assert f"not installed (no {', '.join(missing)}): {line}" in sharpmax_command("env").out


def test_reader_that_stops_early(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["--version"]) == 1


def test_as_a_module_at_a_terminal_without_unicode(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    terminal = io.TextIOWrapper(written, encoding="ascii")
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "argv", ["sharpmax", "report", "β"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("sharpmax.cli", run_name="__main__")
    assert ended.value.code == 2
    terminal.flush()
    assert is_one_error_line(written.getvalue().decode("ascii"))


def only_document(outcome: Any) -> Any:
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)


def test_what_is_saved_is_what_is_printed(home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    """Every command that saves results prints them in `run.show_results`."""
    line = ("evaluate", home / "model", "--task", home / "letters.py", "--sizes", 4, "--prompts", 2, "--no-text")
    outcome = sharpmax_command(*line, "--no-draw", "--device", "split", "--out", tmp_path, "--json")
    assert only_document(outcome) == saved(tmp_path)
    assert f"wrote {tmp_path / 'results.json'}\n" in outcome.err
    files = only_document(sharpmax_command("report", tmp_path, "--json"))["files"]
    assert str(tmp_path / "report.html") in files
    assert all(Path(file).is_file() for file in files)


def test_nothing_else_is_on_stdout(sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_bench, "cpu_tables", lambda **asked: print("chatter") or {"setting": {}, "bench": {}})
    outcome = sharpmax_command("bench", "--json")
    assert only_document(outcome)["tables"] == {"setting": {}, "bench": {}}
    assert outcome.err == "chatter\n"
    sharpmax_command.refused("bench", "--repeat", 0, "--json")


@pytest.mark.parametrize("given", ["p/warm.json", "p", "constant:1.25"])
def test_results_hold_the_policy_that_was_given(
    given: str, home: Path, tmp_path: Path, sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Constant(1.25).save("p/warm.json")
    Constant(1.5).save("p/policy.json")
    sharpmax_command.ok("horizon", home / "model", "--certified-only", "--policy", given, "--out", "out")
    results = saved(Path("out"))
    words = shlex.split(results["command"])
    assert words[words.index("--policy") + 1] == given
    files = results["provenance"].get("files", [])
    assert [one["name"] for one in files] == ([] if given.startswith("constant") else [given])
    for one in files:
        assert hashlib.sha256(one["text"].encode()).hexdigest() == one["sha256"]
        Path("again.json").write_text(one["text"], encoding="utf-8")
        assert load_policy("again.json") == Constant(1.5 if given == "p" else 1.25)
