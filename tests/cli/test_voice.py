"""One voice: the rules that every command and every option keep."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from sharpmax.cli import make_app
from sharpmax.tasks.registry import GROUPS, TASKS
from sharpmax.tasks.sized import SIZED_TASKS
from tests.blocks import command_of
from tests.test_golden import GOLDEN


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
    command, words = command_of(shlex.split(line))
    parameters: dict[str, Any] = command.make_context(command.name, words).params
    return parameters


def test_help_fits_a_screen_and_ends_with_an_example_that_parses() -> None:
    pages = list((GOLDEN / "help").iterdir())  # tests/test_golden.py compares them with the help of today
    assert len(pages) == len(EVERY)
    for page in pages:
        lines = page.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 40, page
        assert max(map(len, lines)) <= 80, page
        path = [] if page.stem == "sharpmax" else page.stem.split("-")
        example = " ".join(" ".join(lines).partition("Example: ")[2].split())
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
            different = ("compare --task", "clrs train --policy", "clrs train --dtype", "calibrate --text")
            # Models can be split over several devices where nothing is trained or timed.
            if " ".join((*path, name)) not in different and not (name == "--device" and "split" in option.help):
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


def test_tasks_are_named_in_help() -> None:
    shown = {path: option.help for path, option in OPTIONS if option.name == "task"}
    (text,) = {text for path, text in shown.items() if path != ("compare",)}
    names = text.removesuffix(", or a Python file.").split(", ")
    assert {name for name in names if name not in TASKS and name not in GROUPS} == {"…"}
    assert shown["compare",] == f"{', '.join(list(SIZED_TASKS)[:-1])} or {list(SIZED_TASKS)[-1]}."
