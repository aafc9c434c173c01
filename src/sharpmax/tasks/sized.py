"""Tasks of growing size for small models: max retrieval (the paper's experiment), sorting, copying and recall."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sharpmax.errors import reject

NOTHING = -1
"""The answer at positions where nothing is asked."""

Sizes = int | tuple[int, int]
"""A size, or the smallest and the largest size, between which each example draws its own."""


def limits(sizes: Sizes) -> tuple[int, int]:
    """Return the smallest and the largest size."""
    return (sizes, sizes) if isinstance(sizes, int) else sizes


@dataclass(frozen=True)
class Batch:
    """Examples of one problem: `inputs` [..., L, F] numbers or [..., L] tokens, `visible` [..., L].

    The last A positions are questions: `answer` [..., A] is a class or `NOTHING`, and `source` [..., A] the position
    that holds it. `close` [...] marks examples in which another position is nearly as good as the right one.
    """

    inputs: Tensor
    visible: Tensor
    answer: Tensor
    source: Tensor
    close: Tensor

    @property
    def parts(self) -> list[Tensor]:
        """The tensors that a model is trained on: inputs, visible, answer."""
        return [self.inputs, self.visible, self.answer]


@dataclass(frozen=True)
class SizedTask:
    """A problem to train on at small sizes and test at large ones."""

    name: str
    version: int  # changes when the same seed no longer gives the same examples
    summary: str
    unit: str
    sizes: tuple[int, ...]  # the default sizes to test at
    most: int  # the largest possible size
    classes: int
    draw: Callable[..., Batch]
    """`draw(shape, sizes, generator, **options)` returns `shape` independent examples on the generator's device."""

    options: tuple[str, ...] = ()
    """Keyword arguments of `draw` that change the examples for training."""

    trained: tuple[int, int] = (5, 16)  # the smallest and the largest training size
    features: int = 0  # numbers per input position, or 0 if inputs are tokens
    tokens: int = 0  # size of the vocabulary, or 0 if inputs are numbers
    ordered: bool = False  # whether the order of positions matters, so that a model needs positions


VERSION = 1
"""Changes when the same seed no longer gives the same sets."""

CLASSES = 10

FEATURES = 1 + CLASSES
"""Numbers per item: its priority, and its class as one-hot."""


@dataclass(frozen=True)
class Sets:
    """Sets of items: `priority` [..., n] in 0 … 1, `label` [..., n] in 0 … 9, `query` [...], `visible` [..., n].

    `query` is a random number that carries no information; `visible` is False where a set is smaller than n.
    """

    priority: Tensor
    label: Tensor
    query: Tensor
    visible: Tensor

    def split(self, count: int) -> list[Sets]:
        """Split the sets along the first axis, `count` at a time."""
        fields = (self.priority, self.label, self.query, self.visible)
        starts = range(0, len(self.query), count)
        return [Sets(*(field[start : start + count] for field in fields)) for start in starts]

    @property
    def items(self) -> Tensor:
        """The model's inputs for each item: [..., n, 11]."""
        # `one_hot` would synchronise a GPU with the host, to check that every class is in range.
        classes = torch.arange(CLASSES, device=self.label.device)
        one_hot = (self.label[..., None] == classes).to(self.priority.dtype)
        return torch.cat((self.priority[..., None], one_hot), dim=-1)

    @property
    def best(self) -> Tensor:
        """The position of the item with the highest priority: [...]."""
        return self.priority.masked_fill(~self.visible, -1.0).argmax(-1)

    @property
    def answer(self) -> Tensor:
        """The class of that item: [...]."""
        return self.label.gather(-1, self.best[..., None])[..., 0]


def seeded(device: torch.device, *numbers: int) -> torch.Generator:
    """Return a generator seeded with whole numbers below 2³²; trailing zeros do not matter."""
    words = np.random.SeedSequence(numbers).generate_state(2)
    return torch.Generator(device).manual_seed(int(words[0]) << 31 | int(words[1]) >> 1)


