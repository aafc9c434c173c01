"""Key replication: read a short list as if it had many more items.

In a long list the keys of other items share the weight of a head, from positions further and further away. Repeating
those keys in every layer and leaving gaps for the items they stand for has the same effect: 64 items whose keys count
eight times, eight times as far apart, disperse attention as 512 items do, at the cost of reading 64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sharpmax.integrations.transformers.interface import repeated
from sharpmax.models.scoring import Judged, Reply, asked_with, judge
from sharpmax.tasks.prompt import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class ReplicatedReply(Reply):
    """A reply whose i-th token counts `times[i]` times as a key, with gaps in the positions for the copies."""

    times: tuple[int, ...]


def replicate_keys(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, reply: Reply, times: int) -> ReplicatedReply:
    """Let the other items of a prompt count `times` times: all lines but the first, the last and those of the evidence.

    The tokens of a line stay together; the gap for its copies follows the line. Where items are not lines of their
    own, or no line holds the answer, every token counts once.
    """
    asked = asked_with(tokenizer, prompt)
    at = asked.index(prompt.user)
    lines = prompt.user.split("\n")
    wanted = (prompt.evidence or prompt.opening + prompt.answer).split("\n")
    places = [i for i in range(len(lines)) if lines[i : i + len(wanted)] == wanted]
    item = [0] * (len(asked) + len(prompt.answer) + 1)  # per character: the number of the other item it belongs to
    if places:
        for number, line in enumerate(lines):
            if 0 < number < len(lines) - 1 and not places[0] <= number < places[0] + len(wanted):
                item[at : at + len(line) + 1] = [number] * (len(line) + 1)
            at += len(line) + 1
    spans = tokenizer(
        asked + prompt.answer, add_special_tokens=tokenizer.chat_template is None, return_offsets_mapping=True
    )["offset_mapping"]
    items = [item[start] if end > start else 0 for start, end in spans]
    counts = tuple(times if one else 1 for one in items)
    positions, gap = [], 0
    for index, one in enumerate(items):
        if index and one != items[index - 1]:
            gap = sum(counts[:index]) - index
        positions.append(index + gap)
    return ReplicatedReply(reply.ids, reply.start, counts, positions=tuple(positions))


@contextmanager
def replicated(model: PreTrainedModel, replies: Sequence[Reply]) -> Iterator[None]:
    """Replicate the keys of these replies, read as one batch in this order, in every layer."""
    if not any(isinstance(reply, ReplicatedReply) for reply in replies):
        yield
        return
    rows = []
    for reply in replies:
        times = reply.times if isinstance(reply, ReplicatedReply) else [1] * len(reply.ids)
        rows.append(torch.arange(len(reply.ids)).repeat_interleave(torch.tensor(times)))
    with repeated(model, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)):
        yield


def judge_replicated(model: PreTrainedModel, replies: Sequence[Reply]) -> list[Judged]:
    """`judge`, with the keys of each `ReplicatedReply` replicated."""
    plain = iter(judge(model, [reply for reply in replies if not isinstance(reply, ReplicatedReply)]))
    judged = []
    for reply in replies:
        if isinstance(reply, ReplicatedReply):
            with replicated(model, [reply]):
                judged += judge(model, [reply])
        else:
            judged.append(next(plain))
    return judged
