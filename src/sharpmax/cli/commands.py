"""How a command is told to Typer: the same form for all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from sharpmax.cli.options import OUTPUT

__all__ = ["BEGIN", "LANGUAGE", "TOOLS", "TRAINING", "Story", "add", "add_group"]

BEGIN, LANGUAGE, TRAINING, TOOLS = "Begin here", "A language model of your own", "Train and compare", "Tools"
"""The groups of commands in help."""

_ORDER = (
    *("reproduce", "explore"),
    *("probe", "calibrate", "evaluate", "fold", "horizon"),
    *("clrs", "compare"),
    *("bench", "report", "env"),
)


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_type_of_flags(super().get_params(ctx))

    def get_help_option(self, ctx: Any) -> Any:
        option: Any = super().get_help_option(ctx)
        if option is not None:
            option.rich_help_panel = OUTPUT
        return option


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_type_of_flags(super().get_params(ctx))


class Story(_Group):
    """Commands in the order of the story: from the paper to a model of one's own, training and tools."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the commands."""
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))


def _without_type_of_flags(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


def add(app: typer.Typer, function: Callable[..., Any], *, example: str, panel: str | None = None) -> None:
    """Add a function as the command of its name; its docstring is the help, `example` a line that anybody can type."""
    told = app.command(
        help=_paragraphs(inspect.getdoc(function) or ""),
        epilog=f"Example: {example}",
        rich_help_panel=panel,
        cls=_Command,
    )
    told(function)


def add_group(app: typer.Typer, name: str, about: str, *, example: str, panel: str) -> typer.Typer:
    """Add a command that has commands of its own."""
    group = typer.Typer(help=about, epilog=f"Example: {example}", cls=_Group)
    app.add_typer(group, name=name, rich_help_panel=panel)
    return group


def _paragraphs(text: str) -> str:
    # A terminal breaks lines by itself; those of the source would be broken twice.
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
