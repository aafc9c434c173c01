"""`sharpmax fold`: a constant policy inside the weights of a plain checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sharpmax.cli.options import policy_named
from sharpmax.cli.terminal import out_folder, progress, say
from sharpmax.errors import reject

__all__ = ["add_to", "fold"]


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: sharpmax fold smollm2 --policy calibrated/policy-constant.json --out folded")(fold)


def fold(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, local folder or the alias smollm2.")],
    policy: Annotated[str, typer.Option(metavar="P", help="A policy with one constant per head: a name or a file.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="A new or empty folder for the checkpoint.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Write a plain checkpoint with the policy inside, which any engine runs at no cost and without sharpmax."""
    from sharpmax.hf import fold as folded
    from sharpmax.models.language import load_language_model, quiet

    chosen = policy_named(policy)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        reject("--out", repr(str(out)), "a new or empty folder", "a checkpoint is never written over another")
    with progress() as note:
        note(f"loading {model}")
        language = load_language_model(model, dtype=dtype)
        note("folding")
        plain = folded(language.model, chosen.policy)
        folder = out_folder(out)
        note(f"writing {folder}")
        with quiet():
            plain.save_pretrained(folder)
            language.tokenizer.save_pretrained(folder)
    say(f"wrote {folder}: load it as any model; it answers as {model} does with the policy {chosen.name}")
