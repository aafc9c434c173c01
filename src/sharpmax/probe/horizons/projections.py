"""Queries and keys of every head as linear maps of a ball: all that a certificate needs of a layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sharpmax.errors import UnsupportedError
from sharpmax.hf.interface import modules_of
from sharpmax.hf.queries import Projection, exact, projections
from sharpmax.hf.support import AttentionModule
from sharpmax.probe.horizons.families import Family, Feed, family_of
from sharpmax.probe.horizons.norms import Ball

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Layer", "Side", "layers_of"]

_NORMS = {"q_norm": "k_norm", "q_layernorm": "k_layernorm"}


@dataclass(frozen=True, eq=False)
class Side:
    """The queries, or the keys, of a layer: matrix·z + bias with z from a ball, then perhaps normalised once more."""

    ball: Ball
    matrix: Tensor
    """`[heads, D, d]` in float64, the gain of the normalisation before it included."""

    bias: Tensor
    """`[heads, D]`."""

    after: Ball | None
    """The normalisation of each head, where there is one."""

    @property
    def constant(self) -> bool:
        """Whether there is anything in it that does not shrink with z."""
        return bool(self.bias.any()) or (self.after is not None and bool(self.after.bias.any()))

    def bounded(self) -> tuple[Tensor, float, Tensor]:
        """Matrix, largest norm of its input and bias: what comes out whatever goes in."""
        if self.after is None:
            return self.matrix, self.ball.radius, self.bias
        width = len(self.after.gain)
        matrix, bias = self.after.folded(torch.eye(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64))
        heads = len(self.matrix)
        return matrix.expand(heads, -1, -1), self.after.radius, bias.expand(heads, -1)

    def of(self, inputs: Tensor, head: int, epsilon: float | None) -> Tensor:
        """What a head makes `[N, D]` of inputs `[N, d]` that are not normalised yet; `epsilon` as in `Ball.points`."""
        made = self.ball.points(inputs, epsilon) @ self.matrix[head].T + self.bias[head]
        if self.after is None:
            return made
        return self.after.points(made, epsilon) * self.after.gain + self.after.bias


@dataclass(frozen=True, eq=False)
class Layer:
    """An attention layer: logits scale·q·k of turned queries and keys, perhaps capped, perhaps with a bias added."""

    number: int
    heads: int
    query: Side
    key: Side
    first: bool
    """Whether its inputs are normalised embeddings."""

    scale: float
    pairs: int
    """Entries i and i + pairs of queries and keys are turned together by their position, for i < pairs."""

    cap: float | None
    bias_spread: Tensor
    """`[heads]`, the largest minus the smallest number that positions add to a logit."""

    window: int | None
    """The most keys a row can see."""


def layers_of(model: PreTrainedModel) -> list[Layer]:
    """The attention layers of a model, in the order of policies, or an error that says why it has no certificate."""
    kind = str(model.config.model_type)
    family = family_of(kind)
    modules = modules_of(model)
    return [_Reader(model, kind, family).layer(number, one) for number, one in enumerate(modules)]


class _Reader:
    """Reads layers off one model."""

    def __init__(self, model: PreTrainedModel, kind: str, family: Family) -> None:
        self.kind, self.family = kind, family
        self.parts = dict(model.named_modules())
        self.names = {part: name for name, part in self.parts.items()}
        if getattr(model.config, "do_layer_norm_before", True) is False:
            raise UnsupportedError(
                f"model: this {kind} normalises after attention, so nothing bounds its first layer; allowed: "
                "do_layer_norm_before=True"
            )

    def layer(self, number: int, one: AttentionModule) -> Layer:
        where, name = f"layer {number} of {self.kind}", self.names[one.module]
        feed = self.family.feed(name)
        if feed is None or not {feed.queries, feed.keys} <= set(self.parts):
            raise UnsupportedError(
                f"model: what {where} attends to is not known ({name}); allowed: plain self-attention"
            )
        made = projections(one, where)
        group = one.heads // len(made[1].rows)
        query, key = self._sides(one, made, feed, where)
        width = made[0].rows.shape[1]
        pairs, turned = self._rotary(width)
        return Layer(
            number,
            one.heads,
            query,
            _repeated(key, group),
            feed.first,
            _scale(one, width) * turned,
            pairs,
            self._cap(one),
            self._bias_spread(name, one.heads),
            self._window(one),
        )

    def _sides(self, one: AttentionModule, made: Sequence[Projection], feed: Feed, where: str) -> Iterator[Side]:
        norms = next(((q, k) for q, k in _NORMS.items() if hasattr(one.module, q)), None)
        for i, (projection, name) in enumerate(zip(made, (feed.queries, feed.keys), strict=True)):
            ball = Ball.of(self.parts[name], where)
            after = None if norms is None else Ball.of(getattr(one.module, norms[i]), where)
            if after is not None and len(after.gain) != projection.rows.shape[1]:
                raise UnsupportedError(
                    f"model: {where} normalises all heads of its queries together; allowed: each alone"
                )
            yield Side(ball, *ball.folded(projection.matrix(), projection.bias()), after)

    def _rotary(self, width: int) -> tuple[int, float]:
        """How many pairs turn, and what the rotation multiplies logits by."""
        if not self.family.rotary:
            return 0, 1.0
        turning = [part for part in self.parts.values() if "RotaryEmbedding" in type(part).__name__]
        pairs = {
            len(tensor)
            for part in turning
            for name, tensor in part.named_buffers()
            if name.endswith("inv_freq") and "original" not in name
        }
        if len(pairs) != 1 or 2 * max(pairs) > width:
            raise UnsupportedError(
                f"model: how positions turn the queries of {self.kind} is not known; allowed: one way"
            )
        scalings = [
            value for part in turning for name, value in vars(part).items() if name.endswith("attention_scaling")
        ]
        return pairs.pop(), max((float(value) ** 2 for value in scalings), default=1.0)

    def _cap(self, one: AttentionModule) -> float | None:
        """Only eager attention caps logits; the others of transformers leave the cap out."""
        cap = getattr(one.module, "attn_logit_softcapping", None)
        return float(cap) if cap is not None and self.kind == "gemma2" and one.inner == "eager" else None

    def _bias_spread(self, name: str, heads: int) -> Tensor:
        """T5 adds a table of numbers by distance, that of the first block of its stack in every self-attention."""
        stack = name.partition(".block.")[0]
        table = self.parts.get(f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias")
        if not isinstance(table, nn.Embedding) or not name.endswith("SelfAttention"):
            return torch.zeros(heads, dtype=torch.float64)
        weight = exact(table.weight)
        return weight.amax(0) - weight.amin(0)

    def _window(self, one: AttentionModule) -> int | None:
        # Mistral says it once for all layers.
        holder: Any = one.config if self.kind == "mistral" else one.module
        window = getattr(holder, "sliding_window", None)
        return window if isinstance(window, int) and window > 0 else None


def _repeated(side: Side, group: int) -> Side:
    """Keys that several heads share, once for each of them."""
    return Side(side.ball, side.matrix.repeat_interleave(group, 0), side.bias.repeat_interleave(group, 0), side.after)


def _scale(one: AttentionModule, width: int) -> float:
    said = getattr(one.module, "scaling", None)
    if isinstance(said, float):
        return said
    unscaled = "position_bias" in one.arguments or getattr(one.module, "scale_attn_weights", True) is False
    return 1.0 if unscaled else 1.0 / math.sqrt(width)
