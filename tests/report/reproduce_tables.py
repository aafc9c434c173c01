"""Made-up tables of `sharpmax reproduce`: plausible numbers, two recipes, every size, always the same."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np

SIZES = [2**power for power in range(4, 15)]
HEAT_SIZES = [16, 64, 256, 1024, 4096, 16384]
ARMS = ["softmax", "paper", "refit", "log-length", "entropy-target", "hard"]
COMMAND = "sharpmax reproduce --out results/reproduce"
PROVENANCE: dict[str, Any] = {
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "versions": {"sharpmax": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6"},
    "hardware": {"cpu": "Example CPU", "cores": 16, "ram_gb": 128.0, "gpu": None, "system": "Linux x86_64"},
    "seed": 0,
    "date": "2026-11-15T12:00:00+00:00",
}

_PUBLISHED = {
    "softmax": [98.6, 97.1, 94.3, 89.7, 81.3, 70.1, 53.8, 35.7, 22.6, 15.7, 12.4],
    "paper": [98.6, 97.1, 94.5, 89.9, 82.1, 72.5, 57.7, 39.4, 24.9, 17.5, 14.0],
}
_SOFTMAX = {
    "paper": [98.9, 97.8, 95.7, 91.3, 83.2, 69.2, 49.9, 33.8, 23.6, 16.9, 13.5],
    "sharp": [99.7, 99.4, 98.9, 98.0, 96.4, 93.7, 89.5, 80.2, 66.7, 49.0, 32.4],
}
_HARD = {
    "paper": [99.0, 98.1, 96.4, 93.3, 87.9, 79.2, 65.2, 48.9, 33.1, 22.3, 16.2],
    "sharp": [99.7, 99.4, 98.9, 98.1, 96.6, 94.3, 90.6, 83.1, 71.2, 54.4, 36.9],
}
_SHARE = {"paper": 0.6, "refit": 0.8, "log-length": 0.9, "entropy-target": 1.0}
"""How much of the way from plain softmax to the ceiling an arm goes in these tables."""

_SPREAD = {"paper": 8.0, "sharp": 11.0}
_BASE = {"paper": 0.4, "sharp": 0.1}
_SEEDS = list(range(10))


def key(name: str, recipe: str) -> str:
    return name if recipe == "paper" else f"{name}/{recipe}"


def make_tables(recipes: tuple[str, ...] = ("paper", "sharp")) -> dict[str, Any]:
    """Tables of a full run with these recipes."""
    tables: dict[str, Any] = {"setting": _setting(recipes), "weights": {name: _weights(name) for name in recipes}}
    for recipe in recipes:
        rng = np.random.default_rng([len(recipe), 7])
        for name, table in _of_a_recipe(recipe, rng).items():
            tables[key(name, recipe)] = table
    tables["published"] = {arm: _row(values) for arm, values in _PUBLISHED.items()}
    return tables


def one_seed(tables: dict[str, Any]) -> dict[str, Any]:
    """The same tables as a run with a single seed would give them: no errors, no p values."""
    tables = copy.deepcopy(tables)
    for name, table in tables.items():
        kind = name.partition("/")[0]
        if kind in ("accuracy", "entropy", "top_weight"):
            for cells in table.values():
                for cell in cells.values():
                    cell |= {"sem": None, "n": 1}
        elif kind == "comparison":
            for cells in table.values():
                for cell in cells.values():
                    cell["p"] = None
    for recipe in tables["setting"]["recipes"].values():
        recipe["seeds"] = [0]
    return tables


def _row(values: list[float]) -> dict[str, float]:
    return {str(n): value for n, value in zip(SIZES, values, strict=True)}


def _cells(values: list[float], sem: float) -> dict[str, Any]:
    return {n: {"mean": value, "sem": sem, "n": len(_SEEDS)} for n, value in _row(values).items()}


def _setting(recipes: tuple[str, ...]) -> dict[str, Any]:
    lines = {
        "paper": "Adam, rate 1e-3, L2 penalty 1e-3, as in the paper",
        "sharp": "Adam, rate 1e-3 falling to 0 as a cosine, no L2 penalty",
    }
    policies = {
        "paper": "β = max(1, −0.037·H⁴ + 0.481·H³ − 2.3·H² + 4.917·H − 1.791) if H > 0.5 nats, else 1",
        "refit": "β = max(1, 0.002·H⁴ − 0.04·H³ + 0.21·H² + 0.3·H + 0.8) if H > 0.5 nats, else 1",
        "log-length": "β = max(1, 1 + 0.31·ln(n / 16))",
        "entropy-target": "β such that H = 0.41 nats",
    }
    return {
        "recipes": {name: {"describe": lines[name], "steps": 100000, "seeds": _SEEDS} for name in recipes},
        "sizes": SIZES,
        "samples": 256,
        "train_sizes": [5, 16],
        "classes": 10,
        "seconds": {"evaluate": 93.1},
        "policies": dict.fromkeys(recipes, policies),
    }


def _weights(recipe: str) -> dict[str, Any]:
    trained = {**PROVENANCE, "command": f"sharpmax reproduce --train --recipe {recipe}", "seconds": 31.2}
    trained["hardware"] = {**PROVENANCE["hardware"], "gpu": "Example GPU"}
    return {"steps": 100000, "seeds": _SEEDS, "trained": trained}


def _of_a_recipe(recipe: str, rng: np.random.Generator) -> dict[str, Any]:
    plain, hard = _SOFTMAX[recipe], _HARD[recipe]
    accuracy = {"softmax": plain}
    for arm, share in _SHARE.items():
        accuracy[arm] = [low + share * (high - low) for low, high in zip(plain, hard, strict=True)]
    accuracy["hard"] = hard
    return {
        "accuracy": {arm: _cells(values, 0.6) for arm, values in accuracy.items()},
        "comparison": {arm: _comparison(accuracy[arm], plain, hard) for arm in ARMS[1:]},
        **_rows(recipe),
        "bounds": _bounds(recipe),
        "fit": _fit(rng),
        "heat": _heat(recipe, rng),
        "detection": _detection(plain),
    }


def _comparison(values: list[float], plain: list[float], hard: list[float]) -> dict[str, Any]:
    cells = {}
    for n, value, base, best in zip(SIZES, values, plain, hard, strict=True):
        gain = value - base
        p = None if gain == 0 else 10.0 ** (-1.0 - 2.0 * gain)
        cells[str(n)] = {"gain": gain, "p": p, "of_ceiling": 100.0 * value / best}
    return cells


def _rows(recipe: str) -> dict[str, Any]:
    low, spread = _BASE[recipe], _SPREAD[recipe]
    plain = [low + (math.log(n) - low) * (1.0 - math.exp(-n / math.exp(spread - 2.0))) for n in SIZES]
    entropy = {"softmax": plain}
    entropy["paper"] = [h if h > 5.94 or h < 0.85 else 0.45 * h for h in plain]
    entropy["refit"] = [h if h < 0.85 else 0.3 * h for h in plain]
    entropy["log-length"] = [low + 0.12 * (h - low) for h in plain]
    entropy["entropy-target"] = [low] * len(SIZES)
    weight = {arm: [100.0 * math.exp(-h * 0.9) for h in values] for arm, values in entropy.items()}
    return {
        "entropy": {arm: _cells(values, 0.05) for arm, values in entropy.items()},
        "top_weight": {arm: _cells(values, 0.5) for arm, values in weight.items()},
    }


def _bounds(recipe: str) -> dict[str, Any]:
    spread = _SPREAD[recipe]
    top = [math.exp(spread) / (math.exp(spread) + n - 1) for n in SIZES]
    least = [
        -p * math.log(p) - (1 - p) * math.log((1 - p) / (n - 1)) if p < 1 else 0.0
        for p, n in zip(top, SIZES, strict=True)
    ]
    return {
        "spread": {"mean": spread, "sem": 0.2, "n": len(_SEEDS)},
        "largest_weight": _row([100.0 * p for p in top]),
        "least_entropy": _row(least),
        "most_entropy": _row([math.log(n) for n in SIZES]),
        "horizon_log10": {"mean": math.log10(1.0 + math.exp(spread)), "sem": 0.02, "n": len(_SEEDS)},
    }


def _fit(rng: np.random.Generator) -> dict[str, Any]:
    coefficients = [0.002, -0.04, 0.21, 0.3, 0.8]
    paper = [-0.037, 0.481, -2.3, 4.917, -1.791]
    entropy = rng.uniform(0.3, 9.0, 1000)
    beta = np.maximum(0.05, np.polyval(coefficients, entropy) + rng.gamma(1.0, 0.8, 1000) - 0.8)
    line = np.linspace(0.0, 9.5, 200)
    return {
        "coefficients": coefficients,
        "fitted_on": [0.31, 8.97],
        "threshold": 0.5,
        "acts_on": [0.62, None],
        "paper_acts_on": [0.85, 5.94],
        "sizes": SIZES,
        "inputs": 40960,
        "wrong": 8123,
        "dropped": 12,
        "r2": 0.42,
        "points": {"entropy": entropy.tolist(), "beta": beta.tolist()},
        "curve": {
            "entropy": line.tolist(),
            "refit": np.maximum(1.0, np.polyval(coefficients, line)).tolist(),
            "paper": np.maximum(1.0, np.polyval(paper, line)).tolist(),
        },
        "policy": {"kind": "polynomial"},
    }


def _heat(recipe: str, rng: np.random.Generator) -> dict[str, Any]:
    arms: dict[str, dict[str, Any]] = {"softmax": {}, "entropy-target": {}}
    for n in HEAT_SIZES:
        gaps = np.sort(rng.exponential(3.0 * 16 / n, (32, 16)).cumsum(axis=1), axis=1)
        logits = _SPREAD[recipe] - gaps
        for arm, sharp in (("softmax", 1.0), ("entropy-target", 1.0 + 4.0 * math.log(n / 16))):
            rest = (n - 16) * math.exp(sharp * (_SPREAD[recipe] * 0.55 - _SPREAD[recipe]))
            top = np.exp(sharp * (logits - logits[:, :1]))
            arms[arm][str(n)] = (100.0 * top / (top.sum(axis=1, keepdims=True) + rest)).tolist()
    return {"sizes": HEAT_SIZES, "items": 16, "sets": 32, "arms": arms}


def _detection(plain: list[float]) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for name, level in (("confidence", 0.9), ("entropy", 0.84), ("both", 0.92)):
        cells: dict[str, Any] = {}
        for step, (n, right) in enumerate(zip(SIZES, plain, strict=True)):
            wrong = round(25.6 * (100.0 - right))
            if n == 16:
                cells[str(n)] = {"auroc": None, "low": None, "high": None, "wrong": 0, "right": 2560}
                continue
            auroc = level - 0.02 * step
            cells[str(n)] = {
                "auroc": auroc,
                "low": auroc - 0.03,
                "high": auroc + 0.02,
                "wrong": wrong,
                "right": 2560 - wrong,
            }
        cells["pooled"] = {"auroc": level, "low": level - 0.01, "high": level + 0.008, "wrong": 9000, "right": 19000}
        tables[name] = cells
    return tables
