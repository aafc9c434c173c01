"""`learnable`: a policy per head whose numbers are parameters of the model and train with its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sharpmax.arrays import ops_for
from sharpmax.calibration.data import FREQUENCY, KINDS, policy_from
from sharpmax.calibration.trainer import TrainablePolicy, frequencies_of, grid_of
from sharpmax.errors import reject
from sharpmax.integrations.transformers.application import apply, restore
from sharpmax.integrations.transformers.interface import install
from sharpmax.ops.attention import Rule
from sharpmax.policies.base import Remeasure, with_columns
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.shipped import LogScale
from sharpmax.stats.statistics import RowStats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SSMAX = "ssmax"
LEARNABLE = (*KINDS, SSMAX)
"""What can be learned in every head: coefficients of `LogLinear` (a constant is one of them), or the s of SSMax."""

PARAMETER = "sharpmax_policy"
"""The name of the numbers among the parameters of the model."""

_FIRST_SCALE = 0.43  # where Scalable-Softmax starts
_DIGITS = 5


class LearnablePolicy:
    """The numbers of a policy, `[layers, heads, numbers]`, as a parameter of a model that chooses β in its attention.

    Optimizers, checkpoints (`state_dict`) and several devices treat it as any other weight. `policy()` is the
    policy learned so far; `finish()` takes the parameter out and applies that policy instead.
    """

    def __init__(self, model: PreTrainedModel, kind: str) -> None:
        if kind not in LEARNABLE:
            reject("kind", repr(kind), f"one of {list(LEARNABLE)}")
        self.model, self.kind = model, kind
        layers, heads = grid_of(model)
        if kind == SSMAX:
            self.parameter = nn.Parameter(torch.full((layers, heads, 1), _FIRST_SCALE, device=model.device))
            install(model, self._scale_rules)
        else:
            frequencies = frequencies_of(model)
            if kind == FREQUENCY and not frequencies:
                reject("kind", f"{kind!r} for a {type(model).__name__}", "a model with rotary frequencies", "constant")
            trainable = TrainablePolicy(kind, layers, heads, model.device, frequencies=frequencies)
            trainable.coefficients = self.parameter = nn.Parameter(trainable.coefficients.detach())
            install(model, trainable.rules)
        model.register_parameter(PARAMETER, self.parameter)

    def _scale_rules(self, layer: int) -> Sequence[Rule]:
        return (_ScaleRule(self.parameter, layer),)

    def policy(self) -> PerHead:
        """The policy learned so far, its numbers rounded to five digits."""
        if self.kind != SSMAX:
            return policy_from(self.kind, self.parameter)
        grid = self.parameter.detach().cpu().double()[..., 0].tolist()
        return PerHead(tuple(tuple(LogScale(round(s, _DIGITS), bias=0.0) for s in layer) for layer in grid))

    def remove(self) -> None:
        """Take the parameter and its rules out of the model."""
        delattr(self.model, PARAMETER)
        restore(self.model)

    def finish(self) -> PerHead:
        """Apply the learned policy in place of the parameter, and return it; constants can then be folded."""
        found = self.policy()
        self.remove()
        apply(self.model, found)
        return found

    def __repr__(self) -> str:
        return f"LearnablePolicy(kind={self.kind!r}, layers × heads = {' × '.join(map(str, self.parameter.shape[:2]))})"


class _ScaleRule:
    """β = s·ln n in one layer."""

    heads = None
    needs = frozenset({"count"})

    def __init__(self, scales: Tensor, layer: int) -> None:
        self._scales, self._layer = scales, layer

    def beta(self, stats: RowStats, remeasure: Remeasure | None) -> Tensor:
        """s·ln n with a gradient into s; 1 in rows of one key, as everywhere."""
        policy = with_columns(LogScale(1.0, bias=0.0), {"scale": self._scales[self._layer]})
        beta: Tensor = policy.rule(ops_for(stats.count), stats, None)
        return beta.masked_fill(stats.count <= 1, 1.0)


def learnable(model: PreTrainedModel, kind: str) -> LearnablePolicy:
    """Give every head of a transformers model a policy whose numbers train with the weights.

    `kind` is "frequency" (one β per rotary frequency), "constant", "length", "entropy" or "rows" (coefficients of
    `LogLinear`), all starting at β = 1, or "ssmax" (β = s·ln n, starting at s = 0.43). Make it before the optimizer.
    What was applied to the model before is replaced.

    >>> import sharpmax as sm  # doctest: +SKIP
    >>> learned = sm.learnable(model, "ssmax")  # doctest: +SKIP
    >>> policy = learned.finish()  # doctest: +SKIP
    """
    return LearnablePolicy(model, kind)
