"""`sharpmax fold`: write a constant policy into the weights of a plain checkpoint or a GGUF file."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sharpmax.cli import answer, options
from sharpmax.cli.options import NamedPolicy, policies_given, policy_named
from sharpmax.cli.run import check_new_gguf, out_folder
from sharpmax.cli.terminal import progress, say
from sharpmax.errors import reject
from sharpmax.files import display_name, written_by_others

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def fold(
    context: typer.Context,
    model: options.Model,
    policy: Annotated[str, options.policy()],
    dtype: options.Dtype = "float32",
    out: options.Out = Path("fold"),
    as_json: options.AsJson = False,
) -> None:
    """Write a policy into the weights of a plain checkpoint.

    Any engine runs it at no cost. The policy has one constant per head, as `sharpmax calibrate --foldable` learns,
    or is `constant:1.5`. The output folder must be new or empty. A GGUF file as MODEL gives a new GGUF file,
    `--out sharper.gguf`, with the types it has.
    """
    from sharpmax.integrations.gguf import is_gguf

    chosen, kind = policy_named(*policies_given(context)), "float32" if dtype == "auto" else dtype
    if is_gguf(model):
        _fold_file(Path(model), chosen, dtype, out, as_json=as_json)
        return
    from sharpmax.integrations.transformers.folding import fold as folded
    from sharpmax.models.language import load_language_model

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        reject("--out", repr(str(out)), "a new or empty folder", "a checkpoint is never written over another")
    with progress() as note:
        note(f"loading {model}")
        language = load_language_model(model, dtype=kind)
        note("folding")
        plain = folded(language.model, chosen.policy)
        folder = out_folder(context)
        note(f"writing {folder}")
        _write(folder, plain, language.tokenizer)
    if as_json:
        answer({"folder": str(folder), "model": display_name(model), "policy": chosen.policy.to_dict(), "dtype": kind})
    say(f"wrote {folder}: {model} with the policy {chosen.name}. Load it as any model.")


def _fold_file(model: Path, chosen: NamedPolicy, dtype: str, out: Path, *, as_json: bool) -> None:
    from sharpmax.integrations.gguf import fold_file

    check_new_gguf("--out", out)
    if dtype not in ("auto", "float32"):
        reject("--dtype", dtype, "none for a GGUF file, which keeps its types")
    with progress() as note:
        note(f"folding {model}")
        made = fold_file(model, chosen.policy, out)
    if as_json:
        policy = chosen.policy.to_dict()
        answer({"file": str(out), "model": display_name(model), "policy": policy, "layers": made.layers,
                "error": made.error})  # fmt: skip
    say(
        f"wrote {out}: {model} with the policy {chosen.name} in {made.layers} layers "
        f"(rounding of scales: {made.error:.3%} of a head's weights at most). Load it as any GGUF file."
    )


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
