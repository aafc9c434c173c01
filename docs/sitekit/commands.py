"""The command line's own help as pages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
import typer.main

from sharpmax.cli import make_app

from .benches import table

__all__ = ["command_lines"]


def command_lines(name: str, heading: Callable[[str], str]) -> Iterator[str]:
    """One command, or every command for `all`: what it does, its arguments and options, an example."""
    top: Any = typer.main.get_command(make_app())
    for words, command in _leaves("sharpmax", top):
        if name in ("all", words.removeprefix("sharpmax ")):
            yield from _one(words, command, heading)


def _leaves(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    inside = getattr(command, "commands", None)
    if inside is None:
        yield words, command
        return
    for name in command.list_commands(typer.Context(command)):
        if not inside[name].hidden:
            yield from _leaves(f"{words} {name}", inside[name])


def _one(words: str, command: Any, heading: Callable[[str], str]) -> Iterator[str]:
    yield from (heading(f"`{words}`"), "", inspect.cleandoc(command.help or "").replace("\b", ""), "")
    for line in inspect.cleandoc(command.epilog or "").splitlines():
        label, colon, example = line.partition(": ")
        yield from (f"{label}: `{example}`" if colon and example.startswith("sharpmax") else line, "")
    panels: dict[str, list[Any]] = {}
    for one in command.params:
        if not getattr(one, "hidden", False):
            panels.setdefault(getattr(one, "rich_help_panel", None) or f"{one.param_type_name}s", []).append(one)
    for panel, shown in panels.items():
        yield from table([panel.lower(), "what"], [[_names(one), _help(one)] for one in shown])
        yield ""


def _names(parameter: Any) -> str:
    value = parameter.metavar or parameter.name.upper()
    if parameter.param_type_name == "argument":
        return f"`{value}`"
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return f"`{names}`" if parameter.is_flag else f"`{names} {value}`"


def _help(parameter: Any) -> str:
    words = (getattr(parameter, "help", None) or "").replace("*", "\\*")
    default = parameter.default
    plain = isinstance(default, (str, int, float, Path)) and not isinstance(default, bool)
    return f"{words} Default: `{default}`." if plain and getattr(parameter, "show_default", True) else words
