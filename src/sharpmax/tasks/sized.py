"""Problems for small models: the same question at any size, with the place where its answer is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

__all__ = ["NOTHING", "Batch", "SizedTask", "Sizes", "limits"]

NOTHING = -1
"""Stands for the answer where nothing is asked."""

Sizes = int | tuple[int, int]
"""A size, or the least and the largest, between which each example draws its own."""


def limits(sizes: Sizes) -> tuple[int, int]:
    """The least and the largest size."""
    return (sizes, sizes) if isinstance(sizes, int) else sizes


@dataclass(frozen=True)
class Batch:
    """Examples of one problem: `inputs` [..., L, F] numbers or [..., L] tokens, `live` [..., L].

    The last A positions are asked: `answer` [..., A] is a class or `NOTHING`, and `source` [..., A] the position that
    it can be read off. `close` [...] tells examples in which another position is nearly as good as the right one.
    """

    inputs: Tensor
    live: Tensor
    answer: Tensor
    source: Tensor
    close: Tensor

    @property
    def parts(self) -> list[Tensor]:
        """What a model is trained on: inputs, live, answer."""
        return [self.inputs, self.live, self.answer]


@dataclass(frozen=True)
class SizedTask:
    """A problem that is learned at small sizes and asked at large ones."""

    name: str
    version: int
    """Changes when the same seed no longer gives the same examples."""

    summary: str
    unit: str
    trained: tuple[int, int]
    """The least and the largest size in training."""

    sizes: tuple[int, ...]
    """Sizes that are tested unless others are given."""

    most: int
    """The largest size there can be."""

    features: int
    """Numbers of an input position, or 0 where inputs are tokens."""

    tokens: int
    """Tokens there are, or 0 where inputs are numbers."""

    classes: int
    ordered: bool
    """Whether the order of positions matters, so that a model must know it."""

    draw: Callable[..., Batch]
    """`draw(shape, sizes, generator)`: independent examples, `shape` of them, on the generator's device.

    What else it takes by name, `options`, makes other examples for training.
    """

    options: tuple[str, ...] = ()
