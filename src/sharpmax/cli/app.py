"""The Typer app, assembled from one module per command."""

from __future__ import annotations

from typing import Annotated

import typer

import sharpmax
from sharpmax.cli import bench, calibrate, clrs, compare, env, evaluate, fold, horizon, probe, report, reproduce
from sharpmax.cli.options import in_order

_MODULES = (reproduce, probe, calibrate, evaluate, fold, horizon, clrs, compare, bench, report, env)
_ORDER = (
    "reproduce", "explore", "probe", "calibrate", "evaluate", "fold", "horizon", "clrs", "compare", "bench", "report",
    "env",
)  # fmt: skip
"""The commands as help lists them: from the paper to a model of one's own, training and tools."""


def make_app() -> typer.Typer:
    """The app with every command."""
    app = typer.Typer(
        help="Keep attention sharp as inputs grow: measure, predict and fix softmax dispersion.",
        epilog="Example: sharpmax reproduce --out reproduce",
        cls=in_order(_ORDER),
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_top)
    for module in _MODULES:
        module.add_to(app)
    return app


def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    # Read before Typer sees the words, so that it works after a command too; here it is for the help.
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    if version:
        print(f"sharpmax {sharpmax.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)
