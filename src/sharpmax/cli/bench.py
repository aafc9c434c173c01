"""`sharpmax bench`: speed, memory and accuracy on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from sharpmax.cli import options
from sharpmax.cli.commands import TOOLS, add
from sharpmax.cli.ending import finish
from sharpmax.cli.terminal import out_folder, print_table, progress, say
from sharpmax.errors import reject

__all__ = ["add_to", "bench"]


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
        from sharpmax.cli.bench_monitor import bench_monitor

        bench_monitor(
            device=device, dtype=dtype, prompts=prompts, repeat=repeat, length=length, seed=seed, out=out,
            as_json=as_json,
        )  # fmt: skip
        return
    if not cpu:
        if probe:
            reject("--probe", "both --probe and --gpu", "one of the two")
        from sharpmax.cli.bench_gpu import bench_gpu

        bench_gpu(repeat=repeat, length=length, seed=seed, out=out, as_json=as_json)
        return
    from sharpmax.experiments import cpu_bench, probe_bench
    from sharpmax.provenance import typed
    from sharpmax.results import collect

    name = "probe" if probe else "cpu"
    kinds: dict[str, tuple[Callable[..., dict[str, Any]], int, int, Callable[[Mapping[str, Any]], None]]] = {
        "cpu": (cpu_bench.cpu_tables, cpu_bench.FULL_LENGTH, 5, _print),
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


def _print(tables: Mapping[str, Any]) -> None:
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
