"""The evaluation of trained heads as the tables of results.json."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sharpmax import theory
from sharpmax.experiments.reproduce.evaluation import (
    HARD,
    Detector,
    Fitted,
    Measured,
    Progress,
    device_of,
    fit,
    fit_samples,
    measure_all,
    read,
    side_by_side,
)
from sharpmax.experiments.reproduce.recipes import PUBLISHED, recipe_named
from sharpmax.experiments.statistics import auroc, compare, mean
from sharpmax.models.single_head import SingleHeads
from sharpmax.models.weights import Trained
from sharpmax.ops.softmax import softmax
from sharpmax.results import json_values
from sharpmax.stats.dense import dense_stats
from sharpmax.tasks.max_retrieval import CLASSES, Sets

_HEAT_SETS, _HEAT_ITEMS = 32, 16
_HEAT_VARIANTS = ("softmax", "entropy-target")
_GRID = 2**14


def items_to_read(sizes: Sequence[int], samples: int, heads: int) -> int:
    """Roughly how many items an evaluation reads, for showing progress."""
    return (samples + fit_samples(samples)) * sum(sizes) * heads


def reproduce_tables(
    trained: Sequence[Trained],
    sizes: Sequence[int],
    samples: int,
    seed: int,
    device: torch.device,
    progress: Progress = lambda items: None,
) -> dict[str, Any]:
    """Evaluate the heads of every recipe on the same sets."""
    began = time.monotonic()
    tables: dict[str, Any] = {}
    policies: dict[str, Any] = {}
    left_out: dict[str, Any] = {}
    for weights in trained:
        heads = [weights.heads([position]).to(device) for position in range(len(weights.seeds))]
        fitted = fit(heads, sizes, samples, seed, recipe_named(weights.recipe).sizes, progress)
        measured = measure_all(heads, fitted.variants, sizes, samples, (seed, 2), progress)
        found = _tables(measured, fitted, heads, seed)
        suffix = "" if weights.recipe == "paper" else f"/{weights.recipe}"
        tables |= {name + suffix: table for name, table in found.items()}
        policies[weights.recipe] = _describe(fitted)
        left_out[weights.recipe] = fitted.left_out
    tables["published"] = PUBLISHED
    tables["weights"] = {
        w.recipe: {"steps": w.steps, "seeds": list(w.seeds), "trained": dict(w.provenance)} for w in trained
    }
    tables["setting"] = {
        "recipes": {
            w.recipe: {"describe": recipe_named(w.recipe).summary, "steps": w.steps, "seeds": list(w.seeds)}
            for w in trained
        },
        "sizes": list(sizes),
        "samples": samples,
        "fit_samples": fit_samples(samples),
        "train_sizes": list(recipe_named(trained[0].recipe).sizes),
        "classes": CLASSES,
        "policies": policies,
        "left_out": left_out,
        "seconds": {"evaluate": round(time.monotonic() - began, 1)},
    }
    return json_values(tables)


def _tables(
    measured: Mapping[int, Measured], fitted: Fitted, heads: Sequence[SingleHeads], seed: int
) -> dict[str, Any]:
    names = list(fitted.variants[0])
    accuracy = {
        variant: {n: 100.0 * m.correct[variant].mean(axis=1) for n, m in measured.items()} for variant in (*names, HARD)
    }
    found = {
        "accuracy": {variant: {str(n): mean(cells[n]) for n in cells} for variant, cells in accuracy.items()},
        "comparison": {
            variant: {str(n): compare(cells[n], accuracy["softmax"][n], accuracy[HARD][n]) for n in cells}
            for variant, cells in accuracy.items()
            if variant != "softmax"
        },
        "entropy": {a: {str(n): mean(m.entropy[a].mean(axis=1)) for n, m in measured.items()} for a in names},
        "top_weight": {
            a: {str(n): mean(100.0 * m.top_weight[a].mean(axis=1)) for n, m in measured.items()} for a in names
        },
        "bounds": _bounds(measured, heads),
        "heat": _heat(heads[0], fitted, list(measured), seed),
        "detection": _detection(measured, fitted.detector, seed),
    }
    if fitted.polynomial is not None:
        found["fit"] = fitted.polynomial
    return found


def _describe(fitted: Fitted) -> dict[str, str]:
    rules = {name: policy.describe() for name, policy in fitted.variants[0].items() if policy is not None}
    targets = [variants["entropy-target"].target for variants in fitted.variants]  # type: ignore[union-attr]
    rules["entropy-target"] = (
        f"β ≥ 1 such that H is the head's mean entropy on training sizes, {min(targets):.3g} … {max(targets):.3g} nat"
    )
    return rules


def _bounds(measured: Mapping[int, Measured], heads: Sequence[SingleHeads]) -> dict[str, Any]:
    """What theory says of plain softmax: bounds from each head's largest logit spread, and the limit of large n."""
    spread = np.max([m.spread.max(axis=1) for m in measured.values()], axis=0).astype(np.float64)
    population = side_by_side(_population, heads, device_of(heads[0]))
    return {
        "spread": mean(spread),
        "horizon_log10": mean(np.array([_log10_horizon(s) for s in spread])),
        "largest_weight": {str(n): 100.0 * float(np.mean(theory.weight_bounds(spread, n)[1])) for n in measured},
        "least_entropy": {str(n): float(np.mean(theory.entropy_floor(spread, n))) for n in measured},
        "most_entropy": {str(n): float(theory.entropy_ceiling(n)) for n in measured},
        "limit_weight": {str(n): 100.0 * float(np.mean([min(1.0, w / n) for w, _ in population])) for n in measured},
        "limit_entropy": {str(n): float(np.mean([max(0.0, h + np.log(n)) for _, h in population])) for n in measured},
    }


