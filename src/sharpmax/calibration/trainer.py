"""Train the coefficients of a policy while it acts in a frozen model."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sharpmax.calibration.budget import MAX_ROWS, TrainingSetup
from sharpmax.calibration.data import CHAT, Domain, replicated
from sharpmax.calibration.learnable import KINDS, TrainablePolicy
from sharpmax.errors import SharpmaxError, reject
from sharpmax.integrations.transformers.application import restore
from sharpmax.integrations.transformers.interface import restoring
from sharpmax.models.language import any_length
from sharpmax.models.scoring import Places, batches, reply_losses
from sharpmax.models.weights import load_tensors, must_fit, save_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def frozen(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block the model has no policy, no dropout and no trainable weight; afterwards it is as before.

    Raises AssertionError if a weight or a gradient changed.
    """
    modes = [(module, module.training) for module in model.modules()]
    weights = [(weight, weight.requires_grad, weight.grad, weight._version) for weight in model.parameters()]
    with restoring(model):
        restore(model).train(False).requires_grad_(False)
        try:
            yield
            if any(weight.grad is not grad or weight._version != version for weight, _, grad, version in weights):
                raise AssertionError("a weight of the model was changed by calibration")
        finally:
            for module, mode in modes:
                module.training = mode
            for weight, trainable, _, _ in weights:
                weight.requires_grad_(trainable)


