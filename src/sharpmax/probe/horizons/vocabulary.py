"""The first layer sees nothing but embeddings: its spread over every token, and over learned positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sharpmax.hf.queries import exact
from sharpmax.probe.horizons.families import Family
from sharpmax.probe.horizons.projections import Layer, Side
from sharpmax.theory import spread_over_inputs
from sharpmax.theory.rotary import common_basis

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Embeddings", "spread_of_first_layer"]

_AT_ONCE = 1 << 21
"""Pairs of a token and a position that are held at a time."""


@dataclass(frozen=True, eq=False)
class Embeddings:
    """All that a first layer can be given: the vector of a token, plus that of a position where these are learned."""

    tokens: Tensor
    positions: Tensor | None

    @classmethod
    def of(cls, model: PreTrainedModel, family: Family) -> Embeddings | None:
        """Those of a model, or None where it does more with them than is known here."""
        table: Any = model.get_input_embeddings()
        if not isinstance(table, nn.Embedding) or table.embedding_dim != model.config.hidden_size:
            return None
        with torch.no_grad():
            # Some tables scale what they give.
            tokens = exact(table(torch.arange(table.num_embeddings, device=table.weight.device)))
        positions: Tensor | None = None
        for name, part in model.named_modules():
            if isinstance(part, nn.Embedding) and name.endswith(family.positions or ("-",)):
                more = exact(part.weight)
                positions = more if positions is None else (positions[:, None] + more).flatten(0, 1)
        return cls(tokens, positions)


def spread_of_first_layer(layer: Layer, given: Embeddings) -> list[float]:
    """A bound on the spread of each head over every text there is."""
    if given.positions is None:
        return [_over_tokens(layer, given.tokens, head) for head in range(layer.heads)]
    return [_over_sums(layer, given.tokens, given.positions, head) for head in range(layer.heads)]


def _over_tokens(layer: Layer, tokens: Tensor, head: int) -> float:
    sides = (layer.query, layer.key)
    # Where lengths alone count, they are safe without epsilon, even if a model scales its embeddings elsewhere.
    lengths = 2 * layer.pairs == layer.query.bounded()[0].shape[1] and not any(side.constant for side in sides)
    queries, keys = (side.of(tokens, head, 0.0 if lengths else None).numpy() for side in sides)
    return spread_over_inputs(queries, keys, layer.scale, pairs=layer.pairs)


def _over_sums(layer: Layer, tokens: Tensor, positions: Tensor, head: int) -> float:
    """2·scale·max‖F q‖·max‖G k‖ over all queries and keys, in the basis in which they meet evenly.

    It holds as q·k = (F q)·(G k); and as F and G come from the whole ball, it never exceeds the bound of the ball.
    """
    query, key = layer.query, layer.key
    left = torch.cat((query.matrix[head] * query.ball.radius, query.bias[head, :, None]), 1)
    right = key.matrix[head] * key.ball.radius
    of_query, of_key = common_basis(torch, left, right)
    # A constant in the keys moves all logits of a row alike.
    longest_query = _longest(query, of_query @ query.matrix[head], of_query @ query.bias[head], tokens, positions)
    still = torch.zeros(len(of_key), dtype=torch.float64)
    longest_key = _longest(key, of_key @ key.matrix[head], still, tokens, positions)
    return 2.0 * layer.scale * longest_query * longest_key


def _longest(side: Side, matrix: Tensor, bias: Tensor, tokens: Tensor, positions: Tensor) -> float:
    """The largest ‖matrix·z + bias‖ over z, the normalised sum of any token and any position."""
    ball = side.ball
    by_position = positions - positions.mean(1, keepdim=True) if ball.centred else positions
    through_position, width = by_position @ matrix.T, positions.shape[1]
    best = 0.0
    for some in torch.split(tokens, max(1, _AT_ONCE // len(positions))):
        by_token = some - some.mean(1, keepdim=True) if ball.centred else some
        through_token = by_token @ matrix.T
        deviation = (_squares(by_token, by_position) / width + ball.epsilon).clamp_min(1e-300).sqrt()
        linear = (through_token @ bias)[:, None] + through_position @ bias
        square = _squares(through_token, through_position) / deviation**2 + 2.0 * linear / deviation
        best = max(best, float(square.max() + bias.square().sum()))
    return math.sqrt(max(best, 0.0))


def _squares(tokens: Tensor, positions: Tensor) -> Tensor:
    """‖t + p‖² of every pair."""
    return (tokens.square().sum(1)[:, None] + 2.0 * tokens @ positions.T + positions.square().sum(1)).clamp_min(0.0)
