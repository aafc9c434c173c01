"""The loss of answers, with logits of answers alone: most tokens are questions, and logits are the largest tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sharpmax.errors import UnsupportedError
from sharpmax.experiments.clrs.packing import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["answer_loss", "answers_only"]


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
