"""Baselines and alarm thresholds learned from a reference, the score of a row, and the report about a request."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from sharpmax.errors import reject
from sharpmax.monitoring.observer import Request, Run

LEAST_LEARNED = 8
"""Fewer examples give no usable means and scales."""

_LEAST_SCALE = 0.02
"""Nats. Without it a head that hardly moved in the reference would turn the smallest change into a large score."""

_MAIN = 0.25
"""Share of the variance of a reference from which on a direction counts as ordinary variation."""

_ROUNDING = 1e-9
"""Products of decimal fractions with whole numbers may miss the whole number they mean."""


def least_examples(rate: float) -> int:
    """How many scores a threshold for such a rate needs.

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
        return scores.new_full(scores.shape[1:], torch.inf)
    return scores.sort(0).values[len(scores) - above]


def split(count: int, rate: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Split `count` examples at random: which to learn from, and which to take the threshold from.

    Half each, or as many for the threshold as the rate needs; an error if too few would be left to learn from.
    """
    needed = least_examples(rate)
    held = max(min(count // 2, count - LEAST_LEARNED), needed)
    if count - held < LEAST_LEARNED:
        hint = f"give {needed + LEAST_LEARNED} or more, or ask for a higher rate"
        reject("reference", f"{count} prompts for a false-alarm rate of {rate:g}", "prompts enough for the rate", hint)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[held:], order[:held]


@dataclass(frozen=True, eq=False)
class Baseline:
    """One kind of row of the reference, the last of a prompt or those of generated tokens; float64 on the CPU."""

    mean: Tensor  # entropy of each head in nats, `[heads]`
    scale: Tensor  # its standard deviation `[heads]`
    weights: Tensor  # of the heads in the score `[heads]`
    range: Tensor  # mean and standard deviation of the weighted sums in the reference `[2]`
    limits: Tensor  # the entropy that each head `[heads]` exceeds by itself as rarely as was asked for
    threshold: Tensor  # the score that a request whose latest row is of this kind exceeds as rarely `[]`

    @classmethod
    def of(cls, entropy: Tensor) -> Baseline:
        """The baseline of rows `[N, heads]`, without limits and threshold."""
        mean, scale = entropy.mean(0), entropy.std(0).clamp_min(_LEAST_SCALE)
        excess = (entropy - mean) / scale
        weights = _weights(excess)
        sums = (excess * weights).sum(-1)
        spread = torch.stack((sums.mean(), sums.std().clamp_min(_ROUNDING)))
        return cls(mean, scale, weights, spread, torch.full_like(mean, torch.inf), sums.new_tensor(torch.inf))

    def with_thresholds(self, entropy: Tensor, score: Tensor, rate: float) -> Baseline:
        """The same with limits and threshold from entropies `[N, heads]` and scores `[N]` of other requests."""
        return replace(self, limits=conformal_threshold(entropy, rate), threshold=conformal_threshold(score, rate))

    def score(self, entropy: Tensor) -> Tensor:
        """How many standard deviations rows `[..., heads]` are above the reference; NaN where an entropy is."""
        excess = (entropy.double() - self.mean) / self.scale
        return ((excess * self.weights).sum(-1) - self.range[0]) / self.range[1]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, None for an infinite limit."""
        found = {one.name: getattr(self, one.name).tolist() for one in fields(self)}
        return found | {"limits": [limit if math.isfinite(limit) else None for limit in found["limits"]]}

    @classmethod
    def from_dict(cls, saved: Any, heads: int) -> Baseline | None:
        """The baseline of `to_dict`; None of None. Raises ValueError, TypeError or KeyError for anything else."""
        if saved is None:
            return None
        limits = [math.inf if limit is None else limit for limit in saved["limits"]]
        found = {
            one.name: torch.tensor(limits if one.name == "limits" else saved[one.name], dtype=torch.float64)
            for one in fields(cls)
        }
        for name, values in found.items():
            shape = {"range": (2,), "threshold": ()}.get(name, (heads,))
            known = ~values.isnan() if name == "limits" else values.isfinite()
            if values.shape != shape or not known.all():
                raise ValueError(f"{name!r} is not {list(shape)} finite numbers")
        if not ((found["scale"] > 0).all() and found["range"][1] > 0):
            raise ValueError("'scale' and 'range' are not positive")
        return cls(**found)


def _weights(excess: Tensor) -> Tensor:
    """Equal weights, less their part in the main directions of the reference: other kinds of prompts, other lengths.

    A reference of several kinds of prompts varies most from kind to kind, and a mean over all heads says little more
    than which kind it is.
    """
    sizes, directions = torch.linalg.svd(excess, full_matrices=False)[1:]
    main = directions[sizes.square() > _MAIN * sizes.square().sum()]
    equal = torch.full_like(excess[0], 1.0 / excess.shape[1])
    left = equal - main.T @ (main @ equal)
    return left / left.abs().sum() if left.abs().sum() > _ROUNDING else equal


def learn(entropy: Tensor, valid: Tensor, heads: Sequence[tuple[int, int]], rate: float) -> Learned:
    """Baselines from one part of a reference, thresholds from the other.

    `entropy` `[N, 1 + K, heads]` is that of the last row of every prompt and of K generated ones, of which the `valid`
    ones `[N, 1 + K]` exist: a sequence may end before.
    """
    base, held = split(len(entropy), rate)
    first, later, exist = entropy[:, 0].double(), entropy[:, 1:].double(), valid[:, 1:]
    prompt = Baseline.of(first[base])
    score = prompt.score(first[held])
    prompt = prompt.with_thresholds(first[held], score, rate)
    if exist[base].sum() < LEAST_LEARNED:
        return Learned(heads, prompt, None)
    generated = Baseline.of(later[base][exist[base]])
    later, exist = later[held], exist[held]
    highest = generated.score(later).masked_fill(~exist, -torch.inf).amax(1)
    entropies = later.masked_fill(~exist[..., None], -torch.inf)[exist.any(1)].amax(1)
    return Learned(heads, prompt, generated.with_thresholds(entropies, score.maximum(highest), rate))


@dataclass(frozen=True)
class Head:
    """A head whose entropy exceeds the threshold that it has learned for itself."""

    sequence: int
    layer: int
    head: int
    entropy: float
    threshold: float
    excess: float
    """How far above the threshold, in standard deviations of the reference."""


@dataclass(frozen=True)
class Verdict:
    """The outcome for one sequence of a request."""

    score: float | None
    """How far its attention was from the reference, in standard deviations; None where there is no score."""

    threshold: float
    tokens: int = 0  # that its last row could see
    rows: int = 0  # how many of its rows were measured
    why: str | None = None  # why it has no score

    @property
    def alarm(self) -> bool:
        """Whether the score exceeds its threshold."""
        return self.score is not None and self.score > self.threshold


@dataclass(frozen=True)
class Report:
    """The outcome of a request."""

    sequences: tuple[Verdict, ...]
    heads: tuple[Head, ...] = ()  # those above their own thresholds, worst first
    why: str | None = None  # why there is no score, if any sequence has none

    @property
    def scores(self) -> list[float | None]:
        """The score of each sequence."""
        return [one.score for one in self.sequences]

    @property
    def alarm(self) -> bool:
        """Whether a sequence is above its threshold."""
        return any(one.alarm for one in self.sequences)

    def to_line(self, **more: Any) -> str:
        """The report as one line of JSON, rounded, with the worst heads alone."""

        def short(one: Verdict | Head) -> dict[str, Any]:
            return {name: round(x, 4) if isinstance(x, float) else x for name, x in asdict(one).items()}

        body = {
            "alarm": self.alarm,
            "why": self.why,
            "sequences": [short(one) | {"alarm": one.alarm} for one in self.sequences],
            "heads": [short(one) for one in self.heads[:8]],
            "heads_above": len(self.heads),
        }
        return json.dumps({**more, **body}, ensure_ascii=False)


NOT_OBSERVED = "no attention was observed: nothing was read, the monitor was paused, or the model is compiled"
PADDING = "nothing but padding"
NOT_A_NUMBER = "attention is not a number (NaN) here"


@dataclass(frozen=True, eq=False)
class Learned:
    """Baselines and thresholds for the rows of a model."""

    heads: Sequence[tuple[int, int]]  # layer and head of every column
    prompt: Baseline
    generated: Baseline | None  # None: generated tokens are not measured

    @property
    def thresholds(self) -> Mapping[str, float]:
        """The score above which there is an alarm, of a prompt alone and of a request that generates."""
        kinds = {"prompt": self.prompt, "generated": self.generated}
        return {name: float(kind.threshold) for name, kind in kinds.items() if kind is not None}

    def report(self, request: Request) -> Report:
        """The report about a request."""
        if not request.runs or request.problem is not None:
            why = NOT_OBSERVED if request.problem is None else f"the monitor failed: {request.problem}"
            many = sum(1 if run.prompt is None else len(run.prompt.count) for run in request.runs)
            return Report((self._no_score(why),) * many, why=why)
        verdicts: list[Verdict] = []
        above: list[Head] = []
        for run in request.runs:
            found, heads = self._judged(run, len(verdicts))
            verdicts += found
            above += heads
        above.sort(key=lambda one: -one.excess)
        return Report(tuple(verdicts), tuple(above), next((one.why for one in verdicts if one.why), None))

    def _no_score(self, why: str, tokens: int = 0, rows: int = 0) -> Verdict:
        return Verdict(None, float(self.prompt.threshold), tokens, rows, why)

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
        count, valid = (torch.stack([getattr(row, name).cpu() for row, _ in rows]) for name in ("count", "valid"))
        score = torch.stack([kind.score(one) for one, (_, kind) in zip(entropy, rows, strict=True)])
        verdicts = [self._verdict(*columns) for columns in zip(count.T, valid.T, score.T, strict=True)]
        scored = torch.tensor([one.score is not None for one in verdicts])
        limits, scales = (torch.stack([getattr(kind, name) for _, kind in rows]) for name in ("limits", "scale"))
        # How far each head of each sequence is above its limit in the worst row.
        excess = (entropy - limits[:, None]) / scales[:, None]
        worst, at = excess.masked_fill(~(valid & scored)[..., None], -1.0).max(0)
        found = []
        for place, column in (worst > 0).nonzero().tolist():
            row, (layer, head) = int(at[place, column]), self.heads[column]
            measured, limit = float(entropy[row, place, column]), float(limits[row, column])
            found.append(Head(first + place, layer, head, measured, limit, float(worst[place, column])))
        return verdicts, found

    def _verdict(self, count: Tensor, valid: Tensor, score: Tensor) -> Verdict:
        """The verdict on one sequence from its rows `[R]`, that of the prompt first."""
        tokens, rows = int(count[valid][-1] if valid.any() else count[-1]), int(valid.sum())
        if not valid[0] or tokens == 0:
            return self._no_score(PADDING, tokens)
        if score[valid].isnan().any():
            return self._no_score(NOT_A_NUMBER, tokens, rows)
        last = self.prompt if rows == 1 or self.generated is None else self.generated
        return Verdict(float(score[valid].max()), float(last.threshold), tokens, rows)