def draw(shape: tuple[int, ...], sizes: Sizes, generator: torch.Generator) -> Sets:
    """Return `shape` independent sets on the generator's device.

    `sizes` is the number of items, or the smallest and the largest number, between which each set draws its own. Sets
    are as wide as the largest, with the rest not visible.

    >>> sets = draw((3,), (5, 16), torch.Generator().manual_seed(0))
    >>> tuple(sets.priority.shape), sets.visible.sum(-1).tolist()
    ((3, 16), [9, 10, 11])
    """
    least, most = limits(sizes)
    device = generator.device
    priority = torch.rand(*shape, most, generator=generator, device=device)
    label = torch.randint(CLASSES, (*shape, most), generator=generator, device=device)
    query = torch.rand(shape, generator=generator, device=device)
    size = torch.randint(least, most + 1, shape, generator=generator, device=device)
    return Sets(priority, label, query, torch.arange(most, device=device) < size[..., None])


ROW = FEATURES + 2
"""Numbers per row: those of an item, the number in a question, and whether the row is a question."""

_ASKED = 8


def items_and_query(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return items [..., n, 11] and the query [...] of rows [..., n + 1, 13] with one question."""
    return inputs[..., :-1, :FEATURES], inputs[..., -1, FEATURES]


def _max(
    shape: tuple[int, ...], sizes: Sizes, generator: torch.Generator, zoom: float = 1.0, anywhere: bool = False
) -> Batch:
    """Draw sets as in the paper; with `zoom` below 1, each in a range of its own with a log-uniform width `zoom` … 1.

    A small set from a narrow range has items as close as the best items of a large set. The ranges end at 1, where the
    best items of large sets are, or with `anywhere` are placed anywhere between 0 and 1.
    """
    sets = draw(shape, sizes, generator)
    if zoom != 1.0:
        width = zoom ** torch.rand(*shape, 1, generator=generator, device=generator.device)
        top = torch.ones_like(width)
        if anywhere:
            top -= (1.0 - width) * torch.rand(*shape, 1, generator=generator, device=generator.device)
        sets = replace(sets, priority=top - width * (1.0 - sets.priority))
    best = sets.best[..., None]
    two = sets.priority.masked_fill(~sets.visible, -1.0).topk(min(2, sets.priority.shape[-1])).values
    return _asked(sets, sets.query[..., None], best, two[..., 0] - two[..., -1])


def _sort(shape: tuple[int, ...], sizes: Sizes, generator: torch.Generator) -> Batch:
    """Ask for the item after a given one in ascending order, `_ASKED` times; 0 asks for the first item."""
    sets = draw(shape, sizes, generator)
    ascending, order = sets.priority.masked_fill(~sets.visible, math.inf).sort(-1)
    size = sets.visible.sum(-1, keepdim=True)
    place = torch.rand(*shape, _ASKED, generator=generator, device=generator.device)
    rank = torch.minimum((place * size).long(), size - 1)
    before = torch.where(rank > 0, ascending.gather(-1, (rank - 1).clamp(min=0)), 0.0)
    after = ascending.gather(-1, torch.minimum(rank + 1, size - 1))
    apart = torch.where(rank + 1 < size, after - ascending.gather(-1, rank), math.inf).amin(-1)
    return _asked(sets, before, order.gather(-1, rank), apart * _ASKED)


def _asked(sets: Sets, query: Tensor, source: Tensor, apart: Tensor) -> Batch:
    """Return rows of the items and the questions. About half of the examples, whose best two are closest, are close."""
    items = torch.nn.functional.pad(sets.items, (0, 2))
    questions = torch.zeros(*query.shape, ROW, device=query.device, dtype=query.dtype)
    questions[..., FEATURES] = query
    questions[..., FEATURES + 1] = 1.0
    seen = torch.ones_like(query, dtype=torch.bool)
    # The gap between neighbours among n uniform draws has a median of about ln 2/n.
    close = apart * (sets.visible.sum(-1) + 1) < math.log(2.0)
    visible = torch.cat((sets.visible, seen), dim=-1)
    answer = sets.label.gather(-1, source)
    return Batch(torch.cat((items, questions), dim=-2), visible, answer, source, close)


MAX = SizedTask(
    "max", VERSION, "the class of the item with the highest priority", "items", classes=CLASSES, features=ROW,
    sizes=tuple(2**power for power in range(4, 15)), most=2**20, draw=_max, options=("zoom", "anywhere"),
)  # fmt: skip

SORT = replace(
    MAX, name="sort", version=1, draw=_sort, options=(),
    summary=f"the class of the item that comes next in ascending order, asked {_ASKED} times of each set",
)  # fmt: skip


_LETTERS = 64


def _copy(shape: tuple[int, ...], sizes: Sizes, generator: torch.Generator) -> Batch:
    least, most = limits(sizes)
    device = generator.device
    letters = torch.randint(_LETTERS, (*shape, most), generator=generator, device=device)
    size = torch.randint(least, most + 1, (*shape, 1), generator=generator, device=device)
    place = torch.arange(most, device=device)
    # The sequence ends where its copy begins: padding is before the sequence and after its copy.
    asked = place < size
    start = most - size
    source = (start + place).clamp(max=most - 1)
    again = letters.gather(-1, source)
    mark = torch.full((*shape, 1), _LETTERS, device=device)
    inputs = torch.cat((letters, mark, again[..., :-1]), dim=-1)
    visible = torch.cat((place >= start, asked), dim=-1)
    answer = torch.where(asked, again, NOTHING)
    return Batch(inputs, visible, answer, source, torch.zeros(shape, dtype=torch.bool, device=device))


_DOUBLING = tuple(2**power for power in range(4, 13))
COPY = SizedTask(
    "copy", 1, f"a sequence of {_LETTERS} letters once more", "letters", sizes=_DOUBLING, most=2**16, classes=_LETTERS,
    draw=_copy, tokens=_LETTERS + 1, ordered=True,
)  # fmt: skip


_ALPHABET, _PAIR, _QUESTIONS = 128, 4, 4


def _recall(shape: tuple[int, ...], sizes: Sizes, generator: torch.Generator) -> Batch:
    least, most = limits(sizes)
    device = generator.device
    keys = _different(shape, most, generator)
    values = torch.randint(_ALPHABET, (*shape, most, 2), generator=generator, device=device)
    pairs = torch.cat((keys, values), dim=-1)
    size = torch.randint(least, most + 1, (*shape, 1), generator=generator, device=device)
    # Padding comes first, so that the pairs end where the questions begin.
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


def _different(shape: tuple[int, ...], count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` different keys of two tokens: the first of a random permutation of all keys.

    The permutation is a Feistel network of random tables, which computes single keys without sorting all of them.
    """
    device = generator.device
    tables = torch.randint(_ALPHABET, (4, *shape, _ALPHABET), generator=generator, device=device)
    index = torch.arange(count, device=device).expand(*shape, count)
    left, right = index // _ALPHABET, index % _ALPHABET
    for table in tables:
        left, right = right, (left + table.gather(-1, right)) % _ALPHABET
    return torch.stack((left, right), dim=-1)


RECALL = SizedTask(
    "recall", 1, f"values of {_QUESTIONS} keys among n pairs, keys and values of two tokens each", "pairs",
    sizes=_DOUBLING, most=_ALPHABET**2, classes=_ALPHABET, draw=_recall, tokens=_ALPHABET, ordered=True,
)  # fmt: skip

SIZED_TASKS: Mapping[str, SizedTask] = {task.name: task for task in (MAX, RECALL, SORT, COPY)}
"""The tasks that small models are compared on."""


def sized_task(name: str) -> SizedTask:
    """Return the task of that name."""
    if name not in SIZED_TASKS:
        reject("task", repr(name), f"one of {list(SIZED_TASKS)}")
    return SIZED_TASKS[name]
