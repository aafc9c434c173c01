"""Exit codes, one-line errors, and what works without Typer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import sharpmax
from sharpmax.cli import env
from sharpmax.errors import ArgumentError
from sharpmax.experiments.reproduce import evaluation as tables
from tests.cli.lines import is_one_error_line

SRC = str(Path(sharpmax.__file__).parent.parent)


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # No PATH: the product looks for git, and these tests must not depend on the checkout they run in.
    keep = {key: value for key, value in os.environ.items() if key not in ("PATH", "FORCE_COLOR", "NO_COLOR")}
    env = {**keep, "PYTHONPATH": SRC, "OMP_NUM_THREADS": "1", "PATH": "", **environment}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, encoding="utf-8", errors="replace", env=env, check=False
    )


def test_version(sharpmax_command: Any) -> None:
    for words in (["--version"], ["--version", "reproduce"]):
        outcome = sharpmax_command(*words)
        assert (outcome.code, outcome.out, outcome.err) == (0, f"sharpmax {sharpmax.__version__}\n", "")


def test_without_a_command_there_is_help_and_exit_code_2(sharpmax_command: Any) -> None:
    outcome = sharpmax_command()
    assert outcome.code == 2
    assert "Example: sharpmax reproduce" in outcome.out


def test_out_is_a_file(sharpmax_command: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for out in (file, file / "below"):
        assert "--out" in sharpmax_command.refused("reproduce", "--out", out)
    assert file.read_text() == "mine"


def test_out_cannot_be_written(sharpmax_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A folder without the right to write would stop everybody but root, so the refusal is made up.
    def refused(*arguments: Any, **more: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    assert "Permission denied" in sharpmax_command.refused("bench", "--out", tmp_path)


def failing(problem: BaseException) -> Any:
    def fail(*arguments: Any, **more: Any) -> None:
        raise problem

    return fail


def test_debug_shows_the_traceback(sharpmax_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "reproduce_tables", failing(ArgumentError("two\nlines")))
    assert sharpmax_command("reproduce", "--out", tmp_path).err == "sharpmax: error: two lines\n"
    for words in (["reproduce", "--out", tmp_path, "--debug"], ["--debug", "reproduce", "--out", tmp_path]):
        outcome = sharpmax_command(*words)
        assert outcome.code == 2
        assert "Traceback" in outcome.err


def test_a_mistake_of_ours_is_not_hidden(
    sharpmax_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "reproduce_tables", failing(ZeroDivisionError("ours")))
    outcome = sharpmax_command("reproduce", "--out", tmp_path)
    assert outcome.code == 1
    assert "Traceback" in outcome.err
    assert "ZeroDivisionError: ours" in outcome.err
    assert outcome.err.splitlines()[-1].startswith("sharpmax: internal error")


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        (
            OSError(28, "No space left on device", "big.json"),
            "No space left on device: big.json; the disk is full: make",
        ),
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
    assert "Traceback" in sharpmax_command("--debug", "reproduce", "--out", tmp_path).err


def test_interrupt_is_quiet(sharpmax_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "reproduce_tables", failing(KeyboardInterrupt()))
    outcome = sharpmax_command("reproduce", "--out", tmp_path)
    assert outcome.code == 130
    assert "Traceback" not in outcome.err


def test_without_typer_the_error_names_the_extra(sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    assert "pip install 'rich>=13.9' 'typer>=0.15'" in sharpmax_command.refused("reproduce")
    assert sharpmax_command("--version").out == f"sharpmax {sharpmax.__version__}\n"


def test_env_needs_neither_typer_nor_rich_and_imports_nothing_heavy() -> None:
    heavy = ["transformers", "scipy", "jax", "ray", "matplotlib", "altair", "lm_eval"]
    done = python(
        "-c",
        "import sys\n"
        "for name in ('typer', 'rich'): sys.modules[name] = None\n"
        "from sharpmax.cli import main\n"
        "code = main(['env'])\n"
        f"print('heavy:', [name for name in {heavy!r} if sys.modules.get(name)])\n"
        "sys.exit(code)",
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["sharpmax", sharpmax.__version__] in lines
    assert ["extra", "hf", "installed"] in lines
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
        (["attrs"], "pip install 'attrs>=24.2'"),
        (["dm-clrs"], "pip install --no-deps dm-clrs==2.0.3"),
        (["attrs", "dm-clrs"], "pip install 'attrs>=24.2' && pip install --no-deps dm-clrs==2.0.3"),
    ],
)
def test_env_says_how_to_install_what_is_missing(
    missing: list[str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "installed_version", lambda name: None if name in missing else "1")
    assert env.describe()["extras"]["clrs"] == {"installed": False, "missing": missing, "install": line}


def test_help_imports_nothing_slow() -> None:
    done = python("-c", "import sys; from sharpmax.cli import main; main(['--help']); sys.exit('torch' in sys.modules)")
    assert done.returncode == 0
    assert "Usage" in done.stdout


def test_reader_that_stops_early() -> None:
    done = python(
        "-c",
        "import os, sys; from sharpmax.cli import main\n"
        "reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1)\n"
        "sys.exit(main(['--version']))",
    )
    assert (done.returncode, done.stderr) == (1, "")


def test_as_a_module() -> None:
    done = python("-m", "sharpmax.cli", "nope")
    assert done.returncode == 2
    assert done.stdout == ""
    assert is_one_error_line(done.stderr)


def test_a_terminal_without_unicode() -> None:
    done = python("-c", "import sys; from sharpmax.cli import main; sys.exit(main(['report', 'β']))",
                  PYTHONIOENCODING="ascii", HOME="/nonexistent")  # fmt: skip
    assert done.returncode == 2
    assert is_one_error_line(done.stderr)
