"""How a command is told to Typer: the same form for all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from sharpmax.cli.options import OUTPUT

__all__ = ["BEGIN", "LANGUAGE", "TOOLS", "TRAINING", "add", "add_group", "in_order"]

BEGIN, LANGUAGE, TRAINING, TOOLS = "Begin here", "A language model of your own", "Train and compare", "Tools"
"""The groups of commands in help."""


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


def in_order(names: Sequence[str]) -> type[TyperGroup]:
    """A group that shows its commands in this order: Typer would put those that have commands of their own last."""

    class Ordered(_Group):
        def list_commands(self, ctx: Any) -> list[str]:
            return sorted(super().list_commands(ctx), key=names.index)

    return Ordered


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
