"""Predict entropy and top weight of every head at sizes that were not read.

Several methods make a forecast. The method is chosen by its error at the largest size that may be known, forecast from
those below it: none of the sizes that forecasts are tested at is used.

One method needs the model: key replication, which reads a short input as if it were a long one. In a longer input more
keys share the weight of a head, from further away. So items in the middle of a short list count several times in every
layer, with gaps in the positions for the copies. Three things stay as they are, because a longer list does not have
more of them:

- the beginning, where tokens that others rest on form at the first occurrence of their kind, and the end;
- the neighbourhood of an item: items stand in blocks, and inside its own block a row sees each key once;
- what a token makes of the text before it: the first items of a block, which a gap precedes, are visible to their own
  block alone. Other rows would take them for the beginning of something.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sharpmax.integrations.transformers.attention import Repeated
from sharpmax.integrations.transformers.interface import observed, repeating
from sharpmax.models.language import context_of
from sharpmax.probing.inputs import Passage, ProbeInputs
from sharpmax.probing.measurement import Numbers, Readings, call_model, curves_of, grid, slope
from sharpmax.stats.call import AttentionCall, hidden_by, without_autocast

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REPLICATION = "crowding"
"""Key replication, by its name in saved results."""

_MIXED = "crowding and line, 3 to 1"
_LEVEL, _LINE = "the largest size again", "line"
_NAMES = ("entropy", "top")
_FLOOR = 1e-4

_REPLICATED = 6
"""Passages that are read with replicated keys, for each size that is forecast."""

# Chosen on lists of 16 and 32 items that stand for 64 (SmolLM2): without the lead the entropy of heads that rest on
# the first item of a list is off by a nat.
_ENDS, _BLOCK, _LEAD = 4, 4, 2

Curves = Mapping[str, Numbers]
"""Statistics of every head at every size, `[sizes, layers, heads]`."""

Changes = Mapping[tuple[int, int], Mapping[str, Numbers]]
"""By (size that was read, size it stands for): what key replication changes in entropy and top weight."""


@dataclass(frozen=True, eq=False)
class Forecast:
    """The predictions of the chosen method, and how every method did where that could be checked."""

    method: str
    fitted: tuple[int, ...]
    values: Mapping[int, Mapping[str, Numbers]]  # by size: entropy and top weight, `[layers, heads]`
    decided: Mapping[str, float] = field(default_factory=dict)
    """By method, the median error in nats at the largest known size, forecast from those below it."""

    others: Mapping[str, Mapping[int, Mapping[str, Numbers]]] = field(default_factory=dict)
    """The predictions of every method, the chosen one included."""


def predict(curves: Curves, sizes: Sequence[int], fit_up_to: int, changes: Changes | None = None) -> Forecast:
    """Forecast the sizes above `fit_up_to` from the others, by the method that does best among the others.

    Above `fit_up_to` only the number of keys is read from the curves, which does not depend on the model.
    """
    known = [place for place, size in enumerate(sizes) if size <= fit_up_to]
    later = range(len(known), len(sizes))
    trial = _predictions(curves, sizes, known[:-1], known[-1], changes or {}) if len(known) > 1 else {}
    decided = {name: _median(one["entropy"] - curves["entropy"][known[-1]]) for name, one in trial.items()}
    found: dict[str, dict[int, Mapping[str, Numbers]]] = {}
    for to in later:
        for name, one in _predictions(curves, sizes, known, to, changes or {}).items():
            found.setdefault(name, {})[sizes[to]] = one
    # A method that does not reach every size cannot be chosen.
    able = {name for name, one in found.items() if len(one) == len(later)}
    choices = {name: value for name, value in decided.items() if name in able and np.isfinite(value)}
    method = min(choices, key=lambda name: choices[name]) if choices else _LINE
    return Forecast(method, tuple(sizes[place] for place in known), found.get(method, {}), decided, found)


def _predictions(
    curves: Curves, sizes: Sequence[int], known: Sequence[int], to: int, changes: Changes
) -> dict[str, dict[str, Numbers]]:
    """The prediction of every method for a size, from the sizes at the places `known`."""
    counts = curves["count"]
    x, target = np.log(counts[known]), np.log(counts[to])

    def line(y: Numbers) -> Numbers:
        return np.asarray(y.mean(0) + slope(x, y) * (target - x.mean(0)))

    found = {_LEVEL: {name: curves[name][known[-1]] for name in _NAMES}}
    if len(known) > 1:
        # Weights lie between 0 and 1: their curves are straight on the logit scale.
        inside = np.clip(curves["top"][known], _FLOOR, 1.0 - _FLOOR)
        top = 1.0 / (1.0 + np.exp(-line(np.log(inside / (1.0 - inside)))))
        found[_LINE] = {"entropy": line(curves["entropy"][known]), "top": top}
    change = changes.get((sizes[known[-1]], sizes[to]))
    if change is not None:
        replicated = found[REPLICATION] = {name: curves[name][known[-1]] + change[name] for name in _NAMES}
        if _LINE in found:
            found[_MIXED] = {name: 0.75 * replicated[name] + 0.25 * found[_LINE][name] for name in _NAMES}
    return {
        name: {"entropy": np.clip(one["entropy"], 0.0, target), "top": np.clip(one["top"], 1.0 / counts[to], 1.0)}
        for name, one in found.items()
    }


def _median(apart: Numbers) -> float:
    known = np.abs(apart[np.isfinite(apart)])
    return float(np.median(known)) if known.size else math.nan


def error(forecast: Mapping[str, Numbers], measured: Mapping[str, Numbers]) -> dict[str, Any]:
    """Median, 90th percentile and bias of the error over heads."""
    found: dict[str, Any] = {}
    for name in _NAMES:
        apart = (forecast[name] - measured[name])[np.isfinite(forecast[name]) & np.isfinite(measured[name])]
        found["heads"] = len(apart)
        found[name] = dict.fromkeys(("median", "p90", "bias"))
        if len(apart):
            median, p90 = np.quantile(np.abs(apart), [0.5, 0.9])
            found[name] = {"median": float(median), "p90": float(p90), "bias": float(apart.mean())}
    return found


def forecast_work(inputs: ProbeInputs) -> int:
    """The work of the passages that `forecast_of` reads with replicated keys."""
    return sum(one.work for base, _ in _pairs(inputs) for one in inputs.passages[base][:_REPLICATED])


def forecast_of(
    model: PreTrainedModel, inputs: ProbeInputs, readings: Readings, done: Callable[[Passage, int], None] | None
) -> Forecast | None:
    """Forecast the larger sizes from the smaller ones; None where there are none.

    `done` is called with each passage that has been read with replicated keys; None leaves that method out.
    """
    pairs = _pairs(inputs)
    changes: dict[tuple[int, int], Mapping[str, Numbers]] = {}
    if not pairs:
        return None
    for base, target in pairs if done is not None else ():
        more, passages = (target - base) / inputs.per_item, inputs.passages[base][:_REPLICATED]
        apart: dict[str, list[Numbers]] = {name: [] for name in _NAMES}
        for number, one in enumerate(passages):
            chosen = replication_of(one, more, context_of(model))
            if chosen is not None:
                for name, values in measure_replicated(model, one, chosen).items():
                    apart[name].append(values - readings[base][name][number])
            if done is not None:
                done(one, target)
        if passages and len(apart["entropy"]) == len(passages):
            changes[base, target] = {name: np.mean(values, axis=0) for name, values in apart.items()}
    return predict(curves_of(readings, inputs.nested), inputs.sizes, inputs.fit_up_to, changes)


def _pairs(inputs: ProbeInputs) -> list[tuple[int, int]]:
    """Which sizes stand for which: the largest known one for every larger, and the one before it for that one."""
    known = [size for size in inputs.sizes if size <= inputs.fit_up_to]
    later = inputs.sizes[len(known) :]
    if len(known) < 2 or not later:
        return []
    return [(known[-2], known[-1]), *((known[-1], size) for size in later)]


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


def measure_replicated(model: PreTrainedModel, passage: Passage, chosen: Replication) -> dict[str, Numbers]:
    """Entropy and top weight of the last row of a passage with replicated keys, `[layers, heads]`."""
    rows: dict[int, tuple[Tensor, Tensor]] = {}

    def observe(call: AttentionCall) -> None:
        rows[call.layer] = _replicated_row(call)

    places = torch.arange(len(chosen.times)).repeat_interleave(chosen.times.clamp_min(1))[None]
    weighted, copied = (_Replicated(places, chosen, copies) for copies in (False, True))
    # The mask marks the input as one text: without it transformers would split it at the gaps.
    mask = torch.ones_like(passage.inputs["input_ids"])
    with observed(model, observe), repeating(model, lambda layer: copied if layer.rules else weighted):
        call_model(model, {**passage.inputs, "position_ids": chosen.positions[None], "attention_mask": mask})
    return {name: grid([rows[layer][place] for layer in sorted(rows)])[0] for place, name in enumerate(_NAMES)}


def _replicated_row(call: AttentionCall) -> tuple[Tensor, Tensor]:
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


@dataclass(frozen=True, eq=False)
class _Replicated(Repeated):
    """Adds ln k to the logit of a key that counts k times, or copies it where a rule reads how many keys there are."""

    chosen: Replication
    copies: bool

    def keys(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, additive: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and mask; those of a sliding window, which hides more than a causal mask, stay as they are."""
        rows, least = query.shape[-2], torch.finfo(query.dtype).min
        causal = torch.ones(rows, rows, dtype=torch.bool, device=query.device).tril()
        if mask is not None and (hidden_by(mask) & causal).any():
            return key, value, mask
        if not self.copies:
            times = self.chosen.weights().to(query.device)
            bias = times.clamp_min(1).log().to(query.dtype)
            return key, value, bias.masked_fill((times == 0) | ~causal, least)[None, None]
        # Rows of its own block see the first copy of a key alone.
        block, places = self.chosen.block, self.places[0]
        first = torch.cat([torch.ones(1, dtype=torch.bool), places[1:] != places[:-1]])
        visible = torch.where(block[:, None] == block[places], first, self.chosen.times[places] > 0)
        key, value, mask = Repeated.keys(self, query, key, value, mask, additive)
        return key, value, mask.masked_fill(~visible.to(mask.device), least if mask.is_floating_point() else False)
