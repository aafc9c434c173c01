"""`sharpmax calibrate`: learn a temperature per head of a language model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from sharpmax.cli import options
from sharpmax.cli.options import choice, resolve_device, sizes_from
from sharpmax.cli.run import check_extras, check_new_gguf, check_resume, finish, out_folder, resumable
from sharpmax.cli.terminal import progress
from sharpmax.errors import reject


def calibrate(
    context: typer.Context,
    model: options.Model,
    task: Annotated[str, options.task("many formats and controls")] = "training,control",
    kinds: Annotated[
        str | None,
        typer.Option(
            metavar="K,K",
            help="Policies to learn: frequency, constant, length, entropy, rows, output, frequency+output.",
            show_default="by profile",
        ),
    ] = None,
    foldable: Annotated[bool, typer.Option("--foldable", help="Learn constants only, for `sharpmax fold`.")] = False,
    text: Annotated[list[str] | None, typer.Option(metavar="NAME=FILE", help="Further text domains.")] = None,
    budget: Annotated[float, typer.Option(metavar="X", help="KL limit per domain, nats per token.")] = 0.01,
    keep: Annotated[str, typer.Option(metavar="P%", help="Share of heads that may be modified.")] = "100%",
    keep_layers: Annotated[str, typer.Option(metavar="P%", help="Share of layers that may be modified.")] = "100%",
    rate: options.LearningRate = 0.02,
    profile: Annotated[
        str, choice("auto", "full", "small", help="full (GPU), small (two CPU cores) or auto.")
    ] = "auto",
    sizes: Annotated[str | None, options.sizes("by profile")] = None,
    steps: Annotated[int | None, options.steps("by profile")] = None,
    memory: Annotated[str | None, typer.Option(metavar="N", help="Memory to use, as 16G.", show_default="8G")] = None,
    fold: Annotated[Path | None, typer.Option(metavar="FILE", help="Fold the constants into a new file.")] = None,
    seed: options.Seed = 0,
    device: options.ModelDevice = "auto",
    dtype: options.Dtype = "float32",
    out: options.Out = Path("calibrate"),
    resume: options.Resume = False,
    draw: options.Draw = True,
    as_json: options.AsJson = False,
) -> None:
    """Learn a temperature for each attention head of a model.

    No weight changes. The model's predictions stay within the budget on each domain: text it samples itself, Python's
    documentation and code, and its own chat answers. The kind with the lowest loss on validation prompts is chosen.
    """
    from sharpmax.calibration.budget import check_budget
    from sharpmax.calibration.calibrate import BudgetError, state_path
    from sharpmax.calibration.calibrate import calibrate as learn
    from sharpmax.calibration.data import profile_for
    from sharpmax.calibration.learnable import FOLDABLE
    from sharpmax.calibration.trainer import DivergedError
    from sharpmax.experiments.tables import calibrated_tables
    from sharpmax.files import display_name
    from sharpmax.integrations.gguf import fold_file, is_gguf
    from sharpmax.models.language import load_language_model
    from sharpmax.tasks.registry import get_tasks
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
    check_budget(budget)
    get_tasks(task)  # reject a wrong name before the model is loaded
    if fold is not None:
        if not is_gguf(model):
            reject("--fold", repr(str(fold)), "a GGUF file as MODEL", "fold a folder with `sharpmax fold`")
        if not set(FOLDABLE) & set(chosen.kinds):
            kinds_given = f"{str(fold)!r} with the kinds {', '.join(chosen.kinds)}"
            reject("--fold", kinds_given, f"{' or '.join(FOLDABLE)} among --kinds")
        check_new_gguf("--fold", fold)
    kept, kept_layers = _share("--keep", keep), _share("--keep-layers", keep_layers)
    texts = {}
    for word in text or []:
        name, _, file = word.partition("=")
        if not (name and file) or "/" in name:
            reject("--text", repr(word), "NAME=FILE, as prose=book.txt")
        texts[name] = text_from_file(file)
    most = None if memory is None else _bytes(memory)
    check_extras("calibrate", ("transformers", "hf"), ("safetensors", "hf"), draw=draw)
    with progress() as show:
        show(f"loading {model}")
        language = load_language_model(model, device=context.params["device"], dtype=precision)
        folder = out_folder(context)
        try:
            with resumable(folder, *states):
                found = learn(
                    language.model, language.tokenizer, task=task, budget=budget, profile=chosen, keep=kept,
                    keep_layers=kept_layers, rate=rate, seed=seed, texts=texts, memory=most,
                    folder=folder, resume=resume, progress=show,
                )  # fmt: skip
        except (BudgetError, DivergedError):
            _remove_states(folder)  # resuming would fail again
            raise
    policies = found.save(folder)
    tables = calibrated_tables(found, display_name(model))
    if fold is not None:
        if found.foldable is None:
            raise BudgetError("--fold: no constants stay within the budget; increase it")
        fold_file(Path(model), found.foldable.policy, fold)
        policies.append(fold)
    finish(context, tables, folder, files=policies)
    _remove_states(folder)


def _share(option: str, text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)%", text.strip())
    share = float(match[1]) / 100.0 if match else 0.0
    if not 0.0 < share <= 1.0:
        reject(option, repr(text), "a percentage above 0% and up to 100%, as 50%")
    return share


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([GM])", text.strip().upper())
    if match is None:
        reject("--memory", repr(text), "a number and G or M, as 16G")
    return int(float(match[1]) * 2 ** {"M": 20, "G": 30}[match[2]])


def _remove_states(folder: Path) -> None:
    for state in folder.glob("state-*.safetensors"):
        state.unlink()
