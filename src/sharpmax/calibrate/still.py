"""A model held still while something is learned around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sharpmax.hf import restore
from sharpmax.hf.interface import kept

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["held_still"]


@contextmanager
def held_still(model: PreTrainedModel) -> Iterator[None]:
    """The model as it comes for a while: no policy, no dropout, no weight that learns; then as it was before.

    That nothing was written to a weight or its gradient is checked at the end.
    """
    modes = [(module, module.training) for module in model.modules()]
    weights = [(weight, weight.requires_grad, weight.grad, weight._version) for weight in model.parameters()]
    with kept(model):
        restore(model).train(False).requires_grad_(False)
        try:
            yield
            if any(weight.grad is not grad or weight._version != version for weight, _, grad, version in weights):
                raise AssertionError("a weight of the model was changed by calibration")
        finally:
            for module, mode in modes:
                module.training = mode
            for weight, learns, _, _ in weights:
                weight.requires_grad_(learns)
