"""Inputs of growing size for a probe: task prompts, text, or the caller's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from sharpmax.calibration.replication import ReplicatedReply, replicate_keys
from sharpmax.errors import reject, reject_type
from sharpmax.models.scoring import encode
from sharpmax.tasks.prompt import Prompt, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT = "text"
"""The task that is plain text."""

FIT_UP_TO = {"items": 64, "tokens": 512}
"""Up to which size forecasts are fitted, by what sizes are counted in, where there are larger sizes to test them on."""

_PROMPTS, _LEAST = 12, 2
_TOKENS = 8192
"""Tokens to read of each size: 12 prompts where they are short, fewer where they are long, but no fewer than 2."""

_SHORTEST, _LONGEST = 64, 8192
"""Lengths of text unless told otherwise; the longest where a model does not say what it is made for."""

_PER_ITEM = 8
"""Tokens of text that are taken for an item: as many as a line of a list has."""


@dataclass(frozen=True, eq=False)
class Passage:
    """One input of a model, and which parts of it can stand for more of their kind."""

    inputs: Mapping[str, Any]
    """What the model is called with, by name."""

    items: tuple[int, ...] = ()
    """Of each token the number of its item, from 1; 0 before the first, −1 after the last. Empty: it has no items."""

    once: int = 0
    """The item that there may be only one of: the one asked for. 0: none, or it is next to what is no item."""

    @property
    def length(self) -> int:
        """How long it is, as far as that decides how long it takes."""
        first = next(iter(self.inputs.values()))
        return int(first.shape[1]) if isinstance(first, torch.Tensor) and first.ndim > 1 else 1


@dataclass(frozen=True, eq=False)
class Material:
    """Passages of one task by size, ascending."""

    task: str
    unit: str
    """What sizes are counted in: items or tokens."""

    passages: Mapping[int, Sequence[Passage]]
    per_item: int = 1
    """How much of a size one item of a passage is."""

    nested: bool = False
    """Whether the i-th passage of a size is the end of the i-th of any larger size."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes."""
        return tuple(self.passages)

    @property
    def fit_up_to(self) -> int:
        """The largest size that forecasts may know; half of the sizes where the usual limit leaves too few."""
        fitted = [size for size in self.sizes if size <= FIT_UP_TO[self.unit]]
        if len(fitted) < 2 or len(fitted) == len(self.sizes):
            fitted = list(self.sizes[: max(2, len(self.sizes) // 2)])
        return fitted[-1]


def task_material(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    room: int | None,
    sizes: Sequence[int] | None,
    prompts: int | None,
    seed: int,
) -> Material:
    """Prompts of a task, each up to where its answer begins; sizes are its own as far as the model goes."""
    found = {}
    for size in task.sizes if sizes is None else sizes:
        task.check_size(size)
        first = _passage(tokenizer, task.prompts(size, 1, seed)[0])
        if room is not None and first.length > room:
            if sizes is None:
                break
            reject(
                "sizes",
                f"{size} for the task {task.name!r}, a prompt of {first.length:,} tokens",
                f"prompts of up to {room:,} tokens, what the model is made for",
                "leave out the largest sizes",
            )
        count = _count(first.length, prompts)
        found[size] = [_passage(tokenizer, prompt) for prompt in task.prompts(size, count, seed)]
    if not found:
        reject("task", repr(task.name), f"one whose smallest prompt is no longer than {room:,} tokens")
    return Material(task.name, "items", found)


def text_material(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    room: int | None,
    sizes: Sequence[int] | None,
    prompts: int | None,
    *,
    causal: bool = True,
) -> Material:
    """The same last tokens with more and more of the text before them; sizes double as far as text and model go.

    Windows that end alike are compared with each other, so that it does not matter how easy their last words are.
    Special tokens that the tokenizer puts around a text are around each window, and count.
    """
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    before, after = _around(tokenizer)
    special = len(before) + len(after)
    most = min(len(ids) + special, room or _LONGEST)
    if sizes is None:
        sizes = list(_doubling(min(_SHORTEST, most), most))
    for size in sizes:
        if not special + 2 <= size <= most:
            allowed = f"{special + 2} … {most:,} tokens, what the model and the text have room for"
            reject("sizes", f"{size} for text", allowed, "leave it out")
    counts = {size: _count(size, prompts) for size in sizes}
    ends = _ends(max(sizes) - special, len(ids), max(counts.values()))
    found = {}
    for size, count in counts.items():
        windows = [[*before, *ids[end - size + special : end], *after] for end in ends[:count]]
        items = tuple(1 + place // _PER_ITEM for place in range(size)) if causal and not after else ()
        found[size] = [Passage({"input_ids": torch.tensor([window])}, items) for window in windows]
    return Material(TEXT, "tokens", found, per_item=_PER_ITEM, nested=True)


def own_material(inputs: Mapping[int, Sequence[Mapping[str, Any]]]) -> Material:
    """Inputs of the caller's own by size: for each size one or several calls of the model, as keyword arguments."""
    if not isinstance(inputs, Mapping) or not inputs:
        reject_type("inputs", type(inputs).__name__, "a mapping from sizes to lists of keyword arguments of the model")
    found = {}
    for size in sorted(inputs):
        one = inputs[size]
        given: list[Any] = [one] if isinstance(one, Mapping) else list(one)
        if type(size) is not int or size < 1 or not given or not all(isinstance(call, Mapping) for call in given):
            reject(
                "inputs", f"{given!r:.60} for {size!r}", "for each size, from 1, dicts that the model is called with"
            )
        found[size] = [Passage(dict(call)) for call in given]
    if len(found) < 2:
        reject("inputs", f"the size {list(found)}", "two sizes or more: a slope needs them")
    return Material("own", "tokens", found)


def _doubling(start: int, most: int) -> list[int]:
    sizes = [start]
    while sizes[-1] * 2 <= most:
        sizes.append(sizes[-1] * 2)
    return sizes


def _count(tokens: int, prompts: int | None) -> int:
    return max(_LEAST, min(_PROMPTS, _TOKENS // tokens)) if prompts is None else prompts


def _passage(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> Passage:
    reply = encode(tokenizer, prompt)
    items, once = _items(replicate_keys(tokenizer, prompt, reply, 2), reply.start) if tokenizer.is_fast else ((), 0)
    return Passage({"input_ids": torch.tensor([reply.ids[: reply.start]])}, items, once)


def _items(replicated: ReplicatedReply, length: int) -> tuple[tuple[int, ...], int]:
    """The items of a list, read off which tokens count twice and where room is left for them."""
    places = replicated.positions or range(len(replicated.ids))
    marks = [(count, place - at) for at, (count, place) in enumerate(zip(replicated.times, places, strict=True))][
        :length
    ]
    runs = [(mark[0], len(list(run))) for mark, run in groupby(marks)]
    if len(runs) < 3:
        return (), 0
    numbers = [0, *range(1, len(runs) - 1), -1]
    once = next((number for number, (count, _) in zip(numbers, runs, strict=True) if number > 0 and count == 1), 0)
    return tuple(number for number, (_, size) in zip(numbers, runs, strict=True) for _ in range(size)), once


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text."""
    bare = tokenizer("a", add_special_tokens=False).input_ids
    whole = tokenizer("a").input_ids
    start = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), 0)
    return whole[:start], whole[start + len(bare) :]


def _ends(shortest: int, longest: int, count: int) -> list[int]:
    """Where windows end, far apart however many of the first are used."""
    ends = []
    for number in range(1, count + 1):
        bits = f"{number:b}"[::-1]
        share = int(bits, 2) / 2 ** len(bits)
        ends.append(round(shortest + share * (longest - shortest)))
    return ends
