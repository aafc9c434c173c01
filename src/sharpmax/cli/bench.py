"""`sharpmax bench`: speed, memory and accuracy on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sharpmax.cli import answer, options
from sharpmax.cli.options import number, resolve_device
from sharpmax.cli.run import check_extras, command_line, draw_saved, finish, out_folder
from sharpmax.cli.terminal import print_table, progress, say, wrote
from sharpmax.errors import MissingExtraError, UnsupportedError, reject

if TYPE_CHECKING:
    import torch

_MODEL = "smollm2"


def bench(
    context: typer.Context,
    cpu: Annotated[bool, typer.Option("--cpu/--gpu", help="Device to measure.")] = True,
    probe: Annotated[bool, typer.Option("--probe", help="Measure the cost of capturing rows.")] = False,
    monitor: Annotated[bool, typer.Option("--monitor", help="Measure a monitor's AUROC and cost.")] = False,
    length: Annotated[int | None, number("Keys.", show_default="16384, --probe 8192, --monitor 2048")] = None,
    repeat: Annotated[int | None, number("Rounds.", show_default="5, --gpu 20, --probe 3, --monitor 12")] = None,
    prompts: Annotated[int, options.prompts()] = 100,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    out: Annotated[Path | None, options.out("print only")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Time row statistics and attention next to PyTorch's own.

    A case that disagrees with the float64 reference is not timed, and the exit code is 1. Targets are judged at the
    default length. --gpu measures statistics, attention, training step and decode next to the fastest kernel, and
    draws a figure. --probe measures smollm2 with and without capture. --monitor measures false alarms, how well
    wrong answers are detected, and time per token; --prompts, --device and --dtype belong to it.
    """
    if not monitor:
        context.params.update(prompts=None, device=None, dtype=None)
    if probe and (monitor or not cpu):
        reject("--probe", f"both --probe and --{'monitor' if monitor else 'gpu'}", "one of the two")
    if monitor:
        _bench_monitor(context)
    elif not cpu:
        _bench_gpu(context)
    else:
        _bench_cpu(context, probe=probe)


def _bench_cpu(context: typer.Context, *, probe: bool) -> None:
    from sharpmax.experiments.benchmarks import cpu as bench

    rounds, length = (bench.PROBE_ROUNDS, bench.PROBE_LENGTH) if probe else (bench.ROUNDS, bench.FULL_LENGTH)
    make: Callable[..., dict[str, Any]] = bench.probe_tables if probe else bench.cpu_tables
    asked = _amounts(context, rounds, length)
    folder = None if context.params["out"] is None else out_folder(context)
    with progress() as note:
        tables = make(**asked, seed=context.params["seed"], note=note)
    name, show = ("probe.json", _print_probe) if probe else ("cpu.json", _print_cpu)
    finish(context, tables, folder, show, name=name)
    _fail_if([name for name, entry in tables["bench"].items() if not entry.get("agrees", True)])


def _bench_gpu(context: typer.Context) -> None:
    import torch

    from sharpmax.experiments.benchmarks.gpu import ROUNDS, gpu_entries, save, slug, with_origin
    from sharpmax.experiments.benchmarks.gpu_inputs import FULL_LENGTH

    device, seed = _gpu(), context.params["seed"]
    asked = _amounts(context, ROUNDS, FULL_LENGTH)
    folder = None if context.params["out"] is None else out_folder(context)
    with progress() as note:
        entries = gpu_entries(device, **asked, seed=seed, note=note)
    if not context.params["as_json"]:
        _print_gpu(entries)
    known = with_origin(entries, command=command_line(context), seed=seed)
    if folder is not None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        saved = save(folder / f"{slug(name)}.json", known)
        wrote([saved])
        # A machine with a GPU need not have what draws, and its time is not to be lost.
        try:
            wrote(draw_saved(saved))
        except MissingExtraError as missing:
            say(f"No figure: {missing}; then: sharpmax report {saved}")
    if context.params["as_json"]:
        answer(known)
    _fail_if([f"{one['kind']} {one['case']}" for one in entries if not one["agrees"]])


