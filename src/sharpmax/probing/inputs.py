"""Inputs of growing size for a probe: task prompts, text, or the caller's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from sharpmax.calibration.replication import replicate_keys
from sharpmax.errors import reject, reject_type
from sharpmax.models.scoring import encode
from sharpmax.tasks.prompt import Prompt, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT = "text"
"""The task that is plain text."""

FIT_UP_TO = {"items": 64, "tokens": 512}
"""By unit: the largest size that forecasts are fitted to, where there are larger sizes to test them on."""

# By default each size gets 8,192 tokens: 12 prompts where they are short, fewer where they are long, at least 2.
_PROMPTS, _LEAST, _TOKENS = 12, 2, 8192

# Default lengths of text; the longest where the model states no context.
_SHORTEST, _LONGEST = 64, 8192

_PER_ITEM = 8
"""Tokens of text that count as one item: about as many as a line of a list."""


@dataclass(frozen=True, eq=False)
class Passage:
    """One input of a model, and which of its items can be replicated."""

    inputs: Mapping[str, Any]  # keyword arguments of the model
    items: tuple[int, ...] = ()
    """The item number of each token, from 1; 0 before the first item, −1 after the last. Empty: no items."""

    once: int = 0  # the item that must stay single, the one asked for; 0: none, or it borders on what is no item

    @property
    def length(self) -> int:
        """The length in tokens, or 1 where the first input is not a batch of sequences."""
        first = next(iter(self.inputs.values()))
        return int(first.shape[1]) if isinstance(first, torch.Tensor) and first.ndim > 1 else 1

    @property
    def work(self) -> int:
        """The relative cost of a forward pass: attention makes long passages cost more than linear."""
        return self.length + self.length**2 // 8192


@dataclass(frozen=True, eq=False)
class ProbeInputs:
    """Passages of one task by size, ascending."""

    task: str
    unit: str  # of sizes: items or tokens
    passages: Mapping[int, Sequence[Passage]]
    per_item: int = 1  # how much of a size one item is
    nested: bool = False  # whether the i-th passage of a size is the end of the i-th of any larger size

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes."""
        return tuple(self.passages)

    @property
    def fit_up_to(self) -> int:
        """The largest size that forecasts are fitted to; half of the sizes where the usual limit leaves too few."""
        fitted = [size for size in self.sizes if size <= FIT_UP_TO[self.unit]]
        if len(fitted) < 2 or len(fitted) == len(self.sizes):
            fitted = list(self.sizes[: max(2, len(self.sizes) // 2)])
        return fitted[-1]


def task_inputs(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    context: int | None,
    sizes: Sequence[int] | None,
    prompts: int | None,
    seed: int,
) -> ProbeInputs:
    """Prompts of a task, each up to where its answer begins; by default the task's sizes that fit the context."""
    found = {}
    for size in task.sizes if sizes is None else sizes:
        task.check_size(size)
        first = _passage(tokenizer, task.prompts(size, 1, seed)[0])
        if context is not None and first.length > context:
            if sizes is None:
                break
            given = f"{size} for the task {task.name!r}, a prompt of {first.length:,} tokens"
            allowed = f"prompts of up to {context:,} tokens, what the model is made for"
            reject("sizes", given, allowed, "leave out the largest sizes")
        found[size] = [_passage(tokenizer, one) for one in task.prompts(size, _count(first.length, prompts), seed)]
    if not found:
        reject("task", repr(task.name), f"one whose smallest prompt is no longer than {context:,} tokens")
    return ProbeInputs(task.name, "items", found)


def text_inputs(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    context: int | None,
    sizes: Sequence[int] | None,
    prompts: int | None,
    *,
    causal: bool = True,
) -> ProbeInputs:
    """The same last tokens with more and more of the text before them; by default sizes double.

    Windows of different sizes end alike, so that a comparison does not depend on how easy their last words are.
    Special tokens that the tokenizer puts around a text are around each window, and count.
    """
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    before, after = _special_tokens(tokenizer)
    special = len(before) + len(after)
    most = min(len(ids) + special, context or _LONGEST)
    if sizes is None:
        sizes = [min(_SHORTEST, most)]
        while sizes[-1] * 2 <= most:
            sizes.append(sizes[-1] * 2)
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
    return ProbeInputs(TEXT, "tokens", found, per_item=_PER_ITEM, nested=True)


def own_inputs(inputs: Mapping[int, Sequence[Mapping[str, Any]]]) -> ProbeInputs:
    """The caller's own inputs: for each size one or several dicts of keyword arguments of the model."""
    if not isinstance(inputs, Mapping) or not inputs:
        reject_type("inputs", type(inputs).__name__, "a mapping from sizes to lists of keyword arguments of the model")
    found = {}
    for size in sorted(inputs):
        one = inputs[size]
        given: list[Any] = [one] if isinstance(one, Mapping) else list(one)
        if type(size) is not int or size < 1 or not given or not all(isinstance(call, Mapping) for call in given):
            allowed = "for each size, from 1, dicts that the model is called with"
            reject("inputs", f"{given!r:.60} for {size!r}", allowed)
        found[size] = [Passage(dict(call)) for call in given]
    if len(found) < 2:
        reject("inputs", f"the size {list(found)}", "two sizes or more: a slope needs them")
    return ProbeInputs("own", "tokens", found)


def _count(tokens: int, prompts: int | None) -> int:
    return max(_LEAST, min(_PROMPTS, _TOKENS // tokens)) if prompts is None else prompts


def _passage(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> Passage:
    """The prompt up to its answer. Its items are where `replicate_keys` counts twice or leaves a gap."""
    reply = encode(tokenizer, prompt)
    inputs = {"input_ids": torch.tensor([reply.ids[: reply.start]])}
    if not tokenizer.is_fast:
        return Passage(inputs)
    twice = replicate_keys(tokenizer, prompt, reply, 2)
    gaps = [place - at for at, place in enumerate(twice.positions or range(len(twice.ids)))]
    runs = [(mark[0], len(list(run))) for mark, run in groupby(zip(twice.times[: reply.start], gaps, strict=False))]
    if len(runs) < 3:
        return Passage(inputs)
    numbers = [0, *range(1, len(runs) - 1), -1]
    once = next((number for number, (times, _) in zip(numbers, runs, strict=True) if number > 0 and times == 1), 0)
    return Passage(inputs, tuple(n for n, (_, size) in zip(numbers, runs, strict=True) for _ in range(size)), once)


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text."""
    bare, whole = tokenizer("a", add_special_tokens=False).input_ids, tokenizer("a").input_ids
    start = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), 0)
    return whole[:start], whole[start + len(bare) :]


def _ends(shortest: int, longest: int, count: int) -> list[int]:
    """Where windows end: far apart however many of the first are used (van der Corput's sequence)."""
    ends = []
    for number in range(1, count + 1):
        bits = f"{number:b}"[::-1]
        ends.append(round(shortest + int(bits, 2) / 2 ** len(bits) * (longest - shortest)))
    return ends
