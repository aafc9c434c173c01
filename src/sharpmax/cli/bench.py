"""`sharpmax bench`: speed, memory and accuracy on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sharpmax.cli.terminal import out_folder, print_table, progress, say, wrote
from sharpmax.errors import UnsupportedError

__all__ = ["add_to", "bench"]


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: sharpmax bench --cpu --out benchmarks")(bench)


def bench(
    cpu: Annotated[bool, typer.Option("--cpu/--gpu", help="What to measure.")] = True,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for cpu.json; without it: print only.")
    ] = None,
    repeat: Annotated[int, typer.Option(help="Rounds; each runs every case once.")] = 5,
    length: Annotated[int, typer.Option(help="Queries and keys; targets are judged at 16384 only.")] = 16_384,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
) -> None:
    """Time row statistics and sharp attention next to torch's own attention, after checking that they are right.

    A case that disagrees with the float64 reference gets no speed, and the exit code is then 1.
    """
    if not cpu:
        raise UnsupportedError("--gpu: measuring on a GPU is not there yet; use --cpu")
    from sharpmax.experiments.cpu_bench import cpu_tables, disagreeing
    from sharpmax.experiments.provenance import typed
    from sharpmax.experiments.results import collect

    folder = None if out is None else out_folder(out)
    with progress() as note:
        tables = cpu_tables(length=length, repeat=repeat, seed=seed, note=note)
    _print(tables)
    if folder is not None:
        command = typed("bench", cpu=True, out=out, repeat=repeat, length=length, seed=seed)
        wrote([collect(command, tables, seed=seed).save(folder / "cpu.json")])
    if wrong := disagreeing(tables):
        say(f"No speed for what disagrees with the reference: {', '.join(wrong)}.")
        raise typer.Exit(1)


def _print(tables: dict[str, Any]) -> None:
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
    worst = f"{max(known):.1e}" if len(known) == len(entry["errors"]) else "not finite"
    checked = [worst, f"{entry['tolerance']:.0e}"]
    if not entry["agrees"]:
        return [name, "disagrees", "–", "–", "–", *checked]
    ratio = "–" if entry["ratio"] is None else f"{entry['ratio']:.2f}"
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
