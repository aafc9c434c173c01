"""The rows of the page to explore, item by item, measured by sharpmax in float64."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

import sharpmax as sm
from sharpmax.errors import OutOfRangeWarning
from sharpmax.report.explore import CHOICES, Place
from sharpmax.stats.dense import dense_stats


@dataclass(frozen=True)
class Measured:
    top: float
    entropy: float
    weights: list[float]
    """The 32 largest at most."""


@dataclass(frozen=True)
class Sharpened:
    beta: float
    plain: Measured
    sharp: Measured


def logits(place: Place) -> torch.Tensor:
    """What the page draws: the best item at 0, the others evenly from its lead down to the spread."""
    others = torch.arange(1, place.items, dtype=torch.float64) / (place.items - 1)
    low = -place.spread * (place.lead + (1 - place.lead) * others)
    return torch.cat((torch.zeros(1, dtype=torch.float64), low)) / place.temperature


def measured(place: Place) -> Sharpened:
    row = logits(place)
    chosen = CHOICES[place.policy].policy
    visible, beta = torch.ones_like(row, dtype=torch.bool), 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutOfRangeWarning)
        plain, sharp = (sm.softmax(row, policy=policy) for policy in (None, chosen))
        if chosen is not None:
            beta = float(chosen.beta(dense_stats(row, visible), lambda factor: dense_stats(row * factor, visible)))
    return Sharpened(beta, _of(row, plain), _of(row * beta, sharp))


def _of(row: torch.Tensor, weights: torch.Tensor) -> Measured:
    return Measured(float(weights[0]), float(sm.entropy(row)), weights[:32].tolist())
