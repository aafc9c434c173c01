"""Every option that more than one command has, written once: its name, its words and where help shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sharpmax.cli import completion
from sharpmax.cli.reading import DEVICES, DTYPES

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
    "value",
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


def value(metavar: str, panel: str, text: str, *names: str, **more: Any) -> Any:
    """An option with a value; without `names` it has that of its parameter."""
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=panel, **more)


def flag(names: str, panel: str, text: str, **more: Any) -> Any:
    """An option that is there or not."""
    return typer.Option(names, help=text, rich_help_panel=panel, **more)


def task(names: Any, *, several: bool = False, shown: str | bool = True) -> Any:
    """What a model is asked; `names` knows those that come with the package."""
    return value(
        "T,T" if several else "T",
        WHAT,
        "kv, max, needle, multi-kv, houses, prices, json, or a Python file that defines one.",
        "--task",
        show_default=shown,
        autocompletion=names,
    )


def policy(shown: str | bool = True) -> Any:
    """What raises β; `shown` says what happens without it."""
    return value(
        "P",
        WHAT,
        "A name as paper, a file, a folder, log-length:64 or constant:1.5.",
        "--policy",
        show_default=shown,
        autocompletion=completion.policies,
    )


def sizes(shown: str | bool = True) -> Any:
    """How large the inputs are."""
    return value("N,N", AMOUNT, "Sizes of the inputs: 8..64 doubles, 8,64 lists.", "--sizes", show_default=shown)


def prompts(shown: str | bool = True) -> Any:
    """How many prompts; the second name is the one that lm-evaluation-harness has for it."""
    return value(
        "N", AMOUNT, "Prompts of each size; more are more precise.", "--prompts", "--limit", show_default=shown
    )


def steps(shown: str | bool = True) -> Any:
    """How long a training is."""
    return value("N", AMOUNT, "Steps of each training.", "--steps", show_default=shown)


def tokens_at_once(*older: str) -> Any:
    """What limits memory; `older` are names it had before."""
    text = "Tokens a device holds at once: fewer need less memory."
    return value("N", PLACE, text, "--tokens-at-once", *older)


def out(shown: str | bool = True) -> Any:
    """Where files go; without it, into a folder with the name of the command."""
    return value("DIR", OUTPUT, "Folder to write to.", "--out", show_default=shown)


Model = Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, local folder or the alias smollm2.")]
Policy = Annotated[str | None, policy("none")]
TextFile = Annotated[
    Path | None,
    value("FILE", WHAT, "Plain text to read.", "--text", show_default="Python's documentation"),
]
Algorithms = Annotated[
    str | None,
    value(
        "A,A",
        WHAT,
        "Algorithms of CLRS-Text.",
        "--algorithms",
        show_default="all 30, or those trained on",
        autocompletion=completion.algorithms,
    ),
]
Dataset = Annotated[
    Path | None,
    value("FILE", WHAT, "Examples of your own instead of generated ones.", "--dataset"),
]
LearningRate = Annotated[float, value("X", LEARNING, "Learning rate at its highest.", "--lr", "--rate")]  # fmt: skip
Samples = Annotated[
    int,
    value("N", AMOUNT, "Test inputs per seed and size; more are more precise.", "--samples"),
]
PerCell = Annotated[int, value("N", AMOUNT, "Examples of each algorithm and size.", "--per-cell")]
Seeds = Annotated[
    int,
    value("N", AMOUNT, "How many models, each trained from a seed of its own.", "--seeds"),
]
Seed = Annotated[
    int,
    value("N", AMOUNT, "Seed of all that is drawn at random; of several, the first.", "--seed"),
]
Device = Annotated[
    str,
    value(
        "D",
        PLACE,
        "auto (a GPU where there is one), cpu, cuda or mps.",
        "--device",
        autocompletion=completion.words(*DEVICES),
    ),
]
Dtype = Annotated[
    str,
    value(
        "D",
        PLACE,
        "float32, bfloat16, float16 or auto (bfloat16 on a GPU).",
        "--dtype",
        autocompletion=completion.words(*DTYPES),
    ),
]
Processes = Annotated[int, value("N", PLACE, "Processes that generate examples.", "--processes")]
Data = Annotated[
    Path | None,
    value("DIR", PLACE, "Folder for generated examples.", "--data", show_default="the user's cache"),
]
Out = Annotated[Path, out()]
Resume = Annotated[bool, flag("--resume", OUTPUT, "Go on with the interrupted run in --out, which must hold one.")]
Draw = Annotated[bool, flag("--draw/--no-draw", OUTPUT, "Draw figures and page, or save numbers only.")]
AsJson = Annotated[bool, flag("--json", OUTPUT, "Print one JSON document and nothing else.")]
