"""Tables and collapsible sections in Markdown, and pages of benchmarks and horizons, which have no report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["BENCHES", "folded", "horizon_lines", "table"]

_SIGNALS = {
    "monitor": "the monitor",
    "confidence": "largest probability of the next token",
    "entropy": "entropy of the next token",
    "energy": "energy of the logits",
    "length": "number of tokens alone",
    "both": "the monitor and confidence together",
}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    lines = [list(head), ["---"] * len(head), *[list(row) for row in rows]]
    return ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines]


def folded(title: str, lines: Sequence[str]) -> list[str]:
    """A collapsible section."""
    quoted = title.replace('"', "'")
    return [f'??? abstract "{quoted}"', "", *(f"    {line}" if line else "" for line in lines), ""]


def horizon_lines(tables: Mapping[str, Any]) -> list[str]:
    """How many heads are certified and measured to hold their mass, and for each layer the spreads."""
    certified, measured, setting = tables["certified"], tables["measured"], tables["setting"]
    mass, prompts = f"{100 * setting['mass']:g}%", setting["prompts"]
    sentences = [
        f"**Certified**: {certified['informative']} of {certified['heads']} certificates are informative. The tightest "
        f"allows {mass} of the weight on one token up to 10^{int(10 * certified['log10_tokens']) / 10} tokens.",
        f"**Measured** on {prompts['prompts']} prompts of {prompts['shortest']} to {prompts['longest']:,} tokens: "
        f"{measured['before']} heads never put {mass} of their weight on one token, {measured['at']} do up to some "
        f"length (median: {int(measured['tokens']):,} tokens), and {measured['beyond']} do at every length.",
    ]
    head = ["layer", "certified spread", "measured spread", "widest", "never", "up to a length", "at all lengths"]
    rows = [
        [
            layer,
            f"{one['certified']['median']:,.1f}",
            *(f"{one['measured'][name]:,.1f}" for name in ("spread", "widest")),
            *(str(one["measured"][name]) for name in ("before", "at", "beyond")),
        ]
        for layer, one in tables["layers"].items()
    ]
    note = "Spreads in nats, medians over heads. Then heads whose top weight is above ½: never, up to a length, always."
    return [*(f"- {sentence}" for sentence in sentences), "", *folded("Layers", [note, "", *table(head, rows)])]


def _timed(tables: Mapping[str, Any]) -> list[str]:
    """Cases timed in alternation; ratios are to the first."""
    rows = [
        [f"`{name.replace('stock', 'PyTorch')}`", _what(one), f"{one['median_s']:.3f}", _times(one), _target(one)]
        for name, one in tables["bench"].items()
    ]
    setting = ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in tables["setting"].items() if _short(value)
    )
    return [*table(["case", "what", "median s", "×", "target"], rows), "", f"<small>{setting}</small>"]


def _what(one: Mapping[str, Any]) -> str:
    return str(one.get("what", "")).removesuffix(" as it comes")  # the words of an older file


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
    costs = (
        f"False alarms on new prompts of the sizes learned from: {alarms['pooled']['mean']:.2f}%. "
        f"A generated token takes {cost['overhead_percent']:.1f}% longer ({cost['context']:,} tokens of context, "
        f"one token in {cost['every']} measured)."
    )
    return ["AUROC of detecting wrong answers:", "", *table(["signal", *tasks], rows), "", costs]


def _tabpfn(tables: Mapping[str, Any]) -> list[str]:
    """Accuracy and log loss of each variant, and their mean difference with its standard error over tables."""
    names = list(tables["setting"]["policies"])
    rows = []
    for table_name, sizes in tables["tables"].items():
        for size, one in sizes.items():
            runs = len(one["policies"][names[0]]["accuracy"])
            cells = [f"`{table_name}`", str(runs), f"{int(size):,}", f"{one['beta']:.2f}"]
            for key, form in (("accuracy", "{:.1%}"), ("loss", "{:.4f}")):
                plain, sharp = (np.array(one["policies"][name][key]) for name in names)
                change, scale = sharp - plain, 100 if key == "accuracy" else 1
                error = scale * change.std(ddof=1) / math.sqrt(len(change))
                digits = 1 if key == "accuracy" else 4
                cells += [form.format(plain.mean()), form.format(sharp.mean())]
                cells.append(f"{scale * change.mean():+.{digits}f} ± {error:.{digits}f}")
            rows.append(cells)
    plain, sharp = names
    head = ["table", "runs", "training rows", "β", f"accuracy, {plain}", f"`{sharp}`", "points"]
    return table([*head, f"log loss, {plain}", f"`{sharp}`", "change"], rows)


def _vllm(tables: Mapping[str, Any]) -> list[str]:
    """Throughput with each policy, relative to none."""
    rows = [[f"`{name}`", f"{one['prefill']:.2f}×", f"{one['decode']:.2f}×"] for name, one in tables["bench"].items()]
    return table(["policy", "prefill", "decode"], rows)


BENCHES: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "cpu": _timed, "probe": _timed, "monitor": _monitor, "tabpfn": _tabpfn, "vllm": _vllm,
}  # fmt: skip
"""What each file of `benchmarks/` shows; docs/gpu.md has h200.json."""
