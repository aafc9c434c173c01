"""Made-up tables of `sharpmax probe`: plausible heads of every kind, two tasks, always the same."""

from __future__ import annotations

import math
from collections import Counter
from statistics import fmean, median
from typing import Any

import numpy as np

LAYERS, HEADS = 30, 9
COMMAND = "sharpmax probe smollm2 --out probed"
SIZES = {"kv": [8, 16, 32, 64, 128, 256, 512], "text": [64, 128, 256, 512, 1024, 2048, 4096]}
FIT_UP_TO = {"kv": 64, "text": 256}
RULE = {
    "uniform": "at the largest size the weight is spread over half or more of all keys, in effect",
    "sink": "otherwise, at the largest size the first key has half or more of the weight",
    "local": "otherwise, at the largest size the last 16 keys have half or more of the weight",
    "dispersing": "otherwise, entropy rises with ln n by a slope of 0.25 or more",
    "sharp": "otherwise: the head keeps looking at about as many keys",
}
VERDICT = [
    "47 (17%) of smollm2's 270 attention heads lose focus as inputs grow from 8 to 512 items (98 to 4,130 tokens).",
    "Layers 0, 1 and 4 of 30 go first; 53 heads have half of their weight on one token in the smallest inputs.",
    "Inputs of up to 64 items foretell what happens at 512: the forecast is off by 0.09 nats in the middle head.",
]


def make_tables(
    layers: int = LAYERS,
    heads: int = HEADS,
    *,
    model: str = "smollm2",
    policy: str | None = None,
    calm: float = 1.0,
    tasks: tuple[str, ...] = ("kv", "text"),
) -> dict[str, Any]:
    """Tables of a full run; `calm` below 1 makes every head disperse less, as a policy would."""
    tables: dict[str, Any] = {
        "setting": {
            "model": model, "family": "llama", "layers": layers, "heads": heads, "tasks": list(tasks),
            "sizes": {task: SIZES[task] for task in tasks}, "unit": {"kv": "items", "text": "tokens"},
            "prompts_of_size": {task: {str(size): 8 for size in SIZES[task]} for task in tasks},
            "rows": "last", "seed": 0, "dtype": "float32", "device": "cpu",
            "policy": policy, "context": 8192, "fit_up_to": {task: FIT_UP_TO[task] for task in tasks},
            "kind_rule": RULE,
        },
        "verdict": VERDICT,
    }  # fmt: skip
    for task in tasks:
        rng = np.random.default_rng([layers, heads, len(task)])
        found = {
            f"{layer}.{head}": _head(rng, layer, layers, task, calm) for layer in range(layers) for head in range(heads)
        }
        tables[f"heads/{task}"] = found
        tables[f"layers/{task}"] = _layers(found, layers, task)
        tables[f"forecast/{task}"] = _errors(found, task)
        tables[f"chain/{task}"] = {"next": 0.41, "low": 0.05, "high": 0.68, "pairs": layers - 1}
    return tables


def tiny_tables() -> dict[str, Any]:
    """Two layers of four heads, one task, one head without any number, and nothing forecast."""
    tables = make_tables(2, 4, model="tiny", tasks=("kv",))
    del tables["forecast/kv"]
    tables["chain/kv"] = {"next": None, "low": None, "high": None, "pairs": 1}
    for about in tables["heads/kv"].values():
        about["forecast"] = {}
        about["horizon"] = dict.fromkeys(("tokens", "low", "high"))
    unknown = tables["heads/kv"]["1.2"]
    unknown |= {"kind": "unknown", "slope": None, "slope_low": None, "slope_high": None}
    unknown["curve"] = {size: dict.fromkeys(cells) for size, cells in unknown["curve"].items()}
    tables["layers/kv"]["1"] |= {"slope": None, "sink": None, "top": None}
    return tables


def keys(task: str, size: int) -> float:
    """How many keys the last row of a prompt sees."""
    return 8.0 * size + 34.0 if task == "kv" else float(size)


