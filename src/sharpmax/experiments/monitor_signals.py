"""What one pass tells of prompts: the answer's rightness, how sure the model is, and where its attention rests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sharpmax.errors import UnsupportedError
from sharpmax.hf.interface import watched
from sharpmax.models.scoring import Reply, batches, encode, reply_losses
from sharpmax.probe.watch.learning import Reference, tokens_at_once
from sharpmax.probe.watch.passes import Pass
from sharpmax.tasks.prompt import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sharpmax.models.language import LanguageModel

__all__ = ["OWN", "Answered", "answered", "replies_of"]

OWN: Mapping[str, str] = {
    "confidence": "largest probability of a next token",
    "entropy": "entropy of the next token",
    "energy": "−ln Σ exp of the output logits",
}
"""The model's own signals; of each, more is more suspicious (of the probability, less)."""


@dataclass(frozen=True, eq=False)
class Answered:
    """N prompts as a model answered them; all but `right` is about the row that says the first token of the answer."""

    right: np.ndarray
    """Whether greedy decoding gives the right answer `[N]`."""

    own: Mapping[str, np.ndarray]
    """How suspicious each of the model's own signals finds it `[N]`."""

    entropy: Tensor
    """Of every head `[N, heads]`."""

    count: Tensor
    """Tokens read so far `[N]`."""

    @classmethod
    def together(cls, parts: Sequence[Answered]) -> Answered:
        """Several lots of prompts as one."""
        return cls(
            np.concatenate([part.right for part in parts]),
            {name: np.concatenate([part.own[name] for part in parts]) for name in OWN},
            torch.cat([part.entropy for part in parts]),
            torch.cat([part.count for part in parts]),
        )

    def as_reference(self, heads: Sequence[tuple[int, int]]) -> Reference:
        """The rows as something to learn from."""
        found = Reference(len(self.right), 0, heads)
        found.entropy, found.count = self.entropy.double(), self.count
        return found


def replies_of(language: LanguageModel, task: Task, size: int, count: int, seed: int) -> list[Reply]:
    """Prompts that the model reads up to the first token of the answer that says something.

    Where numbers are tokens of their own, every answer begins with a blank, about which nobody can be wrong.
    """
    found = []
    for prompt in task.prompts(size, count, seed):
        reply = encode(language.tokenizer, prompt)
        start = reply.start
        while start < len(reply.ids) - 1 and not str(language.tokenizer.decode([reply.ids[start]])).strip():
            start += 1
        found.append(Reply(reply.ids, start))
    return found


def answered(model: PreTrainedModel, replies: Sequence[Reply]) -> Answered:
    """Let the model answer, each prompt in one pass."""
    parts: list[Answered] = []
    order: list[int] = []
    seeing: list[Pass] = []
    logits: list[Tensor] = []
    hook = model.register_forward_hook(lambda module, args, out: logits.append(out.logits))
    with hook, watched(model, lambda seen: seeing[-1].see(seen)), torch.no_grad():
        for batch in batches(replies, tokens_at_once(model)):
            chosen = [replies[place] for place in batch]
            seeing[:], logits[:] = [_pass(model, chosen)], []
            right = reply_losses(model, chosen)[1].all(-1)
            parts.append(_read_off(chosen, right, logits[-1], seeing[-1]))
            order += batch
    found = Answered.together(parts)
    back = np.argsort(order)
    return Answered(
        found.right[back], {name: values[back] for name, values in found.own.items()},
        found.entropy[back], found.count[back],
    )  # fmt: skip


def _pass(model: PreTrainedModel, replies: Sequence[Reply]) -> Pass:
    return Pass(torch.tensor([reply.start - 1 for reply in replies], device=model.device))


def _read_off(replies: Sequence[Reply], right: Tensor, logits: Tensor, seeing: Pass) -> Answered:
    """The row that says the first token of each reply, among the rows `[B, places, V]` that were computed."""
    said = sorted({place for reply in replies for place in range(reply.start, len(reply.ids))})
    whole = logits.shape[1] > len(said)  # a model that cannot leave rows out
    columns = [reply.start - 1 if whole else said.index(reply.start) for reply in replies]
    rows = logits[torch.arange(len(replies)), torch.tensor(columns)].float()
    log_p = rows.log_softmax(-1)
    own: dict[str, Any] = {
        "confidence": -log_p.amax(-1).exp(),
        "entropy": torch.special.entr(log_p.exp()).sum(-1),
        "energy": -rows.logsumexp(-1),
    }
    row = seeing.row()
    if row is None:
        raise UnsupportedError("model: its attention was not seen; allowed: a model that is not compiled")
    numbers = {name: own[name].cpu().double().numpy() for name in OWN}
    return Answered(right.cpu().numpy(), numbers, row.entropy.cpu(), row.count.cpu())
