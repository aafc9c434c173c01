"""`sharpmax bench --monitor`: how good a monitor of attention is, next to the model's own confidence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sharpmax.cli.ending import finish
from sharpmax.cli.reading import device_named, dtype_named
from sharpmax.cli.terminal import out_folder, print_table, progress, say

__all__ = ["bench_monitor"]

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
    from sharpmax.experiments.monitor_bench import monitor_tables
    from sharpmax.experiments.monitor_cost import CONTEXT, ROUNDS
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
    finish(results, None if folder is None else results.save(folder / _FILE), _print, as_json=as_json)


def _print(tables: Mapping[str, Any]) -> None:
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
