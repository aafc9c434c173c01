"""`sharpmax calibrate`: learn a temperature per head of a language model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from sharpmax.cli import options
from sharpmax.cli.options import (
    LANGUAGE,
    add,
    device_named,
    dtype_named,
    files_given,
    share_from,
    sizes_from,
    word_shown,
)
from sharpmax.cli.report import finish, require_drawing
from sharpmax.cli.terminal import check_resume, out_folder_if_used, print_table, progress, say, steps_shown, stopped
from sharpmax.errors import reject


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    add(app, calibrate, example="sharpmax calibrate smollm2 --task kv --leash 1% --out calibrate", panel=LANGUAGE)


def calibrate(
    model: options.Model,
    task: Annotated[str, options.task(options.tasks)] = "kv",
    kinds: Annotated[
        str | None,
        options.value(
            "K,K",
            options.WHAT,
            "Kinds of policy to learn: constant, length, entropy, rows.",
            show_default="those of the profile",
            autocompletion=options.kinds,
        ),
    ] = None,
    foldable: Annotated[
        bool,
        options.flag(
            "--foldable", options.WHAT, "Learn constants only, which `sharpmax fold` can put into the weights."
        ),
    ] = False,
    text: options.TextFile = None,
    leash: Annotated[
        str,
        options.value(
            "P%", options.LEARNING, "How far perplexity may rise, on text and on the model's answers: 1% or 0.01."
        ),
    ] = "1%",
    keep: Annotated[
        str,
        options.value("P%", options.LEARNING, "Share of the heads that may be touched."),
    ] = "100%",
    keep_layers: Annotated[
        str,
        options.value("P%", options.LEARNING, "Share of the layers they may be in: each costs time."),
    ] = "100%",
    rate: options.LearningRate = 0.03,
    profile: Annotated[
        str,
        options.value(
            "NAME",
            options.AMOUNT,
            "full (a GPU's minutes), small (ten minutes of two cores) or auto, by the device.",
            autocompletion=options.words("auto", "full", "small"),
        ),
    ] = "auto",
    sizes: Annotated[str | None, options.sizes("those of the profile")] = None,
    steps: Annotated[int | None, options.steps("those of the profile")] = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    out: options.Out = Path("calibrate"),
    resume: options.Resume = False,
    draw: options.Draw = True,
    as_json: options.AsJson = False,
) -> None:
    """Learn a temperature for each attention head of a language model, without changing a weight.

    Perplexity on plain text and on the model's own answers to ordinary questions, neither of them seen while learning,
    rises by no more than the leash. Of several kinds of policy the one that answers unseen prompts best is chosen.
    """
    from sharpmax.calibration.budget import MOST
    from sharpmax.calibration.calibrate import LeashError, state_path
    from sharpmax.calibration.calibrate import calibrate as learn
    from sharpmax.calibration.data import profile_for
    from sharpmax.calibration.trainer import DivergedError
    from sharpmax.experiments.tables import calibrated_tables
    from sharpmax.files import display_name
    from sharpmax.lazy import require
    from sharpmax.models.language import load_language_model
    from sharpmax.provenance import check_seed, typed
    from sharpmax.results import FILE_NAME, collect
    from sharpmax.tasks.registry import get_task
    from sharpmax.tasks.text import text_from_file

    check_seed(seed)
    if foldable and kinds is not None:
        reject("--kinds", repr(kinds), "nothing together with --foldable", "give one of the two")
    place = device_named(device)
    precision = dtype_named(dtype, place)
    chosen = profile_for(
        ("full" if place.type == "cuda" else "small") if profile == "auto" else profile,
        kinds=("constant",) if foldable else None if kinds is None else tuple(k.strip() for k in kinds.split(",")),
        sizes=None if sizes is None else tuple(sizes_from(sizes, least=1)),
        steps=steps,
    )
    states = [state_path(out, kind).name for kind in chosen.kinds]
    check_resume(resume, out, *states)
    limit, what = share_from("--leash", leash, most=MOST), get_task(task)
    shares = {"keep": share_from("--keep", keep), "keep_layers": share_from("--keep-layers", keep_layers)}
    plain = None if text is None else text_from_file(text)
    for package in ("transformers", "safetensors"):
        require(package, "hf", "sharpmax calibrate")
    if draw:
        require_drawing()
    with progress() as note:
        note(f"loading {model}")
        language = load_language_model(model, device=place.type, dtype=precision)
    try:
        with out_folder_if_used(out) as folder, steps_shown() as tell:
            try:
                found = learn(
                    language.model, language.tokenizer, task=what, leash=limit, profile=chosen, **shares, rate=rate,
                    seed=seed, text=plain, folder=folder, resume=resume, progress=tell,
                )  # fmt: skip
            except (LeashError, DivergedError):
                _forget_states(folder)  # they lead here again
                raise
            policies = found.save(folder)
    except KeyboardInterrupt:
        stopped(out, *states)
        raise
    tables = calibrated_tables(found, display_name(model))
    command = typed(
        f"calibrate {tables['setting']['model']}", task=word_shown(task), leash=leash, foldable=foldable,
        profile=profile, kinds=kinds, sizes=sizes, keep=keep, keep_layers=keep_layers, steps=steps, lr=rate, text=text,
        device=place.type, dtype=precision, seed=seed, out=out,
    )  # fmt: skip
    results = collect(command, tables, seed=seed, files=files_given([task], [text]))
    saved = results.save(folder / FILE_NAME)
    _forget_states(folder)
    finish(results, saved, _print, files=policies, draw=draw, as_json=as_json)


def _forget_states(folder: Path) -> None:
    for state in folder.glob("state-*.safetensors"):
        state.unlink()


def _print(tables: Mapping[str, Any]) -> None:
    from sharpmax.report.calibrate import headline, notes

    setting = tables["setting"]
    size = max(setting["sizes"])
    lengths = list(tables["candidates"][tables["chosen"]]["rise"])
    before = tables["validation"]["as it comes"][str(size)]["mean"]
    rows = [["as it comes", "–", f"{before:.1f}", *("–" for _ in lengths)]]
    for kind, one in tables["candidates"].items():
        mark = " (chosen)" if kind == tables["chosen"] else ""
        rises = (f"{one['rise'][name]:+.2f}" for name in lengths)
        rows.append([f"{kind}{mark}", str(one["touched"]), f"{one['validation']:.1f}", *rises])
    heads = [name if name == "chat" else f"{int(name):,} tokens" for name in lengths]
    print_table(
        f"{setting['model']}: {setting['task']}, unseen prompts of size {size}, leash {setting['leash']:g}%",
        ["kind", "heads touched", "right, %", *(f"rise {head}, %" for head in heads)],
        rows,
    )
    for sentence in (*headline(tables), *notes(tables)):
        say(sentence)
    say()
