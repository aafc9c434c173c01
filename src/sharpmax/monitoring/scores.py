"""One score per row from the entropies of all heads, and what follows for a request."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sharpmax.errors import reject
from sharpmax.monitoring.requests import Head, Report, Request, Row, Run, Verdict

DEFAULT = "unexplained"
"""The rule that did best on validation prompts (`sharpmax bench --monitor`)."""

_LEAST_SCALE = 0.02
"""Nats. Without it a head that hardly moved in the reference would turn the smallest change into a large score."""

_TOP = 0.1
_MAIN = 0.25
"""Share of the variance of a reference from which on a direction counts as ordinary variation."""

_SHRINKAGE = 0.1
_ROUNDING = 1e-9
_LEAST_RANGE = 0.05
"""Standard deviation of ln n below which the lengths of a reference do not tell which heads disperse."""


@dataclass(frozen=True, eq=False)
class Baseline:
    """The entropy of each head in one kind of row of the reference, and the rule that turns it into a score.

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
        """Plain JSON values."""
        return {"rule": self.rule, **{name: getattr(self, name).tolist() for name in _TENSORS}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Baseline:
        """The baseline of `to_dict`."""
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
    # Row-major as a loaded file is: products of another layout may be rounded differently.
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


NOT_OBSERVED = "no attention was observed: nothing was read, the monitor was paused, or the model is compiled"
PADDING = "nothing but padding"
NOT_A_NUMBER = "attention is not a number (NaN) here"


@dataclass(frozen=True, eq=False)
class Kind:
    """One kind of row, the last of a prompt or that of a generated token."""

    baseline: Baseline
    limits: Tensor  # the entropy that each head `[heads]` exceeds by itself as rarely as was asked for
    threshold: float  # the score that a request whose latest row is of this kind exceeds as rarely

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, None for an infinite limit."""
        limits = [limit if math.isfinite(limit) else None for limit in self.limits.tolist()]
        return {"baseline": self.baseline.to_dict(), "limits": limits, "threshold": self.threshold}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Kind:
        """The kind of `to_dict`."""
        limits = torch.tensor([math.inf if limit is None else limit for limit in data["limits"]], dtype=torch.float64)
        return cls(Baseline.from_dict(data["baseline"]), limits, float(data["threshold"]))


def request_score(prompt: Tensor, generated: Tensor, counts: Tensor) -> Tensor:
    """The score of requests `[N]`: the highest of the prompt's `[N]` and of generated rows `[N, K]` that count."""
    return torch.cat((prompt[:, None], generated.masked_fill(~counts, -torch.inf)), dim=1).amax(1)


@dataclass(frozen=True, eq=False)
class Learned:
    """Baselines and thresholds for the rows of a model."""

    heads: Sequence[tuple[int, int]]  # layer and head of every column
    prompt: Kind
    generated: Kind | None  # None: generated tokens are not measured

    def report(self, request: Request) -> Report:
        """The report about a request."""
        if not request.runs or request.problem is not None:
            why = NOT_OBSERVED if request.problem is None else f"the monitor failed: {request.problem}"
            many = sum(1 if run.prompt is None else len(run.prompt.count) for run in request.runs)
            return Report(tuple(self._no_score(why) for _ in range(many)), why=why)
        verdicts: list[Verdict] = []
        above: list[Head] = []
        for run in request.runs:
            found, heads = self._judged(run, len(verdicts))
            verdicts += found
            above += heads
        above.sort(key=lambda one: -one.excess)
        return Report(tuple(verdicts), tuple(above), next((one.why for one in verdicts if one.why), None))

    def _no_score(self, why: str, tokens: int = 0, rows: int = 0) -> Verdict:
        return Verdict(None, self.prompt.threshold, tokens, rows, why)

    def _judged(self, run: Run, first: int) -> tuple[list[Verdict], list[Head]]:
        """The verdicts on the sequences of a run, which are numbered from `first`, and their heads above limits."""
        if run.prompt is None:
            return [self._no_score(NOT_OBSERVED)], []
        if run.prompt.entropy.shape[1] != len(self.heads):
            why = f"{run.prompt.entropy.shape[1]} heads were observed, and {len(self.heads)} were learned"
            return [self._no_score(why) for _ in run.prompt.count], []
        later = [] if self.generated is None else [(row, self.generated) for row in run.generated]
        rows = [(run.prompt, self.prompt), *later]
        # All on the CPU: entropies [R, B, heads], and counts, validity and scores [R, B].
        entropy = torch.stack([row.entropy.cpu().double() for row, _ in rows])
        count = torch.stack([row.count.cpu() for row, _ in rows])
        valid = torch.stack([_valid(row) for row, _ in rows])
        score = torch.stack([kind.baseline.score(one) for one, (_, kind) in zip(entropy, rows, strict=True)])
        verdicts = [self._verdict(*columns) for columns in zip(count.T, valid.T, score.T, strict=True)]
        scored = torch.tensor([one.score is not None for one in verdicts])
        limits = torch.stack([kind.limits for _, kind in rows])[:, None]
        scales = torch.stack([kind.baseline.scale for _, kind in rows])[:, None]
        # How far each head of each sequence is above its limit in the worst row.
        worst, at = ((entropy - limits) / scales).masked_fill(~(valid & scored)[..., None], -1.0).max(0)
        found = []
        for place, column in (worst > 0).nonzero().tolist():
            row = int(at[place, column])
            measured, limit = float(entropy[row, place, column]), float(limits[row, 0, column])
            over = float(worst[place, column])
            layer, head = self.heads[column]
            found.append(Head(first + place, layer, head, measured, limit, over))
        return verdicts, found

    def _verdict(self, count: Tensor, valid: Tensor, score: Tensor) -> Verdict:
        """The verdict on one sequence from its rows `[R]`, that of the prompt first."""
        tokens, rows = int(count[valid][-1] if valid.any() else count[-1]), int(valid.sum())
        if not valid[0] or tokens == 0:
            return self._no_score(PADDING, tokens)
        if score[valid].isnan().any():
            return self._no_score(NOT_A_NUMBER, tokens, rows)
        last = self.prompt if rows == 1 or self.generated is None else self.generated
        return Verdict(float(score[valid].max()), last.threshold, tokens, rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "heads": [list(one) for one in self.heads],
            "prompt": self.prompt.to_dict(),
            "generated": None if self.generated is None else self.generated.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Learned:
        """What `to_dict` gave."""
        generated = None if data["generated"] is None else Kind.from_dict(data["generated"])
        heads = [(int(layer), int(head)) for layer, head in data["heads"]]
        return cls(heads, Kind.from_dict(data["prompt"]), generated)


def _valid(row: Row) -> Tensor:
    """Which sequences a row is valid for `[B]`, on the CPU."""
    return torch.ones(len(row.count), dtype=torch.bool) if row.counts is None else row.counts.cpu()
