"""One number per row from the entropies of all heads: how far attention is from what it was in the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sharpmax.errors import FileFormatError, reject

__all__ = ["DEFAULT", "RULES", "Baseline", "learn"]

DEFAULT = "unexplained"
"""The rule that did best on validation prompts (`sharpmax bench --monitor`)."""

_LEAST_SCALE = 0.02
"""Nats. A head that hardly moved in the reference would turn the smallest change into the largest score."""

_TOP = 0.1
_MAIN = 0.25
"""Share of the variance of a reference from which on a direction counts as what it ordinarily varies by."""

_SHRINKAGE = 0.1
_ROUNDING = 1e-9
_LEAST_RANGE = 0.05
"""Standard deviation of ln n below which the lengths of a reference do not tell which heads disperse."""


@dataclass(frozen=True, eq=False)
class Baseline:
    """What the entropy of each head is in one kind of row of the reference, and the rule that sums it up.

    All tensors are float64 on the CPU: `mean` and `scale` `[heads]` in nats, `part` what the rule has learned, and
    `range` the mean and the standard deviation of what it gave for the reference.
    """

    rule: str
    mean: Tensor
    scale: Tensor
    part: Tensor
    range: Tensor

    def excess(self, entropy: Tensor) -> Tensor:
        """How many standard deviations each head `[..., heads]` is above the reference."""
        return (entropy.double() - self.mean) / self.scale

    def score(self, entropy: Tensor) -> Tensor:
        """How many standard deviations rows `[..., heads]` are from those of the reference; NaN where an entropy is."""
        return (RULES[self.rule].score(self.excess(entropy), self.part) - self.range[0]) / self.range[1]

    def to_dict(self) -> dict[str, Any]:
        """The baseline as plain JSON values."""
        return {"rule": self.rule, **{name: getattr(self, name).tolist() for name in _TENSORS}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Baseline:
        """The baseline that `to_dict` gave."""
        if data["rule"] not in RULES:
            raise FileFormatError(f"rule: got {data['rule']!r}; allowed: one of {list(RULES)}")
        return cls(data["rule"], *(torch.tensor(data[name], dtype=torch.float64) for name in _TENSORS))


_TENSORS = ("mean", "scale", "part", "range")


def learn(entropy: Tensor, count: Tensor, layers: Tensor, rule: str = DEFAULT) -> Baseline:
    """Learn from rows: entropies `[N, heads]`, visible keys `[N]`, and the layer of each head `[heads]`."""
    if rule not in RULES:
        reject("score", repr(rule), f"one of {list(RULES)}")
    entropy = entropy.double()
    mean, scale = entropy.mean(0), entropy.std(0).clamp_min(_LEAST_SCALE)
    excess = (entropy - mean) / scale
    part = RULES[rule].learn(excess, count.double().clamp_min(1).log(), layers)
    raw = RULES[rule].score(excess, part)
    return Baseline(rule, mean, scale, part, torch.stack((raw.mean(), raw.std().clamp_min(_ROUNDING))))


@dataclass(frozen=True)
class _Rule:
    """How a rule learns from excesses `[N, heads]`, ln n `[N]` and layers `[heads]`, and scores `[..., heads]`."""

    what: str
    learn: Callable[[Tensor, Tensor, Tensor], Tensor]
    score: Callable[[Tensor, Tensor], Tensor]


def _equal(excess: Tensor, length: Tensor, layers: Tensor) -> Tensor:
    return torch.full_like(excess[0], 1.0 / excess.shape[1])


def _dispersing(excess: Tensor, length: Tensor, layers: Tensor) -> Tensor:
    """Correlation of each head's entropy with ln n, where it is positive: those are the heads that lose focus."""
    centred = length - length.mean()
    if centred.std() < _LEAST_RANGE:
        return _equal(excess, length, layers)
    rising = (excess * centred[:, None]).mean(0).clamp_min(0.0)
    return rising / rising.sum() if rising.sum() > 0 else _equal(excess, length, layers)


def _unexplained(excess: Tensor, length: Tensor, layers: Tensor) -> Tensor:
    """Equal weights, less their part in the main directions of the reference: other kinds of prompts, other lengths.

    A reference of several kinds of prompts varies most from kind to kind, and a mean over all heads says little more
    than which kind it is.
    """
    sizes, directions = torch.linalg.svd(excess, full_matrices=False)[1:]
    main = directions[sizes.square() > _MAIN * sizes.square().sum()]
    equal = _equal(excess, length, layers)
    left = equal - main.T @ (main @ equal)
    return left / left.abs().sum() if left.abs().sum() > _ROUNDING else equal


def _weighted(excess: Tensor, weights: Tensor) -> Tensor:
    return (excess * weights).sum(-1)


def _highest(excess: Tensor, length: Tensor, layers: Tensor) -> Tensor:
    return excess.new_tensor(max(1, round(_TOP * excess.shape[1])))


def _mean_of_highest(excess: Tensor, number: Tensor) -> Tensor:
    return excess.topk(int(number), dim=-1).values.mean(-1)


def _covariance(excess: Tensor, length: Tensor, layers: Tensor) -> Tensor:
    """A map `[layers, heads]` of excesses that gives the means of layers the covariance 1 in the reference."""
    numbers = torch.tensor(sorted(set(layers.tolist())))
    means = (layers[None] == numbers[:, None]).double()
    means /= means.sum(-1, keepdim=True)
    covariance = torch.cov((excess @ means.T).T).reshape(len(numbers), len(numbers))
    typical = covariance.diagonal().mean().clamp_min(_LEAST_SCALE)
    factor = torch.linalg.cholesky(covariance + _SHRINKAGE * typical * torch.eye(len(numbers), dtype=torch.float64))
    whiten: Tensor = torch.linalg.solve_triangular(factor, means, upper=False)
    # By rows, as it comes back from a file: products of another layout may be rounded otherwise.
    return whiten.contiguous()


def _distance(excess: Tensor, whiten: Tensor) -> Tensor:
    return (excess @ whiten.T).square().sum(-1).sqrt()


RULES: Mapping[str, _Rule] = MappingProxyType(
    {
        "unexplained": _Rule("mean excess beyond what the reference itself varies by", _unexplained, _weighted),
        "dispersing": _Rule("mean excess, weighted by how much a head disperses with length", _dispersing, _weighted),
        "mean": _Rule("mean excess over all heads", _equal, _weighted),
        "highest": _Rule("mean excess of the tenth of the heads with the highest", _highest, _mean_of_highest),
        "distance": _Rule("Mahalanobis distance of the mean excesses of layers", _covariance, _distance),
    }
)
"""The ways to sum up a row; higher is less like the reference."""
