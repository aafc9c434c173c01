"""Every case, one after the other, and the file that they go to."""

from __future__ import annotations

import gc
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from sharpmax.experiments.gpu_bench.decoding import can_decode, decoding
from sharpmax.experiments.gpu_bench.prefill import prefill
from sharpmax.experiments.gpu_bench.shapes import FULL_LENGTH, Shape, decode_shapes, prefill_shapes
from sharpmax.experiments.gpu_bench.training import training
from sharpmax.files import write_text
from sharpmax.provenance import check_amounts, check_seed, provenance

__all__ = ["KINDS", "ROUNDS", "disagreeing", "gpu_entries", "save", "slug", "with_origin"]

KINDS = ("stats", "attention", "train", "decode")
ROUNDS = 20


def gpu_entries(
    device: torch.device,
    *,
    length: int = FULL_LENGTH,
    repeat: int = ROUNDS,
    seed: int = 0,
    note: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """The entries of every case, in the order of `KINDS`; without a kernel for decode there are none of it."""
    check_amounts(length, repeat)
    check_seed(seed)
    found: list[dict[str, Any]] = []
    with torch.no_grad(), warnings.catch_warnings():
        # Flat rows lie beyond the polynomial's range on purpose, and stock kernels say what they would like better.
        warnings.simplefilter("ignore", UserWarning)
        for made in _all(device, length, repeat, seed, note):
            found += made
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    full = {"full_size": length == FULL_LENGTH}
    return sorted((one | full for one in found), key=lambda one: KINDS.index(one["kind"]))


def _all(
    device: torch.device, length: int, repeat: int, seed: int, note: Callable[[str], None]
) -> Iterator[list[dict[str, Any]]]:
    def options(shape: Shape, kind: str) -> dict[str, Any]:
        def tell(text: str) -> None:
            note(f"{kind}, {shape.name}: {text}")

        return {"seed": seed, "device": device, "rounds": 1 if shape.once else repeat, "note": tell}

    for shape in prefill_shapes(length):
        yield prefill(shape, **options(shape, "attention"))
    for shape in prefill_shapes(length):
        if shape.counts:
            yield [training(shape, **options(shape, "train"))]
    if can_decode():
        for shape in decode_shapes(length):
            yield [decoding(shape, **options(shape, "decode"))]


def disagreeing(entries: Sequence[dict[str, Any]]) -> list[str]:
    """The cases that are not right."""
    return [f"{one['kind']} {one['case']}" for one in entries if not one["agrees"]]


def slug(gpu: str) -> str:
    """A device as the name of a file.

    >>> slug("NVIDIA H200"), slug("NVIDIA GeForce RTX 4090")
    ('h200', 'geforce-rtx-4090')
    """
    words = re.findall(r"[a-z0-9]+", gpu.lower())
    return "-".join(word for word in words if word not in ("nvidia", "amd")) or "gpu"


def with_origin(entries: Sequence[dict[str, Any]], *, command: str, seed: int) -> list[dict[str, Any]]:
    """The entries, each of which says by itself which command made it, where and when."""
    origin = {"command": command, "provenance": provenance(seed)}
    return [one | origin for one in entries]


def save(path: Path, entries: Sequence[dict[str, Any]]) -> Path:
    """Write entries as a JSON list."""
    return write_text(path, json.dumps(entries, indent=2, ensure_ascii=False) + "\n")
