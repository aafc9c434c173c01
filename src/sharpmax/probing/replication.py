"""Key replication: a short input read as if it were a long one, for forecasts.

What a longer input does to a head is that more keys share its weight, from further away. So items in the middle of a
short list count several times in every layer, and room is left for as many as they stand for. Three things are kept
as they are, because a longer list does not have more of them:

- the beginning, where tokens that others rest on form at the first occurrence of their kind, and the end;
- the neighbourhood of an item: items stand in blocks, and inside its own block a row sees each key once;
- what a token makes of the text before it: the first items of a block, which a gap precedes, are seen by their own
  block alone. Others would take them for the beginning of something.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sharpmax.integrations.transformers.attention import Repeated
from sharpmax.integrations.transformers.interface import repeating
from sharpmax.probing.inputs import Passage
from sharpmax.stats.call import AttentionCall, hidden_by, without_autocast

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Chosen on lists of 16 and 32 items that stand for 64 (SmolLM2): without the lead the entropy of heads that rest on
# the first item of a list is off by a nat.
_ENDS = 4
_BLOCK = 4
_LEAD = 2


@dataclass(frozen=True, eq=False)
class Crowding:
    """How often each token of a passage counts for rows outside its block, and where it stands."""

    times: Tensor
    """`[L]`; 0: for rows of its own block alone."""

    block: Tensor
    """`[L]`, the block of each token; rows see every key of their own block once."""

    positions: Tensor
    """`[L]`."""

    def weights(self) -> Tensor:
        """How often each key counts for each row, `[L, L]`, what comes later included."""
        own = self.block[:, None] == self.block[None]
        return torch.where(own, torch.ones_like(self.times), self.times)


def crowding_of(passage: Passage, more: float, room: int | None = None) -> Crowding | None:
    """Let a passage stand for one with so many `more` items; None where it has too few items for that."""
    items = torch.tensor(passage.items)
    last = int(items.max()) if len(items) else 0
    blocks = (last - 2 * _ENDS) // _BLOCK
    if blocks < 1:
        return None
    first = last - _ENDS - blocks * _BLOCK
    middle = (items > first) & (items <= last - _ENDS)
    place = items - first - 1
    lead = middle & (place % _BLOCK < _LEAD) & (items != passage.once)
    kept = sorted(set(items[middle & ~lead].tolist()) - {passage.once})
    if not kept:
        return None
    due = more + len(set(items[lead].tolist()))
    times = torch.ones(len(items), dtype=torch.long).masked_fill(lead, 0)
    for number, item in enumerate(kept):
        # Whole numbers whose running sum is never off by more than a half.
        copies = math.floor(due * (number + 1) / len(kept) + 0.5) - math.floor(due * number / len(kept) + 0.5)
        times[items == item] += copies
    block = torch.where(middle, place // _BLOCK, torch.where((items >= 0) & (items <= first), -1, blocks))
    added = times - 1
    gaps = torch.stack([added[block == number].sum().clamp_min(0) for number in range(-1, blocks)]).cumsum(0)
    shift = torch.cat([torch.zeros(1, dtype=torch.long), gaps])[block + 1]
    positions = torch.arange(len(items)) + shift
    if room is not None:
        positions = torch.minimum(positions, room - len(items) + torch.arange(len(items)))
    return Crowding(times, block, positions)


def crowding(model: PreTrainedModel, chosen: Crowding) -> AbstractContextManager[None]:
    """Let every layer of a watched model see the keys of one passage as often as they count.

    A layer without a rule adds ln k to the logit of a key that counts k times. One with a rule sees k keys, because
    the rule asks how many there are and how they share the weight. A window is bounded and stays as it is.
    """
    weighted, copied = _Weighted(torch.empty(0), chosen), _Copied.of(chosen)
    return repeating(model, lambda layer: copied if layer.rules else weighted)


def crowded_row(seen: AttentionCall) -> tuple[Tensor, Tensor]:
    """Entropy and top weight `[B, H]` of the last row, keys that count several times taken for as many keys."""
    row = torch.tensor([seen.queries - 1])
    with without_autocast(seen.q.device):
        weights = seen.logits(row).scaled(None)[:, :, 0].softmax(-1)
    entropy, times = torch.special.entr(weights).sum(-1), None
    if seen.mask is not None and seen.mask.is_floating_point():
        mask = seen.mask.expand(-1, -1, seen.queries, -1)[:, :, -1]
        times = mask.masked_fill(hidden_by(mask), 0.0).to(weights.dtype)
        entropy = entropy + (weights * times).sum(-1)
        weights = weights * (-times).exp()
    return entropy, weights.amax(-1)


def _windowed(mask: Tensor | None, rows: int) -> bool:
    """Whether a mask hides what comes before, beyond what is causal."""
    if mask is None:
        return False
    return bool((hidden_by(mask) & torch.ones(rows, rows, dtype=torch.bool, device=mask.device).tril()).any())


@dataclass(frozen=True, eq=False)
class _Weighted(Repeated):
    chosen: Crowding

    def keys(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, additive: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The keys as they are, under a mask that adds the logarithm of how often they count."""
        rows = query.shape[-2]
        if mask is not None and _windowed(mask, rows):
            return key, value, mask
        times = self.chosen.weights().to(query.device)
        bias = times.clamp_min(1).log().to(query.dtype)
        hidden = (times == 0) | ~torch.ones_like(times, dtype=torch.bool).tril()
        return key, value, bias.masked_fill(hidden, torch.finfo(query.dtype).min)[None, None]


@dataclass(frozen=True, eq=False)
class _Copied(Repeated):
    visible: Tensor

    @classmethod
    def of(cls, chosen: Crowding) -> _Copied:
        """As many copies of a key as it counts, of which a row of its own block sees the first."""
        places = torch.arange(len(chosen.times)).repeat_interleave(chosen.times.clamp_min(1))
        first = torch.cat([torch.ones(1, dtype=torch.bool), places[1:] != places[:-1]])
        own = chosen.block[:, None] == chosen.block[places][None]
        return cls(places[None], torch.where(own, first, chosen.times[places] > 0))

    def keys(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, additive: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The copies, hidden from those that must not see them."""
        if mask is not None and _windowed(mask, query.shape[-2]):
            return key, value, mask
        key, value, mask = Repeated.keys(self, query, key, value, mask, additive)
        hidden = ~self.visible.to(mask.device)
        return key, value, mask.masked_fill(hidden, torch.finfo(mask.dtype).min if mask.is_floating_point() else False)
