"""Train the coefficients of a policy while it acts in a frozen model."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sharpmax.arrays import ops_for
from sharpmax.calibration.budget import CHAT, Losses
from sharpmax.calibration.data import KINDS, NOT_NEGATIVE, Everyday, Lessons
from sharpmax.calibration.replication import crowded
from sharpmax.errors import SharpmaxError, reject
from sharpmax.integrations.transformers.application import restore
from sharpmax.integrations.transformers.interface import install, kept, modules_of
from sharpmax.models.scoring import reply_losses, window_losses
from sharpmax.models.weights import load_tensors, must_fit, save_tensors
from sharpmax.ops.attention import Rule
from sharpmax.policies.base import Remeasure, with_columns
from sharpmax.policies.log_linear import LogLinear
from sharpmax.stats.statistics import RowStats

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def held_still(model: PreTrainedModel) -> Iterator[None]:
    """The model as it comes for a while: no policy, no dropout, no weight that learns; then as it was before.

    That nothing was written to a weight or its gradient is checked at the end.
    """
    modes = [(module, module.training) for module in model.modules()]
    weights = [(weight, weight.requires_grad, weight.grad, weight._version) for weight in model.parameters()]
    with kept(model):
        restore(model).train(False).requires_grad_(False)
        try:
            yield
            if any(weight.grad is not grad or weight._version != version for weight, _, grad, version in weights):
                raise AssertionError("a weight of the model was changed by calibration")
        finally:
            for module, mode in modes:
                module.training = mode
            for weight, learns, _, _ in weights:
                weight.requires_grad_(learns)


def grid_of(model: PreTrainedModel) -> tuple[int, int]:
    """Layers and heads of a model, the grid that a `PerHead` policy has."""
    heads = [one.heads for one in modules_of(model)]
    if len(set(heads)) > 1:
        reject("model", f"layers of {sorted(set(heads))} heads", "a model with as many heads in every layer")
    return len(heads), heads[0]


class Live:
    """Coefficients `[layers, heads, kind]` that require gradients, and which heads they may touch."""

    def __init__(self, kind: str, layers: int, heads: int, device: torch.device) -> None:
        self.kind = kind
        self.coefficients = torch.zeros(layers, heads, len(KINDS[kind]), device=device, requires_grad=True)
        self.touched = torch.ones(layers, heads, dtype=torch.bool, device=device)

    def values(self) -> Tensor:
        """The coefficients in effect: 0 in heads that are not touched."""
        return self.coefficients * self.touched[..., None]

    @contextmanager
    def at_work(self, model: PreTrainedModel) -> Iterator[None]:
        """Let the coefficients choose β in the model's attention for a while."""
        with kept(model):
            install(model, self._rules)
            yield

    def _rules(self, layer: int) -> Sequence[Rule]:
        return (_LiveRule(self, layer),)


class _LiveRule:
    """One layer of a `Live`, as the attention interface asks for it."""

    heads = None

    def __init__(self, live: Live, layer: int) -> None:
        self._live, self._layer = live, layer
        self.needs = self._policy().needs

    def _policy(self) -> LogLinear:
        columns = self._live.values()[self._layer]
        names = KINDS[self._live.kind]
        return with_columns(LogLinear(), {name: columns[:, i, None] for i, name in enumerate(names)})

    def beta(self, stats: RowStats, remeasure: Remeasure | None) -> Tensor:
        """β of every row. What the row looks like is taken as given: only the coefficients learn from it.

        The way through the statistics is left out of the gradient: it would cost as much again as the attention
        itself, and says only how earlier layers change what later ones measure.
        """
        seen = stats.map(torch.detach)
        beta: Tensor = self._policy().rule(ops_for(seen.count), seen, None)
        return beta


_WARM_UP = 10
_LAST_RATE = 0.02
_MARGIN = 0.7
"""The share of the leash that is aimed at: what is learned on one text rises a little more on another."""

_FIRST_PRICE, _LEAST_PRICE, _MOST_PRICE = 10.0, 1.0, 300.0
_PRICE_RATE, _MEMORY = 0.04, 0.9
_PRUNE_AT = (0.4, 0.6)
_SAVED_AS = "calibration"


