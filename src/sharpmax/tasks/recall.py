"""Multi-query multi-token associative recall: pairs of a key and a value, two tokens each, then some of them again.

Keys of a sequence are all different. A question is a key followed by its value: the value's first token is asked after
the key, its second after the first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sharpmax.tasks.sized import NOTHING, Batch, SizedTask, Sizes, limits

__all__ = ["RECALL"]

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
    live = torch.arange(most, device=device) >= most - size
    live = torch.cat(
        (live.repeat_interleave(_PAIR, dim=-1), torch.ones_like(questions.flatten(-2), dtype=torch.bool)), -1
    )
    nothing = torch.full_like(chosen, NOTHING)
    answer = torch.stack((nothing, questions[..., 2], questions[..., 3], nothing), dim=-1).flatten(-2)
    first = _PAIR * chosen
    source = torch.stack((first, first + 2, first + 3, first), dim=-1).flatten(-2)
    return Batch(inputs, live, answer, source, torch.zeros(shape, dtype=torch.bool, device=device))


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
    name="recall",
    version=1,
    summary=f"values of {_QUESTIONS} keys among n pairs, keys and values of two tokens each",
    unit="pairs",
    trained=(5, 16),
    sizes=tuple(2**power for power in range(4, 13)),
    most=_ALPHABET**2,
    features=0,
    tokens=_ALPHABET,
    classes=_ALPHABET,
    ordered=True,
    draw=_recall,
)
