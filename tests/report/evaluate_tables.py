"""Made-up tables of `sharpmax evaluate`: plausible numbers, two policies, three tasks, always the same."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sharpmax.experiments.statistics import accuracy

SIZES = [8, 16, 32, 64, 128, 256, 512]
COMMAND = "sharpmax evaluate smollm2 --policy smollm2 --policy log-length:64 --task kv,houses,json --sizes 8..512"
PROMPTS = 200
_RIGHT = {
    "kv": {
        "as it comes": [64.5, 38.5, 30.5, 16.0, 12.0, 12.5, 10.0],
        "smollm2": [94.0, 93.0, 93.5, 93.0, 89.5, 86.5, 84.5],
        "log-length:64": [66.5, 57.0, 46.5, 35.5, 18.5, 16.0, 2.5],
    },
    "houses": {
        "as it comes": [41.0, 26.0, 21.0, 17.0, 12.0, 9.0, 8.0],
        "smollm2": [72.0, 56.0, 41.0, 29.0, 22.0, 15.0, 12.0],
        "log-length:64": [44.0, 31.0, 27.0, 21.0, 13.0, 8.0, 6.0],
    },
    "json": {
        "as it comes": [55.0, 36.0, 17.0, 7.0, 6.0, 5.0, 4.0],
        "smollm2": [80.0, 69.0, 45.0, 26.0, 14.0, 9.0, 6.0],
        "log-length:64": [56.0, 39.0, 22.0, 11.0, 7.0, 5.0, 3.0],
    },
}
_SUMMARIES = {
    "kv": "the number of one name in a list of n",
    "houses": "the house of one person among n sentences",
    "json": "the value of one key in an object of n",
}


def make_tables(tasks: tuple[str, ...] = ("kv", "houses", "json"), *, policies: bool = True) -> dict[str, Any]:
    """Tables of a full run."""
    arms = ["as it comes", "smollm2", "log-length:64"] if policies else ["as it comes"]
    tables: dict[str, Any] = {"setting": _setting(tasks, arms)}
    for task in tasks:
        right = {arm: [round(PROMPTS * value / 100) for value in _RIGHT[task][arm]] for arm in arms}
        tables[f"accuracy/{task}"] = {
            arm: {str(n): asdict(accuracy([1] * k + [0] * (PROMPTS - k))) for n, k in zip(SIZES, counts, strict=True)}
            for arm, counts in right.items()
        }
        tables[f"paired/{task}"] = {
            arm: {str(n): _paired(k - base) for n, k, base in zip(SIZES, right[arm], right["as it comes"], strict=True)}
            for arm in arms[1:]
        }
    tables["perplexity"] = {arm: _perplexity(place) for place, arm in enumerate(arms)}
    tables["cost"] = {arm: _cost(place) for place, arm in enumerate(arms)}
    return tables


def _setting(tasks: tuple[str, ...], arms: list[str]) -> dict[str, Any]:
    abouts = {
        "as it comes": {"describe": "no policy", "policy": None, "touched": 0, "remarks": [], "calibrated_on": None},
        "smollm2": {
            "describe": "30 layers × 9 heads, kinds: constant, curve, 211 heads left alone",
            "policy": {"kind": "per-head"}, "touched": 59, "remarks": [], "calibrated_on": "kv",
        },
        "log-length:64": {
            "describe": "β = max(1, ln n / ln 64)", "policy": {"kind": "log-length"}, "touched": 270,
            "remarks": ["3.0% of the rows have count outside 2 … 512"], "calibrated_on": None,
        },
    }  # fmt: skip
    return {
        "model": "smollm2",
        "layers": 30,
        "heads": 9,
        "arms": {arm: abouts[arm] for arm in arms},
        "tasks": {task: {"version": 1, "summary": _SUMMARIES[task]} for task in tasks},
        "sizes": SIZES,
        "prompts": PROMPTS,
        "text": {"source": "Python's own documentation, test part", "fingerprint": "1d31762c2fa7", "tokens": 61234},
        "windows": 8,
        "questions": 24,
        "context": 2048,
        "rounds": 3,
        "dtype": "float32",
        "device": "cpu",
    }


def _paired(more: int) -> dict[str, Any]:
    p = 0.5 ** min(60, abs(more)) if more else 1.0
    return {"gained": max(more, 0) + 3, "lost": max(-more, 0) + 3, "p": p}


def _perplexity(place: int) -> dict[str, Any]:
    plain = {"2048": 16.08, "6144": 11.6, "chat": 1.82}
    rises = [{}, {"2048": 0.62, "6144": 0.91, "chat": -0.1}, {"2048": 51.7, "6144": 143.1, "chat": 12.4}][place]
    cells = {}
    for column, mean in plain.items():
        rise = rises.get(column, 0.0)
        spread = None if place == 0 else 0.4 * abs(rise) + 0.1
        cells[column] = {
            "mean": mean * (1 + rise / 100), "n": 16376, "rise": rise, "texts": 8,
            "low": None if spread is None else rise - spread, "high": None if spread is None else rise + spread,
        }  # fmt: skip
    return cells


def _cost(place: int) -> dict[str, Any]:
    ratio, decode = [(1.0, 1.0), (1.21, 1.04), (1.03, 1.01)][place]
    return {
        "prefill_ms": 5120.0 * ratio, "decode_ms": 61.3 * decode, "peak_mib": 1310.0 + 20 * place,
        "prefill_ratio": ratio, "decode_ratio": decode,
    }  # fmt: skip
