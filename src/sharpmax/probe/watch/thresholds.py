"""Thresholds that a fresh example exceeds no more often than asked for, whatever the scores look like."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sharpmax.errors import reject, reject_type

__all__ = ["LEAST_LEARNED", "check_rate", "conformal_threshold", "least_examples", "split"]

LEAST_LEARNED = 8
"""Means and scales of fewer examples are worth nothing."""

_ROUNDING = 1e-9
"""Rates are decimal fractions, whose products with whole numbers may miss the whole number they mean."""


def check_rate(rate: object, name: str = "false_alarms") -> float:
    """A false-alarm rate as it has to be."""
    allowed = "a share above 0 and below 1, as 0.01"
    if isinstance(rate, bool) or not isinstance(rate, (int, float)):
        reject_type(name, repr(rate), allowed)
    if not 0.0 < rate < 1.0:
        reject(name, rate, allowed)
    return float(rate)


def least_examples(rate: float) -> int:
    """How many scores it takes before any threshold can promise so low a rate.

    >>> least_examples(0.01)
    99
    """
    return max(1, math.ceil(1.0 / rate - _ROUNDING) - 1)


def conformal_threshold(scores: Tensor, rate: float) -> Tensor:
    """The threshold, along the first axis, that one more score like these n exceeds with probability ≤ `rate`.

    It is the score of rank ⌈(n + 1)(1 − rate)⌉: if the fresh score is exchangeable with the others, each of its n + 1
    ranks among them is as likely as another, so the probability is ⌊(n + 1)·rate⌋ / (n + 1) without ties and less with
    them, for scores of any distribution. With fewer scores than `least_examples` it is infinite.

    >>> conformal_threshold(torch.arange(1.0, 100.0), 0.05)
    tensor(95.)
    """
    above = math.floor(rate * (len(scores) + 1) + _ROUNDING)
    if above == 0:
        return torch.full_like(scores[0], torch.inf) if len(scores) else scores.new_full(scores.shape[1:], torch.inf)
    return scores.sort(0).values[len(scores) - above]


def split(count: int, rate: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Which of `count` examples to learn from, and which to take the threshold from, at random.

    Half each, or as many for the threshold as the rate needs; an error if too few would be left to learn from.
    """
    needed = least_examples(rate)
    judged = max(min(count // 2, count - LEAST_LEARNED), needed)
    if count - judged < LEAST_LEARNED:
        hint = f"give {needed + LEAST_LEARNED} or more, or ask for a higher rate"
        reject("reference", f"{count} prompts for a false-alarm rate of {rate:g}", "prompts enough for the rate", hint)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[judged:], order[:judged]
