"""`sharpmax bench`: speed, memory and accuracy on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sharpmax.cli import options
from sharpmax.cli.json_output import answer
from sharpmax.cli.options import TOOLS, add, device_named, dtype_named
from sharpmax.cli.report import draw_saved, finish
from sharpmax.cli.terminal import out_folder, print_table, progress, say, wrote
from sharpmax.errors import MissingExtraError, UnsupportedError, reject

if TYPE_CHECKING:
    import torch


def bench_gpu(*, repeat: int | None, length: int | None, seed: int, out: Path | None, as_json: bool) -> None:
    """Measure, print, and write a list of entries and a figure where a folder is given."""
    from sharpmax.experiments.benchmarks.gpu import ROUNDS, disagreeing, gpu_entries, save, slug, with_origin
    from sharpmax.experiments.benchmarks.gpu_inputs import FULL_LENGTH
    from sharpmax.provenance import typed

    device = _device()
    asked = {"repeat": ROUNDS if repeat is None else repeat, "length": FULL_LENGTH if length is None else length}
    folder = None if out is None else out_folder(out)
    with progress() as note:
        entries = gpu_entries(device, **asked, seed=seed, note=note)
    if not as_json:
        _print_gpu(entries)
    known = with_origin(entries, command=typed("bench", gpu=True, out=out, **asked, seed=seed), seed=seed)
    if folder is not None:
        saved = save(folder / f"{slug(_name(device))}.json", known)
        wrote([saved])
        _draw(saved)
    if as_json:
        answer(known)
    if wrong := disagreeing(entries):
        say(f"No speed for what disagrees with the reference: {'; '.join(wrong)}.")
        raise typer.Exit(1)


def _draw(saved: Path) -> None:
    # A machine with a GPU need not have what draws, and its time is not to be lost.
    try:
        wrote(draw_saved(saved))
    except MissingExtraError as missing:
        say(f"No figure: {missing}; then: sharpmax report {saved}")


def _device() -> torch.device:
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError("--gpu: this machine has no CUDA device that torch can use; use --cpu")
    return torch.device("cuda")


def _name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _print_gpu(entries: Sequence[dict[str, Any]]) -> None:
    from sharpmax.report.gpu import KINDS, TARGET_COLUMNS, columns, of_kind, rows, target_rows

    for kind, title in KINDS.items():
        if of_kind(entries, kind):
            print_table(f"{kind}: {title}, bfloat16", columns(kind), rows(entries, kind))
        else:
            say(f"{kind}: not measured, this sharpmax has no sm.{kind}.")
    print_table("targets", list(TARGET_COLUMNS), target_rows(entries))
    for one in entries:
        if one["problem"]:
            say(f"{one['kind']} {one['case']} fails: {one['problem']}")
    say("* not part of a mean. Ratios are rounded up. Times are the device's; the file has the host's too.")


_MODEL = "smollm2"
_FILE = "monitor.json"


def bench_monitor(
    *,
    device: str,
    dtype: str,
    prompts: int,
    repeat: int | None,
    length: int | None,
    seed: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure, print, and write `monitor.json` where a folder is given."""
    from sharpmax.experiments.benchmarks.monitor import monitor_tables
    from sharpmax.experiments.benchmarks.monitor_cost import CONTEXT, ROUNDS
    from sharpmax.lazy import require
    from sharpmax.models.language import load_language_model
    from sharpmax.provenance import typed
    from sharpmax.results import collect

    require("scipy.stats", "fit", "sharpmax bench --monitor")
    place = device_named(device)
    kind = dtype_named(dtype, place)
    rounds, context = ROUNDS if repeat is None else repeat, CONTEXT if length is None else length
    folder = None if out is None else out_folder(out)
    with progress() as note:
        note(f"loading {_MODEL}")
        language = load_language_model(_MODEL, device=place.type, dtype=kind)
        tables = monitor_tables(language, limit=prompts, seed=seed, rounds=rounds, context=context, note=note)
    command = typed(
        "bench", monitor=True, device=place.type, dtype=kind, prompts=prompts, repeat=rounds, length=context,
        seed=seed, out=out,
    )  # fmt: skip
    results = collect(command, tables, seed=seed)
    finish(results, None if folder is None else results.save(folder / _FILE), _print_monitor, as_json=as_json)


