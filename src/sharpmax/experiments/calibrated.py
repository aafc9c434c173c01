"""A calibration as the tables of results.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sharpmax.calibrate.leash import percent
from sharpmax.calibrate.outcome import CalibrationResult
from sharpmax.experiments.evaluate.statistics import accuracy
from sharpmax.policies import PerHead, Policy
from sharpmax.rows.stats import RowStats

__all__ = ["REFERENCE_ROW", "calibrated_tables"]

REFERENCE_ROW = "a row of 1,024 keys with H/ln n = 0.5 and a top weight of 0.25"
"""The row whose β stands for a head where heads are compared."""

_POINTS = 120
"""Points of a learning curve that are kept: enough to see it."""


def calibrated_tables(found: CalibrationResult, model: str) -> dict[str, Any]:
    """Everything a reader of the calibration may ask for."""
    setting, profile = dict(found.setting), found.setting["profile"]
    chosen, foldable = found.chosen, found.foldable
    size = str(max(profile["sizes"]))
    return {
        "setting": {
            **setting,
            "model": model,
            "leash": 100.0 * setting["leash"],
            "sizes": profile["sizes"],
            "kinds": profile["kinds"],
            "steps": profile["steps"],
            "touched": chosen.touched,
            "reference_row": REFERENCE_ROW,
        },
        "curve": _curves(found.curves[chosen.kind]),
        "candidates": {
            kind: {
                "kind": kind,
                "strength": one.strength,
                "touched": one.touched,
                "validation": 100.0 * one.right,
                "nll": one.nll,
                "rise": {name: percent(rise) for name, rise in one.rises.items()},
                "foldable": one.foldable,
            }
            for kind, one in found.candidates.items()
        },
        "before": dict(found.before),
        "chosen": chosen.kind,
        "best_foldable": None if foldable is None else foldable.kind,
        "heads": _heads(chosen.policy),
        "validation": {
            "as it comes": {size: _cell(found.before["right"], profile["validation_prompts"])},
            **{kind: {size: _cell(one.right, profile["validation_prompts"])} for kind, one in found.candidates.items()},
        },
    }


def _cell(share: float, prompts: int) -> dict[str, Any]:
    right = round(share * prompts)
    return accuracy([1] * right + [0] * (prompts - right))


def _curves(steps: Sequence[Mapping[str, float]]) -> dict[str, list[list[float]]]:
    every = max(1, math.ceil(len(steps) / _POINTS))
    kept = steps[::every]
    names = dict.fromkeys(name for step in steps for name in step if name not in ("step", "nll"))
    curve = {"nll": [[step["step"], step["nll"]] for step in kept]}
    for name in names:
        curve[f"rise/{name}"] = [[step["step"], percent(step[name])] for step in kept if name in step]
    return curve


def _heads(policy: PerHead) -> dict[str, Any]:
    betas = [[_beta(one) for one in layer] for layer in policy.policies]
    touched: list[list[Any]] = [
        [i, j, one.describe(), betas[i][j]]
        for i, layer in enumerate(policy.policies)
        for j, one in enumerate(layer)
        if not one.is_identity
    ]
    touched.sort(key=lambda entry: -abs(math.log(entry[3])))
    return {"betas": betas, "touched": touched}


def _beta(policy: Policy) -> float:
    n, entropy, top = 1024, 0.5 * math.log(1024), 0.25
    lse = -math.log(top)
    # With the largest logit at 0 the top weight is e^−lse.
    row = RowStats(*(torch.tensor([value]) for value in (n, 0.0, lse, lse - entropy, 1.0)))
    return float(policy.beta(row))
