"""Every option that more than one command has, written once: its name, its words and where help shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sharpmax.cli import completion

__all__ = [
    "AMOUNT",
    "LEARNING",
    "OUTPUT",
    "PANELS",
    "PLACE",
    "WHAT",
    "Algorithms",
    "AsJson",
    "Data",
    "Dataset",
    "Device",
    "Draw",
    "Dtype",
    "LearningRate",
    "Model",
    "Out",
    "PerCell",
    "Policy",
    "Processes",
    "Resume",
    "Samples",
    "Seed",
    "Seeds",
    "TextFile",
    "flag",
    "out",
    "policy",
    "prompts",
    "sizes",
    "steps",
    "task",
    "tokens_at_once",
]

WHAT, LEARNING, AMOUNT, PLACE, OUTPUT = (
    "What to run",
    "How it learns",
    "How much",
    "Where it runs",
    "What comes out",
)
PANELS = (WHAT, LEARNING, AMOUNT, PLACE, OUTPUT)
"""The groups of options in help, in the order in which every command shows them."""


def flag(names: str, panel: str, text: str, **more: Any) -> Any:
    """An option that is there or not."""
    return typer.Option(names, help=text, rich_help_panel=panel, **more)


def task(names: Any, *, several: bool = False, shown: str | bool = True) -> Any:
    """What a model is asked; `names` knows those that come with the package."""
    return typer.Option(
        "--task",
        metavar="T,T" if several else "T",
        help="kv, max, needle, multi-kv, houses, prices, json, or a Python file that defines one.",
        rich_help_panel=WHAT,
        show_default=shown,
        autocompletion=names,
    )


def policy(shown: str | bool = True) -> Any:
    """What raises β; `shown` says what happens without it."""
    return typer.Option(
        "--policy",
        metavar="P",
        help="A name as paper, a file, a folder, log-length:64 or constant:1.5.",
        rich_help_panel=WHAT,
        show_default=shown,
        autocompletion=completion.policies,
    )


def sizes(shown: str | bool = True) -> Any:
    """How large the inputs are."""
    return typer.Option(
        "--sizes",
        metavar="N,N",
        help="Sizes of the inputs: 8..64 doubles, 8,64 lists.",
        rich_help_panel=AMOUNT,
        show_default=shown,
    )


def prompts(shown: str | bool = True) -> Any:
    """How many prompts; the second name is the one that lm-evaluation-harness has for it."""
    return typer.Option(
        "--prompts",
        "--limit",
        metavar="N",
        help="Prompts of each size; more are more precise.",
        rich_help_panel=AMOUNT,
        show_default=shown,
    )


def steps(shown: str | bool = True) -> Any:
    """How long a training is."""
    return typer.Option(
        "--steps", metavar="N", help="Steps of each training.", rich_help_panel=AMOUNT, show_default=shown
    )


def tokens_at_once(*older: str) -> Any:
    """What limits memory; `older` are names it had before."""
    text = "Tokens a device holds at once: fewer need less memory."
    return typer.Option("--tokens-at-once", *older, metavar="N", help=text, rich_help_panel=PLACE)


def out(shown: str | bool = True) -> Any:
    """Where files go; without it, into a folder with the name of the command."""
    return typer.Option("--out", metavar="DIR", help="Folder to write to.", rich_help_panel=OUTPUT, show_default=shown)


Model = Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, local folder or the alias smollm2.")]
Policy = Annotated[str | None, policy("none")]
TextFile = Annotated[
    Path | None,
    typer.Option(
        "--text",
        metavar="FILE",
        help="Plain text to read.",
        rich_help_panel=WHAT,
        show_default="Python's documentation",
    ),
]
Algorithms = Annotated[
    str | None,
    typer.Option(
        "--algorithms",
        metavar="A,A",
        help="Algorithms of CLRS-Text.",
        rich_help_panel=WHAT,
        show_default="all 30, or those trained on",
        autocompletion=completion.algorithms,
    ),
]
Dataset = Annotated[
    Path | None,
    typer.Option(
        "--dataset", metavar="FILE", help="Examples of your own instead of generated ones.", rich_help_panel=WHAT
    ),
]
LearningRate = Annotated[float, typer.Option("--lr", "--rate", metavar="X", help="Learning rate at its highest.",
                                             rich_help_panel=LEARNING)]  # fmt: skip
Samples = Annotated[
    int,
    typer.Option(
        "--samples",
        metavar="N",
        help="Test inputs per seed and size; more are more precise.",
        rich_help_panel=AMOUNT,
    ),
]
PerCell = Annotated[
    int, typer.Option("--per-cell", metavar="N", help="Examples of each algorithm and size.", rich_help_panel=AMOUNT)
]
Seeds = Annotated[
    int,
    typer.Option(
        "--seeds", metavar="N", help="How many models, each trained from a seed of its own.", rich_help_panel=AMOUNT
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed",
        metavar="N",
        help="Seed of all that is drawn at random; of several, the first.",
        rich_help_panel=AMOUNT,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="D",
        help="auto (a GPU where there is one), cpu, cuda or mps.",
        rich_help_panel=PLACE,
        autocompletion=completion.words("auto", "cpu", "cuda", "mps"),
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="D",
        help="float32, bfloat16, float16 or auto (bfloat16 on a GPU).",
        rich_help_panel=PLACE,
        autocompletion=completion.words("float32", "bfloat16", "float16", "auto"),
    ),
]
Processes = Annotated[
    int, typer.Option("--processes", metavar="N", help="Processes that generate examples.", rich_help_panel=PLACE)
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="Folder for generated examples.",
        rich_help_panel=PLACE,
        show_default="the user's cache",
    ),
]
Out = Annotated[Path, out()]
Resume = Annotated[bool, flag("--resume", OUTPUT, "Go on with the interrupted run in --out.")]
Draw = Annotated[bool, flag("--draw/--no-draw", OUTPUT, "Draw figures and page, or save numbers only.")]
AsJson = Annotated[bool, flag("--json", OUTPUT, "Print one JSON document and nothing else.")]
