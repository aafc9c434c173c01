"""Key replication for forecasts: read a short input as if it were a long one.

In a longer input more keys share the weight of a head, from further away. So items in the middle of a short list count
several times in every layer, with gaps in the positions for the copies. Three things stay as they are, because a
longer list does not have more of them:

- the beginning, where tokens that others rest on form at the first occurrence of their kind, and the end;
- the neighbourhood of an item: items stand in blocks, and inside its own block a row sees each key once;
- what a token makes of the text before it: the first items of a block, which a gap precedes, are visible to their own
  block alone. Other rows would take them for the beginning of something.
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
_ENDS, _BLOCK, _LEAD = 4, 4, 2


@dataclass(frozen=True, eq=False)
class Replication:
    """How often the keys of a passage count, and at which positions its tokens are. All tensors are `[L]`."""

    times: Tensor  # how often each key counts for rows outside its block; 0: not at all
    block: Tensor  # the block of each token; rows see every key of their own block once
    positions: Tensor

    def weights(self) -> Tensor:
        """How often each key counts for each row, `[L, L]`, before the causal mask."""
        own = self.block[:, None] == self.block[None]
        return torch.where(own, torch.ones_like(self.times), self.times)


def replication_of(passage: Passage, more: float, context: int | None = None) -> Replication | None:
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
    replicated = sorted(set(items[middle & ~lead].tolist()) - {passage.once})
    if not replicated:
        return None
    due = more + len(set(items[lead].tolist()))
    times = torch.ones(len(items), dtype=torch.long).masked_fill(lead, 0)
    for number, item in enumerate(replicated):
        # Whole numbers whose running sum is never off by more than a half.
        before, now = (math.floor(due * n / len(replicated) + 0.5) for n in (number, number + 1))
        times[items == item] += now - before
    block = torch.where(middle, place // _BLOCK, torch.where((items >= 0) & (items <= first), -1, blocks))
    gaps = torch.stack([(times - 1)[block == number].sum().clamp_min(0) for number in range(-1, blocks)]).cumsum(0)
    positions = torch.arange(len(items)) + torch.cat([torch.zeros(1, dtype=torch.long), gaps])[block + 1]
    if context is not None:
        positions = torch.minimum(positions, context - len(items) + torch.arange(len(items)))
    return Replication(times, block, positions)


def replicating(model: PreTrainedModel, chosen: Replication) -> AbstractContextManager[None]:
    """Let every layer of an observed model replicate the keys of one passage.

    A layer without a rule adds ln k to the logit of a key that counts k times. One with a rule gets k copies, because
    the rule reads how many keys there are and how they share the weight. A sliding window stays as it is.
    """
    weighted, copied = _Weighted(torch.empty(0), chosen), _Copied.of(chosen)
    return repeating(model, lambda layer: copied if layer.rules else weighted)


def replicated_row(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Entropy and top weight `[B, H]` of the last row, a key that counts k times taken for k keys."""
    with without_autocast(call.q.device):
        weights = call.logits(torch.tensor([call.queries - 1])).scaled(None)[:, :, 0].softmax(-1)
    entropy = torch.special.entr(weights).sum(-1)
    if call.mask is not None and call.mask.is_floating_point():
        mask = call.mask.flatten(1, 2).expand(-1, -1, call.queries, -1)[:, :, -1]
        log_times = mask.masked_fill(hidden_by(mask), 0.0).to(weights.dtype)
        entropy = entropy + (weights * log_times).sum(-1)
        weights = weights * (-log_times).exp()
    return entropy, weights.amax(-1)


def _has_window(mask: Tensor | None, rows: int) -> bool:
    """Whether a mask hides more than a causal mask does."""
    if mask is None:
        return False
    return bool((hidden_by(mask) & torch.ones(rows, rows, dtype=torch.bool, device=mask.device).tril()).any())


@dataclass(frozen=True, eq=False)
class _Weighted(Repeated):
    chosen: Replication

    def keys(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, additive: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The keys as they are, under a mask that adds the logarithm of how often they count."""
        if mask is not None and _has_window(mask, query.shape[-2]):
            return key, value, mask
        times = self.chosen.weights().to(query.device)
        bias = times.clamp_min(1).log().to(query.dtype)
        hidden = (times == 0) | ~torch.ones_like(times, dtype=torch.bool).tril()
        return key, value, bias.masked_fill(hidden, torch.finfo(query.dtype).min)[None, None]


@dataclass(frozen=True, eq=False)
class _Copied(Repeated):
    visible: Tensor

    @classmethod
    def of(cls, chosen: Replication) -> _Copied:
        """As many copies of a key as it counts; rows of its own block see the first copy alone."""
        places = torch.arange(len(chosen.times)).repeat_interleave(chosen.times.clamp_min(1))
        first = torch.cat([torch.ones(1, dtype=torch.bool), places[1:] != places[:-1]])
        own = chosen.block[:, None] == chosen.block[places][None]
        return cls(places[None], torch.where(own, first, chosen.times[places] > 0))

    def keys(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, additive: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The copies, hidden from rows that must not see them."""
        if mask is not None and _has_window(mask, query.shape[-2]):
            return key, value, mask
        key, value, mask = Repeated.keys(self, query, key, value, mask, additive)
        hidden = ~self.visible.to(mask.device)
        return key, value, mask.masked_fill(hidden, torch.finfo(mask.dtype).min if mask.is_floating_point() else False)
