"""The inverse temperature that would have been best for a row whose wanted item is known."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sharpmax.arrays import in_float64
from sharpmax.rows.dense import centred, dense_stats

__all__ = ["best_beta"]

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
