"""`sharpmax bench`: speed, memory and accuracy on this machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sharpmax.cli import answer, options
from sharpmax.cli.options import number, resolve_device
from sharpmax.cli.run import check_extras, command_line, draw_saved, finish, out_folder
from sharpmax.cli.terminal import Show, print_table, progress, say, wrote
from sharpmax.errors import MissingExtraError, UnsupportedError, reject

if TYPE_CHECKING:
    import torch

_OPTIONS = {
    "monitor": ("prompts", "device", "dtype"), "host": ("device",), "training": ("device",),
    "generate": ("policy", "together", "static", "device", "dtype"),
}  # fmt: skip
"""Options of single benchmarks."""


def bench(
    context: typer.Context,
    cpu: Annotated[bool, typer.Option("--cpu/--gpu", help="Device to measure.")] = True,
    probe: Annotated[bool, typer.Option("--probe", help="Measure the cost of capturing rows.")] = False,
    monitor: Annotated[bool, typer.Option("--monitor", help="Measure a monitor's AUROC and cost.")] = False,
    training: Annotated[bool, typer.Option("--training", help="Measure the cost per training step.")] = False,
    host: Annotated[bool, typer.Option("--host", help="Measure host time per call.")] = False,
    generate: Annotated[
        str | None, typer.Option("--generate", metavar="MODEL", help="Measure transformers' generate, or `random`.")
    ] = None,
    policy: Annotated[list[str] | None, options.policy("four")] = None,
    together: Annotated[int | None, number("Batch size.", show_default="1 and 16")] = None,
    static: Annotated[bool, typer.Option("--static/--no-static", help="Also measure a static cache.")] = True,
    length: Annotated[int | None, number("Number of keys.", show_default="16384, --probe 8192, others 2048")] = None,
    repeat: Annotated[int | None, number("Timing rounds.", show_default="3 to 20")] = None,
    prompts: Annotated[int, options.prompts()] = 100,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    out: Annotated[Path | None, options.out("print only")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Time row statistics and attention against PyTorch's own.

    A case that disagrees with the float64 reference is not timed, and the exit code is 1. --gpu adds the training step
    and decode, compares with PyTorch's fastest kernel, and draws a figure. --probe measures smollm2 with and without
    capture. --monitor measures false alarms, detected mistakes and time per token. --generate measures prefill and time
    per token with and without policies, on a GPU at 2,048 and 8,192 tokens. --device applies to --monitor, --training,
    --host and --generate, --dtype to --monitor and --generate.
    """
    given = context.params
    modes = ("probe", "monitor", "gpu", "host", "generate", "training")
    mode, *others = [name for name in modes if ({"gpu": not cpu} | given)[name]] or ["cpu"]
    if others:
        reject(f"--{mode}", f"both --{mode} and --{others[0]}", "one of the two")
    place, kind = resolve_device(context)
    unused = {name for names in _OPTIONS.values() for name in names} - set(_OPTIONS.get(mode, ()))
    given.update(dict.fromkeys(unused))
    asked = {name: given[name] for name in ("length", "repeat") if given[name] is not None}
    if mode == "gpu":
        _bench_gpu(context, asked)
        return
    if monitor:
        check_extras("bench --monitor", ("scipy.stats", "fit"))
    folder = None if out is None else out_folder(context)
    with progress() as note:
        name, tables = _measured(context, mode, asked, place, kind, note)
    finish(context, tables, folder, _print, name=name)
    _fail_if([name for name, entry in tables.get("bench", {}).items() if not entry.get("agrees", True)])


def _measured(
    context: typer.Context, mode: str, asked: Mapping[str, int], place: torch.device, kind: str, note: Show
) -> tuple[str, dict[str, Any]]:  # fmt: skip
    """Run a benchmark; return the name of its file and its tables."""
    given = context.params
    seed, length, repeat = given["seed"], given["length"], given["repeat"]
    if mode in ("cpu", "probe"):
        from sharpmax.experiments.benchmarks import cpu

        measure = cpu.cpu_tables if mode == "cpu" else cpu.probe_tables
        return f"{mode}.json", measure(**asked, seed=seed, note=note)
    if mode == "monitor":
        from sharpmax.experiments.benchmarks import monitor
        from sharpmax.models.language import load_language_model

        note("loading smollm2")
        language = load_language_model("smollm2", device=place.type, dtype=kind)
        amounts = {"limit": given["prompts"], "rounds": repeat or monitor.ROUNDS, "context": length or monitor.CONTEXT}
        return "monitor.json", monitor.monitor_tables(language, **amounts, seed=seed, note=note)
    from sharpmax.experiments.benchmarks import latency
    from sharpmax.experiments.benchmarks.gpu import slug

    def file(tables: Mapping[str, Any]) -> str:
        return f"{mode}-{slug(tables['setting']['device'])}.json"

    if mode == "training":
        length = length or (latency.TRAINING_LENGTH if place.type == "cuda" else 64)
        rounds = repeat or latency.TRAINING_ROUNDS
        tables = latency.training_tables(length=length, repeat=rounds, device=place, seed=seed, note=note)
        return "training.json", tables
    if mode == "host":
        tables = latency.host_tables(place, repeat or latency.ROUNDS, seed, note)
        return file(tables), tables
    model = given["generate"]
    note(f"loading {model}")
    tables = latency.generate_tables(
        latency.model_for(model, place, kind, seed), model, policies=given["policy"] or latency.POLICIES,
        contexts=[length] if length else None, batches=[given["together"]] if given["together"] else None,
        compiled=given["static"] and place.type == "cuda", repeat=repeat or latency.GENERATE_ROUNDS, seed=seed,
        note=note,
    )  # fmt: skip
    return file(tables), tables


