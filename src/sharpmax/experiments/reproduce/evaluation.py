"""Trained heads on sets of growing size, every arm on the same heads and the same items.

Sets are drawn in pages of so many items and read in parts of them that fit into memory, one set at least.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from sharpmax.errors import OutOfRangeWarning
from sharpmax.experiments.threads import one_thread_each, without_denormals
from sharpmax.models.single_head import WIDTH, SingleHeads
from sharpmax.policies.base import Policy
from sharpmax.stats.dense import centred, dense_stats
from sharpmax.stats.statistics import RowStats
from sharpmax.tasks.max_retrieval import draw, seeded

T = TypeVar("T")
X = TypeVar("X")
Size = TypeVar("Size", bound=int | tuple[int, int])

HARD = "hard"
"""The arm that takes the item with the largest logit alone: the limit of any temperature that goes to 0."""

Progress = Callable[[int], None]
"""Told how many items were read since it was last told."""

_PAGE = {"cpu": 2**15, "cuda": 2**22}
_BLOCK = 2**12
_REACH = 40.0
_COPIES = 8


@dataclass(frozen=True)
class Read:
    """What a head makes of some sets: features h [B, n, 128] and logits s [B, n], −inf where an item is not live."""

    head: SingleHeads
    features: Tensor
    logits: Tensor
    priority: Tensor
    best: Tensor
    answer: Tensor

    def scores(self, pooled: Tensor) -> Tensor:
        """Class logits of Σ p_i h_i: [B, ..., 128] -> [B, ..., 10]."""
        return self.head.classify(pooled[None])[0]


def side_by_side(work: Callable[[X], T], over: Sequence[X], device: torch.device) -> list[T]:
    """work(x) for every x, in inference mode; on a CPU several at a time, each on one thread."""

    def one(x: X) -> T:
        with without_denormals(), torch.inference_mode():  # both hold for the thread that asks for them
            return work(x)

    if device.type != "cpu":
        return [one(x) for x in over]
    with one_thread_each() as threads, ThreadPoolExecutor(threads) as pool:
        return list(pool.map(one, over))


def read(
    head: SingleHeads,
    size: int | tuple[int, int],
    samples: int,
    stream: Sequence[int],
    progress: Progress = lambda items: None,
) -> Iterator[Read]:
    """What the head makes of `samples` sets, page by page; `stream` tells one use of random numbers from another."""
    device = device_of(head)
    most = size if isinstance(size, int) else size[1]
    page = max(1, _PAGE.get(device.type, _PAGE["cpu"]) // most)
    generator = seeded(device, *stream, most)
    at_once = max(1, _room(device) // most)
    for start in range(0, samples, page):
        drawn = draw((min(page, samples - start),), size, generator)
        for sets in drawn.split(at_once):
            h = _features(head, sets.items)
            s = head.logits(h[None], sets.query[None])[0].masked_fill(~sets.visible, -torch.inf)
            yield Read(head, h, s, sets.priority, sets.best, sets.answer)
            progress(len(s) * most)


def _room(device: torch.device) -> int:
    """Items whose features fit into memory at once, with what is made of them."""
    if device.type != "cuda":
        return _PAGE["cpu"]
    free, _ = torch.cuda.mem_get_info(device)
    return int(min(_PAGE["cuda"], free // (_COPIES * 4 * WIDTH)))


def device_of(head: SingleHeads) -> torch.device:
    """Where the head's weights are."""
    return next(head.parameters()).device


def _features(head: SingleHeads, items: Tensor) -> Tensor:
    if items.device.type != "cpu":
        return head.features(items[None])[0]
    # On a CPU the layers in between must stay in its cache: wide ones are written to memory and read back.
    rows = items.flatten(0, 1)
    h = torch.empty(len(rows), WIDTH)
    for start in range(0, len(rows), _BLOCK):
        h[start : start + _BLOCK] = head.features(rows[None, start : start + _BLOCK])[0]
    return h.view(*items.shape[:2], WIDTH)


@dataclass(frozen=True)
class Measured:
    """One size: arrays [heads, samples] by arm; `confidence` and `spread` are those of plain softmax."""

    correct: Mapping[str, np.ndarray]
    entropy: Mapping[str, np.ndarray]
    top_weight: Mapping[str, np.ndarray]
    confidence: np.ndarray
    spread: np.ndarray


def measure(
    heads: Sequence[SingleHeads],
    arms: Sequence[Mapping[str, Policy | None]],
    size: Size,
    samples: int,
    stream: Sequence[int],
    progress: Progress = lambda items: None,
) -> Measured:
    """`measure_all` of one size: a number of items, or the least and the largest number of them."""
    return measure_all(heads, arms, [size], samples, stream, progress)[size]


