"""One voice: the rules that every command and every option keep."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import sharpmax
from sharpmax.cli import make_app
from sharpmax.tasks.max_retrieval import SIZED_TASKS
from sharpmax.tasks.registry import GROUPS, TASKS
from tests.blocks import command_of

ROOT = Path(sharpmax.__file__).parents[2]
APP = make_app()


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that call it."""
    yield path, command
    context = typer.Context(command)
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        yield from walk(command.commands[name], (*path, name))


EVERY = list(walk(typer.main.get_command(APP)))
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
def test_help_fits_a_screen_and_ends_with_an_example_that_parses(path: tuple[str, ...], command: Any) -> None:
    runner = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"})
    lines = runner.invoke(APP, [*path, "--help"], prog_name="sharpmax").stdout.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in "".join(lines)
    introduction, _, example = command.epilog.partition(": ")
    assert introduction == "Example"
    assert example.split()[: len(path) + 1] == ["sharpmax", *path]
    parse(example)


def test_every_option_has_a_sentence() -> None:
    for path, option in OPTIONS:
        assert option.help, (path, option.name)
        assert option.help.endswith("."), (path, option.name)
        assert option.is_flag or option.metavar, (path, option.name)


def test_the_same_flag_is_the_same_everywhere() -> None:
    words: dict[str, set[str]] = {}
    for path, option in OPTIONS:
        for name in option.opts:
            # Small models have tasks of their own, a training in bfloat16 fewer dtypes, a calibration domains.
            different = (
                ("compare", "--task"),
                ("clrs", "evaluate", "--batch-tokens"),
                ("clrs", "train", "--dtype"),
                ("calibrate", "--text"),
            )
            # Models can be split over several devices where nothing is trained or timed.
            if (*path, name) not in different and not (name == "--device" and "split" in option.help):
                words.setdefault(name, set()).add(option.help)
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


def test_commands_of_saved_results_still_mean_something() -> None:
    found: set[str] = set()
    for file in (*ROOT.glob("results/*/results.json"), *ROOT.glob("benchmarks/*.json")):
        saved = json.loads(file.read_text(encoding="utf-8"))
        found |= {entry["command"] for entry in (saved if isinstance(saved, list) else [saved])}
    for command in found - {command for command in found if command.startswith("make ")}:
        parse(command)
    assert len(found) > 10 or not (ROOT / "results").is_dir()


def test_tasks_are_named_in_help() -> None:
    shown = {path: option.help for path, option in OPTIONS if option.name == "task"}
    (text,) = {text for path, text in shown.items() if path != ("compare",)}
    names = text.removesuffix(", or a Python file.").split(", ")
    assert {name for name in names if name not in TASKS and name not in GROUPS} == {"…"}
    assert shown["compare",] == f"{', '.join(list(SIZED_TASKS)[:-1])} or {list(SIZED_TASKS)[-1]}."


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("ca", ["calibrate"]),
        ("clrs t", ["train"]),
        ("probe smollm2 --policy pa", ["paper"]),
        ("evaluate smollm2 --task kv,ho", ["kv,houses"]),
        ("clrs train --algorithms minimum,binary", ["minimum,binary_search"]),
        ("compare softmax spars", ["sparsemax"]),
        ("compare --device c", ["cpu", "cuda"]),
        ("reproduce --recipe s", ["sharp"]),
    ],
)
def test_names_are_completed(line: str, offered: list[str]) -> None:
    environment = {"_SHARPMAX_COMPLETE": "complete_bash", "COMP_WORDS": f"sharpmax {line}"}
    environment["COMP_CWORD"] = str(len(line.split()))
    done = CliRunner(env=environment).invoke(APP, [], prog_name="sharpmax")
    assert done.stdout.split() == offered


RESUMES = {
    ("reproduce",): (), ("calibrate",): ("smollm2",), ("evaluate",): ("smollm2",), ("compare",): (),
    ("clrs", "train"): (), ("clrs", "evaluate"): ("smollm2",),
}  # fmt: skip


@pytest.mark.parametrize("path", RESUMES, ids="-".join)
def test_nothing_to_resume_is_one_line_and_begins_nothing(
    path: tuple[str, ...], sharpmax_command: Any, tmp_path: Path
) -> None:
    assert {path for path, option in OPTIONS if "--resume" in option.opts} == set(RESUMES)
    for out in (tmp_path / "new", tmp_path):
        error = sharpmax_command.refused(*path, *RESUMES[path], "--resume", "--out", out)
        assert f"--resume: got {str(out)!r}, which has nothing to resume" in error
        assert list(tmp_path.iterdir()) == []