def _bench_monitor(context: typer.Context) -> None:
    from sharpmax.experiments.benchmarks.monitor import CONTEXT, ROUNDS, monitor_tables
    from sharpmax.models.language import load_language_model

    given = context.params
    check_extras("bench --monitor", ("scipy.stats", "fit"))
    place, kind = resolve_device(context)
    asked = _amounts(context, ROUNDS, CONTEXT)
    folder = None if given["out"] is None else out_folder(context)
    with progress() as note:
        note(f"loading {_MODEL}")
        language = load_language_model(_MODEL, device=place.type, dtype=kind)
        tables = monitor_tables(
            language, limit=given["prompts"], seed=given["seed"], rounds=asked["repeat"], context=asked["length"],
            note=note,
        )  # fmt: skip
    finish(context, tables, folder, _print_monitor, name="monitor.json")


def _amounts(context: typer.Context, repeat: int, length: int) -> dict[str, int]:
    """Rounds and length, as asked for or the defaults of a benchmark."""
    usual = {"repeat": repeat, "length": length}
    found = {name: value if context.params[name] is None else context.params[name] for name, value in usual.items()}
    context.params.update(found)
    return found


def _fail_if(wrong: Sequence[str]) -> None:
    if wrong:
        say(f"Not timed, because results disagree with the reference: {'; '.join(wrong)}.")
        raise typer.Exit(1)


def _gpu() -> torch.device:
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError("--gpu: this machine has no CUDA device that torch can use; use --cpu")
    return torch.device("cuda")


def _print_gpu(entries: Sequence[dict[str, Any]]) -> None:
    from sharpmax.report.gpu import KINDS, TARGET_COLUMNS, columns, of_kind, rows, target_rows

    for kind, title in KINDS.items():
        if of_kind(entries, kind):
            print_table(f"{kind}: {title}, bfloat16", columns(kind), rows(entries, kind))
    print_table("targets", list(TARGET_COLUMNS), target_rows(entries))
    for one in entries:
        if one["problem"]:
            say(f"{one['kind']} {one['case']} fails: {one['problem']}")
    say("* not part of a mean. Ratios are rounded up. Times are the device's; the file has the host's too.")


def _print_monitor(tables: Mapping[str, Any]) -> None:
    setting, false, cost = tables["setting"], tables["false_alarms"], tables["overhead"]
    tasks = [*setting["tasks"], "all"]
    say(f"Detecting wrong answers: {setting['model']}, {setting['dtype']} on {setting['device']}.")
    print_table(
        "AUROC over all sizes (95% interval)",
        ["signal", *tasks],
        [[name, *(_auroc(tables[f"auroc/{task}"][name]["pooled"]) for task in tasks)] for name in setting["signals"]],
    )
    for task in setting["tasks"]:
        table, right, alarms = (tables[f"{kind}/{task}"] for kind in ("auroc", "accuracy", "alarms"))
        shares = [[name, *(f"{cell['mean']:.0f}%" for cell in cells.values())]
                  for name, cells in (("accuracy", right), ("alarms", alarms))]  # fmt: skip
        signals = [[name, *(_auroc(cells[size], short=True) for size in right)] for name, cells in table.items()]
        print_table(f"{task}: AUROC by size", ["size", *right], [*shares, *signals])
    pooled = false["pooled"]
    sizes = "; ".join(f"{task} {', '.join(map(str, known))}" for task, known in setting["reference"].items())
    say(f"The monitor learned from sizes {sizes}.")
    say(
        f"False alarms on {pooled['n']:,} fresh prompts of these sizes: {pooled['mean']:.2f}% ({pooled['low']:.2f}–"
        f"{pooled['high']:.2f}%), {false['asked']:g}% asked for; within 1 point: {_reached(pooled['targets']['off'])}."
    )
    say(
        f"Cost at {cost['context']:,} tokens: {cost['watched_ms']:.2f} ms per token instead of {cost['plain_ms']:.2f}, "
        f"{cost['overhead_percent']:+.1f}% (target ≤ 3%, {_reached(cost['targets']['overhead_percent'])}; by the "
        f"quickest rounds {cost['quickest_percent']:+.1f}%); the report {cost['report_ms']:.2f} ms per request."
    )


