"""`sharpmax fold`: write a constant policy into the weights of a checkpoint or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sharpmax.cli import answer, options
from sharpmax.cli.options import policies_given, policies_named
from sharpmax.cli.run import check_new_gguf
from sharpmax.cli.terminal import progress, say
from sharpmax.errors import reject
from sharpmax.files import display_name


def fold(
    context: typer.Context,
    model: options.Model,
    policy: Annotated[str, options.policy()],
    form: Annotated[
        str, options.choice("checkpoint", "adapter", help="checkpoint or adapter (PEFT).", name="--as", metavar="F")
    ] = "checkpoint",
    out: options.Out = Path("fold"),
    as_json: options.AsJson = False,
) -> None:
    """Write a policy into the weights of a model file.

    Any engine runs the result at no cost. The policy is `constant:1.5`, or has one constant per head or rotary
    frequency, as learned by `sharpmax calibrate`. For a Llama it may also be `ministral3:N`, a length rule that engines
    compute. A checkpoint gives a folder, which must be new or empty. A GGUF file gives a new GGUF file: `--out
    sharper.gguf` (smollm2 gives either). `--as adapter` writes a PEFT adapter.
    """
    from sharpmax.integrations.gguf import fold_file, is_gguf

    ((name, chosen),) = policies_named(policies_given(context, foldable=True)).items()
    source, wanted = model, out.suffix.lower() == ".gguf"
    if model == "smollm2" and wanted:
        from sharpmax.models.language import smollm2_file

        source = str(smollm2_file()[0])
    whole = is_gguf(source)
    if whole:
        check_new_gguf("--out", out)
        if form == "adapter":
            reject("--as", form, "checkpoint for a GGUF file")
    elif wanted:
        reject("--out", repr(str(out)), "a folder for a checkpoint", "give a GGUF file as MODEL to write one")
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        reject("--out", repr(str(out)), "a new or empty folder", "a checkpoint is never written over another")
    with progress() as note:
        note(f"folding {model}")
        if whole:
            made = fold_file(source, chosen, out)
        else:
            from sharpmax.integrations.transformers.checkpoint import fold_checkpoint

            made = fold_checkpoint(model, chosen, out, as_adapter=form == "adapter")
    if as_json:
        about = {"model": display_name(model), "policy": chosen.to_dict(), "layers": made.layers}
        answer({"file" if whole else "folder": str(out), **about, "error": made.error})
    load = "any GGUF file" if whole else "any PEFT adapter of the model" if form == "adapter" else "any model"
    say(
        f"wrote {out}: {model} with the policy {name} in {made.layers} layers "
        f"(rounding: {made.error:.3%} of the weights at most). Load it as {load}."
    )
