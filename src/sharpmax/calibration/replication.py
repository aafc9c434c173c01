"""Key replication: read a short list as if it had many more items.

What a long list does to a head is that the keys of other items share its weight, from places further and further away.
Repeating those keys in every layer and leaving the places of the items they stand for empty does just that: 64 items
whose keys count eight times, eight times as far apart, disperse attention as 512 items do, at the price of reading 64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sharpmax.integrations.transformers.interface import repeated
from sharpmax.models.scoring import Judged, Reply, asked_with, judge
from sharpmax.tasks.prompt import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Crowded(Reply):
    """A reply of which some tokens count more than once as keys, with room for as many."""

    times: tuple[int, ...]


def crowd(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, reply: Reply, times: int) -> Crowded:
    """Let the other items of a prompt count `times` times: its lines but the first, the last and the one asked for.

    Each line keeps its tokens together, and as much room is left after it as the items it stands for would take. A
    prompt whose items are not lines of their own, or whose answer stands on no line, is left as it is.
    """
    asked = asked_with(tokenizer, prompt)
    at = asked.index(prompt.user)
    lines = prompt.user.split("\n")
    wanted = prompt.opening + prompt.answer
    item = [0] * (len(asked) + len(prompt.answer) + 1)  # of each letter: the number of the other item it is part of
    if wanted in lines:
        for number, line in enumerate(lines):
            if 0 < number < len(lines) - 1 and line != wanted:
                item[at : at + len(line) + 1] = [number] * (len(line) + 1)
            at += len(line) + 1
    spans = tokenizer(
        asked + prompt.answer, add_special_tokens=tokenizer.chat_template is None, return_offsets_mapping=True
    )["offset_mapping"]
    items = [item[start] if end > start else 0 for start, end in spans]
    counts = tuple(times if one else 1 for one in items)
    positions, room = [], 0
    for index, one in enumerate(items):
        if index and one != items[index - 1]:
            room = sum(counts[:index]) - index
        positions.append(index + room)
    return Crowded(reply.ids, reply.start, counts, positions=tuple(positions))


@contextmanager
def crowded(model: PreTrainedModel, replies: Sequence[Reply]) -> Iterator[None]:
    """Let the keys of these replies, read together in this order, count as often as each of them says."""
    if not any(isinstance(reply, Crowded) for reply in replies):
        yield
        return
    with repeated(model, _places(replies)):
        yield


def judge_crowded(model: PreTrainedModel, replies: Sequence[Reply]) -> list[Judged]:
    """Each reply as the model sees it, with the keys of crowded ones counted as often as they say."""
    plain = [reply for reply in replies if not isinstance(reply, Crowded)]
    found = iter(judge(model, plain))
    judged = []
    for reply in replies:
        if isinstance(reply, Crowded):
            with crowded(model, [reply]):
                judged += judge(model, [reply])
        else:
            judged.append(next(found))
    return judged


def _places(replies: Sequence[Reply]) -> Tensor:
    rows = []
    for reply in replies:
        times = reply.times if isinstance(reply, Crowded) else [1] * len(reply.ids)
        rows.append(torch.arange(len(reply.ids)).repeat_interleave(torch.tensor(times)))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