def _auroc(cell: Mapping[str, Any], *, short: bool = False) -> str:
    if cell["auroc"] is None:
        return "–"
    return f"{cell['auroc']:.2f}" if short else f"{cell['auroc']:.3f} ({cell['low']:.2f}–{cell['high']:.2f})"


def _reached(target: Mapping[str, Any]) -> str:
    return {True: "reached", False: "missed", None: "not judged"}[target["reached"]]


def _print_probe(tables: Mapping[str, Any]) -> None:
    setting = tables["setting"]
    print_table(
        f"{setting['model']} reads {setting['length']:,} tokens, {setting['dtype']}, threads: {setting['threads']}, "
        f"rounds: {setting['rounds']}",
        [
            *("case", "rows", "median s", "× plain", "target", "CPU s", "× plain", "peak MiB", "× plain", "target"),
            *("largest error", "allowed"),
        ],
        [_probe_row(name, entry, setting["rows"]) for name, entry in tables["bench"].items()],
    )
    say(
        "Each pass runs in a fresh interpreter, whose whole memory is counted. Errors: entropies against float64, nats."
    )


def _probe_row(name: str, entry: dict[str, Any], rows: dict[str, int]) -> list[str]:
    median = _number(entry, "median_s", ".1f")
    if not entry.get("agrees", True):
        median = "disagrees" if entry["same_output"] else "changes the output"
    return [
        name, str(rows.get(name.partition("/")[2], "–")), median, _number(entry, "ratio", ".2f"),
        _target(entry, "ratio"), _number(entry, "cpu_s", ".1f"), _number(entry, "cpu_ratio", ".2f"),
        _number(entry, "peak_mib", ",.0f"), _number(entry, "peak_ratio", ".2f"), _target(entry, "peak_ratio"),
        *_errors(entry),
    ]  # fmt: skip


def _print_cpu(tables: Mapping[str, Any]) -> None:
    setting, entries = tables["setting"], tables["bench"]
    imports = {name: entry for name, entry in entries.items() if name.startswith("import/")}
    print_table(
        f"attention: {setting['length']:,} keys, {setting['heads']} heads of {setting['head_size']}, causal, float32, "
        f"threads: {setting['threads']}, rounds: {setting['rounds']}",
        ["case", "median s", "min s", "× PyTorch", "target", "largest error", "allowed"],
        [[*_times(name, entry), *_errors(entry)] for name, entry in entries.items() if name not in imports],
    )
    print_table(
        "import, in fresh interpreters",
        ["case", "median s", "min s", "× import torch", "target", "heavy modules", "target"],
        [
            [*_times(name, one), ", ".join(one["heavy_modules"]) or "none", _target(one, "heavy_modules", "none")]
            for name, one in imports.items()
        ],
    )
    entry = entries["row-stats/streaming"]
    extra = "not measurable here" if entry["extra_mb"] is None else f"{entry['extra_mb']:,.0f} MB"
    say(
        f"Extra memory of row-stats/streaming: {extra} (target in MB: {_target(entry, 'extra_mb')}); the matrix of "
        f"logits would take {entry['dense_mb']:,.0f} MB."
    )
    say(f"Errors: {setting['checked_rows']} rows against float64, relative where a value exceeds 1.")


def _times(name: str, entry: dict[str, Any]) -> list[str]:
    median = _number(entry, "median_s", ".3f") if entry.get("agrees", True) else "disagrees"
    return [name, median, _number(entry, "min_s", ".3f"), _number(entry, "ratio", ".2f"), _target(entry, "ratio")]


def _errors(entry: dict[str, Any]) -> list[str]:
    """The largest error and what is allowed."""
    if "errors" not in entry:
        return ["–", "–"]
    errors = entry["errors"].values()
    return ["not finite" if None in errors else f"{max(errors):.1e}", f"{entry['tolerance']:.0e}"]


def _number(entry: dict[str, Any], quantity: str, form: str) -> str:
    value = entry.get(quantity)
    return "–" if value is None else format(value, form)


def _target(entry: dict[str, Any], quantity: str, text: str | None = None) -> str:
    target = entry.get("targets", {}).get(quantity)
    if target is None or quantity not in entry:
        return "–"
    verdict = {True: ", reached", False: ", missed", None: ""}[target["reached"]]
    return (text or f"≤ {target['at_most']:g}") + verdict
