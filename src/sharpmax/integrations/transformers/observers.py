"""Observers see the attention calls of a running model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sharpmax.integrations.transformers.logits import DenseLogits
from sharpmax.stats.call import floats_at_least_32


@dataclass(frozen=True, eq=False)
class Seen:
    """One call of attention in one layer, with the logits its softmax gets: β, masks and biases are in them.

    `query` `[B, H, Lq, D]` and `key` `[B, Hkv, Lk, D]` are detached. A mask is boolean (True = visible) or float
    (added); without one, `causal` rows see the keys up to their own place and `offset` more.
    """

    layer: int
    query: Tensor
    key: Tensor
    mask: Tensor | None
    causal: bool
    scaling: float | None
    softcap: float | None = None
    after_cap: Tensor | None = None
    """β `[B, H, Lq]` where it meets the logits after their cap; elsewhere it is in the query already."""

    offset: int = 0

    @property
    def batch(self) -> int:
        """How many sequences."""
        return self.query.shape[0]

    @property
    def heads(self) -> int:
        """How many heads."""
        return self.query.shape[1]

    @property
    def queries(self) -> int:
        """How many rows each head has in this call."""
        return self.query.shape[2]

    @property
    def keys(self) -> int:
        """How many keys there are, visible or not."""
        return self.key.shape[2]

    def rows(self, places: Tensor | slice) -> DenseLogits:
        """The logits of the rows at `places` `[R]`, `[B, H, R, Lk]` in float32 at least; a slice costs less."""
        q, k = self.query[:, :, places], self.key
        dtype, (batch, heads, rows, width) = floats_at_least_32(q.dtype), q.shape
        scale = width**-0.5 if self.scaling is None else self.scaling
        # Each key is read once for all heads that share it, and scaled by the product itself: a generated token can
        # afford few operations.
        q = q.to(dtype).reshape(batch * k.shape[1], -1, width)
        k = k.to(dtype).flatten(0, 1).transpose(1, 2)
        s = torch.baddbmm(q.new_empty(()), q, k, beta=0.0, alpha=scale).view(batch, heads, rows, self.keys)
        if self.softcap is not None:
            s = torch.tanh(s / self.softcap) * self.softcap
        if self.after_cap is not None:
            s = s * self.after_cap.expand(self.query.shape[:-1])[:, :, places, None].to(dtype)
        return DenseLogits.masked(s, self._mask(places))

    def own_rows(self, places: Tensor) -> Seen:
        """The same call with a single row of each sequence, that at its own place `[B]`."""
        chosen = places.to(self.query.device).view(-1, 1, 1, 1)
        query = self.query.gather(2, chosen.expand(-1, self.heads, 1, self.query.shape[-1]))
        mask, beta = self.mask, self.after_cap
        if mask is not None:
            whole = mask.expand(self.batch, -1, self.queries, -1)
            mask = whole.gather(2, chosen.to(whole.device).expand(-1, whole.shape[1], 1, whole.shape[3]))
        elif self.causal:
            mask = torch.arange(self.keys, device=chosen.device) <= chosen + self.offset
        if beta is not None:
            beta = beta.expand(self.query.shape[:-1]).gather(2, chosen[..., 0].expand(-1, self.heads, 1))
        return replace(self, query=query, mask=mask, causal=False, after_cap=beta)

    def _mask(self, places: Tensor | slice) -> Tensor | None:
        if self.mask is not None:
            whole = self.mask.expand(-1, -1, self.queries, -1)
            return whole[:, :, _on(places, whole.device)]
        if self.causal:
            device = self.key.device
            last = torch.arange(self.queries, device=device)[_on(places, device), None] + self.offset
            return (torch.arange(self.keys, device=device) <= last)[None, None]
        return None


def _on(places: Tensor | slice, device: torch.device) -> Tensor | slice:
    return places.to(device) if isinstance(places, Tensor) else places


Watcher = Callable[[Seen], None]


@dataclass(eq=False)
class Watchers:
    """Those who watch one model. The tuple is replaced, never changed, so that a call in another thread may go on."""

    active: tuple[Watcher, ...] = field(default=())

    def __deepcopy__(self, memo: Any) -> Watchers:
        """Nobody watches a copy."""
        return Watchers()

    def __reduce__(self) -> tuple[type[Watchers], tuple[()]]:
        """Nor what comes back from a pickle."""
        return Watchers, ()

    def looking(self) -> list[Watcher]:
        """Those who are to see a call of this thread.

        A watcher that has a method `looks` is asked by it: describing a call for nobody would cost a token that is
        generated one percent of its time.
        """
        if not self.active or torch.compiler.is_compiling():
            return []
        return [one for one in self.active if getattr(one, "looks", _always)()]


def _always() -> bool:
    return True
