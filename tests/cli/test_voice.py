"""One voice: the rules that every command and every option keep."""

from __future__ import annotations

import json
import os
import pty
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import sharpmax
from sharpmax.cli.app import make_app
from sharpmax.cli.options import PANELS
from sharpmax.cli.terminal import print_table
from sharpmax.tasks.registry import TASKS
from sharpmax.tasks.sized_registry import SIZED_TASKS
from tests.blocks import command_of
from tests.cli.lines import is_one_error_line

ROOT = Path(sharpmax.__file__).parents[2]
STORY = [
    *("reproduce", "explore", "probe", "calibrate", "evaluate", "fold", "horizon"),
    *("clrs", "compare", "bench", "report", "env"),
]
OTHER_TASKS = ("compare", "--task")
"""Small models have tasks of their own, which no file can add to."""


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that call it."""
    yield path, command
    context = typer.Context(command)
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        yield from walk(command.commands[name], (*path, name))


EVERY = list(walk(typer.main.get_command(make_app())))
LEAVES = {path: command for path, command in EVERY if not hasattr(command, "commands")}
OPTIONS = [
    (path, option)
    for path, command in LEAVES.items()
    for option in command.get_params(typer.Context(command))
    if option.param_type_name == "option"
]


def parse(line: str) -> dict[str, Any]:
    """What a command line means, without running it; raises where it means nothing."""
    name, command, words = command_of(shlex.split(line))
    parameters: dict[str, Any] = command.make_context(name, words).params
    return parameters


@pytest.mark.parametrize(("path", "command"), EVERY, ids=lambda given: " ".join(given) if type(given) is tuple else "")
def test_every_command_has_help_and_an_example_that_parses(path: tuple[str, ...], command: Any) -> None:
    assert command.help
    assert command.help.partition("\n\n")[0].endswith((".", "?"))
    assert "\n" not in command.help.replace("\n\n", ""), "a terminal breaks lines by itself"
    introduction, _, example = command.epilog.partition(": ")
    assert introduction == "Example"
    assert example.split()[: len(path) + 1] == ["sharpmax", *path]
    parse(example)


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_options_are_grouped_in_one_order(path: tuple[str, ...]) -> None:
    panels = [option.rich_help_panel for where, option in OPTIONS if where == path]
    assert set(panels) <= set(PANELS)
    assert panels == sorted(panels, key=PANELS.index)


def test_every_option_says_what_it_is() -> None:
    for path, option in OPTIONS:
        assert option.help, (path, option.name)
        assert option.help.endswith("."), (path, option.name)
        assert option.is_flag == (option.metavar == ""), (path, option.name)
        assert option.is_flag or option.metavar, (path, option.name)


def test_the_same_flag_is_the_same_everywhere() -> None:
    words: dict[str, set[tuple[str, str]]] = {}
    for path, option in OPTIONS:
        for name in option.opts:
            if (*path, name) not in (OTHER_TASKS, ("clrs", "evaluate", "--batch-tokens")):
                words.setdefault(name, set()).add((option.help, option.rich_help_panel))
    assert {name: found for name, found in words.items() if len(found) > 1} == {}
    assert len(words) > 40


def test_the_same_flags_come_in_the_same_order() -> None:
    before: dict[tuple[str, str], tuple[str, ...]] = {}
    for path in LEAVES:
        names = [option.name for where, option in OPTIONS if where == path]
        for index, first in enumerate(names):
            for second in names[index + 1 :]:
                before[first, second] = path
    assert [(pair, path, before[pair[::-1]]) for pair, path in before.items() if pair[::-1] in before] == []


def test_defaults_are_the_same_everywhere() -> None:
    for path, option in OPTIONS:
        usual = {"device": "auto", "seed": 0, "draw": True, "resume": False, "as_json": False, "policy": None}
        if option.name in usual and not option.required:
            assert option.default == usual[option.name] or (path, option.default) == (("clrs", "train"), "none")
        if option.name == "dtype":
            assert option.default == ("auto" if path[0] == "clrs" else "float32")
        if option.name == "out" and option.default is not None:
            assert option.default == Path("-".join(path)), "a folder has the name of its command"


def test_every_command_answers_in_json() -> None:
    assert {path for path, option in OPTIONS if "--json" in option.opts} == set(LEAVES)


def test_commands_are_told_as_a_story(sharpmax_command: Any) -> None:
    names = [path[0] for path, _ in EVERY if len(path) == 1]
    assert names == STORY
    said = sharpmax_command("--help").out
    panels = ["Begin here", "A language model of your own", "Train and compare", "Tools"]
    assert [line.split("─")[1].strip() for line in said.splitlines() if line.startswith("╭")] == ["Options", *panels]
    places = [said.index(f"│ {name} ") for name in STORY]
    assert places == sorted(places)


def test_commands_of_saved_results_still_mean_something() -> None:
    found: set[str] = set()
    for file in (*ROOT.glob("results/*/results.json"), *ROOT.glob("benchmarks/*.json")):
        saved = json.loads(file.read_text(encoding="utf-8"))
        found |= {entry["command"] for entry in (saved if isinstance(saved, list) else [saved])}
    for command in found - {command for command in found if command.startswith("make ")}:
        parse(command)
    assert len(found) > 10 or not (ROOT / "results").is_dir()


def test_tasks_are_named_in_help() -> None:
    told = {path: option.help for path, option in OPTIONS if option.name == "task"}
    assert {text for path, text in told.items() if path != ("compare",)} == {
        f"{', '.join(TASKS)}, or a Python file that defines one."
    }
    assert told["compare",] == f"{', '.join(list(SIZED_TASKS)[:-1])} or {list(SIZED_TASKS)[-1]}."


def test_older_names_mean_the_same() -> None:
    assert parse("sharpmax evaluate m --limit 7") == parse("sharpmax evaluate m --prompts 7")
    assert parse("sharpmax calibrate m --rate 7") == parse("sharpmax calibrate m --lr 7")
    assert parse("sharpmax clrs evaluate m --batch-tokens 7") == parse("sharpmax clrs evaluate m --tokens-at-once 7")


def completed(*words: str) -> list[str]:
    """What a shell is offered for the last word."""
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT / "src"), "_SHARPMAX_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["sharpmax", *words]), "COMP_CWORD": str(len(words)),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "sharpmax.cli"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ca"], ["calibrate"]),
        (["clrs", "t"], ["train"]),
        (["probe", "smollm2", "--policy", "pa"], ["paper"]),
        (["evaluate", "smollm2", "--task", "kv,ho"], ["kv,houses"]),
        (["clrs", "train", "--algorithms", "minimum,binary"], ["minimum,binary_search"]),
        (["compare", "softmax", "spars"], ["sparsemax"]),
        (["compare", "--device", "c"], ["cpu", "cuda"]),
        (["reproduce", "--recipe", "s"], ["sharp"]),
    ],
)
def test_names_are_completed(words: list[str], offered: list[str]) -> None:
    assert completed(*words) == offered


def test_the_shell_is_told_how_to_complete() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-m", "sharpmax.cli", "--show-completion", "zsh"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "#compdef sharpmax" in done.stdout
    assert "_SHARPMAX_COMPLETE=complete_zsh" in done.stdout


def at_a_terminal(words: list[str], **more: str) -> str:
    """What a command writes to a terminal."""
    unwanted = ("NO_COLOR", "FORCE_COLOR", "GITHUB_ACTIONS", "_TYPER_FORCE_DISABLE_TERMINAL")
    keep = {name: value for name, value in os.environ.items() if name not in unwanted}
    environment = {**keep, "PYTHONPATH": str(ROOT / "src"), "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **more}
    ours, its = pty.openpty()
    with subprocess.Popen([sys.executable, "-m", "sharpmax.cli", *words], stdout=its, stderr=its, env=environment):
        os.close(its)
        written = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the terminal is closed at the other end
                break
            if not part:
                break
            written += part
    os.close(ours)
    return written.decode(errors="replace")


def test_colours_are_for_terminals_that_want_them() -> None:
    coloured, plain = at_a_terminal(["--help"]), at_a_terminal(["--help"], NO_COLOR="1")
    assert "\x1b[36m" in coloured or "\x1b[1;36m" in coloured
    # Bold and dim are no colours.
    assert {part.partition("m")[0] for part in plain.split("\x1b[")[1:]} <= {"0", "1", "2"}


def test_tables_are_bold_at_a_terminal_and_plain_where_no_colour_is_wanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_table("title", ["a"], [["b"]])
    assert "\x1b[1m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    print_table("title", ["a"], [["b"]])
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("path", [path for path, _ in EVERY], ids=" ".join)
def test_help_in_a_pipe_has_no_colours(path: tuple[str, ...], sharpmax_command: Any) -> None:
    outcome = sharpmax_command(*path, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert "\x1b" not in outcome.out
    assert "<bool>" not in outcome.out


RESUMES = [path for path, option in OPTIONS if "--resume" in option.opts]


@pytest.mark.parametrize("path", RESUMES, ids="-".join)
def test_nothing_to_resume_is_one_line_and_begins_nothing(
    path: tuple[str, ...], sharpmax_command: Any, tmp_path: Path
) -> None:
    needed = {("clrs", "evaluate"): ["smollm2"], ("evaluate",): ["smollm2"], ("calibrate",): ["smollm2"]}.get(path, [])
    for out in (tmp_path / "new", tmp_path):
        outcome = sharpmax_command(*path, *needed, "--resume", "--out", out)
        assert (outcome.code, outcome.out) == (2, "")
        assert is_one_error_line(outcome.err)
        assert f"--resume: got {str(out)!r}, which has nothing to resume" in outcome.err
        assert list(tmp_path.iterdir()) == []


def test_every_command_that_can_be_resumed_is_tried() -> None:
    commands = {("reproduce",), ("calibrate",), ("evaluate",), ("compare",), ("clrs", "train"), ("clrs", "evaluate")}
    assert set(RESUMES) == commands
