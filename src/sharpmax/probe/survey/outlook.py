"""The forecast of one task: which short passages are read as if they were long, and what follows from that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from sharpmax.models.language import context_of
from sharpmax.probe.survey.crowding import crowding_of
from sharpmax.probe.survey.findings import curves_of
from sharpmax.probe.survey.forecast import Forecast, foretell
from sharpmax.probe.survey.material import Material, Passage
from sharpmax.probe.survey.measuring import Readings, read_crowded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["forecast_of", "read_for_forecast"]

_CROWDED = 6
"""Passages that are read as if they were longer, for each size that is forecast."""


def read_for_forecast(material: Material) -> Iterator[Passage]:
    """The passages that `forecast_of` reads again, each as often as it does."""
    for base, _ in _pairs(material):
        yield from material.passages[base][:_CROWDED]


def forecast_of(
    model: PreTrainedModel, material: Material, readings: Readings, done: Callable[[Passage, int], None] | None
) -> Forecast | None:
    """Forecast the larger sizes from the smaller ones; None where there are none.

    `done` is told of each short passage that has been read as if it were of a larger size; None leaves that out.
    """
    pairs = _pairs(material)
    if not pairs:
        return None
    room, changes = context_of(model), {}
    tell = done or (lambda passage, size: None)
    for base, target in pairs if done is not None else ():
        more = (target - base) / material.per_item
        chosen = [(one, crowding_of(one, more, room)) for one in material.passages[base][:_CROWDED]]
        ready = [(one, crowding) for one, crowding in chosen if crowding is not None]
        if ready and len(ready) == len(chosen):
            crowded = read_crowded(model, ready)
            changes[base, target] = {
                name: (values - readings[base][name][: len(ready)]).mean(0) for name, values in crowded.items()
            }
        for one, _ in chosen:
            tell(one, target)
    return foretell(curves_of(readings, material.nested), material.sizes, material.fit_up_to, changes)


def _pairs(material: Material) -> list[tuple[int, int]]:
    """Which sizes stand for which: the largest known one for every larger, and the one before it for that one."""
    known = [size for size in material.sizes if size <= material.fit_up_to]
    later = [size for size in material.sizes if size > material.fit_up_to]
    if len(known) < 2 or not later:
        return []
    return [(known[-2], known[-1]), *((known[-1], size) for size in later)]