def _log10_horizon(spread: float) -> float:
    # 1 + e^δ leaves float64 at a spread of 710, its logarithm does not.
    return float(np.logaddexp(0.0, spread) / np.log(10.0))


def _population(head: SingleHeads) -> tuple[float, float]:
    """For items drawn at random: the limit of n·(top weight), and that of the entropy minus ln n, as n grows."""
    device = next(head.parameters()).device
    priority = ((torch.arange(_GRID, device=device) + 0.5) / _GRID).repeat(CLASSES, 1)
    label = torch.arange(CLASSES, device=device)[:, None].expand(-1, _GRID)
    sets = Sets(priority, label, torch.full((CLASSES,), 0.5, device=device), torch.ones_like(label, dtype=torch.bool))
    h = head.features(sets.items[None])
    s = head.logits(h, sets.query[None]).flatten().cpu().double()
    stats = dense_stats(s, torch.ones_like(s, dtype=torch.bool))
    weight = theory.top_weight_limit(float(stats.max), float(stats.lse) - np.log(len(s)))
    return float(weight), float(stats.entropy) - float(np.log(len(s)))


def _heat(head: SingleHeads, fitted: Fitted, sizes: Sequence[int], seed: int) -> dict[str, Any]:
    """Weights of the items with the highest priority in a few sets, highest first, for every second size."""
    shown = sizes[::2]

    def weights(n: int) -> dict[str, list[list[float]]]:
        rows: dict[str, list[list[float]]] = {name: [] for name in _HEAT_VARIANTS}
        for seen in read(head, n, _HEAT_SETS, (seed, 3)):
            order = seen.priority.topk(min(_HEAT_ITEMS, n)).indices
            for name in _HEAT_VARIANTS:
                of_items = 100.0 * softmax(seen.logits, policy=fitted.variants[0][name]).gather(-1, order)
                rows[name] += [[float(f"{w:.4g}") for w in row] for row in of_items.tolist()]
        return rows

    found = dict(zip(shown, side_by_side(weights, shown, device_of(head)), strict=True))
    variants = {name: {str(n): found[n][name] for n in shown} for name in _HEAT_VARIANTS}
    return {"sizes": list(shown), "items": _HEAT_ITEMS, "sets": _HEAT_SETS, "arms": variants}


def _detection(measured: Mapping[int, Measured], detector: Detector | None, seed: int) -> dict[str, Any]:
    """AUROC of detecting wrong answers of plain softmax, at each size and over all."""
    signals: dict[str, Callable[[Measured], np.ndarray]] = {
        "confidence": lambda m: -m.confidence,
        "entropy": lambda m: m.entropy["softmax"],
    }
    if detector is not None:
        signals["both"] = lambda m: detector.suspicion(m.confidence, m.entropy["softmax"])
    correct = {n: m.correct["softmax"] for n, m in measured.items()}
    found: dict[str, Any] = {}
    for name, signal in signals.items():
        suspicion = {n: signal(m) for n, m in measured.items()}
        found[name] = {str(n): auroc(suspicion[n], correct[n], seed) for n in measured}
        found[name]["pooled"] = auroc(_side_by_side(suspicion), _side_by_side(correct), seed)
    return found


def _side_by_side(by_size: Mapping[int, np.ndarray]) -> np.ndarray:
    return np.concatenate(list(by_size.values()), axis=1)
