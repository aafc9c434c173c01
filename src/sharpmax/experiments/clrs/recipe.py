"""Training recipe, loss curve and matrix-multiply rate."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sharpmax.calibration.data import KINDS
from sharpmax.errors import FileFormatError, SharpmaxError, UnsupportedError, reject
from sharpmax.experiments.clrs.packing import IGNORED
from sharpmax.files import append_bytes, parse_json, write_text
from sharpmax.policies.base import Policy
from sharpmax.provenance import check_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SIDE, _ROUNDS = 8192, 20


def matrix_rate(device: torch.device) -> float | None:
    """Measured bfloat16 FLOP/s of a large square product; None where there is no GPU."""
    if device.type != "cuda":
        return None
    a, b = (torch.randn(_SIDE, _SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(_ROUNDS):
        a @ b
    torch.cuda.synchronize(device)
    return 2.0 * _SIDE**3 * _ROUNDS / (time.perf_counter() - began)


def _said(labels: Tensor) -> Tensor:
    """The places whose next token somebody has to say."""
    return labels[:, 1:] != IGNORED


@contextmanager
def answers_only(model: PreTrainedModel, labels: Tensor) -> Iterator[None]:
    """Let the model compute logits `[1, labelled tokens, vocabulary]` for a while: those that labels are compared with.

    What a family does to logits afterwards (a scale, a cap) it does to these.
    """
    of_model: Any = model
    head = of_model.get_output_embeddings()
    if head is None:
        raise UnsupportedError(f"model: {type(model).__name__} has no output embeddings, from which logits come")
    hook = head.register_forward_pre_hook(lambda module, args: (args[0][:, :-1][_said(labels)][None], *args[1:]))
    try:
        yield
    finally:
        hook.remove()


def answer_loss(logits: Tensor, labels: Tensor, count: Tensor | int | float, typical: float | None = None) -> Tensor:
    """Loss in nats of every labelled token, summed and divided by `count`, from logits under `answers_only`.

    With `typical`, the mean length of an answer, a token counts `typical` / length of its answer: answers count alike.
    """
    wanted = labels[:, 1:][_said(labels)]
    if typical is None:
        return F.cross_entropy(logits[0].float(), wanted, reduction="sum") / count
    losses = F.cross_entropy(logits[0].float(), wanted, reduction="none")
    return (losses * (typical / _answer_lengths(labels))).sum() / count


def _answer_lengths(labels: Tensor) -> Tensor:
    """How many tokens the answer has that a labelled token is part of; between two answers there is a question."""
    said = _said(labels)
    begins = said & ~F.pad(said, (1, 0))[:, :-1]
    number = begins.flatten().cumsum(0)[said.flatten()] - 1
    return torch.bincount(number)[number]


FILE_NAME = "curve.jsonl"


class Curve:
    """Losses and times by step. Losses stay on the device until they are written, so that no step waits for it."""

    def __init__(
        self, path: Path, tokens: Callable[[int], int], every: int, main: bool = True, typical: float | None = None
    ) -> None:
        self.entries: list[dict[str, Any]] = []
        self._path, self._tokens, self._every, self._main, self._typical = path, tokens, every, main, typical
        self._parts: list[Tensor] = []
        self._waiting: list[tuple[int, Tensor]] = []
        self._since = time.perf_counter()
        self._fresh = True

    def go_on_after(self, step: int) -> None:
        """Take up the entries of an interrupted run up to `step`; what came after will come again."""
        lines = self._path.read_bytes().split(b"\n")[:-1] if self._path.is_file() else []
        for number, line in enumerate(lines, 1):
            try:
                entry = parse_json(line)
                known = {"step": int(entry["step"]), "loss": float(entry["loss"]), "tokens": int(entry["tokens"])}
                seconds = None if entry["seconds"] is None else float(entry["seconds"])
            except (ValueError, KeyError, TypeError):
                raise FileFormatError(
                    f"--out: line {number} of {str(self._path)!r} is not what sharpmax wrote; bring it back, or train "
                    "again in another folder"
                ) from None
            if known["step"] <= step:
                self.entries.append({**known, "seconds": seconds})

    def begin(self) -> None:
        """The first step begins."""
        self._since = time.perf_counter()
        if self._main:
            write_text(self._path, "".join(json.dumps(entry) + "\n" for entry in self.entries))

    def loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int) -> Tensor:
        """The loss of a part of a step, as transformers' Trainer asks for it."""
        loss = answer_loss(outputs.logits, labels, num_items_in_batch, self._typical)
        # A copy: with several devices the Trainer multiplies the loss in place.
        self._parts.append(loss.detach().clone())
        return loss

    def step_done(self, step: int, last: bool) -> None:
        """Note a step; now and then write what there is."""
        self._waiting.append((step, torch.stack(self._parts).sum()))
        self._parts.clear()
        if last or len(self._waiting) >= self._every:
            self.flush()

    def flush(self) -> None:
        """Write what is waiting."""
        if not self._waiting:
            return
        losses = torch.stack([loss for _, loss in self._waiting])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(losses)
        values = losses.tolist()
        now = time.perf_counter()
        seconds = (now - self._since) / len(values)
        new = [
            # The first steps of a process warm it up: their time says nothing of the others.
            {"step": step, "loss": value, "tokens": self._tokens(step), "seconds": None if self._fresh else seconds}
            for (step, _), value in zip(self._waiting, values, strict=True)
        ]
        self._waiting, self._since, self._fresh = [], now, False
        for entry in new:
            if not math.isfinite(entry["loss"]):
                raise SharpmaxError(
                    f"clrs train: the loss is not a number at step {entry['step']}; try a smaller --lr, or "
                    "--dtype float32"
                )
        self.entries += new
        if self._main:
            append_bytes(self._path, "".join(json.dumps(entry) + "\n" for entry in new).encode())

    def tokens_per_second(self) -> float | None:
        """Over the steps whose time is known."""
        timed = [entry for entry in self.entries if entry["seconds"]]
        seconds = math.fsum(entry["seconds"] for entry in timed)
        return sum(entry["tokens"] for entry in timed) / seconds if seconds else None