def measure_all(
    heads: Sequence[SingleHeads],
    arms: Sequence[Mapping[str, Policy | None]],
    sizes: Sequence[Size],
    samples: int,
    stream: Sequence[int],
    progress: Progress = lambda items: None,
) -> dict[Size, Measured]:
    """Evaluate the arms (for each head its own policies, the same names, `softmax` the first) and `hard` at each size.

    Heads see different sets, so that the spread between them holds the chance of drawing too; the arms of a head all
    see the same ones.
    """

    def one(task: tuple[Size, int]) -> dict[str, np.ndarray]:
        size, position = task
        reads = read(heads[position], size, samples, (*stream, position), progress)
        pages = [measure_page(seen, arms[position]) for seen in reads]
        return {name: torch.cat([page[name] for page in pages]).cpu().numpy() for name in pages[0]}

    # The longest first, so that none is left for the end.
    tasks = [(size, position) for size in reversed(sizes) for position in range(len(heads))]
    with warnings.catch_warnings():
        # Where a policy leaves the range it was fitted on is part of the results; it is told there.
        warnings.simplefilter("ignore", OutOfRangeWarning)
        found = dict(zip(tasks, side_by_side(one, tasks, device_of(heads[0])), strict=True))
    return {size: _measured(list(arms[0]), [found[size, p] for p in range(len(heads))]) for size in sizes}


def _measured(arms: Sequence[str], by_head: Sequence[Mapping[str, np.ndarray]]) -> Measured:
    def gather(name: str) -> np.ndarray:
        return np.stack([columns[name] for columns in by_head])

    return Measured(
        correct={arm: gather(f"correct {arm}") for arm in (*arms, HARD)},
        entropy={arm: gather(f"entropy {arm}") for arm in arms},
        top_weight={arm: gather(f"top {arm}") for arm in arms},
        confidence=gather("confidence"),
        spread=gather("spread"),
    )


def measure_page(seen: Read, arms: Mapping[str, Policy | None]) -> dict[str, Tensor]:
    """What `Measured` holds, for one head and the sets it has just read: [B] by the name of field and arm."""
    s, h = _near(seen)
    live = s > -torch.inf
    x, _ = centred(s, live)
    plain = _counting_all(dense_stats(s, live), seen.logits)
    found: dict[str, Tensor] = {"spread": _spread(seen.logits)}
    weights = []
    for name, policy in arms.items():
        scaled, stats = x, plain
        if policy is not None:
            beta = policy.beta(plain, lambda b: dense_stats(x * b[:, None].to(x.dtype), live))
            scaled = x * beta[:, None].to(x.dtype)
            stats = dense_stats(scaled, live)
        found[f"entropy {name}"], found[f"top {name}"] = stats.entropy, stats.top_weight
        weights.append(scaled.masked_fill(~live, -torch.inf).softmax(-1))
    pooled = torch.matmul(torch.stack(weights, dim=1), h)
    # Items come largest logit first, so the first is the one that hard attention takes.
    scores = seen.scores(torch.cat((pooled, h[:, :1]), dim=1))
    right = scores.argmax(-1) == seen.answer[:, None]
    found |= {f"correct {name}": right[:, column] for column, name in enumerate((*arms, HARD))}
    found["confidence"] = scores[:, 0].softmax(-1).amax(-1)
    return found


def _near(seen: Read) -> tuple[Tensor, Tensor]:
    """Logits and features of the items that can weigh anything, largest logit first.

    An item `_REACH` nats under the top weighs less than e^−40 of it at any β ≥ 1. All of them together stay under the
    rounding of float32 by a factor of a million, and leaving them out saves most of the work.
    """
    reach = seen.logits > seen.logits.amax(-1, keepdim=True) - _REACH
    count = int(reach.sum(-1).max())
    s, order = seen.logits.topk(count)
    h = seen.features.gather(1, order[..., None].expand(-1, -1, WIDTH))
    return s.masked_fill(s <= s[:, :1] - _REACH, -torch.inf), h


def _counting_all(stats: RowStats, logits: Tensor) -> RowStats:
    """The statistics with every item counted, those out of reach too: some policies go by their number."""
    parts, measured = stats.flatten()
    return RowStats.unflatten(measured, [(logits > -torch.inf).sum(-1), *parts[1:]])


def _spread(logits: Tensor) -> Tensor:
    least = logits.masked_fill(logits == -torch.inf, torch.inf).amin(-1)
    return logits.amax(-1) - least
