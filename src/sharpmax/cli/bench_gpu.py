"""`sharpmax bench --gpu`: sharp attention next to the stock kernels of the same GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sharpmax.cli.answers import answer
from sharpmax.cli.report import draw_saved
from sharpmax.cli.terminal import out_folder, print_table, progress, say, wrote
from sharpmax.errors import MissingExtraError, UnsupportedError

if TYPE_CHECKING:
    import torch

__all__ = ["bench_gpu"]


def bench_gpu(*, repeat: int | None, length: int | None, seed: int, out: Path | None, as_json: bool) -> None:
    """Measure, print, and write a list of entries and a figure where a folder is given."""
    from sharpmax.experiments.gpu_bench.run import ROUNDS, disagreeing, gpu_entries, save, slug, with_origin
    from sharpmax.experiments.gpu_bench.shapes import FULL_LENGTH
    from sharpmax.provenance import typed

    device = _device()
    asked = {"repeat": ROUNDS if repeat is None else repeat, "length": FULL_LENGTH if length is None else length}
    folder = None if out is None else out_folder(out)
    with progress() as note:
        entries = gpu_entries(device, **asked, seed=seed, note=note)
    if not as_json:
        _print(entries)
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


def _print(entries: Sequence[dict[str, Any]]) -> None:
    from sharpmax.report.gpu.cells import TARGET_COLUMNS, columns, rows, target_rows
    from sharpmax.report.gpu.entries import KINDS, of_kind

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
