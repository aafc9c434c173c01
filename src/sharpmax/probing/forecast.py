"""Predict entropy and top weight of every head at sizes that were not read.

Curves are extrapolated as straight lines against ln n. For causal language models, three quarters of the forecast come
from key replication, which simulates a long input with a short one: in every layer, items in the middle of a short list
count several times, and positions leave gaps for the copies. What a longer list has no more of is not replicated:

- the beginning and the end of the list; attention sinks form at the beginning;
- the neighbourhood of an item: items form blocks, and a row sees each key of its own block once;
- the context before an item: the first items of a block follow a gap, so rows of other blocks, which would take them
  for the beginning of a text, do not see them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sharpmax.integrations.transformers.attention import Repeated
from sharpmax.integrations.transformers.interface import observed, repeating
from sharpmax.models.language import context_of
from sharpmax.probing.measurement import Numbers, Passage, ProbeInputs, Readings, call_model, curves_of, grid, slope
from sharpmax.stats.call import AttentionCall, hidden_by, without_autocast

LINE, REPLICATION = "line", "replication and line, 3 to 1"
"""The methods, as results.json names them."""

_NAMES = ("entropy", "top")
_FLOOR = 1e-4

_REPLICATED = 6
"""The number of passages read with replicated keys for each forecast size."""

# Chosen on lists of 16 and 32 items that simulate 64 (SmolLM2). Without the lead, the entropy of heads that attend to
# the first item of a list is off by a nat.
_ENDS, _BLOCK, _LEAD = 4, 4, 2

Values = Mapping[int, Mapping[str, Numbers]]
"""Entropy and top weight of every head `[layers, heads]`, by size."""


@dataclass(frozen=True, eq=False)
class Forecast:
    """The prediction of a method, and the sizes it was fitted to."""

    method: str
    fitted: tuple[int, ...]
    values: Values


def forecast_of(
    model: nn.Module, inputs: ProbeInputs, readings: Readings, done: Callable[[int], None] | None
) -> Forecast | None:
    """Forecast the larger sizes from the smaller ones; None if there are no larger ones.

    `done` is called with the size after each of `replicated_reads`. Without `done` there is no key replication.
    """
    base = inputs.fit_up_to
    if base == inputs.sizes[-1]:
        return None
    apart: dict[int, list[Mapping[str, Numbers]]] = {}
    for size, number in replicated_reads(inputs) if done is not None else ():
        passage, plain = inputs.passages[base][number], readings[base]
        chosen = replication_of(passage, (size - base) / inputs.per_item, context_of(model))
        if chosen is not None:
            read = measure_replicated(model, passage, chosen)
            apart.setdefault(size, []).append({name: read[name] - plain[name][number] for name in _NAMES})
        if done is not None:
            done(size)
    changes = {size: {name: np.mean([one[name] for one in ones], 0) for name in _NAMES} for size, ones in apart.items()}
    return predict(curves_of(readings, inputs.nested), inputs.sizes, base, changes)


def replicated_reads(inputs: ProbeInputs) -> list[tuple[int, int]]:
    """The passages to read with replicated keys: the size to forecast and the index of the passage, for each."""
    many = len(inputs.passages[inputs.fit_up_to][:_REPLICATED])
    return [(size, number) for size in inputs.sizes if size > inputs.fit_up_to for number in range(many)]


def predict(curves: Mapping[str, Numbers], sizes: Sequence[int], fit_up_to: int, changes: Values) -> Forecast:
    """Forecast the sizes above `fit_up_to` from two or more other sizes; curves are `[sizes, layers, heads]`.

    Above `fit_up_to` only the number of keys, which does not depend on the model, is read from the curves. `changes` is
    the effect of key replication on the largest known size; it is used if it has every size to forecast.
    """
    known = [place for place, size in enumerate(sizes) if size <= fit_up_to]
    later, counts = range(len(known), len(sizes)), curves["count"]
    replicated = all(sizes[to] in changes for to in later)
    # Weights lie between 0 and 1, so their lines are fitted on the logit scale.
    inside = np.clip(curves["top"][known], _FLOOR, 1.0 - _FLOOR)
    straight = {"entropy": curves["entropy"][known], "top": np.log(inside / (1.0 - inside))}
    x, found = np.log(counts[known]), {}
    for to in later:
        target = np.log(counts[to])
        ahead = target - x.mean(0)
        one = {name: np.asarray(y.mean(0) + slope(x, y) * ahead) for name, y in straight.items()}
        one["top"] = 1.0 / (1.0 + np.exp(-one["top"]))
        if replicated:
            change = changes[sizes[to]]
            one = {name: 0.25 * one[name] + 0.75 * (curves[name][known[-1]] + change[name]) for name in _NAMES}
        found[sizes[to]] = {
            "entropy": np.clip(one["entropy"], 0.0, target),
            "top": np.clip(one["top"], 1.0 / counts[to], 1.0),
        }
    return Forecast(REPLICATION if replicated else LINE, tuple(sizes[place] for place in known), found)


@dataclass(frozen=True, eq=False)
class Replication(Repeated):
    """How often each key of a passage counts, and the positions of its tokens. Tensors `[L]`.

    Attention adds ln k to the logit of a key that counts k times. A policy that reads row statistics would count it
    once.
    """

    times: Tensor  # how often each key counts for rows of other blocks; 0: hidden
    block: Tensor  # the block of each token; a row sees every key of its own block once
    positions: Tensor

    def weights(self) -> Tensor:
        """How often each key counts for each row, `[L, L]`, without the causal mask."""
        own = self.block[:, None] == self.block[None]
        return torch.where(own, torch.ones_like(self.times), self.times)

    def keys(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, additive: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values and mask; unchanged for a mask that hides more than a causal one (sliding window)."""
        rows, least = query.shape[-2], torch.finfo(query.dtype).min
        causal = torch.ones(rows, rows, dtype=torch.bool, device=query.device).tril()
        if mask is not None and (hidden_by(mask) & causal).any():
            return key, value, mask
        times = self.weights().to(query.device)
        bias = times.clamp_min(1).log().to(query.dtype)
        return key, value, bias.masked_fill((times == 0) | ~causal, least)[None, None]


