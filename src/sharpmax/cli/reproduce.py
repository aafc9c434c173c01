"""`sharpmax reproduce`: the paper's max retrieval, from training to the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sharpmax.cli import options
from sharpmax.cli.options import choice, resolve_device, sizes_from
from sharpmax.cli.run import check_extras, check_resume, command_line, finish, out_folder, resumable
from sharpmax.cli.terminal import bar, progress, say
from sharpmax.errors import reject

if TYPE_CHECKING:
    import torch

    from sharpmax.models.weights import Trained


def reproduce(
    context: typer.Context,
    recipe: Annotated[str, choice("paper", "sharp", "both", help="Training recipe: paper, sharp or both.")] = "both",
    train: Annotated[bool, typer.Option("--train", help="Train heads instead of using the shipped ones.")] = False,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Heads of an earlier --train: folder or file.", show_default="shipped"),
    ] = None,
    sizes: Annotated[str, options.sizes()] = "16..16384",
    samples: options.Samples = 128,
    steps: Annotated[int | None, options.steps("the paper's 100000")] = None,
    seeds: options.Seeds = 10,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    out: options.Out = Path("reproduce"),
    resume: options.Resume = False,
    draw: options.Draw = True,
    as_json: options.AsJson = False,
) -> None:
    """Reproduce the paper's main table and figures.

    Does a trained head find the best of n items as n grows? The package ships ten trained heads for each of two
    recipes, the paper's and a sharper one.
    """
    from sharpmax.experiments.reproduce import items_to_read, reproduce_tables
    from sharpmax.experiments.stacked_training import RECIPES, STEPS, state_path
    from sharpmax.policies.base import policy_from_dict
    from sharpmax.report.reproduce import file_name, part

    recipes = list(RECIPES) if recipe == "both" else [recipe]
    tested = sizes_from(sizes)
    train = train or resume
    if steps is not None and not train:
        reject("--steps", steps, "a number together with --train", "add --train, or leave --steps out")
    steps = steps or STEPS
    if train and weights is not None:
        reject("--weights", repr(str(weights)), "nothing together with --train", "give one of the two")
    states = [state_path(out, name).name for name in recipes]
    check_resume(context, *states)
    chosen, _ = resolve_device(context)
    check_extras("reproduce", ("scipy.stats", "reproduce"), ("safetensors", "reproduce"), draw=draw)
    heads = [] if train else _load(recipes, seeds, weights)
    folder = out_folder(context)
    context.params.update(train=train, steps=steps if train else None)
    if train:
        with resumable(folder, *states):
            command = command_line(context)
            heads = _train(recipes, range(seed, seed + seeds), steps, chosen, folder, command, resume=resume)
    total = items_to_read(tested, samples, sum(len(w.seeds) for w in heads))
    with bar("testing", total) as advance:
        tables = reproduce_tables(heads, tested, samples, seed, chosen, lambda items: advance(items, ""))
    fits = {name: part(tables, "fit", name) for name in tables["setting"]["recipes"]}
    policies = [
        policy_from_dict(fit["policy"]).save(folder / f"{file_name('policy-refit', name)}.json")
        for name, fit in fits.items()
        if fit is not None
    ]
    finish(context, tables, folder, files=policies)


def _train(
    recipes: Sequence[str], seeds: range, steps: int, device: torch.device, folder: Path, command: str, *, resume: bool
) -> list[Trained]:
    from sharpmax.experiments.stacked_training import RECIPES, train, weights_path

    reached, losses = dict.fromkeys(recipes, 0), dict[str, str]()
    with progress() as show:

        def report(recipe: str, step: int, loss: float) -> None:
            reached[recipe], losses[recipe] = step, f"{recipe} {loss:.4f}"
            done = sum(reached.values())
            show("training", done, steps * len(recipes), f"loss: {', '.join(losses.values())}")

        chosen = [RECIPES[name] for name in recipes]
        models = train(chosen, seeds, steps, device, folder, command=command, resume=resume, progress=report)
    for trained in models:
        took, where = f"{trained.provenance['seconds']:.0f} s", weights_path(folder, trained.recipe)
        say(f"trained recipe {trained.recipe!r}: {len(seeds)} × {steps:,} steps in {took}, weights in {where}")
    return models


def _load(recipes: Sequence[str], seeds: int, weights: Path | None) -> list[Trained]:
    from sharpmax.experiments.stacked_training import weights_path
    from sharpmax.models.weights import Trained, shipped_path

    if weights is not None and weights.is_file():
        return [Trained.load(weights).first(seeds)]
    paths = [shipped_path(name) if weights is None else weights_path(weights, name) for name in recipes]
    return [Trained.load(path).first(seeds) for path in paths]
