"""`sharpmax fold`: a constant policy inside the weights of a plain checkpoint."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sharpmax.cli.options import policy_named
from sharpmax.cli.terminal import out_folder_if_used, progress, say
from sharpmax.errors import ArgumentError, reject

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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
    from sharpmax.models.language import load_language_model

    chosen = policy_named(policy)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        reject("--out", repr(str(out)), "a new or empty folder", "a checkpoint is never written over another")
    with progress() as note:
        note(f"loading {model}")
        language = load_language_model(model, dtype=dtype)
        note("folding")
        plain = folded(language.model, chosen.policy)
        with out_folder_if_used(out) as folder:
            note(f"writing {folder}")
            _write(folder, plain, language.tokenizer)
    say(f"wrote {folder}: load it as any model; it answers as {model} does with the policy {chosen.name}")


def _write(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the checkpoint beside its place first, so that there is all of it or nothing."""
    from sharpmax.models.language import quiet

    partial = Path(tempfile.mkdtemp(dir=folder, prefix=".", suffix=".partial"))
    try:
        with quiet():
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
        for file in partial.iterdir():
            file.replace(folder / file.name)
    except OSError as problem:
        raise ArgumentError(
            f"--out: cannot write to {str(folder)!r} ({problem.strerror}); allowed: a folder with room for the model"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
