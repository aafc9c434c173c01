"""Fit what an evaluation needs on sets it never sees: entropy targets and the polynomial."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sharpmax.arrays import in_float64
from sharpmax.experiments.reproduce.detection import Detector
from sharpmax.experiments.reproduce.evaluation import (
    Progress,
    Read,
    device_of,
    measure,
    measure_page,
    read,
    side_by_side,
)
from sharpmax.models.single_head import SingleHeads
from sharpmax.policies.base import Policy
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.log_length import LogLength
from sharpmax.policies.polynomial import PAPER, Polynomial
from sharpmax.stats.dense import centred, dense_stats

_STEPS = 60
_TOLERANCE = 1e-9
_LEAST, _MOST = math.log(1e-4), math.log(1e4)


def best_beta(logits: Tensor, wanted: Tensor) -> Tensor:
    """The β at which softmax(β·logits) gives the item `wanted` [...] of each row [..., n] the largest weight; float64.

    The weight's slope in β is its weight times s_wanted − E_β[s], and E_β[s] rises with β from the plain mean to the
    maximum: the best β is where the two meet. It is ∞ where the wanted item has the largest logit and 0 where it is
    not above the plain mean, so that no temperature helps; otherwise it is looked for between 1e-4 and 1e4. Logits of
    −inf are not part of their row, and a row with NaN has none.

    >>> best_beta(torch.tensor([2.0, 1.5, 0.0, 0.0]), torch.tensor(1))
    tensor(0.8959, dtype=torch.float64)
    """
    logits = in_float64(logits)
    live, wanted = logits != -torch.inf, wanted.to(logits.device)
    x, _ = centred(logits, live)
    goal = x.gather(-1, wanted[..., None])[..., 0]
    mean = torch.where(live, x, 0.0).sum(-1) / live.sum(-1)
    free = (goal > mean) & (goal < 0.0)
    u, low, high = torch.zeros_like(goal), torch.full_like(goal, _LEAST), torch.full_like(goal, _MOST)
    # Newton's steps in u = ln β, where the slope of E[s] is β·Var[s], halving the bracket wherever they leave it.
    for _ in range(_STEPS):
        beta = u.exp()
        stats = dense_stats(x * beta[..., None], live)
        gap = goal - stats.mean / beta
        low, high = torch.where(gap > 0, u, low), torch.where(gap > 0, high, u)
        step = u + gap * beta / stats.var.clamp_min(1e-300)
        inside = (step > low) & (step < high)
        after = torch.where(inside, step, 0.5 * (low + high))
        settled = ~free | ((after - u).abs() <= _TOLERANCE)
        u = after
        if bool(settled.all()):
            break
    best = torch.where(goal <= mean, 0.0, u.exp())
    best = torch.where(goal >= 0.0, torch.inf, best)
    best = torch.where(live.gather(-1, wanted[..., None])[..., 0], best, 0.0)
    return torch.where(mean.isnan(), torch.nan, best)


_LARGEST_BETA = 10.0
_LEAST_POINTS = 50
_IN_DISTRIBUTION_SETS = 2048
_PLOTTED = 1000


@dataclass(frozen=True)
class Fitted:
    """What one recipe's heads taught: policies by arm for each head, the polynomial's table, the failure detector."""

    arms: list[dict[str, Policy | None]]
    polynomial: dict[str, Any] | None
    detector: Detector | None
    left_out: dict[str, str]
    """What could not be fitted, and why."""


def fit_samples(samples: int) -> int:
    """How many sets of each size are spent on fitting when `samples` are spent on evaluation."""
    return max(32, samples // 4)


def fit(
    heads: Sequence[SingleHeads],
    sizes: Sequence[int],
    samples: int,
    seed: int,
    train_sizes: tuple[int, int],
    progress: Progress,
) -> Fitted:
    """Fit everything on `fit_samples(samples)` sets per size, from a stream of random numbers of their own."""
    plain: list[dict[str, Policy | None]] = [{"softmax": None} for _ in heads]
    inside = measure(heads, plain, train_sizes, _IN_DISTRIBUTION_SETS, (seed, 0), progress)
    targets = inside.entropy["softmax"].mean(axis=1)

    def surveyed(task: tuple[int, int]) -> list[dict[str, np.ndarray]]:
        size, position = task
        reads = read(heads[position], size, fit_samples(samples), (seed, 1, position), progress)
        return [_survey(seen) for seen in reads]

    tasks = [(size, position) for size in reversed(sizes) for position in range(len(heads))]
    points = [page for pages in side_by_side(surveyed, tasks, device_of(heads[0])) for page in pages]
    survey = {name: np.concatenate([page[name] for page in points]) for name in points[0]}
    table, refit = _polynomial(survey, sizes)
    arms = []
    for target in targets:
        policies: dict[str, Policy | None] = {"softmax": None, "paper": PAPER}
        if refit is not None:
            policies["refit"] = refit
        policies["log-length"] = LogLength(reference=train_sizes[1])
        policies["entropy-target"] = EntropyTarget(float(target))
        arms.append(policies)
    detector = Detector.fit(survey["confidence"], survey["entropy"], survey["correct"])
    return Fitted(arms, table, detector, _left_out(survey, refit, detector))


def _left_out(survey: Mapping[str, np.ndarray], refit: Policy | None, detector: Detector | None) -> dict[str, str]:
    reasons = {}
    if refit is None:
        reasons["refit"] = (
            f"{int(_usable(survey['beta']).sum())} wrongly ranked inputs are too few to fit a polynomial on "
            f"({_LEAST_POINTS} are needed); more --samples, --seeds or larger --sizes give more"
        )
    if detector is None:
        reasons["both"] = "too few wrong answers to fit a failure detector on"
    return reasons


def _survey(seen: Read) -> dict[str, np.ndarray]:
    """Entropy, confidence, whether the answer is right, and the best β: NaN where the best item is on top anyway."""
    found = measure_page(seen, {"softmax": None})
    missed = seen.logits.argmax(-1) != seen.best
    best = torch.full(missed.shape, torch.nan, dtype=torch.float64)
    if bool(missed.any()):
        best[missed.cpu()] = best_beta(seen.logits[missed], seen.best[missed]).cpu()
    columns = {"entropy": found["entropy softmax"], "confidence": found["confidence"], "beta": best}
    columns["correct"] = found["correct softmax"]
    return {name: values.cpu().numpy() for name, values in columns.items()}


def _polynomial(survey: Mapping[str, np.ndarray], sizes: Sequence[int]) -> tuple[dict[str, Any] | None, Policy | None]:
    """The paper's procedure: a polynomial of degree 4 through (entropy, best β) of the inputs that are ranked wrongly.

    The best β is unbounded as the wanted item comes close to the top, and any large one does: those are left out.
    """
    wrong, used = ~np.isnan(survey["beta"]), _usable(survey["beta"])
    entropy, beta = survey["entropy"][used].astype(np.float64), survey["beta"][used]
    if len(beta) < _LEAST_POINTS:
        return None, None
    policy = Polynomial.fit(entropy, beta)
    residual = beta - np.polyval(policy.coefficients, entropy)
    shown = np.linspace(0, len(beta) - 1, min(_PLOTTED, len(beta))).round().astype(int)
    grid = np.linspace(0.0, max(policy.fitted_on[1], 6.5), 200)
    table = {
        "coefficients": list(policy.coefficients),
        "fitted_on": list(policy.fitted_on),
        "threshold": policy.threshold,
        "acts_on": _ends(policy),
        "paper_acts_on": _ends(PAPER),
        "sizes": list(sizes),
        "inputs": len(wrong),
        "wrong": len(beta),
        "dropped": int(wrong.sum() - used.sum()),
        "r2": float(1.0 - residual.var() / beta.var()),
        "points": {"entropy": _short(entropy[shown]), "beta": _short(beta[shown])},
        "curve": {
            "entropy": _short(grid),
            "refit": _short(policy.value_at(grid)),
            "paper": _short(PAPER.value_at(grid)),
        },
        "policy": policy.to_dict(),
    }
    return table, policy


def _usable(beta: np.ndarray) -> np.ndarray:
    return np.asarray((beta > 0.0) & (beta <= _LARGEST_BETA))


def _ends(policy: Polynomial) -> list[float | None] | None:
    ends = policy.acts_on
    return None if ends is None else [float(end) if np.isfinite(end) else None for end in ends]


def _short(values: np.ndarray) -> list[float]:
    return [float(f"{value:.5g}") for value in values]
