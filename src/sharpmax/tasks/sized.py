"""Tasks of growing size for small models: copying and associative recall."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NOTHING = -1
"""Stands for the answer where nothing is asked."""

Sizes = int | tuple[int, int]
"""A size, or the least and the largest, between which each example draws its own."""


def limits(sizes: Sizes) -> tuple[int, int]:
    """The least and the largest size."""
    return (sizes, sizes) if isinstance(sizes, int) else sizes


@dataclass(frozen=True)
class Batch:
    """Examples of one problem: `inputs` [..., L, F] numbers or [..., L] tokens, `visible` [..., L].

    The last A positions are asked: `answer` [..., A] is a class or `NOTHING`, and `source` [..., A] the position that
    it can be read off. `close` [...] marks examples in which another position is nearly as good as the right one.
    """

    inputs: Tensor
    visible: Tensor
    answer: Tensor
    source: Tensor
    close: Tensor

    @property
    def parts(self) -> list[Tensor]:
        """What a model is trained on: inputs, visible, answer."""
        return [self.inputs, self.visible, self.answer]


@dataclass(frozen=True)
class SizedTask:
    """A problem that is learned at small sizes and asked at large ones."""

    name: str
    version: int  # changes when the same seed no longer gives the same examples
    summary: str
    unit: str
    sizes: tuple[int, ...]  # sizes that are tested unless others are given
    most: int  # the largest size there can be
    classes: int
    draw: Callable[..., Batch]
    """`draw(shape, sizes, generator)`: independent examples, `shape` of them, on the generator's device.

    What else it takes by name, `options`, makes other examples for training.
    """

    options: tuple[str, ...] = ()
    trained: tuple[int, int] = (5, 16)  # the least and the largest size in training
    features: int = 0  # numbers of an input position, or 0 where inputs are tokens
    tokens: int = 0  # tokens there are, or 0 where inputs are numbers
    ordered: bool = False  # whether the order of positions matters, so that a model must know it


_LETTERS = 64
_MARK = _LETTERS


def _copy(shape: tuple[int, ...], sizes: Sizes, generator: torch.Generator) -> Batch:
    least, most = limits(sizes)
    device = generator.device
    letters = torch.randint(_LETTERS, (*shape, most), generator=generator, device=device)
    size = torch.randint(least, most + 1, (*shape, 1), generator=generator, device=device)
    place = torch.arange(most, device=device)
    # The sequence ends where its copy begins, and so has its blanks in front; those of the copy are behind it.
    asked = place < size
    start = most - size
    source = (start + place).clamp(max=most - 1)
    again = letters.gather(-1, source)
    mark = torch.full((*shape, 1), _MARK, device=device)
    inputs = torch.cat((letters, mark, again[..., :-1]), dim=-1)
    visible = torch.cat((place >= start, asked), dim=-1)
    answer = torch.where(asked, again, NOTHING)
    return Batch(inputs, visible, answer, source, torch.zeros(shape, dtype=torch.bool, device=device))


_DOUBLING = tuple(2**power for power in range(4, 13))
COPY = SizedTask(
    "copy", 1, f"a sequence of {_LETTERS} letters once more", "letters", sizes=_DOUBLING, most=2**16, classes=_LETTERS,
    draw=_copy, tokens=_LETTERS + 1, ordered=True,
)  # fmt: skip


_ALPHABET = 128
_PAIR = 4
_QUESTIONS = 4
_ROUNDS = 4


def _recall(shape: tuple[int, ...], sizes: Sizes, generator: torch.Generator) -> Batch:
    least, most = limits(sizes)
    device = generator.device
    pairs = torch.cat((_different(shape, most, generator), _any(shape, most, generator)), dim=-1)
    size = torch.randint(least, most + 1, (*shape, 1), generator=generator, device=device)
    # Blanks come first, so that the pairs end where the questions begin.
    place = torch.rand(*shape, _QUESTIONS, generator=generator, device=device)
    chosen = most - 1 - torch.minimum((place * size).long(), size - 1)
    questions = pairs.gather(-2, chosen[..., None].expand(*chosen.shape, _PAIR))
    inputs = torch.cat((pairs.flatten(-2), questions.flatten(-2)), dim=-1)
    visible = torch.arange(most, device=device) >= most - size
    visible = torch.cat(
        (visible.repeat_interleave(_PAIR, dim=-1), torch.ones_like(questions.flatten(-2), dtype=torch.bool)), -1
    )
    nothing = torch.full_like(chosen, NOTHING)
    answer = torch.stack((nothing, questions[..., 2], questions[..., 3], nothing), dim=-1).flatten(-2)
    first = _PAIR * chosen
    source = torch.stack((first, first + 2, first + 3, first), dim=-1).flatten(-2)
    return Batch(inputs, visible, answer, source, torch.zeros(shape, dtype=torch.bool, device=device))


def _any(shape: tuple[int, ...], count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(_ALPHABET, (*shape, count, 2), generator=generator, device=generator.device)


def _different(shape: tuple[int, ...], count: int, generator: torch.Generator) -> Tensor:
    """`count` different keys of two tokens: a random permutation of all keys, of which the first are taken.

    Sorting all keys to draw a few would be most of the work. A Feistel network of random tables permutes them as well,
    and each key can be asked for alone.
    """
    device = generator.device
    tables = torch.randint(_ALPHABET, (_ROUNDS, *shape, _ALPHABET), generator=generator, device=device)
    index = torch.arange(count, device=device).expand(*shape, count)
    left, right = index // _ALPHABET, index % _ALPHABET
    for table in tables:
        left, right = right, (left + table.gather(-1, right)) % _ALPHABET
    return torch.stack((left, right), dim=-1)


RECALL = SizedTask(
    "recall", 1, f"values of {_QUESTIONS} keys among n pairs, keys and values of two tokens each", "pairs",
    sizes=_DOUBLING, most=_ALPHABET**2, classes=_ALPHABET, draw=_recall, tokens=_ALPHABET, ordered=True,
)  # fmt: skip
