"""Transformer encoders of one to a few layers with any normaliser, for many seeds at once.

Pre-norm; attention is global or causal and has no position encoding, which could fail at sizes beyond training. Where
order matters, a short convolution at the input gives each position the three before it: enough to know what follows
what, at any size and with every normaliser.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sharpmax.errors import reject
from sharpmax.models.single_head import (
    ACTIVATIONS,
    Linear,
    Mlp,
    Norm,
    Normalisers,
    Reading,
    RowSummary,
    initialise,
    summarise_rows,
)
from sharpmax.normalisers.base import Normaliser
from sharpmax.tasks.sized import SizedTask

_REACH = 3
_FEED = 2
_LOGITS = {"cpu": 2**22, "cuda": 2**27}
"""Attention weights that are computed at once without gradients."""


class Encoders(nn.Module):
    """Encoders of several seeds for one task; every input and output has the seeds as its first axis."""

    def __init__(
        self,
        seeds: Sequence[int],
        normaliser: str,
        options: Mapping[str, Any],
        task: SizedTask,
        *,
        width: int = 128,
        heads: int = 4,
        depth: int = 1,
        causal: bool = False,
        feed_forward: str = "gelu",
    ) -> None:
        super().__init__()
        if width % heads:
            reject("width", width, f"a multiple of the number of heads, {heads}")
        self._tokens, count = task.tokens, len(seeds)
        self.embed = Linear(count, task.tokens, width) if task.tokens else Mlp(count, task.features, width, width)
        self.neighbours = Linear(count, (1 + _REACH) * width, width) if task.ordered else None
        self.layers = nn.ModuleList(
            _Layer(seeds, normaliser, options, width, heads, causal=causal, feed_forward=feed_forward)
            for _ in range(depth)
        )
        self.norm = Norm(count, width)
        self.classes = Linear(count, width, task.classes)
        initialise(self, seeds)

    def answer(self, inputs: Tensor, visible: Tensor, asked: int) -> Tensor:
        """Class logits [S, B, A, C] at the last `asked` positions of inputs [S, B, L] or [S, B, L, F]."""
        x = self._embedded(inputs, visible)
        for number, layer in enumerate(self._layers(), start=1):
            x = layer(x, visible, asked if number == len(self.layers) else x.shape[-2])
        return self._classify(x)

    def read(self, inputs: Tensor, visible: Tensor, asked: int) -> Reading:
        """The answer, and summaries of the attention rows."""
        x = self._embedded(inputs, visible)
        argmax, summaries = x, []
        for number, layer in enumerate(self._layers(), start=1):
            x, argmax, summary = layer.read(x, visible, asked if number == len(self.layers) else x.shape[-2], asked)
            summaries.append(summary)
        return Reading(self._classify(x), self._classify(argmax), tuple(summaries))

    def _layers(self) -> Sequence[_Layer]:
        return list(self.layers)  # type: ignore[arg-type]

    def _embedded(self, inputs: Tensor, visible: Tensor) -> Tensor:
        if self._tokens:
            # Compared instead of `one_hot`, which on a GPU asks the host whether every token is in range.
            inputs = (inputs[..., None] == torch.arange(self._tokens, device=inputs.device)).to(self.norm.gain.dtype)
        x: Tensor = self.embed(inputs)
        if self.neighbours is None:
            return x
        x = x * visible[..., None]
        around = [F.pad(x, (0, 0, back, 0))[..., : x.shape[-2], :] for back in range(1 + _REACH)]
        return x + self.neighbours(torch.cat(around, dim=-1))  # type: ignore[no-any-return]

    def _classify(self, x: Tensor) -> Tensor:
        return self.classes(self.norm(x))  # type: ignore[no-any-return]


class _Layer(nn.Module):
    """Attention and a feed-forward network, each added to what came in."""

    def __init__(
        self,
        seeds: Sequence[int],
        normaliser: str,
        options: Mapping[str, Any],
        width: int,
        heads: int,
        *,
        causal: bool,
        feed_forward: str,
    ) -> None:
        super().__init__()
        count = len(seeds)
        self.before = Norm(count, width)
        self.q, self.k, self.v = (Linear(count, width, width, bias=False) for _ in range(3))
        self.out = Linear(count, width, width, bias=False)
        self.between = Norm(count, width)
        self.feed = Mlp(count, width, _FEED * width, width, activation=ACTIVATIONS[feed_forward])
        self.normalisers = Normalisers(seeds, normaliser, options)
        self._heads, self._causal = heads, causal

    def forward(self, x: Tensor, visible: Tensor, rows: int) -> Tensor:
        """The last `rows` positions of x [S, B, L, W] after this layer."""
        q, k, v = self._projected(x, rows)
        weights = self.normalisers(q, k, mask=visible[:, :, None, None], is_causal=self._causal)
        return self._added(x, torch.matmul(weights, v))

    def read(self, x: Tensor, visible: Tensor, rows: int, asked: int) -> tuple[Tensor, Tensor, RowSummary]:
        """The same, the last `asked` of them with argmax attention too, and their summary; rows come in parts."""
        q, k, v = self._projected(x, rows)
        pooled, summaries, left = [], [], rows
        for part, keys in self._parts(q, k):
            mask = visible[:, :, None, None, :keys]
            weights = self.normalisers(part, k[..., :keys, :], mask=mask, is_causal=self._causal)
            pooled.append(torch.matmul(weights, v[..., :keys, :]))
            left -= part.shape[-2]
            if left < asked:
                summaries.append(summarise_rows(weights[..., -min(asked - left, part.shape[-2]) :, :]))
        summary = RowSummary.joined(summaries)
        return self._added(x, torch.cat(pooled, dim=-2)), self._added(x, summary.argmax_values(v)), summary

    def _parts(self, q: Tensor, k: Tensor) -> list[tuple[Tensor, int]]:
        """Rows that are read together, and how many keys they may see."""
        length = k.shape[-2]
        row = k[..., 0].numel()
        at_once = max(1, _LOGITS.get(q.device.type, _LOGITS["cpu"]) // row)
        # A normaliser takes its rows for the last ones, which matters if what a row sees depends on where it stands.
        if type(self.normalisers.kind).visible is not Normaliser.visible and not self._causal:
            at_once = q.shape[-2]
        ahead = length - q.shape[-2]
        parts = []
        for start in range(0, q.shape[-2], at_once):
            part = q[..., start : start + at_once, :]
            parts.append((part, ahead + start + part.shape[-2] if self._causal else length))
        return parts

    def _projected(self, x: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        y = self.before(x)
        q, k, v = self.q(y[..., -rows:, :]), self.k(y), self.v(y)
        q, k, v = (one.unflatten(-1, (self._heads, -1)).transpose(-2, -3) for one in (q, k, v))
        return q, k, v

    def _added(self, x: Tensor, pooled: Tensor) -> Tensor:
        x = x[..., -pooled.shape[-2] :, :] + self.out(pooled.transpose(-2, -3).flatten(-2))
        return x + self.feed(self.between(x))  # type: ignore[no-any-return]
