"""Benchmarks and horizons, which no report draws, as tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .tables import folded, table

__all__ = ["BENCHES", "horizon_lines"]

_SIGNALS = {
    "monitor": "the monitor",
    "confidence": "largest probability of the next token",
    "entropy": "entropy of the next token",
    "energy": "energy of the logits",
    "length": "number of tokens alone",
    "both": "the monitor and confidence together",
}


def horizon_lines(tables: Mapping[str, Any]) -> list[str]:
    """The verdict, and for each layer what is certain and what was measured."""
    head = [
        "layer",
        "certified spread, median",
        "measured spread, median",
        "widest",
        "never",
        "falls",
        "not seen to fall",
    ]
    rows = [
        [
            layer,
            f"{one['certified']['median']:,.1f}",
            *(f"{one['measured'][name]:,.1f}" for name in ("spread", "widest")),
            *(str(one["measured"][name]) for name in ("before", "at", "beyond")),
        ]
        for layer, one in tables["layers"].items()
    ]
    note = "Spreads in nats, medians over heads; how many heads hold the weight at no length, up to some, at all."
    return [*(f"- {sentence}" for sentence in tables["verdict"]), "", *folded("Layers", [note, "", *table(head, rows)])]


def _timed(tables: Mapping[str, Any]) -> list[str]:
    """Cases that were timed next to each other, the first being the yardstick."""
    rows = [
        [f"`{name}`", one.get("what", ""), f"{one['median_s']:.3f}", _times(one), _target(one)]
        for name, one in tables["bench"].items()
    ]
    setting = ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in tables["setting"].items() if _short(value)
    )
    return [*table(["case", "what", "median s", "×", "target"], rows), "", f"<small>{setting}</small>"]


def _short(value: object) -> bool:
    return isinstance(value, (str, int, float))


def _times(one: Mapping[str, Any]) -> str:
    return f"{one['ratio']:.2f}" if one.get("ratio") is not None else "–"


def _target(one: Mapping[str, Any]) -> str:
    target = (one.get("targets") or {}).get("ratio")
    if target is None:
        return "–"
    return f"≤ {target['at_most']:g}" + {True: ", reached", False: ", missed"}.get(target["reached"], "")


def _monitor(tables: Mapping[str, Any]) -> list[str]:
    tasks = [name.partition("/")[2] for name in tables if name.startswith("auroc/")]
    rows = [
        [words, *(f"{tables[f'auroc/{task}'][signal]['pooled']['auroc']:.2f}" for task in tasks)]
        for signal, words in _SIGNALS.items()
    ]
    alarms, cost = tables["false_alarms"], tables["overhead"]
    said = (
        f"False alarms on fresh prompts of the range learned from: {alarms['pooled']['mean']:.2f}%. "
        f"A generated token takes {cost['overhead_percent']:.1f}% longer ({cost['context']:,} tokens of context, "
        f"one token in {cost['every']} looked at)."
    )
    return ["AUROC of telling wrong answers from right ones:", "", *table(["signal", *tasks], rows), "", said]


BENCHES: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {"cpu": _timed, "probe": _timed, "monitor": _monitor}
"""What each file of `sharpmax bench` shows; docs/gpu.md has h200.json."""
