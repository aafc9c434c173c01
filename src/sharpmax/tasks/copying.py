"""Copying a sequence of tokens: x₁ … xₙ, a mark, and then x₁ … xₙ once more, asked token by token."""

from __future__ import annotations

import torch

from sharpmax.tasks.sized import NOTHING, Batch, SizedTask, Sizes, limits

__all__ = ["COPY"]

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
    live = torch.cat((place >= start, asked), dim=-1)
    answer = torch.where(asked, again, NOTHING)
    return Batch(inputs, live, answer, source, torch.zeros(shape, dtype=torch.bool, device=device))


COPY = SizedTask(
    name="copy",
    version=1,
    summary=f"a sequence of {_LETTERS} letters once more",
    unit="letters",
    trained=(5, 16),
    sizes=tuple(2**power for power in range(4, 13)),
    most=2**16,
    features=0,
    tokens=_LETTERS + 1,
    classes=_LETTERS,
    ordered=True,
    draw=_copy,
)