class DivergedError(SharpmaxError, ArithmeticError):
    """The loss of a calibration is no longer a number."""


@dataclass(frozen=True)
class Course:
    """What is learned from, and the model that learns."""

    model: PreTrainedModel
    lessons: Lessons
    practice: Everyday
    base: Losses
    """Of the model as it comes, for each item of `practice`."""

    room: float
    """The rise the leash allows, in nats per token."""


@dataclass
class Descent:
    """One kind being learned; everything that `save` writes and `resume` reads is here."""

    live: Live
    steps: int
    rate: float
    keep: float
    """The share of the heads that may stay touched in the end."""

    keep_layers: float = 1.0
    """The share of the layers that they may be in."""

    prices: dict[str, float] = field(default_factory=dict)
    """What a nat of rise costs, for each piece of everyday material."""

    rises: dict[str, float] = field(default_factory=dict)
    """The rise of each piece over the last steps."""

    curve: list[dict[str, float]] = field(default_factory=list)
    step: int = 0

    def __post_init__(self) -> None:
        self._optimizer = torch.optim.Adam([self.live.coefficients], lr=self.rate, betas=(0.9, 0.99))

    def run(self, course: Course, after_step: Callable[[Descent], None]) -> None:
        """Take the steps that are left."""
        for name in course.base:
            self.prices.setdefault(name, _FIRST_PRICE)
        with self.live.at_work(course.model):
            while self.step < self.steps:
                self._take(course)
                after_step(self)

    def _take(self, course: Course) -> None:
        rng = random.Random(f"descent/{course.lessons.seed}/{self.step}")
        self._optimizer.zero_grad()
        wrong = 0.0
        groups = course.lessons.at(self.step)
        for group in groups:
            with crowded(course.model, group):
                loss = reply_losses(course.model, group)[0].sum(-1).mean() / len(groups)
                wrong += _learn_from(loss)
        lengths = list(course.practice.text)
        length = lengths[self.step % len(lengths)]
        # Lengths take turns: each counts for the turns it misses.
        seen = {str(length): self._text(course, length, rng, weight=len(lengths)), CHAT: self._chat(course, rng)}
        self._check(wrong, seen)
        self._move()
        for name, rise in seen.items():
            self.rises[name] = _MEMORY * self.rises.get(name, rise) + (1 - _MEMORY) * rise
            aim = _MARGIN * course.room
            pull = min(max((self.rises[name] - aim) / aim, -1.0), 1.0)
            price = self.prices[name] * math.exp(_PRICE_RATE * pull)
            self.prices[name] = min(max(price, _LEAST_PRICE), _MOST_PRICE)
        self.step += 1
        self.curve.append({"step": self.step, "nll": wrong, **self.rises})

    def _text(self, course: Course, length: int, rng: random.Random, weight: float) -> float:
        pieces, base = course.practice.text[length], course.base[str(length)]
        count = max(1, min(course.lessons.profile.tokens // length, len(pieces)))
        chosen = rng.sample(range(len(pieces)), count)
        rise = window_losses(course.model, [pieces[i] for i in chosen]).mean() - sum(base[i] for i in chosen) / count
        return _learn_from(rise, weight * self.prices[str(length)])

    def _chat(self, course: Course, rng: random.Random) -> float:
        answers, base = course.practice.answers, course.base[CHAT]
        chosen = rng.sample(range(len(answers)), min(course.lessons.profile.answers, len(answers)))
        tokens = sum(answers[i].tokens for i in chosen)
        losses, _ = reply_losses(course.model, [answers[i] for i in chosen])
        return _learn_from((losses.sum() - sum(base[i] for i in chosen)) / tokens, self.prices[CHAT])

    def _check(self, wrong: float, seen: Mapping[str, float]) -> None:
        gradient = self.live.coefficients.grad
        finite = gradient is not None and bool(gradient.isfinite().all())
        if not (finite and math.isfinite(wrong) and all(map(math.isfinite, seen.values()))):
            raise DivergedError(
                f"calibration: the loss of kind {self.live.kind!r} is not a number at step {self.step + 1}; "
                f"try a smaller --rate than {self.rate:g}, or --dtype float32"
            )

    def _move(self) -> None:
        along = self.step / self.steps
        cosine = 0.5 + 0.5 * math.cos(math.pi * along)
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate * min(1.0, (self.step + 1) / _WARM_UP) * (cosine + _LAST_RATE)
        self._optimizer.step()
        names = KINDS[self.live.kind]
        with torch.no_grad():
            if NOT_NEGATIVE in names:
                self.live.coefficients[..., names.index(NOT_NEGATIVE)].clamp_(min=0.0)
            self._prune()

    def _prune(self) -> None:
        """At two points, let go of the heads that the loss would miss least: the others have time to make up for it."""
        points = [min(round(at * self.steps), self.steps - 1) for at in _PRUNE_AT]
        if min(self.keep, self.keep_layers) >= 1.0 or self.step not in points:
            return
        done = sum(point <= self.step for point in points) / len(points)  # both at once in a run of a few steps
        state = self._optimizer.state[self.live.coefficients]
        # The square of a coefficient times the mean square of its gradient: what setting it to 0 would cost.
        worth = (self.live.coefficients**2 * state["exp_avg_sq"]).sum(-1).masked_fill(~self.live.touched, -1.0)
        self.live.touched &= _best(worth.clamp_min(0.0).sum(-1), 1.0 - (1.0 - self.keep_layers) * done)[:, None]
        worth = worth.masked_fill(~self.live.touched, -1.0)
        self.live.touched &= _best(worth.flatten(), 1.0 - (1.0 - self.keep) * done).view_as(worth)
        self.live.coefficients.mul_(self.live.touched[..., None])
        for moment in ("exp_avg", "exp_avg_sq"):
            state[moment].mul_(self.live.touched[..., None])

    def save(self, path: Path, about: Mapping[str, Any]) -> None:
        """Write the state after a step, to go on from."""
        state = self._optimizer.state[self.live.coefficients]
        tensors: dict[str, Tensor] = {
            "coefficients": self.live.coefficients.detach(),
            "touched": self.live.touched,
            "exp_avg": state["exp_avg"],
            "exp_avg_sq": state["exp_avg_sq"],
        }
        notes = {"step": self.step, "prices": self.prices, "rises": self.rises, "curve": self.curve}
        save_tensors(path, _SAVED_AS, {k: t.cpu().contiguous() for k, t in tensors.items()}, {**about, "state": notes})

    def resume(self, path: Path, about: Mapping[str, Any]) -> bool:
        """Go on from a file that a calibration with the same settings wrote; False if there is none."""
        if not path.is_file():
            return False
        tensors, found = load_tensors(path, _SAVED_AS)
        notes = found.pop("state", None)
        with must_fit(path, "calibration", "delete it, or leave --resume out"):
            if found != dict(about):
                raise ValueError("it was made with other settings")
            with torch.no_grad():
                self.live.coefficients.copy_(tensors["coefficients"])
            self.live.touched.copy_(tensors["touched"])
            like = self.live.coefficients
            self._optimizer.state[like] = {
                "step": torch.tensor(float(notes["step"])),
                "exp_avg": tensors["exp_avg"].to(like.device),
                "exp_avg_sq": tensors["exp_avg_sq"].to(like.device),
            }
            self.step, self.curve = int(notes["step"]), list(notes["curve"])
            self.prices, self.rises = dict(notes["prices"]), dict(notes["rises"])
        return True


def _best(worth: Tensor, share: float) -> Tensor:
    """Which entries are among the best `share` of them, at least one."""
    chosen = torch.zeros_like(worth, dtype=torch.bool)
    chosen[worth.topk(max(1, round(share * worth.numel()))).indices] = True
    return chosen


def _learn_from(loss: Tensor, weight: float = 1.0) -> float:
    """Add the gradient of weight·loss, and give the loss as a number."""
    torch.autograd.backward([weight * loss])
    return float(loss.detach())
