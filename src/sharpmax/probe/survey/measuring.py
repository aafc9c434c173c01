"""A model reads passages of growing size, and every head's row statistics are kept: nothing else is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from sharpmax.hf.interface import watched
from sharpmax.hf.watching import Seen
from sharpmax.probe.capture import capture
from sharpmax.probe.statistics import STATISTICS
from sharpmax.probe.survey.crowding import Crowding, crowded_row, crowding
from sharpmax.probe.survey.material import Material, Passage

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Numbers", "Progress", "Readings", "measure", "read_crowded", "work"]

Numbers = NDArray[np.float64]
Readings = Mapping[int, Mapping[str, Numbers]]
"""By size, each statistic of every passage and head, `[passages, layers, heads]`, NaN where there is none."""

Progress = Callable[[str, int, int, str], None]
"""Told what is being done, how much of how much is done, and a remark."""


def work(length: int) -> int:
    """How much there is to do for a passage, in tokens of a short one: attention makes long ones cost more."""
    return length + length * length // 8192


def measure(model: PreTrainedModel, material: Material, rows: str, done: Callable[[Passage, int], None]) -> Readings:
    """Statistics of every head at every size, the longest passages last; of several rows of a passage, the mean.

    `done` is told of each passage that has been read, and its size. The model must not be in training.
    """
    found: dict[int, dict[str, Numbers]] = {}
    for size, passages in material.passages.items():
        parts: dict[str, list[Numbers]] = {name: [] for name in STATISTICS}
        for passage in passages:
            for name, value in _read(model, passage, rows).items():
                parts[name].append(value)
            done(passage, size)
        found[size] = {name: np.concatenate(values) for name, values in parts.items()}
    return found


def read_crowded(model: PreTrainedModel, passages: Sequence[tuple[Passage, Crowding]]) -> dict[str, Numbers]:
    """Entropy and top weight of the last row of passages that stand for longer ones, `[passages, layers, heads]`."""
    found: dict[str, list[Numbers]] = {"entropy": [], "top": []}
    for passage, chosen in passages:
        seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def see(call: Seen, into: dict[int, Any] = seen) -> None:
            into[call.layer] = crowded_row(call)

        ids = passage.inputs["input_ids"]
        # The mask says that all is one text: without it a gap would be taken for the start of another.
        more = {"position_ids": chosen.positions[None], "attention_mask": torch.ones_like(ids)}
        with watched(model, see), crowding(model, chosen):
            _call(model, {**passage.inputs, **more})
        for place, name in enumerate(found):
            found[name].append(_grid([seen[layer][place] for layer in sorted(seen)]))
    return {name: np.concatenate(values) for name, values in found.items()}


def _read(model: PreTrainedModel, passage: Passage, rows: str) -> dict[str, Numbers]:
    with capture(model, rows) as seen:
        _call(model, passage.inputs)
    last = {call.layer: call.statistics for call in seen.calls}
    found = {}
    for name in STATISTICS:
        layers = []
        for layer in sorted(last):
            value, live = last[layer][name].cpu().double(), last[layer]["count"].cpu() > 0
            # A row that sees nothing, as padding does, says nothing.
            layers.append(value.masked_fill(~live, torch.nan).nanmean(-1))
        found[name] = _grid(layers)
    return found


def _grid(layers: Sequence[torch.Tensor]) -> Numbers:
    """`[B, heads]` of each layer as `[B, layers, heads]`, filled up where layers have fewer heads."""
    heads = max(layer.shape[1] for layer in layers)
    grid = np.full((layers[0].shape[0], len(layers), heads), np.nan)
    for place, layer in enumerate(layers):
        grid[:, place, : layer.shape[1]] = layer.cpu().double().numpy()
    return grid


def _call(model: PreTrainedModel, inputs: Mapping[str, Any]) -> None:
    known = inspect.signature(model.forward).parameters
    options = {name: value for name, value in {"use_cache": False, "logits_to_keep": 1}.items() if name in known}
    placed = {
        name: value.to(model.device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()
    }
    with torch.no_grad():
        model(**{**options, **placed})
