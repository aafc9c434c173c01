"""The loss of answers, with logits of answers alone: most tokens are questions, and logits are the largest tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

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


def answer_loss(logits: Tensor, labels: Tensor, count: Tensor | int | float) -> Tensor:
    """Loss in nats of every labelled token, summed and divided by `count`, from logits under `answers_only`."""
    wanted = labels[:, 1:][_said(labels)]
    return F.cross_entropy(logits[0].float(), wanted, reduction="sum") / count