def _print_monitor(tables: Mapping[str, Any]) -> None:
    setting, false, cost = tables["setting"], tables["false_alarms"], tables["overhead"]
    tasks = [*setting["tasks"], "all"]
    say(f"Telling wrong answers from right ones: {setting['model']}, {setting['dtype']} on {setting['device']}.")
    print_table(
        "AUROC over all sizes (95% interval)",
        ["signal", *tasks],
        [[name, *(_auroc(tables[f"auroc/{task}"][name]["pooled"]) for task in tasks)] for name in setting["signals"]],
    )
    for task in setting["tasks"]:
        _print_task(task, tables)
    print_table(
        "rules, AUROC on validation prompts",
        ["rule", *tasks],
        [[name, *(_auroc(cells[task]) for task in tasks)] for name, cells in tables["validation"].items()],
    )
    pooled = false["pooled"]
    sizes = "; ".join(f"{task} {', '.join(map(str, known))}" for task, known in setting["reference"].items())
    say(f"The monitor goes by {setting['rule']}: {setting['rules'][setting['rule']]}. It learned from sizes {sizes}.")
    say(
        f"False alarms on {pooled['n']:,} fresh prompts of these sizes: {pooled['mean']:.2f}% ({pooled['low']:.2f}–"
        f"{pooled['high']:.2f}%), {false['asked']:g}% asked for; within 1 point: {_reached(pooled['targets']['off'])}."
    )
    say(
        f"Cost at {cost['context']:,} tokens: {cost['watched_ms']:.2f} ms per token instead of {cost['plain_ms']:.2f}, "
        f"{cost['overhead_percent']:+.1f}% (target ≤ 3%, {_reached(cost['targets']['overhead_percent'])}; by the "
        f"quickest rounds {cost['quickest_percent']:+.1f}%); "
        f"the report {cost['report_ms']:.2f} ms per request."
    )


def _print_task(task: str, tables: Mapping[str, Any]) -> None:
    table, right, alarms = (tables[f"{kind}/{task}"] for kind in ("auroc", "accuracy", "alarms"))
    print_table(
        f"{task}: AUROC by size",
        ["size", *right],
        [
            ["right answers", *(f"{cell['mean']:.0f}%" for cell in right.values())],
            ["alarms", *(f"{cell['mean']:.0f}%" for cell in alarms.values())],
            *([name, *(_auroc(cells[size], short=True) for size in right)] for name, cells in table.items()),
        ],
    )


def _auroc(cell: Mapping[str, Any], *, short: bool = False) -> str:
    if cell["auroc"] is None:
        return "–"
    return f"{cell['auroc']:.2f}" if short else f"{cell['auroc']:.3f} ({cell['low']:.2f}–{cell['high']:.2f})"


def _reached(target: Mapping[str, Any]) -> str:
    return {True: "reached", False: "missed", None: "not judged"}[target["reached"]]


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    add(app, bench, example="sharpmax bench --cpu --out benchmarks", panel=TOOLS)