@contextmanager
def checkpointed(model: PreTrainedModel) -> Iterator[None]:
    """Gradient checkpointing inside the block: the backward pass recomputes each layer."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    untyped: Any = model
    untyped.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        layer.training = True  # the layer alone; its modules, such as dropout, stay in evaluation mode
    try:
        yield
    finally:
        untyped.gradient_checkpointing_disable()
        for layer in layers:
            layer.training = False


_DEFAULT_MEMORY = 8 << 30
_MAX_TOKENS = 16_384


def plan_memory(model: PreTrainedModel, longest: int, limit: int | None) -> tuple[int, bool, int]:
    """Fit training on inputs of up to `longest` tokens into `limit` bytes.

    Returns the number of tokens per batch, whether to use gradient checkpointing, and the estimated bytes. The default
    limit is 8 GiB, or more for large weights, but no more than the free memory of a GPU.
    """
    config = model.config.get_text_config()
    hidden, layers = int(config.hidden_size), int(config.num_hidden_layers)
    inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    size = next(model.parameters()).element_size()
    weights = sum(weight.nbytes for weight in model.parameters())
    fixed = weights + 4 * 6 * MAX_ROWS * int(config.vocab_size)  # logits and the intermediate results of KL
    if limit is None:
        limit = max(_DEFAULT_MEMORY, 2 * fixed)
        if model.device.type == "cuda":
            limit = min(limit, weights + int(0.8 * torch.cuda.mem_get_info(model.device)[0]))
    every, again = size * layers * (16 * hidden + 4 * inner), size * (layers * hidden + 16 * hidden + 6 * inner)
    for per_token, checkpoint in ((every, False), (again, True)):
        most = int(0.8 * limit - fixed) // per_token
        if most >= longest:
            most = min(most, _MAX_TOKENS)
            return most, checkpoint, fixed + most * per_token
    needed = (fixed + again * longest) / 0.8 / 2**30
    reject("memory", f"{limit / 2**30:.1f}G", f"at least {needed:.1f}G for inputs of {longest:,} tokens")


_MARGIN = 0.95
"""The target as a share of the budget: divergence is slightly larger on text that was not trained on."""

_FIRST_PRICE, _MIN_PRICE, _MAX_PRICE = 50.0, 1.0, 3000.0
_PRICE_RATE, _MEMORY = 0.1, 0.9
_PRUNE_AT = (0.4, 0.6)
_MOMENTS = ("exp_avg", "exp_avg_sq")
_SAVED_AS = "calibration"


class DivergedError(SharpmaxError, ArithmeticError):
    """The loss of a calibration is NaN or infinite."""


@dataclass
class Trainer:
    """Trains one kind of policy; `save` and `resume` keep its state in a file."""

    policy: TrainablePolicy
    steps: int
    rate: float
    keep: float  # the share of modified heads after pruning
    keep_layers: float = 1.0  # the share of layers with modified heads after pruning
    prices: dict[str, float] = field(default_factory=dict)  # Lagrange multiplier of each domain
    divergences: dict[str, float] = field(default_factory=dict)  # moving average on each domain, in nats per token
    curve: list[dict[str, float]] = field(default_factory=list)
    step: int = 0

    def __post_init__(self) -> None:
        self._optimizer = torch.optim.Adam([self.policy.coefficients], lr=self.rate, betas=(0.9, 0.99))

    def run(self, setup: TrainingSetup, after_step: Callable[[Trainer], None]) -> None:
        """Take the remaining steps."""
        for domain in setup.domains:
            if domain.trained:
                self.prices.setdefault(domain.name, _FIRST_PRICE)
        while self.step < self.steps:
            self._take_step(setup)
            after_step(self)

    def _take_step(self, setup: TrainingSetup) -> None:
        self._optimizer.zero_grad()
        nll = self._answers_backward(setup)
        divergences = {
            domain.name: self._divergence_backward(setup, domain, weight) for domain, weight in self._turns(setup)
        }
        gradient = self.policy.coefficients.grad
        finite = gradient is not None and bool(gradient.isfinite().all())
        if not (finite and all(map(math.isfinite, (nll, *divergences.values())))):
            raise DivergedError(
                f"calibration: the loss of kind {self.policy.kind!r} is not a number at step {self.step + 1}; "
                f"try a smaller rate than {self.rate:g}, or float32"
            )
        self._update()
        target = _MARGIN * setup.budget
        for name, kl in divergences.items():
            self.divergences[name] = _MEMORY * self.divergences.get(name, kl) + (1 - _MEMORY) * kl
            pull = min(max((self.divergences[name] - target) / target, -1.0), 1.0)
            self.prices[name] = min(max(self.prices[name] * math.exp(_PRICE_RATE * pull), _MIN_PRICE), _MAX_PRICE)
        self.step += 1
        self.curve.append({"step": self.step, "nll": nll, **self.divergences})

    def _answers_backward(self, setup: TrainingSetup) -> float:
        """Add the gradient of the loss of this step's answers; return the loss."""
        nll = 0.0
        every = setup.prompts.at(self.step)
        for replicate in (False, True):  # replicated keys need a mask; other replies are faster without one
            some = [reply for reply in every if (reply.times is not None) == replicate]
            for batch in batches(some, setup.most_tokens):
                replies = [some[i] for i in batch]
                with self.policy.installed(setup.model), replicated(setup.model, replies):
                    nll += _backward(reply_losses(setup.model, replies)[0].sum() / len(every))
        return nll

    def _turns(self, setup: TrainingSetup) -> list[tuple[Domain, float]]:
        """The domains of this step with their weights. Texts take turns; the weight makes up for the other steps."""
        trained = [domain for domain in setup.domains if domain.trained]
        texts = [domain for domain in trained if domain.name != CHAT]
        count = min(setup.prompts.profile.turns, len(texts))
        turn = [(texts[(self.step * count + i) % len(texts)], len(texts) / count) for i in range(count)]
        return [*turn, *((domain, 1.0) for domain in trained if domain.name == CHAT)]

    def _divergence_backward(self, setup: TrainingSetup, domain: Domain, weight: float) -> float:
        """Add the gradient of the divergence on some texts of a domain; return it in nats per token."""
        profile = setup.prompts.profile
        rng = random.Random(f"descent/{setup.prompts.seed}/{self.step}/{domain.name}")
        most = profile.answers if domain.name == CHAT else max(1, profile.tokens // len(domain.training[0].ids))
        chosen = rng.sample(domain.training, min(most, len(domain.training)))
        divergence = 0.0
        for batch in batches(chosen, setup.most_tokens, most_rows=MAX_ROWS):
            places = Places.of([chosen[i] for i in batch], setup.model.device, profile.rows, rng.random().hex())
            with torch.no_grad():
                baseline = places.logits(setup.model)
            with self.policy.installed(setup.model):
                kl = places.divergences(baseline, places.logits(setup.model)).sum() / places.count
                divergence += _backward(kl * len(batch) / len(chosen), weight * self.prices[domain.name])
        return divergence

    def _update(self) -> None:
        cosine = 0.5 + 0.5 * math.cos(math.pi * self.step / self.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate * min(1.0, (self.step + 1) / 10) * (cosine + 0.02)  # 10 steps of warm-up
        self._optimizer.step()
        names = KINDS[self.policy.kind]
        with torch.no_grad():
            if "length" in names:  # below 0 it would disperse attention on long inputs, which a budget on text rewards
                self.policy.coefficients[..., names.index("length")].clamp_(min=0.0)
            self._prune()

    def _prune(self) -> None:
        """At two steps, remove the heads whose removal raises the loss least; the others train on."""
        points = [min(round(at * self.steps), self.steps - 1) for at in _PRUNE_AT]
        if min(self.keep, self.keep_layers) >= 1.0 or self.step not in points:
            return
        done = sum(point <= self.step for point in points) / len(points)  # 1 if both points are the same step
        state, policy = self._optimizer.state[self.policy.coefficients], self.policy
        # The square of a coefficient times the mean square of its gradient estimates the cost of setting it to 0.
        worth = (policy.coefficients**2 * state["exp_avg_sq"]).sum(-1).masked_fill(~policy.modified, -1.0)
        policy.modified &= _largest(worth.clamp_min(0.0).sum(-1), 1.0 - (1.0 - self.keep_layers) * done)[:, None]
        worth = worth.masked_fill(~policy.modified, -1.0)
        policy.modified &= _largest(worth.flatten(), 1.0 - (1.0 - self.keep) * done).view_as(worth)
        for tensor in (policy.coefficients, *(state[moment] for moment in _MOMENTS)):
            tensor.mul_(policy.modified[..., None])

    def save(self, path: Path, about: Mapping[str, Any]) -> None:
        """Write the state after a step, for `resume`."""
        state = self._optimizer.state[self.policy.coefficients]
        tensors = {"coefficients": self.policy.coefficients.detach(), "modified": self.policy.modified}
        tensors |= {moment: state[moment] for moment in _MOMENTS}
        notes = {"step": self.step, "prices": self.prices, "divergences": self.divergences, "curve": self.curve}
        save_tensors(path, _SAVED_AS, {k: t.cpu().contiguous() for k, t in tensors.items()}, {**about, "state": notes})

    def resume(self, path: Path, about: Mapping[str, Any]) -> bool:
        """Continue from a file of a calibration with the same settings; return False if there is none."""
        if not path.is_file():
            return False
        tensors, found = load_tensors(path, _SAVED_AS)
        notes = found.pop("state", None)
        with must_fit(path, "calibration", "delete it, or start without resuming"):
            if found != dict(about):
                raise ValueError("it was made with other settings")
            coefficients = self.policy.coefficients
            with torch.no_grad():
                coefficients.copy_(tensors["coefficients"])
            self.policy.modified.copy_(tensors["modified"])
            moments = {moment: tensors[moment].to(coefficients.device) for moment in _MOMENTS}
            self._optimizer.state[coefficients] = {"step": torch.tensor(float(notes["step"])), **moments}
            self.step, self.curve = int(notes["step"]), list(notes["curve"])
            self.prices, self.divergences = dict(notes["prices"]), dict(notes["divergences"])
        return True


def _largest(worth: Tensor, share: float) -> Tensor:
    """A mask of the largest `share` of the entries, at least one."""
    chosen = torch.zeros_like(worth, dtype=torch.bool)
    chosen[worth.topk(max(1, round(share * worth.numel()))).indices] = True
    return chosen


def _backward(loss: Tensor, weight: float = 1.0) -> float:
    """Add the gradient of weight·loss and return the loss."""
    with any_length(loss.device):  # layers recomputed by checkpointing must use the same kernels
        torch.autograd.backward([weight * loss])
    return float(loss.detach())
