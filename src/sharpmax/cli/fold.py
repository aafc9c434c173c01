"""`sharpmax fold`: a constant policy inside the weights of a plain checkpoint."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sharpmax.cli import options
from sharpmax.cli.json_output import answer
from sharpmax.cli.options import LANGUAGE, add, device_named, dtype_named, policy_named
from sharpmax.cli.terminal import out_folder_if_used, progress, say
from sharpmax.errors import reject
from sharpmax.files import display_name, written_by_others

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    example = "sharpmax fold smollm2 --policy calibrate/policy-constant.json --out folded"
    add(app, fold, example=example, panel=LANGUAGE)


def fold(
    model: options.Model,
    policy: Annotated[str, options.policy()],
    dtype: options.Dtype = "float32",
    out: options.Out = Path("fold"),
    as_json: options.AsJson = False,
) -> None:
    """Write a plain checkpoint with the policy inside, which any engine runs at no cost and without sharpmax.

    The policy has one constant per head, as what --foldable of `sharpmax calibrate` learns, or `constant:1.5`. The
    folder must be new or empty.
    """
    from sharpmax.integrations.transformers.folding import fold as folded
    from sharpmax.models.language import load_language_model

    chosen, kind = policy_named(policy), dtype_named(dtype, device_named("cpu"))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        reject("--out", repr(str(out)), "a new or empty folder", "a checkpoint is never written over another")
    with progress() as note:
        note(f"loading {model}")
        language = load_language_model(model, dtype=kind)
        note("folding")
        plain = folded(language.model, chosen.policy)
        with out_folder_if_used(out) as folder:
            note(f"writing {folder}")
            _write(folder, plain, language.tokenizer)
    if as_json:
        answer({"folder": str(folder), "model": display_name(model), "policy": chosen.policy.to_dict(), "dtype": kind})
    say(f"wrote {folder}: load it as any model; it answers as {model} does with the policy {chosen.name}")


def _write(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the checkpoint beside its place first, so that there is all of it or nothing."""
    from sharpmax.models.language import quiet

    partial = Path(tempfile.mkdtemp(dir=folder, prefix=".", suffix=".partial"))
    try:
        with written_by_others(folder), quiet():
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            for file in partial.iterdir():
                file.replace(folder / file.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