def replication_of(passage: Passage, more: float, context: int | None = None) -> Replication | None:
    """Make a passage simulate one with `more` items; None if it has too few items to replicate."""
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
        # Round the running sum, so that it is never off by more than a half.
        before, now = (math.floor(due * n / len(replicated) + 0.5) for n in (number, number + 1))
        times[items == item] += now - before
    block = torch.where(middle, place // _BLOCK, torch.where((items >= 0) & (items <= first), -1, blocks))
    gaps = torch.stack([(times - 1)[block == number].sum().clamp_min(0) for number in range(-1, blocks)]).cumsum(0)
    positions = torch.arange(len(items)) + torch.cat([torch.zeros(1, dtype=torch.long), gaps])[block + 1]
    if context is not None:
        positions = torch.minimum(positions, context - len(items) + torch.arange(len(items)))
    return Replication(torch.arange(len(items))[None], times, block, positions)


def measure_replicated(model: Any, passage: Passage, chosen: Replication) -> dict[str, Numbers]:
    """Return entropy and top weight `[layers, heads]` of the last row; a key that counts k times is k keys."""
    rows: dict[int, tuple[Tensor, Tensor]] = {}

    def observe(call: AttentionCall) -> None:
        with without_autocast(call.q.device):
            weights = call.logits(torch.tensor([call.queries - 1])).scaled(None)[:, :, 0].softmax(-1)
        entropy = torch.special.entr(weights).sum(-1)
        if call.mask is not None and call.mask.is_floating_point():
            mask = call.mask.flatten(1, 2).expand(-1, -1, call.queries, -1)[:, :, -1]
            log_times = mask.masked_fill(hidden_by(mask), 0.0).to(weights.dtype)
            entropy = entropy + (weights * log_times).sum(-1)
            weights = weights * (-log_times).exp()
        rows[call.layer] = entropy, weights.amax(-1)

    # Without a mask, transformers would split the input into several texts at the gaps in the positions.
    mask = torch.ones_like(passage.inputs["input_ids"])
    with observed(model, observe), repeating(model, lambda layer: chosen):
        call_model(model, {**passage.inputs, "position_ids": chosen.positions[None], "attention_mask": mask})
    return {name: grid([rows[layer][place] for layer in sorted(rows)])[0] for place, name in enumerate(_NAMES)}