def bench(
    cpu: Annotated[bool, options.flag("--cpu/--gpu", options.WHAT, "What to measure.")] = True,
    probe: Annotated[
        bool, options.flag("--probe", options.WHAT, "Measure what capturing rows of smollm2 costs.")
    ] = False,
    monitor: Annotated[
        bool, options.flag("--monitor", options.WHAT, "Measure how good a monitor of smollm2 is, and what it costs.")
    ] = False,
    length: Annotated[
        int | None,
        options.value(
            "N",
            options.AMOUNT,
            "Queries and keys; with --gpu less scales every shape down. Targets are judged at the default.",
            show_default="16384, with --probe 8192, with --monitor 2048",
        ),
    ] = None,
    repeat: Annotated[
        int | None,
        options.value(
            "N",
            options.AMOUNT,
            "Rounds; each runs every case once.",
            show_default="5, with --gpu 20, with --probe 3, with --monitor 12",
        ),
    ] = None,
    prompts: Annotated[int, options.prompts()] = 100,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    out: Annotated[Path | None, options.out("none: print only")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Time row statistics and sharp attention next to torch's own attention, after checking that they are right.

    A case that disagrees with the float64 reference gets no speed, and the exit code is then 1. With --probe, the same
    for a model that is watched, next to the model as it comes, and with the memory of both. With --monitor: false
    alarms on fresh prompts, wrong answers told from right ones next to the model's own confidence, and time per token.
    With --gpu: statistics, attention, training step and decode next to the fastest stock kernel; writes a figure too.
    --prompts, --device and --dtype are for --monitor.
    """
    if monitor:
        if probe:
            reject("--probe", "both --probe and --monitor", "one of the two")
        pass

        bench_monitor(
            device=device, dtype=dtype, prompts=prompts, repeat=repeat, length=length, seed=seed, out=out,
            as_json=as_json,
        )  # fmt: skip
        return
    if not cpu:
        if probe:
            reject("--probe", "both --probe and --gpu", "one of the two")
        pass

        bench_gpu(repeat=repeat, length=length, seed=seed, out=out, as_json=as_json)
        return
    from sharpmax.experiments.benchmarks import cpu as cpu_bench
    from sharpmax.experiments.benchmarks import probe as probe_bench
    from sharpmax.provenance import typed
    from sharpmax.results import collect

    name = "probe" if probe else "cpu"
    kinds: dict[str, tuple[Callable[..., dict[str, Any]], int, int, Callable[[Mapping[str, Any]], None]]] = {
        "cpu": (cpu_bench.cpu_tables, cpu_bench.FULL_LENGTH, 5, _print_cpu),
        "probe": (probe_bench.probe_tables, probe_bench.FULL_LENGTH, probe_bench.ROUNDS, _print_probe),
    }
    make, full_length, rounds, show = kinds[name]
    asked = {"repeat": rounds if repeat is None else repeat, "length": full_length if length is None else length}
    folder = None if out is None else out_folder(out)
    with progress() as note:
        tables = make(**asked, seed=seed, note=note)
    results = collect(typed("bench", **{name: True}, out=out, **asked, seed=seed), tables, seed=seed)
    saved = None if folder is None else results.save(folder / f"{name}.json")
    finish(results, saved, show, as_json=as_json)
    if wrong := cpu_bench.disagreeing(tables):
        say(f"No speed for what disagrees with the reference: {', '.join(wrong)}.")
        raise typer.Exit(1)


def _print_probe(tables: Mapping[str, Any]) -> None:
    setting, entries = tables["setting"], tables["bench"]
    print_table(
        f"{setting['model']} reads {setting['length']:,} tokens, {setting['dtype']}, threads: {setting['threads']}, "
        f"rounds: {setting['rounds']}",
        [
            *("case", "rows", "median s", "× plain", "target", "CPU s", "× plain", "peak MiB", "× plain", "target"),
            *("largest error", "allowed"),
        ],
        [_probe_row(name, entry, setting["rows"]) for name, entry in entries.items()],
    )
    say(
        "Each pass runs in a fresh interpreter, whose whole memory is counted. Errors: entropies against float64, nats."
    )


def _probe_row(name: str, entry: dict[str, Any], rows: dict[str, int]) -> list[str]:
    if "errors" not in entry:
        times = [f"{entry['median_s']:.1f}", "–", "–", f"{entry['cpu_s']:.1f}", "–"]
        return [name, "–", *times, _number(entry["peak_mib"], ",.0f"), *["–"] * 4]
    chosen = str(rows[name.partition("/")[2]])
    checked = [_number(entry["errors"]["entropy"], ".1e", "not finite"), f"{entry['tolerance']:.0e}"]
    if not entry["agrees"]:
        return [name, chosen, "disagrees" if entry["same_output"] else "changes the output", *["–"] * 7, *checked]
    times = [f"{entry['median_s']:.1f}", f"{entry['ratio']:.2f}", _target(entry, "ratio")]
    times += [f"{entry['cpu_s']:.1f}", f"{entry['cpu_ratio']:.2f}"]
    memory = [_number(entry["peak_mib"], ",.0f"), _number(entry["peak_ratio"], ".2f"), _target(entry, "peak_ratio")]
    return [name, chosen, *times, *memory, *checked]


def _number(value: float | None, form: str, missing: str = "–") -> str:
    return missing if value is None else format(value, form)


def _print_cpu(tables: Mapping[str, Any]) -> None:
    setting, entries = tables["setting"], tables["bench"]
    attention = [name for name in entries if not name.startswith("import/")]
    print_table(
        f"attention: {setting['length']:,} keys, {setting['heads']} heads of {setting['head_size']}, causal, float32, "
        f"threads: {setting['threads']}, rounds: {setting['rounds']}",
        ["case", "median s", "min s", "× stock", "target", "largest error", "allowed"],
        [_attention_row(name, entries[name]) for name in attention],
    )
    print_table(
        "import, in fresh interpreters",
        ["case", "median s", "min s", "× import torch", "target", "heavy modules", "target"],
        [_import_row(name, entry) for name, entry in entries.items() if name not in attention],
    )
    _say_memory(entries["row-stats/streaming"])
    say(f"Errors: {setting['checked_rows']} rows against float64, relative where a value exceeds 1.")


def _attention_row(name: str, entry: dict[str, Any]) -> list[str]:
    known = [error for error in entry["errors"].values() if error is not None]
    worst = max(known) if len(known) == len(entry["errors"]) else None
    checked = [_number(worst, ".1e", "not finite"), f"{entry['tolerance']:.0e}"]
    if not entry["agrees"]:
        return [name, "disagrees", "–", "–", "–", *checked]
    ratio = _number(entry["ratio"], ".2f")
    return [name, f"{entry['median_s']:.3f}", f"{entry['min_s']:.3f}", ratio, _target(entry, "ratio"), *checked]


def _import_row(name: str, entry: dict[str, Any]) -> list[str]:
    times = [f"{entry['median_s']:.3f}", f"{entry['min_s']:.3f}", f"{entry['ratio']:.2f}", _target(entry, "ratio")]
    return [name, *times, ", ".join(entry["heavy_modules"]) or "none", _target(entry, "heavy_modules", "none")]


def _say_memory(entry: dict[str, Any]) -> None:
    extra = "not measurable here" if entry["extra_mb"] is None else f"{entry['extra_mb']:,.0f} MB"
    say(
        f"Extra memory of row-stats/streaming: {extra} (target in MB: {_target(entry, 'extra_mb')}); the matrix of "
        f"logits would take {entry['dense_mb']:,.0f} MB."
    )


def _target(entry: dict[str, Any], quantity: str, text: str | None = None) -> str:
    target = entry["targets"].get(quantity)
    if target is None:
        return "–"
    verdict = {True: ", reached", False: ", missed", None: ""}[target["reached"]]
    return (text or f"≤ {target['at_most']:g}") + verdict
