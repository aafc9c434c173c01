"""`sharpmax reproduce`: the paper's max retrieval, from training to the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sharpmax.cli import options
from sharpmax.cli.options import BEGIN, add, device_named, files_given, sizes_from
from sharpmax.cli.report import finish, require_drawing
from sharpmax.cli.terminal import bar, check_resume, out_folder, print_table, say, stopped
from sharpmax.errors import reject
from sharpmax.experiments.reproduce.recipes import RECIPES, SIZES, STEPS

if TYPE_CHECKING:
    import torch

    from sharpmax.models.weights import Trained

_BOTH = "both"
_DEFAULT_SIZES = ",".join(map(str, SIZES))


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    add(app, reproduce, example="sharpmax reproduce --train --steps 2000 --seeds 1 --out quick", panel=BEGIN)


def reproduce(
    recipe: Annotated[
        str,
        options.value(
            "R",
            options.WHAT,
            "How heads are trained: paper, sharp or both.",
            autocompletion=options.words(*RECIPES, _BOTH),
        ),
    ] = _BOTH,
    train: Annotated[
        bool, options.flag("--train", options.WHAT, "Train heads instead of taking the package's own; see --steps.")
    ] = False,
    weights: Annotated[
        Path | None,
        options.value(
            "PATH",
            options.WHAT,
            "Test the heads of an earlier --train: its folder or a file.",
            show_default="the package's own",
        ),
    ] = None,
    sizes: Annotated[str, options.sizes(f"{SIZES[0]}..{SIZES[-1]}")] = _DEFAULT_SIZES,
    samples: options.Samples = 128,
    steps: Annotated[int | None, options.steps(f"the paper's {STEPS}")] = None,
    seeds: options.Seeds = 10,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    out: options.Out = Path("reproduce"),
    resume: options.Resume = False,
    draw: options.Draw = True,
    as_json: options.AsJson = False,
) -> None:
    """Reproduce the paper's main table and figures: does a trained head still find the best of n items as n grows?

    Ten heads trained at full length come with the package for each of two recipes, the paper's and a sharper one.
    """
    from sharpmax.experiments.reproduce.tables import items_to_read, reproduce_tables
    from sharpmax.experiments.reproduce.training import state_path
    from sharpmax.lazy import require
    from sharpmax.provenance import check_seed, typed
    from sharpmax.results import FILE_NAME, collect

    if recipe not in (*RECIPES, _BOTH):
        reject("--recipe", repr(recipe), ", ".join((*RECIPES, _BOTH)))
    recipes = list(RECIPES) if recipe == _BOTH else [recipe]
    tested = sizes_from(sizes)
    for name, value in (("samples", samples), ("seeds", seeds), ("steps", steps)):
        if value is not None and value < 1:
            reject(f"--{name}", value, "1 or more")
    check_seed(seed)
    train = train or resume
    if steps is not None and not train:
        reject("--steps", steps, "a number together with --train", "add --train, or leave --steps out")
    steps = steps or STEPS
    if train and weights is not None:
        reject("--weights", repr(str(weights)), "nothing together with --train", "give one of the two")
    check_resume(resume, out, *(state_path(out, name).name for name in recipes))
    chosen = device_named(device)
    # Everything that could stop the run is asked for before it begins.
    require("scipy.stats", "reproduce", "sharpmax reproduce")
    require("safetensors", "reproduce", "sharpmax reproduce")
    if draw:
        require_drawing()
    heads = [] if train else _load(recipes, seeds, weights)
    folder = out_folder(out)
    command = typed(
        "reproduce",
        out=out,
        recipe=recipe,
        samples=samples,
        sizes=None if sizes == _DEFAULT_SIZES else sizes,
        seeds=seeds,
        seed=seed,
        device=chosen.type,
        train=train,
        steps=steps if train else None,
        weights=weights,
    )
    if train:
        heads = _train(recipes, range(seed, seed + seeds), steps, chosen, folder, command, resume=resume)
    total = items_to_read(tested, samples, sum(len(w.seeds) for w in heads))
    with bar("testing", total) as advance:
        tables = reproduce_tables(heads, tested, samples, seed, chosen, lambda items: advance(items, ""))
    results = collect(command, tables, seed=seed, files=files_given([], [weights]))
    saved, policies = results.save(folder / FILE_NAME), _save_policies(tables, folder)
    finish(results, saved, _print, files=policies, draw=draw, as_json=as_json)


def _train(
    recipes: Sequence[str],
    seeds: range,
    steps: int,
    device: torch.device,
    folder: Path,
    command: str,
    *,
    resume: bool,
) -> list[Trained]:
    from sharpmax.experiments.reproduce.training import state_path, train, weights_path

    reached, losses = dict.fromkeys(recipes, 0), dict.fromkeys(recipes, math.nan)
    with bar("training", steps * len(recipes)) as advance:

        def show(recipe: str, step: int, loss: float) -> None:
            ahead, reached[recipe], losses[recipe] = step - reached[recipe], step, loss
            known = [f"{name} {value:.4f}" for name, value in losses.items() if not math.isnan(value)]
            advance(ahead, f"loss: {', '.join(known)}" if known else "")

        chosen = [RECIPES[name] for name in recipes]
        try:
            done = train(chosen, seeds, steps, device, folder, command=command, resume=resume, progress=show)
        except KeyboardInterrupt:
            stopped(folder, *(state_path(folder, name).name for name in recipes))
            raise
    for trained in done:
        heads = "1 head" if len(seeds) == 1 else f"{len(seeds)} heads"
        say(
            f"trained {heads} by recipe {trained.recipe!r}: {steps:,} steps in {trained.provenance['seconds']:.0f} s, "
            f"weights in {weights_path(folder, trained.recipe)}"
        )
    return done


def _load(recipes: Sequence[str], seeds: int, weights: Path | None) -> list[Trained]:
    from sharpmax.experiments.reproduce.training import weights_path
    from sharpmax.models.weights import Trained, shipped_path

    if weights is not None and weights.is_file():
        return [Trained.load(weights).first(seeds)]
    paths = [shipped_path(name) if weights is None else weights_path(weights, name) for name in recipes]
    return [Trained.load(path).first(seeds) for path in paths]


def _save_policies(tables: Mapping[str, Any], folder: Path) -> list[Path]:
    from sharpmax.policies.base import policy_from_dict
    from sharpmax.report.reproduce import file_name, part

    fits = {recipe: part(tables, "fit", recipe) for recipe in tables["setting"]["recipes"]}
    return [
        policy_from_dict(fit["policy"]).save(folder / f"{file_name('policy-refit', recipe)}.json")
        for recipe, fit in fits.items()
        if fit is not None
    ]


def _print(tables: Mapping[str, Any]) -> None:
    from sharpmax.report.reproduce import REFERENCE, headline, part

    setting = tables["setting"]
    for recipe, about in setting["recipes"].items():
        accuracy = part(tables, "accuracy", recipe)
        reference = tables["published"] if recipe == REFERENCE else {}
        columns = [name for arm in accuracy for name in ([arm, f"{arm}, published"] if arm in reference else [arm])]
        rows = []
        for n in map(str, setting["sizes"]):
            row = [f"{int(n):,}"]
            for arm in accuracy:
                cell = accuracy[arm][n]
                row.append(f"{cell['mean']:.1f}" + ("" if cell["sem"] is None else f" ±{cell['sem']:.1f}"))
                if arm in reference:
                    row.append(f"{reference[arm][n]:.1f}" if n in reference[arm] else "–")
            rows.append(row)
        title = (
            f"accuracy (%) of recipe {recipe!r}: {about['describe']}; {about['steps']:,} steps, "
            f"seeds: {len(about['seeds'])}, sets per seed: {setting['samples']:,}"
        )
        print_table(title, ["items n", *columns], rows)
        for what, why in setting["left_out"][recipe].items():
            say(f"left out: {what}, because {why}")
    for sentence in headline(tables):
        say(sentence)
    say()
