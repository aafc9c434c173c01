"""The Typer app: every command with the example that its help ends with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import sharpmax
from sharpmax.cli.bench import bench
from sharpmax.cli.calibrate import calibrate
from sharpmax.cli.clrs import evaluate as clrs_evaluate
from sharpmax.cli.clrs import train as clrs_train
from sharpmax.cli.compare import compare
from sharpmax.cli.env import env
from sharpmax.cli.evaluate import evaluate
from sharpmax.cli.fold import fold
from sharpmax.cli.horizon import horizon
from sharpmax.cli.probe import probe
from sharpmax.cli.report import explore, report
from sharpmax.cli.reproduce import reproduce

_COMMANDS: dict[Callable[..., None], str] = {
    reproduce: "sharpmax reproduce --train --steps 2000 --seeds 1 --out quick",
    explore: "sharpmax explore --out explore --no-open",
    probe: "sharpmax probe smollm2 --task kv --sizes 8..64 --out probe",
    calibrate: "sharpmax calibrate smollm2 --task kv --budget 1% --out calibrate",
    evaluate: "sharpmax evaluate smollm2 --policy smollm2 --task kv,houses --sizes 8..512",
    fold: "sharpmax fold smollm2 --policy calibrate/policy-constant.json --out folded",
    horizon: "sharpmax horizon smollm2 --mass 0.5 --out horizon",
    compare: "sharpmax compare softmax ssmax hard --steps 2000 --seeds 2 --sizes 16..1024",
    bench: "sharpmax bench --cpu --out benchmarks",
    report: "sharpmax report before after --out comparison",
    env: "sharpmax env --json",
}
_CLRS: dict[Callable[..., None], str] = {
    clrs_train: "sharpmax clrs train --policy paper --out clrs-paper",
    clrs_evaluate: "sharpmax clrs evaluate clrs-none clrs-paper --out clrs-evaluate",
}
_ORDER = (
    "reproduce", "explore", "probe", "calibrate", "evaluate", "fold", "horizon", "clrs", "compare", "bench", "report",
    "env",
)  # fmt: skip
"""Commands as help lists them: from the paper to a model of one's own, training and tools."""


class _Ordered(TyperGroup):
    """Typer lists groups after commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=_ORDER.index)


def make_app() -> typer.Typer:
    """The app with every command."""
    app = typer.Typer(
        help="Keep attention sharp as inputs grow: measure, predict and fix softmax dispersion.",
        epilog="Example: sharpmax reproduce --out reproduce",
        cls=_Ordered,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # plain help: a command fits on a screen
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_top)
    clrs = typer.Typer(
        help="Fine-tune and test models on algorithms as text (CLRS-Text).",
        epilog="Example: sharpmax clrs train --policy paper --out clrs-paper",
    )
    app.add_typer(clrs, name="clrs")
    for group, commands in ((app, _COMMANDS), (clrs, _CLRS)):
        for function, example in commands.items():
            group.command(function.__name__, epilog=f"Example: {example}")(function)
    return app


def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    # Read before Typer sees the words, so that it works after a command too; here it is for the help.
    debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")] = False,
) -> None:
    if version:
        print(f"sharpmax {sharpmax.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)
