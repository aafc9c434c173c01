"""What a monitor has learned from its reference, and what follows from it for a request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sharpmax.probe.watch.passes import Row, Run
from sharpmax.probe.watch.requests import Head, Report, Request, Verdict
from sharpmax.probe.watch.scores import Baseline

__all__ = ["Kind", "Learned", "request_score"]

NOTHING_SEEN = "no attention was seen: nothing was read, the monitor was paused, or the model is compiled"
PADDING = "nothing but padding"
NOT_A_NUMBER = "attention is not a number (NaN) here"


@dataclass(frozen=True, eq=False)
class Kind:
    """One kind of row, the last of a prompt or that of a generated token."""

    baseline: Baseline
    limits: Tensor
    """The entropy that each head `[heads]` exceeds by itself as rarely as was asked for."""

    threshold: float
    """The score that a request whose latest row is of this kind exceeds as rarely."""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values, None for a limit that nothing exceeds."""
        limits = [limit if math.isfinite(limit) else None for limit in self.limits.tolist()]
        return {"baseline": self.baseline.to_dict(), "limits": limits, "threshold": self.threshold}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Kind:
        """The kind that `to_dict` gave."""
        limits = torch.tensor([math.inf if limit is None else limit for limit in data["limits"]], dtype=torch.float64)
        return cls(Baseline.from_dict(data["baseline"]), limits, float(data["threshold"]))


def request_score(prompt: Tensor, generated: Tensor, counts: Tensor) -> Tensor:
    """The score of requests `[N]`: the highest of the prompt's `[N]` and of generated rows `[N, K]` that count."""
    return torch.cat((prompt[:, None], generated.masked_fill(~counts, -torch.inf)), dim=1).amax(1)


@dataclass(frozen=True, eq=False)
class Learned:
    """Baselines and thresholds for the rows of a model."""

    heads: Sequence[tuple[int, int]]
    """Layer and head of every column."""

    prompt: Kind
    generated: Kind | None
    """None: generated tokens are not looked at."""

    def report(self, request: Request) -> Report:
        """What there is to say about a request."""
        if not request.runs or request.problem is not None:
            why = NOTHING_SEEN if request.problem is None else f"the monitor failed: {request.problem}"
            many = sum(1 if run.prompt is None else len(run.prompt.count) for run in request.runs)
            return Report(tuple(self._unsaid(why) for _ in range(many)), why=why)
        verdicts: list[Verdict] = []
        above: list[Head] = []
        for run in request.runs:
            found, heads = self._judged(run, len(verdicts))
            verdicts += found
            above += heads
        above.sort(key=lambda one: -one.excess)
        return Report(tuple(verdicts), tuple(above), next((one.why for one in verdicts if one.why), None))

    def _unsaid(self, why: str, tokens: int = 0, rows: int = 0) -> Verdict:
        return Verdict(None, self.prompt.threshold, tokens, rows, why)

    def _judged(self, run: Run, first: int) -> tuple[list[Verdict], list[Head]]:
        """The verdicts on the sequences of a run, which are numbered from `first`, and their heads above limits."""
        if run.prompt is None:
            return [self._unsaid(NOTHING_SEEN)], []
        if run.prompt.entropy.shape[1] != len(self.heads):
            why = f"{run.prompt.entropy.shape[1]} heads were seen, and {len(self.heads)} were learned"
            return [self._unsaid(why) for _ in run.prompt.count], []
        kinds = [self.prompt] + [self.generated for _ in run.generated if self.generated is not None]
        rows = [_Judged.of(row, kind) for row, kind in zip((run.prompt, *run.generated), kinds, strict=False)]
        verdicts = [self._verdict(rows, place) for place in range(len(run.prompt.count))]
        scored = torch.tensor([one.score is not None for one in verdicts])
        # How far each head of each sequence is above its limit in the worst row.
        excess = torch.stack([row.excess.masked_fill(~(row.counts & scored)[:, None], -1.0) for row in rows])
        worst, at = excess.max(0)
        found = [
            rows[int(at[place, head])].head(first + place, place, head, self.heads[head], over)
            for (place, head), over in zip((worst > 0).nonzero().tolist(), worst[worst > 0].tolist(), strict=True)
        ]
        return verdicts, found

    def _verdict(self, rows: Sequence[_Judged], place: int) -> Verdict:
        mine = [row for row in rows if row.counts[place]]
        tokens = int((mine or rows)[-1].count[place])
        if not rows[0].counts[place] or tokens == 0:
            return self._unsaid(PADDING, tokens)
        score = max(float(row.score[place]) for row in mine)
        if any(math.isnan(float(row.score[place])) for row in mine):
            return self._unsaid(NOT_A_NUMBER, tokens, len(mine))
        last = self.prompt if len(mine) == 1 or self.generated is None else self.generated
        return Verdict(score, last.threshold, tokens, len(mine))

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
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


@dataclass(frozen=True, eq=False)
class _Judged:
    """A row on the CPU, with everything that follows from it alone."""

    entropy: Tensor
    count: Tensor
    counts: Tensor
    score: Tensor
    excess: Tensor
    """Above the limits, in standard deviations."""

    limits: Tensor

    @classmethod
    def of(cls, row: Row, kind: Kind) -> _Judged:
        entropy, count = row.entropy.cpu().double(), row.count.cpu()
        counts = torch.ones_like(count, dtype=torch.bool) if row.counts is None else row.counts.cpu()
        excess = (entropy - kind.limits) / kind.baseline.scale
        return cls(entropy, count, counts, kind.baseline.score(entropy), excess, kind.limits)

    def head(self, number: int, place: int, column: int, name: tuple[int, int], excess: float) -> Head:
        """A head above its limit, in the sequence at `place`, which is called `number`."""
        return Head(number, *name, float(self.entropy[place, column]), float(self.limits[column]), excess=excess)