def _fail_if(wrong: Sequence[str]) -> None:
    if wrong:
        say(f"Not timed, because results disagree with the reference: {'; '.join(wrong)}.")
        raise typer.Exit(1)


def _bench_gpu(context: typer.Context, asked: Mapping[str, int]) -> None:
    import torch

    from sharpmax.experiments.benchmarks.gpu import gpu_entries, save, slug

    device, given = _gpu(), context.params
    folder = None if given["out"] is None else out_folder(context)
    with progress() as note:
        entries = gpu_entries(device, **asked, seed=given["seed"], command=command_line(context), note=note)
    if not given["as_json"]:
        _print_gpu(entries)
    if folder is not None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        saved = save(folder / f"{slug(name)}.json", entries)
        wrote([saved])
        # The numbers are saved even where the packages that draw are missing.
        try:
            wrote(draw_saved(saved))
        except MissingExtraError as missing:
            say(f"No figure: {missing}; then: sharpmax report {saved}")
    if given["as_json"]:
        answer(entries)
    _fail_if([f"{one['kind']} {one['case']}" for one in entries if not one["agrees"]])


def _gpu() -> torch.device:
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError("--gpu: this machine has no CUDA device that torch can use; use --cpu")
    return torch.device("cuda")


def _print_gpu(entries: Sequence[dict[str, Any]]) -> None:
    from sharpmax.report.gpu import gpu_tables

    for table in gpu_tables(entries):
        rows = [[cell.text for cell in row] for row in table.rows]
        print_table(f"{table.title}, bfloat16", [cell.text for cell in table.head], rows)
    for one in entries:
        if one["problem"]:
            say(f"{one['kind']} {one['case']} fails: {one['problem']}")
    say("* not part of a mean. Ratios are rounded up. Times are device times; the file also has host times.")


_COLUMNS = {
    "median_s": ".3f", "median_us": ".1f", "min_us": ".1f", "median_ms": ".3f", "prefill_ms": ".1f",
    "prefill_ratio": ".2f", "prefill_device_ratio": ".2f", "token_ms": ".2f", "token_ratio": ".2f",
    "token_device_ratio": ".2f", "graph_breaks": ".0f", "ratio": ".2f",
    "extra_mb": ",.0f", "dense_mb": ",.0f", "largest_error": ".1e", "tolerance": ".0e",
}  # fmt: skip
"""Numbers of a case, with their formats."""


def _print(tables: Mapping[str, Any]) -> None:
    """Print a row for each case, then the other numbers. Ratios are to the first case of a kind."""
    setting = tables["setting"]
    facts: dict[str, Any] = {}
    named = {name: setting.get(name) for name in ("model", "device", "dtype", "length", "threads", "rounds")}
    title = ", ".join(f"{name} {value}" for name, value in named.items() if value is not None)
    if "auroc/all" in tables:
        columns = ["AUROC of a signal", *setting["tasks"], "all"]
        rows = [
            [name, *(_auroc(tables[f"auroc/{task}"][name]["pooled"]) for task in columns[1:])]
            for name in setting["signals"]
        ]
        facts |= {"false alarms (%)": tables["false_alarms"]["pooled"], "overhead": tables["overhead"]}
    else:
        cases = dict(tables.get("bench") or tables.get("training_bench") or {})
        for name, one in cases.items():
            if errors := list(one.get("errors", {}).values()):
                cases[name] = {**one, "largest_error": math.inf if None in errors else max(errors)}
        shown = [name for name in _COLUMNS if any(one.get(name) is not None for one in cases.values())]
        columns = ["case", *(name.replace("_", " ") for name in shown), "remarks"]
        rows = []
        for case, one in cases.items():
            numbers = ["–" if one.get(name) is None else format(one[name], _COLUMNS[name]) for name in shown]
            rows.append([case.replace("stock", "PyTorch"), *numbers, _remarks(one)])
        facts |= {"training cost": tables["training_cost"]} if "training_cost" in tables else {}
        facts |= tables.get("profile", {})
    print_table(title, columns, rows)
    for name, one in facts.items():
        numbers = [f"{what.replace('_', ' ')} {value:.4g}" for what, value in one.items() if isinstance(value, float)]
        say(f"{name}: {', '.join([*numbers, *_targets(one)])}")


def _auroc(cell: Mapping[str, Any]) -> str:
    return "–" if cell["auroc"] is None else f"{cell['auroc']:.3f} ({cell['low']:.2f}–{cell['high']:.2f})"


def _remarks(entry: Mapping[str, Any]) -> str:
    found = [] if entry.get("agrees", True) else ["disagrees"]
    found += [entry["problem"]] if entry.get("problem") else []
    found += [f"imports {', '.join(entry['heavy_modules'])}"] if entry.get("heavy_modules") else []
    return "; ".join([*found, *_targets(entry)]) or "–"


def _targets(entry: Mapping[str, Any]) -> list[str]:
    words = {True: ", reached", False: ", missed", None: ""}
    return [
        f"{name.replace('_', ' ')} ≤ {one['at_most']:g}{words[one['reached']]}"
        for name, one in entry.get("targets", {}).items()
        if name in entry
    ]
