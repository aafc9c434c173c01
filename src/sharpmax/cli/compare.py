"""`sharpmax compare`: the league of softmax and its alternatives on inputs larger than those in training."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from sharpmax.cli import options
from sharpmax.cli.options import TRAINING, add, device_named, files_given, sizes_from
from sharpmax.cli.report import finish, require_drawing
from sharpmax.cli.terminal import check_resume, out_folder, print_table, say, steps_shown, stopped
from sharpmax.errors import reject

_STEPS = 20_000
_GRID = {"width": "32,64,128", "heads": "1,2,4", "depth": "1,2,4"}
_ENCODER = {"width": "128", "heads": "4", "depth": "1"}
_SINGLE = {"width": "128", "heads": "1", "depth": "1"}


def _shape(text: str, shown: str) -> Any:
    return options.value("N", options.WHAT, text, show_default=shown)


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    example = "sharpmax compare softmax ssmax hard --steps 2000 --seeds 2 --sizes 16..1024"
    add(app, compare, example=example, panel=TRAINING)


def compare(
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="METHODS", help="Which methods; all of them unless told.", autocompletion=options.methods
        ),
    ] = None,
    task: Annotated[
        str,
        options.value(
            "T",
            options.WHAT,
            "max, recall, sort or copy.",
            autocompletion=options.sized_tasks,
        ),
    ] = "max",
    model: Annotated[
        str,
        options.value(
            "M",
            options.WHAT,
            "single, which is the paper's head, or encoder.",
            autocompletion=options.words("single", "encoder"),
        ),
    ] = "single",
    width: Annotated[str | None, _shape("Width of the model.", "128, several with --capacity")] = None,
    heads: Annotated[str | None, _shape("Heads of an encoder.", "4, several with --capacity")] = None,
    depth: Annotated[str | None, _shape("Layers of an encoder.", "1, several with --capacity")] = None,
    causal: Annotated[
        bool, options.flag("--causal", options.WHAT, "An encoder whose positions see those before them.")
    ] = False,
    capacity: Annotated[
        bool,
        options.flag("--capacity", options.WHAT, "Encoders of several widths, heads and depths, as --width 32,64."),
    ] = False,
    own: Annotated[
        list[Path] | None,
        options.value("FILE", options.WHAT, "A Python file with a normaliser of your own.", "--with"),
    ] = None,
    batch: Annotated[int, options.value("N", options.LEARNING, "Examples per step and seed.")] = 128,
    sizes: Annotated[str | None, options.sizes("those of the task")] = None,
    samples: options.Samples = 128,
    steps: Annotated[int, options.steps()] = _STEPS,
    seeds: options.Seeds = 5,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    stack: Annotated[
        int | None,
        options.value("N", options.PLACE, "Seeds trained in one program.", show_default="all"),
    ] = None,
    engine: Annotated[
        str,
        options.value("E", options.PLACE, "local or ray.", autocompletion=options.words("local", "ray")),
    ] = "local",
    workers: Annotated[
        int | None,
        options.value("N", options.PLACE, "Processes on this machine.", show_default="as the engine chooses"),
    ] = None,
    address: Annotated[
        str | None,
        options.value("HOST:PORT", options.PLACE, "Address of a Ray cluster.", show_default="one on this machine"),
    ] = None,
    out: options.Out = Path("compare"),
    resume: options.Resume = False,
    draw: options.Draw = True,
    as_json: options.AsJson = False,
) -> None:
    """Compare softmax with its alternatives: trained on small inputs by one recipe, tested on large ones."""
    from sharpmax.experiments.compare.capacity import capacity_tables
    from sharpmax.experiments.compare.leaderboard import compare_tables
    from sharpmax.experiments.compare.methods import methods_named, methods_of_files, models_of
    from sharpmax.experiments.compare.plan import Plan
    from sharpmax.experiments.engines import run
    from sharpmax.experiments.engines.store import Store
    from sharpmax.experiments.run_folder import RUN
    from sharpmax.lazy import require
    from sharpmax.provenance import check_seed, typed
    from sharpmax.results import FILE_NAME, collect
    from sharpmax.tasks.sized_registry import sized_task

    problem = sized_task(task)
    for name, value in (("seeds", seeds), ("steps", steps), ("batch", batch), ("samples", samples), ("stack", stack)):
        if value is not None and value < 1:
            reject(f"--{name}", value, "1 or more")
    check_seed(seed)
    files = own or []
    mine = methods_of_files(files)
    chosen = methods_named((methods or (["softmax"] if capacity and not mine else [])), mine)
    shapes = {"width": width, "heads": heads, "depth": depth}
    models = models_of(model, _shapes(model, shapes, capacity=capacity), causal=causal or problem.ordered)
    for one in models:
        one.check(problem)
    for method in chosen:
        method.check(problem)
    tested = sizes_from(sizes) if sizes else list(problem.sizes)
    if tested[-1] > problem.most:
        reject("--sizes", tested[-1], f"up to {problem.most} {problem.unit} for the task {task!r}")
    require("scipy.stats", "reproduce", "sharpmax compare")
    require("safetensors", "reproduce", "sharpmax compare")
    if draw:
        require_drawing()
    where = device_named(device).type
    plan = Plan(
        methods=tuple(chosen),
        models=tuple(models),
        task=task,
        seeds=tuple(range(seed, seed + seeds)),
        steps=steps,
        batch=batch,
        sizes=tuple(tested),
        samples=samples,
        device=where,
        stack=stack or seeds,
        files=tuple(file.read_text(encoding="utf-8-sig") for file in files),
    )
    command = typed(
        " ".join(["compare", *(methods or [])]),
        task=task,
        model=model,
        **shapes,
        causal=causal,
        capacity=capacity,
        seeds=seeds,
        seed=seed,
        steps=steps,
        batch=batch,
        sizes=sizes,
        samples=samples,
        stack=stack,
        engine=engine,
        device=where,
        out=out,
        **{"with": files},
    )
    check_resume(resume, out, RUN)
    folder = out_folder(out)
    store = Store(folder)
    store.claim(plan.identity(), resume=resume)
    with steps_shown() as tell:

        def tell_of(progress: Any) -> None:
            tell("comparing", progress.done, progress.total, ", ".join(progress.running[:2]))

        try:
            run(plan.tasks(), store, engine=engine, workers=workers, address=address, plugins=files, progress=tell_of)
        except KeyboardInterrupt:
            stopped(folder, RUN)
            raise
    tables = capacity_tables(plan, store) if capacity else compare_tables(plan, store)
    results = collect(command, tables, seed=seed, files=files_given(files))
    show = partial(_print, capacity=capacity)
    finish(results, results.save(folder / FILE_NAME), show, draw=draw, as_json=as_json)


def _print(tables: Mapping[str, Any], *, capacity: bool) -> None:
    (_print_capacity if capacity else _print_league)(tables)
    _print_verdict(tables)


def _print_verdict(tables: Mapping[str, Any]) -> None:
    """Print what the page says first."""
    from sharpmax.report.compare import headline

    for sentence in headline(tables):
        say(sentence)
    say()


def _shapes(model: str, given: Mapping[str, str | None], *, capacity: bool) -> dict[str, list[int]]:
    """Widths, numbers of heads and depths: one each, or several with --capacity."""
    if capacity and model != "encoder":
        reject("--capacity", f"--model {model}", "--model encoder")
    usual = _GRID if capacity else _ENCODER if model == "encoder" else _SINGLE
    found = {name: sizes_from(text or usual[name], least=1, option=f"--{name}") for name, text in given.items()}
    for name, values in found.items():
        if len(values) > 1 and not capacity:
            reject(f"--{name}", repr(given[name]), "one number", "add --capacity to compare several")
    return found


def _print_league(tables: Mapping[str, Any]) -> None:
    setting, league = tables["setting"], tables["league"]
    ranks = [place["rank"] for place in league.values()]
    rows = []
    for name, place in league.items():
        accuracy, training = tables["accuracy"][name], tables["training"][name]
        rank = f"{place['rank']}{'=' if ranks.count(place['rank']) > 1 else ''}"
        cells = [f"{accuracy[str(n)]['mean']:.1f}" for n in setting["sizes"]]
        rows.append([name, rank, _with_reach(place["score"]), *cells, _seconds(training), _megabytes(training)])
    title = (
        f"accuracy (%) of {setting['model']} on {setting['task']}: {setting['task_summary']}; trained at "
        f"{setting['train_sizes'][0]} … {setting['train_sizes'][1]} {setting['unit']} for {setting['steps']:,} steps, "
        f"seeds: {len(setting['seeds'])}, examples per seed: {setting['samples']:,}"
    )
    columns = ["method", "rank", "mean beyond training", *(f"{n:,}" for n in setting["sizes"]), "train s", "MB"]
    print_table(title, columns, rows)
    if (largest := str(setting["sizes"][-1])) and len(setting["sizes"]) > 1:
        rows = [
            [name, *(_percent(tables[table][name][largest]) for table in ("accuracy", "hard", "ranking", "close")),
             _percent(tables["top_weight"][name][largest]), _nats(tables["entropy"][name][largest])]
            for name in league
        ]  # fmt: skip
        columns = ["method", "accuracy", "if hard", "ranked right", "of near-ties", "top weight", "entropy (nat)"]
        print_table(f"at {int(largest):,} {setting['unit']} (%): dispersion or wrong ranking", columns, rows)
    for name in league:
        if lost := tables["training"][name]["diverged"]:
            say(f"diverged: {name}, seeds {', '.join(map(str, lost))}; their answers count as wrong")
    if len(setting["seeds"]) == 1:
        say("one seed: ranks are by the mean alone, no difference was tested")


def _print_capacity(tables: Mapping[str, Any]) -> None:
    setting = tables["setting"]
    for method, cells in tables["capacity"].items():
        ends = ("half_accuracy_size", "half_top_weight_size")
        rows = [[cell["model"], f"{cell['parameters']:,}", *(_size(cell[end]) for end in ends)] for cell in cells]
        title = (
            f"{method} on {setting['task']}: size at which accuracy halves, and at which the top weight is under 1/2"
        )
        print_table(title, ["model", "parameters", "accuracy", "top weight"], rows)
        for name, law in tables["laws"][method].items():
            say(f"{name}: {_law(law)}")
        layers = {label: found for label, found in tables["layers"][method].items() if found is not None}
        for label, found in layers.items():
            same = found["first_measured"] == found["first_forecast"]
            agree = "as forecast" if same else f"forecast: layer {found['first_forecast'] + 1}"
            say(f"{label}: layer {found['first_measured'] + 1} disperses first ({agree})")
    say()


def _law(law: Mapping[str, Any]) -> str:
    used = f"{law['used']} of {law['models']} models end among the sizes tested"
    if law["exponents"] is None:
        return f"no law, {used}"
    powers = []
    for name, exponent in law["exponents"].items():
        reach = "" if exponent["low"] is None else f" ({exponent['low']:.2f} … {exponent['high']:.2f})"
        powers.append(f"{name}^{exponent['mean']:.2f}{reach}")
    return f"size ≈ {law['constant']:.3g} · {' · '.join(powers)}, {used}" if powers else f"size ≈ {law['constant']:.3g}"


def _size(value: float | str | None) -> str:
    return f"{value:,.0f}" if isinstance(value, float) else value or "–"


def _with_reach(cell: Mapping[str, Any]) -> str:
    return f"{cell['mean']:.1f}" + ("" if cell["low"] is None else f" ±{cell['mean'] - cell['low']:.1f}")


def _percent(cell: Mapping[str, Any]) -> str:
    return "–" if cell["mean"] is None else f"{cell['mean']:.1f}"


def _nats(cell: Mapping[str, Any]) -> str:
    return "–" if cell["mean"] is None else f"{cell['mean']:.2f}"


def _seconds(training: Mapping[str, Any]) -> str:
    return f"{training['seconds']:.1f}"


def _megabytes(training: Mapping[str, Any]) -> str:
    return "–" if training["memory"] is None else f"{training['memory'] / 1e6:,.0f}"
