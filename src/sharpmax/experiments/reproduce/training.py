"""Training single heads by the recipes of the paper and ours."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sharpmax.experiments.recipe import Recipe
from sharpmax.experiments.stacked_training import StackedTraining
from sharpmax.models.single_head import SingleHeads
from sharpmax.tasks.max_retrieval import draw, seeded

__all__ = ["Training"]


class Training(StackedTraining[SingleHeads]):
    """Single heads of several seeds in training, at some step of `steps`."""

    def __init__(self, recipe: Recipe, seeds: Sequence[int], steps: int, device: torch.device) -> None:
        def data(seed: int, block: int, steps: int) -> list[Tensor]:
            sets = draw((steps, recipe.batch), recipe.sizes, seeded(device, seed, block))
            return [sets.items, sets.query, sets.live, sets.answer]

        super().__init__(lambda: SingleHeads.initial(seeds), _losses, data, recipe, seeds, steps, device)


def _losses(heads: SingleHeads, data: Sequence[Tensor]) -> Tensor:
    items, query, live, answer = data
    scores = heads(items, query, live)
    losses = F.cross_entropy(scores.flatten(0, 1), answer.flatten(), reduction="none")
    return losses.view(answer.shape).mean(-1)
