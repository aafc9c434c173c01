"""A small model with a monitor beside it, and what eager attention says about the same rows."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import sharpmax as sm
from sharpmax.monitoring.monitor import Monitor
from tests.integrations.families import FAMILIES


def prompts(count: int, seed: int = 0, least: int = 3, most: int = 24) -> list[list[int]]:
    """Lists of random tokens of different lengths."""
    rng = random.Random(seed)
    return [[rng.randint(3, 96) for _ in range(rng.randint(least, most))] for _ in range(count)]


def model(family: str = "llama", **changes: Any) -> Any:
    return FAMILIES[family].build(**changes)


def monitored(one: Any, **options: Any) -> Monitor:
    """A monitor that has learned in a moment."""
    settings: dict[str, Any] = {"false_alarms": 0.1, "every": 2, "generated": 2} | options
    return sm.monitor(one, settings.pop("reference", prompts(30)), **settings)


def padded(lists: list[list[int]], side: str) -> dict[str, Tensor]:
    """A batch with its mask."""
    longest = max(map(len, lists))
    ids, mask = torch.zeros(len(lists), longest, dtype=torch.long), torch.zeros(len(lists), longest, dtype=torch.long)
    for row, one in enumerate(lists):
        place = slice(longest - len(one), longest) if side == "left" else slice(len(one))
        ids[row, place], mask[row, place] = torch.tensor(one), 1
    return {"input_ids": ids, "attention_mask": mask}


def last_entropies(one: Any, ids: list[int]) -> Tensor:
    """Entropy `[heads]` of the last row of every head in float64, from the weights that eager attention returns."""
    one.set_attn_implementation("eager")
    with torch.no_grad():
        weights = one(torch.tensor([ids]), output_attentions=True).attentions
    rows = torch.cat([layer[0, :, -1].double() for layer in weights])
    found: Tensor = torch.special.entr(rows).sum(-1)
    return found
