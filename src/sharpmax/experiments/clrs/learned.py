"""A policy that learns together with the weights: its numbers are parameters of the model for as long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sharpmax.calibrate.kinds import KINDS, NOT_NEGATIVE, policy_from
from sharpmax.calibrate.live import Live, grid_of
from sharpmax.policies import PerHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Learned"]

_NAME = "sharpmax_coefficients"


class Learned:
    """Coefficients per head that optimizers, checkpoints and several devices treat as any weight of the model."""

    def __init__(self, model: PreTrainedModel, kind: str) -> None:
        self._model = model
        self._live = Live(kind, *grid_of(model), model.device)
        self._live.coefficients = nn.Parameter(self._live.coefficients.detach())

    @property
    def parameter(self) -> Tensor:
        """The coefficients."""
        return self._live.coefficients

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The coefficients as a parameter of the model that chooses β in its attention; afterwards it has none."""
        self._model.register_parameter(_NAME, self.parameter)  # type: ignore[arg-type]
        try:
            with self._live.at_work(self._model):
                yield
        finally:
            delattr(self._model, _NAME)

    def hold(self) -> None:
        """After a step: what must not be negative is not."""
        names = KINDS[self._live.kind]
        if NOT_NEGATIVE in names:
            with torch.no_grad():
                self.parameter[..., names.index(NOT_NEGATIVE)].clamp_(min=0.0)

    def policy(self) -> PerHead:
        """What has been learned so far."""
        return policy_from(self._live.kind, self.parameter)
