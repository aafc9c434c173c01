"""`sharpmax calibrate`: learn a temperature per head of a language model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sharpmax.cli import options
from sharpmax.cli.options import choice, resolve_device, share_from, sizes_from
from sharpmax.cli.run import check_extras, check_resume, finish, out_folder, print_report, resumable
from sharpmax.cli.terminal import progress
from sharpmax.errors import reject


def calibrate(
    context: typer.Context,
    model: options.Model,
    task: Annotated[str, options.task(metavar="T")] = "kv",
    kinds: Annotated[
        str | None,
        typer.Option(
            metavar="K,K",
            help="Policies to learn: constant, length, entropy, rows.",
            show_default="by profile",
            autocompletion=options.Kinds,
        ),
    ] = None,
    foldable: Annotated[bool, typer.Option("--foldable", help="Learn constants, which `sharpmax fold` takes.")] = False,
    text: options.TextFile = None,
    budget: Annotated[
        str, typer.Option("--budget", "--leash", metavar="P%", help="Rise of perplexity allowed.")
    ] = "1%",
    keep: Annotated[str, typer.Option(metavar="P%", help="Share of heads that may be modified.")] = "100%",
    keep_layers: Annotated[str, typer.Option(metavar="P%", help="Share of layers that may be modified.")] = "100%",
    rate: options.LearningRate = 0.03,
    profile: Annotated[str, choice("full (GPU), small (two CPU cores) or auto.", "auto", "full", "small")] = "auto",
    sizes: Annotated[str | None, options.sizes("by profile")] = None,
    steps: Annotated[int | None, options.steps("by profile")] = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    out: options.Out = Path("calibrate"),
    resume: options.Resume = False,
    draw: options.Draw = True,
    as_json: options.AsJson = False,
) -> None:
    """Learn a temperature for each attention head of a model.

    No weight changes. Perplexity on text and on the model's own answers, neither seen in training, stays within the
    budget. Of several kinds of policy the one with the highest accuracy on validation prompts is chosen.
    """
    from sharpmax.calibration.budget import MAX_BUDGET
    from sharpmax.calibration.calibrate import BudgetError, state_path
    from sharpmax.calibration.calibrate import calibrate as learn
    from sharpmax.calibration.data import profile_for
    from sharpmax.calibration.trainer import DivergedError
    from sharpmax.experiments.tables import calibrated_tables
    from sharpmax.files import display_name
    from sharpmax.models.language import load_language_model
    from sharpmax.tasks.registry import get_task
    from sharpmax.tasks.text import text_from_file

    if foldable and kinds is not None:
        reject("--kinds", repr(kinds), "nothing together with --foldable", "give one of the two")
    place, precision = resolve_device(context)
    chosen = profile_for(
        ("full" if place.type == "cuda" else "small") if profile == "auto" else profile,
        kinds=("constant",) if foldable else None if kinds is None else tuple(k.strip() for k in kinds.split(",")),
        sizes=None if sizes is None else tuple(sizes_from(sizes, least=1)),
        steps=steps,
    )
    states = [state_path(out, kind).name for kind in chosen.kinds]
    check_resume(context, *states)
    limit, what = share_from("--budget", budget, most=MAX_BUDGET), get_task(task)
    shares = {"keep": share_from("--keep", keep), "keep_layers": share_from("--keep-layers", keep_layers)}
    plain = None if text is None else text_from_file(text)
    check_extras("calibrate", ("transformers", "hf"), ("safetensors", "hf"), draw=draw)
    with progress() as show:
        show(f"loading {model}")
        language = load_language_model(model, device=place.type, dtype=precision)
        folder = out_folder(context)
        try:
            with resumable(folder, *states):
                found = learn(
                    language.model, language.tokenizer, task=what, budget=limit, profile=chosen, **shares, rate=rate,
                    seed=seed, text=plain, folder=folder, resume=resume, progress=show,
                )  # fmt: skip
        except (BudgetError, DivergedError):
            _remove_states(folder)  # resuming would fail again
            raise
    policies = found.save(folder)
    tables = calibrated_tables(found, display_name(model))
    finish(context, tables, folder, print_report(2), files=policies)
    _remove_states(folder)


def _remove_states(folder: Path) -> None:
    for state in folder.glob("state-*.safetensors"):
        state.unlink()
