"""Entries as `sharpmax bench --gpu` writes them, with numbers that are easy to follow."""

from __future__ import annotations

from typing import Any

from sharpmax.experiments.benchmarks.gpu import FLOORS, LIMITS

PROVENANCE = {
    "commit": "abc",
    "versions": {"torch": "2.11.0", "triton": "3.6.0"},
    "hardware": {"gpu": "NVIDIA H200", "cpu": "a processor"},
    "seed": 0,
    "date": "2026-01-02T03:04:05+00:00",
}


def entry(kind: str, case: str, ratio: float | None, **changes: Any) -> dict[str, Any]:
    right = ratio is not None
    return {
        "kind": kind,
        "case": case,
        "counts": True,
        "agrees": right,
        "problem": None,
        "full_size": True,
        "ours_ms": 2.0 * ratio if ratio is not None else None,
        "stock_ms": 2.0 if right else None,
        "stock_backend": "cuDNN",
        "ratio": ratio,
        "floor": FLOORS[kind],
        "limits": LIMITS[kind],
        "errors": {"output": {"ours": 0.01, "allowed": 0.02 if right else 0.001, "stock": 0.01, "stock_plain": 0.01}},
        "rounds": 20,
        "extra_bytes_per_row": 12.0 if right else None,
        "tflop_per_s": 612.3,
        "tb_per_s": 4.271,
        "command": "sharpmax bench --gpu --out benchmarks",
        "provenance": PROVENANCE,
        **changes,
    }


def entries() -> list[dict[str, Any]]:
    return [
        entry("stats", "one", 0.6),
        entry("stats", "two", 0.64),
        entry("attention", "one", 1.5, extra_bytes_per_row=33.25),
        entry("attention", "two", 1.7),
        entry("attention", "long", 3.0, counts=False),
        entry("train", "one", None),
        entry("train", "two", 1.8),
        entry("decode", "8 × 32,768 keys", 1.1203),
    ]
