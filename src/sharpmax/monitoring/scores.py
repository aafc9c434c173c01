"""Baselines and alarm thresholds learned from a reference, the score of a row, and the report about a request."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sharpmax.errors import reject

if TYPE_CHECKING:
    from sharpmax.monitoring.requests import Run

LEAST_LEARNED = 8
"""With fewer examples, means and standard deviations are too rough."""

_LEAST_SCALE = 0.02
"""Smallest standard deviation of a head, in nats: a nearly constant head must not turn a tiny change into an alarm."""

_MAIN = 0.25
"""A direction with more than this share of the variance of a reference is ordinary variation."""

_WORST = 8
"""How many heads a report lists for each alarm."""

_ROUNDING = 1e-9
"""Tolerance for products such as 0.29 * 100, which are not exactly whole numbers."""

NOT_OBSERVED = "no attention was observed: nothing was read, the monitor was paused, or the model is compiled"
PADDING = "only padding"
NOT_A_NUMBER = "attention is NaN"


def least_examples(rate: float) -> int:
    """The number of scores needed to set a threshold for a false-alarm rate.

    >>> least_examples(0.01)
    99
    """
    return max(1, math.ceil(1.0 / rate - _ROUNDING) - 1)


def conformal_threshold(scores: Tensor, rate: float) -> Tensor:
    """The threshold that a new score, exchangeable with these n, exceeds with probability ≤ `rate`.

    It is the score of rank ⌈(n + 1)(1 − rate)⌉ (split conformal prediction). The new score has each of the n + 1 ranks
    with the same probability, so it exceeds the threshold with probability ⌊(n + 1)·rate⌋ / (n + 1), less with ties,
    for any distribution. With fewer scores than `least_examples` the threshold is infinite.

    >>> conformal_threshold(torch.arange(1.0, 100.0), 0.05)
    tensor(95.)
    """
    above = math.floor(rate * (len(scores) + 1) + _ROUNDING)
    return scores.new_tensor(torch.inf) if above == 0 else scores.sort().values[len(scores) - above]


def split(count: int, rate: float) -> tuple[Tensor, Tensor]:
    """Split `count` examples at random into those to learn a baseline from and those to set the threshold with.

    Half each, or more for the threshold if the rate needs more. Raises ArgumentError if too few are left to learn from.
    """
    needed = least_examples(rate)
    held = max(min(count // 2, count - LEAST_LEARNED), needed)
    if count - held < LEAST_LEARNED:
        hint = f"give {needed + LEAST_LEARNED} or more, or a higher rate"
        reject("reference", f"{count} prompts for a false-alarm rate of {rate:g}", "enough prompts for this rate", hint)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return order[held:], order[:held]


@dataclass(frozen=True, eq=False)
class Baseline:
    """What is typical of one kind of row, of prompts or of generated tokens. Tensors are float64 on the CPU."""

    mean: Tensor  # entropy of each head in nats, `[heads]`
    scale: Tensor  # its standard deviation `[heads]`
    weights: Tensor  # of the heads in the score `[heads]`
    range: Tensor  # mean and standard deviation of the weighted sums in the reference `[2]`
    threshold: Tensor  # for requests whose latest row is of this kind `[]`

    @classmethod
    def of(cls, entropy: Tensor) -> Baseline:
        """Return the baseline of rows `[N, heads]`, without a threshold.

        Equal weights of all heads are projected away from the main directions of the reference. With several kinds of
        prompts, the main directions tell the kinds apart, and a plain mean over heads would mostly measure the kind.
        """
        mean, scale = entropy.mean(0), entropy.std(0).clamp_min(_LEAST_SCALE)
        excess = (entropy - mean) / scale
        sizes, directions = torch.linalg.svd(excess, full_matrices=False)[1:]
        main = directions[sizes.square() > _MAIN * sizes.square().sum()]
        weights = torch.full_like(excess[0], 1.0 / excess.shape[1])
        left = weights - main.T @ (main @ weights)
        if left.abs().sum() > _ROUNDING:
            weights = left / left.abs().sum()
        sums = (excess * weights).sum(-1)
        spread = torch.stack((sums.mean(), sums.std().clamp_min(_ROUNDING)))
        return cls(mean, scale, weights, spread, sums.new_tensor(torch.inf))

    def excess(self, entropy: Tensor) -> Tensor:
        """How many standard deviations each head of rows `[..., heads]` is above the reference."""
        return (entropy.double() - self.mean) / self.scale

    def score(self, entropy: Tensor) -> Tensor:
        """How many standard deviations rows `[..., heads]` are above the reference; NaN where an entropy is."""
        return ((self.excess(entropy) * self.weights).sum(-1) - self.range[0]) / self.range[1]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {one.name: getattr(self, one.name).tolist() for one in fields(self)}

    @classmethod
    def from_dict(cls, saved: Any, heads: int) -> Baseline:
        """Read what `to_dict` wrote. Raises ValueError, TypeError or KeyError for anything else."""
        found = {one.name: torch.tensor(saved[one.name], dtype=torch.float64) for one in fields(cls)}
        for name, values in found.items():
            shape = {"range": (2,), "threshold": ()}.get(name, (heads,))
            if values.shape != shape or not values.isfinite().all():
                raise ValueError(f"{name!r} is not {list(shape)} finite numbers")
        if not ((found["scale"] > 0).all() and found["range"][1] > 0):
            raise ValueError("'scale' and 'range' are not positive")
        return cls(**found)


@dataclass(frozen=True)
class Head:
    """A head that is far above the reference."""

    layer: int
    head: int
    entropy: float
    excess: float  # how far, in standard deviations of the reference


@dataclass(frozen=True)
class Verdict:
    """The outcome for one sequence of a request."""

    score: float | None  # standard deviations above the reference; None: it has no score
    threshold: float
    tokens: int = 0  # visible to its last row
    rows: int = 0  # number of rows measured
    heads: tuple[Head, ...] = ()  # of an alarm, the worst heads in the worst row
    why: str | None = None  # why it has no score

    @property
    def alarm(self) -> bool:
        """Whether the score exceeds its threshold."""
        return self.score is not None and self.score > self.threshold


@dataclass(frozen=True)
class Report:
    """The outcome of a request."""

    sequences: tuple[Verdict, ...]
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
        """The report as one line of JSON with rounded numbers; the fields of `more` come first."""
        body = {"alarm": self.alarm, "why": self.why, "sequences": [asdict(one) for one in self.sequences]}
        rounded = json.loads(json.dumps(body), parse_float=lambda number: round(float(number), 4))
        return json.dumps({**more, **rounded}, ensure_ascii=False)


@dataclass(frozen=True, eq=False)
class Learned:
    """Baselines and thresholds for the rows of a model."""

    heads: Sequence[tuple[int, int]]  # layer and head of every column
    prompt: Baseline
    generated: Baseline | None  # None: generated tokens are not measured

    def report(self, runs: Sequence[Run], problem: str | None) -> Report:
        """Report about the runs of a request; `problem` is an error inside the monitor, if any."""
        if not runs or problem is not None:
            why = NOT_OBSERVED if problem is None else f"the monitor failed: {problem}"
            many = sum(1 if run.prompt is None else len(run.prompt.count) for run in runs)
            return Report((self._no_score(why),) * many, why=why)
        verdicts = tuple(verdict for run in runs for verdict in self._judged(run))
        return Report(verdicts, next((one.why for one in verdicts if one.why), None))

    def _no_score(self, why: str, tokens: int = 0, rows: int = 0) -> Verdict:
        return Verdict(None, float(self.prompt.threshold), tokens, rows, why=why)

    def _judged(self, run: Run) -> list[Verdict]:
        """The verdicts on the sequences of a run."""
        if run.prompt is None:
            return [self._no_score(NOT_OBSERVED)]
        sequences, columns = run.prompt.entropy.shape
        if columns != len(self.heads):
            why = f"{columns} heads were observed, but the monitor has learned {len(self.heads)}"
            return [self._no_score(why)] * sequences
        later = [] if self.generated is None else [(row, self.generated) for row in run.generated]
        rows = [
            (row.entropy.cpu(), row.count.tolist(), row.valid.tolist(), kind)
            for row, kind in [(run.prompt, self.prompt), *later]
        ]
        found = []
        for n in range(sequences):
            own = [(entropy[n], count[n], kind) for entropy, count, valid, kind in rows if valid[n]]
            tokens = own[-1][1] if own and rows[0][2][n] else 0
            if tokens == 0:
                found.append(self._no_score(PADDING))
                continue
            scores = torch.stack([kind.score(entropy) for entropy, _, kind in own])
            if scores.isnan().any():
                found.append(self._no_score(NOT_A_NUMBER, tokens, len(own)))
                continue
            verdict = Verdict(float(scores.max()), float(own[-1][2].threshold), tokens, len(own))
            if verdict.alarm:
                entropy, _, kind = own[int(scores.argmax())]
                excess = kind.excess(entropy)
                worst = excess.topk(min(_WORST, len(excess))).indices.tolist()
                named = [(*self.heads[column][:2], float(entropy[column]), float(excess[column])) for column in worst]
                verdict = replace(verdict, heads=tuple(Head(*one) for one in named))
            found.append(verdict)
        return found


def learn(entropy: Tensor, valid: Tensor, heads: Sequence[tuple[int, int]], rate: float) -> Learned:
    """Learn baselines from one part of a reference and thresholds from the other.

    `entropy` `[N, 1 + K, heads]` has the last row of every prompt and K rows of generated tokens. `valid` `[N, 1 + K]`
    is False for rows that do not exist because the sequence has ended.
    """
    base, held = split(len(entropy), rate)
    first, later, exist = entropy[:, 0].double(), entropy[:, 1:].double(), valid[:, 1:]
    prompt = Baseline.of(first[base])
    score = prompt.score(first[held])
    prompt = replace(prompt, threshold=conformal_threshold(score, rate))
    if exist[base].sum() < LEAST_LEARNED:
        return Learned(heads, prompt, None)
    generated = Baseline.of(later[base][exist[base]])
    highest = generated.score(later[held]).masked_fill(~exist[held], -torch.inf).amax(1)
    return Learned(heads, prompt, replace(generated, threshold=conformal_threshold(score.maximum(highest), rate)))