WEIGHED = ("tokens", "answers")

NONE = "none"
"""What stands for no policy."""


@dataclass(frozen=True)
class Recipe:
    """The settings of a fine-tuning."""

    policy: Policy | None = None
    """In every attention row of training and, beside the saved model, of evaluation; None is the model as it comes."""

    policy_name: str = NONE
    learn: str | None = None
    """The kind of policy whose numbers are learned with the weights, one per head, from β = 1 on."""

    steps: int | None = None
    epochs: float = 1.0
    """Passes over the data where `steps` does not say how long."""

    batch_tokens: int = 65_536
    """Tokens of one step, on all devices together."""

    row_tokens: int = 512
    """Tokens of a packed row; longer documents have rows of twice the room, or four times, and so on."""

    tokens_at_once: int = 16_384
    """Tokens that a device reads at once: of a larger batch, gradients are added up."""

    rate: float = 5e-4
    policy_rate: float = 1e-2
    warm_up: float = 0.05
    """The share of the steps in which the rate rises; then it falls along a cosine."""

    weight_decay: float = 0.01
    clip: float = 1.0
    weigh: str = "tokens"
    """What counts alike in the loss: tokens, or answers, of which a long one would otherwise count for many."""

    checkpointing: bool = False
    """Keep activations of whole layers only and compute the rest again: less memory, a third more work."""

    compiled: bool = False
    save_every: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name, value, least in (
            ("--steps", self.steps, 1), ("--batch-tokens", self.batch_tokens, 1), ("--row-tokens", self.row_tokens, 2),
            ("--tokens-at-once", self.tokens_at_once, 1), ("--save-every", self.save_every, 1),
        ):  # fmt: skip
            if value is not None and value < least:
                reject(name, value, f"{least} or more")
        for name, number in (("--epochs", self.epochs), ("--lr", self.rate), ("--policy-lr", self.policy_rate)):
            if not 0.0 < number < float("inf"):
                reject(name, number, "a number above 0")
        if self.weigh not in WEIGHED:
            reject("--weigh", repr(self.weigh), f"one of {list(WEIGHED)}")
        if self.learn is not None and self.learn not in KINDS:
            reject("--learn-policy", repr(self.learn), f"one of {list(KINDS)}")
        if self.learn is not None and self.policy is not None:
            reject("--learn-policy", self.learn, "together with --policy none", "what is learned starts at β = 1")

    @property
    def group_tokens(self) -> int:
        """Tokens of a group, which a device reads at once."""
        return min(self.tokens_at_once, self.batch_tokens)

    @property
    def together(self) -> int:
        """Groups of one step, on all devices."""
        return round(self.batch_tokens / self.group_tokens)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return values | {"policy": None if self.policy is None else self.policy.to_dict()}
