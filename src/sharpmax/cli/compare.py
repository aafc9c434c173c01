"""`sharpmax compare`: softmax and its alternatives on inputs larger than those in training."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from sharpmax.cli import options
from sharpmax.cli.options import check_engine, choice, number, resolve_device, sizes_from
from sharpmax.cli.run import check_extras, check_resume, finish, out_folder, resumable
from sharpmax.cli.terminal import progress
from sharpmax.errors import reject

_GRID = {"width": "32,64,128", "heads": "1,2,4", "depth": "1,2,4"}
"""Shapes of --capacity."""


def compare(
    context: typer.Context,
    methods: Annotated[
        list[str] | None, typer.Argument(metavar="METHODS", help="Methods to compare.", show_default="all")
    ] = None,
    task: Annotated[str, typer.Option(metavar="T", help="max, recall, sort or copy.")] = "max",
    model: Annotated[
        str, choice("single", "encoder", help="single (the paper's head) or encoder.", metavar="M")
    ] = "single",
    width: Annotated[str | None, typer.Option(metavar="N", help="Model width.", show_default="128")] = None,
    heads: Annotated[str | None, typer.Option(metavar="N", help="Heads of an encoder.", show_default="4")] = None,
    depth: Annotated[str | None, typer.Option(metavar="N", help="Layers of an encoder.", show_default="1")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Use a causal encoder.")] = False,
    capacity: Annotated[bool, typer.Option("--capacity", help="Compare shapes: --width 32,64.")] = False,
    own: Annotated[
        list[Path] | None, typer.Option("--with", metavar="FILE", help="Python file with your normaliser.")
    ] = None,
    batch: Annotated[int, number("Examples per step and seed.")] = 128,
    sizes: Annotated[str | None, options.sizes("by task")] = None,
    samples: options.Samples = 128,
    steps: Annotated[int, options.steps()] = 20_000,
    seeds: options.Seeds = 5,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    engine: options.Engine = "local",
    workers: options.Workers = None,
    address: options.Address = None,
    out: options.Out = Path("compare"),
    resume: options.Resume = False,
    draw: options.Draw = True,
    as_json: options.AsJson = False,
) -> None:
    """Compare softmax with its alternatives on growing inputs.

    All methods are trained alike on small inputs and tested on large ones.
    """
    from sharpmax.experiments.compare.methods import methods_named, methods_of_files, models_of
    from sharpmax.experiments.compare.run import ComparisonPlan, capacity_tables, compare_tables
    from sharpmax.experiments.engine import run
    from sharpmax.experiments.run_folder import RUN, RunStore
    from sharpmax.tasks.sized import sized_task

    problem = sized_task(task)
    files = list(own or [])
    mine = methods_of_files(files)
    chosen = methods_named(list(methods or (["softmax"] if capacity and not mine else [])), mine)
    shapes = _shapes(model, {"width": width, "heads": heads, "depth": depth}, capacity=capacity)
    models = models_of(model, shapes, causal=causal or problem.ordered)
    for one in models:
        one.check(problem)
    for method in chosen:
        method.check(problem)
    tested = sizes_from(sizes) if sizes else list(problem.sizes)
    if tested[-1] > problem.most:
        reject("--sizes", tested[-1], f"up to {problem.most} {problem.unit} for the task {task!r}")
    check_engine(context)
    check_extras("compare", ("scipy.stats", "reproduce"), ("safetensors", "reproduce"), draw=draw)
    where = resolve_device(context)[0].type
    plan = ComparisonPlan(
        methods=tuple(chosen), models=tuple(models), task=task, seeds=tuple(range(seed, seed + seeds)), steps=steps,
        batch=batch, sizes=tuple(tested), samples=samples, device=where,
        files=tuple(file.read_text(encoding="utf-8-sig") for file in files),
    )  # fmt: skip
    tasks, identity = plan.tasks(), plan.identity()
    check_resume(context, RUN)
    folder = out_folder(context)
    store = RunStore(folder)
    store.claim(identity, resume=resume)
    with resumable(folder, RUN), progress() as show:
        report = partial(show, "comparing")
        run(tasks, store, engine=engine, workers=workers, address=address, plugins=files, progress=report)
    tables = capacity_tables(plan, store) if capacity else compare_tables(plan, store)
    finish(context, tables, folder)


def _shapes(model: str, given: Mapping[str, str | None], *, capacity: bool) -> dict[str, list[int]]:
    """Widths, numbers of heads and depths: one each, or several with --capacity."""
    if capacity and model != "encoder":
        reject("--capacity", f"--model {model}", "--model encoder")
    usual = _GRID if capacity else {"width": "128", "heads": "4" if model == "encoder" else "1", "depth": "1"}
    found = {name: sizes_from(text or usual[name], least=1, option=f"--{name}") for name, text in given.items()}
    for name, values in found.items():
        if len(values) > 1 and not capacity:
            reject(f"--{name}", repr(given[name]), "one number", "add --capacity to compare several")
    return found
