"""What attention looks at while a model runs, for whoever watches: any of its rows, one call at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sharpmax.hf.dense import DenseLogits
from sharpmax.rows.layout import floats_at_least_32

__all__ = ["Seen", "Watcher", "Watchers"]


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

    def rows(self, places: Tensor) -> DenseLogits:
        """The logits of the rows at `places` `[R]`, `[B, H, R, Lk]` in float32 at least."""
        q, k, group = self.query[:, :, places], self.key, self.heads // self.key.shape[1]
        dtype = floats_at_least_32(q.dtype)
        scale = q.shape[-1] ** -0.5 if self.scaling is None else self.scaling
        q = (q.to(dtype) * scale).reshape(self.batch, k.shape[1], group * len(places), -1)
        s = torch.matmul(q, k.to(dtype).transpose(2, 3)).view(self.batch, self.heads, len(places), self.keys)
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

    def _mask(self, places: Tensor) -> Tensor | None:
        if self.mask is not None:
            whole = self.mask.expand(-1, -1, self.queries, -1)
            return whole[:, :, places.to(whole.device)]
        if self.causal:
            last = places[:, None].to(self.key.device) + self.offset
            return (torch.arange(self.keys, device=self.key.device) <= last)[None, None]
        return None


Watcher = Callable[[Seen], None]


@dataclass(eq=False)
class Watchers:
    """Those who watch one model. The tuple is replaced, never changed, so that a call in another thread may go on."""

    active: tuple[Watcher, ...] = field(default=())

    def __deepcopy__(self, memo: Any) -> Watchers:
        """Nobody watches a copy."""
        return Watchers()

    def show(self, seen: Callable[[], Seen]) -> None:
        """Let everyone see a call, which is described only if there is someone.

        A watcher that has a method `looks` is asked by it first: describing a call for nobody would cost a token that
        is generated one percent of its time.
        """
        if self.active and not torch.compiler.is_compiling():
            looking = [one for one in self.active if getattr(one, "looks", _always)()]
            if looking:
                with torch.no_grad():
                    call = seen()
                    for watcher in looking:
                        watcher(call)


def _always() -> bool:
    return True