def _head(rng: np.random.Generator, layer: int, layers: int, task: str, calm: float) -> dict[str, Any]:
    deep = layer / max(1, layers - 1)
    chances = {"sharp": 0.15, "dispersing": max(0.05, 0.5 - deep), "uniform": 0.05, "sink": 0.1 + 0.6 * deep}
    chances["local"] = 0.15
    kind = str(rng.choice(list(chances), p=np.array(list(chances.values())) / sum(chances.values())))
    slope = calm * float(
        {"sharp": rng.normal(0.1, 0.08), "dispersing": rng.uniform(0.5, 0.9), "uniform": rng.normal(0.97, 0.01),
         "sink": rng.normal(-0.05, 0.12), "local": rng.normal(0.05, 0.05)}[kind]
    )  # fmt: skip
    if kind == "dispersing" and slope < 0.4:
        kind = "sharp"
    first = keys(task, SIZES[task][0])
    start = {
        "sharp": 0.6,
        "dispersing": float(rng.uniform(0.1, 1.6)),
        "uniform": 0.97 * math.log(first),
        "sink": 1.4,
        "local": 1.9,
    }[kind]
    curve = {}
    for size in SIZES[task]:
        n = keys(task, size)
        entropy = min(math.log(n), max(0.02, start + slope * math.log(n / first) + float(rng.normal(0.0, 0.04))))
        top = min(1.0, math.exp(-0.8 * entropy))
        curve[str(size)] = {
            "count": n, "entropy": entropy, "top": top, "sink": 0.8 * top if kind == "sink" else 0.02,
            "spread": 9.0 + 2.0 * deep, "local": 0.7 if kind == "local" else 0.1, "effective": math.exp(entropy),
        }  # fmt: skip
    later = [size for size in SIZES[task] if size > FIT_UP_TO[task]]
    forecast = {}
    for size in later:
        entropy = max(0.0, start + slope * math.log(keys(task, size) / first) + float(rng.normal(0.0, 0.12)))
        forecast[str(size)] = {"entropy": entropy, "top": min(1.0, math.exp(-0.8 * entropy))}
    half = first * math.exp((math.log(2.0) / 0.8 - start) / slope) if slope > 0.02 else math.inf
    known = first < half < keys(task, SIZES[task][-1])
    horizon = {"tokens": half, "low": half / 1.2, "high": half * 1.3} if known else {}
    return {
        "kind": kind, "slope": slope, "slope_low": slope - 0.07, "slope_high": slope + 0.07, "curve": curve,
        "forecast": forecast, "horizon": horizon or dict.fromkeys(("tokens", "low", "high")),
    }  # fmt: skip


def _layers(found: dict[str, Any], layers: int, task: str) -> dict[str, Any]:
    last = str(SIZES[task][-1])
    of = {layer: [about for name, about in found.items() if name.startswith(f"{layer}.")] for layer in range(layers)}
    slopes = {layer: fmean(about["slope"] for about in heads) for layer, heads in of.items()}
    order = sorted(slopes, key=lambda layer: -slopes[layer])
    return {
        str(layer): {
            "slope": slopes[layer], "rank": order.index(layer) + 1,
            "kinds": dict(Counter(about["kind"] for about in heads)),
            "sink": fmean(about["curve"][last]["sink"] for about in heads),
            "top": fmean(about["curve"][last]["top"] for about in heads),
        }
        for layer, heads in of.items()
    }  # fmt: skip


def _errors(found: dict[str, Any], task: str) -> dict[str, Any]:
    def error(size: str, name: str) -> dict[str, float]:
        apart = [about["forecast"][size][name] - about["curve"][size][name] for about in found.values()]
        wide = sorted(map(abs, apart))
        return {"median": median(wide), "p90": wide[int(0.9 * len(wide))], "bias": fmean(apart)}

    tested = [str(size) for size in SIZES[task] if size > FIT_UP_TO[task]]
    errors = {
        size: {"entropy": error(size, "entropy"), "top": error(size, "top"), "heads": len(found)} for size in tested
    }
    return {
        "method": "line",
        "fitted": [size for size in SIZES[task] if size <= FIT_UP_TO[task]],
        "tested": errors,
        "methods": {
            "the largest size again": {"decided_by": 0.31, "tested": {}},
            "line": {"decided_by": 0.07, "tested": errors},
        },
    }
