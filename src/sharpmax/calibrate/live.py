"""A policy in the making: its coefficients are tensors that learn while they act in the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sharpmax.arrays import ops_for
from sharpmax.calibrate.kinds import KINDS
from sharpmax.errors import reject
from sharpmax.hf.interface import install, kept, modules_of
from sharpmax.hf.rules import Rule
from sharpmax.policies import LogLinear
from sharpmax.policies.base import Remeasure, with_columns
from sharpmax.rows.stats import RowStats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Live", "grid_of"]


def grid_of(model: PreTrainedModel) -> tuple[int, int]:
    """Layers and heads of a model, the grid that a `PerHead` policy has."""
    heads = [one.heads for one in modules_of(model)]
    if len(set(heads)) > 1:
        reject("model", f"layers of {sorted(set(heads))} heads", "a model with as many heads in every layer")
    return len(heads), heads[0]


class Live:
    """Coefficients `[layers, heads, kind]` that require gradients, and which heads they may touch."""

    def __init__(self, kind: str, layers: int, heads: int, device: torch.device) -> None:
        self.kind = kind
        self.coefficients = torch.zeros(layers, heads, len(KINDS[kind]), device=device, requires_grad=True)
        self.touched = torch.ones(layers, heads, dtype=torch.bool, device=device)

    def values(self) -> Tensor:
        """The coefficients in effect: 0 in heads that are not touched."""
        return self.coefficients * self.touched[..., None]

    @contextmanager
    def at_work(self, model: PreTrainedModel) -> Iterator[None]:
        """Let the coefficients choose β in the model's attention for a while."""
        with kept(model):
            install(model, self._rules)
            yield

    def _rules(self, layer: int) -> Sequence[Rule]:
        return (_LiveRule(self, layer),)


class _LiveRule:
    """One layer of a `Live`, as the attention interface asks for it."""

    heads = None

    def __init__(self, live: Live, layer: int) -> None:
        self._live, self._layer = live, layer
        self.needs = self._policy().needs

    def _policy(self) -> LogLinear:
        columns = self._live.values()[self._layer]
        names = KINDS[self._live.kind]
        return with_columns(LogLinear(), {name: columns[:, i, None] for i, name in enumerate(names)})

    def beta(self, stats: RowStats, remeasure: Remeasure | None) -> Tensor:
        """β of every row. What the row looks like is taken as given: only the coefficients learn from it.

        The way through the statistics is left out of the gradient: it would cost as much again as the attention
        itself, and says only how earlier layers change what later ones measure.
        """
        seen = stats.map(torch.detach)
        beta: Tensor = self._policy().rule(ops_for(seen.count), seen, None)
        return beta
