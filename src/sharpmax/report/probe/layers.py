"""The figure of layers: the slopes of all heads, and the mean of each layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sharpmax.report.looks import SOFT, Look
from sharpmax.report.plot import Axis, Mark, Panel, Plot, Series
from sharpmax.report.probe.curves import look_of
from sharpmax.report.probe.facts import Run, place, runs
from sharpmax.report.probe.told import at_a_glance, called
from sharpmax.report.tables import Tables
from sharpmax.report.words import capital, joined, points

__all__ = ["layers"]


def layers(tables: Tables, task: str) -> Plot:
    """The slope of every head against its layer, and the mean of each layer as a line."""
    found = runs(tables)
    lines = [series for run in found for series in _series(run, task)]
    values = [0.0, 1.0, *(value for series in lines for value in series.y)]
    last = max((x for series in lines for x in series.x), default=0.0)
    room = 0.05 * (max(values) - min(values))
    return Plot(
        _title(found, task),
        "; ".join(run.label for run in found) + f"; task {task}",
        "A dot for each head, a line through the means of the layers. A slope of 1 is dispersion without end, 0 is "
        "none. A mean near 0 can hide heads that disperse behind others that gather.",
        f"Slopes of entropy against ln n, by layer. {_title(found, task)}.",
        [
            Panel(
                Axis("layer", (-0.6, last + 0.6), ticks=tuple((float(n), str(n)) for n in range(int(last) + 1))),
                Axis("slope of entropy against ln n", (min(values) - room, max(values) + room)),
                lines,
                [Mark("y", 0.0, "", SOFT), Mark("y", 1.0, "", SOFT)],
                together=False,
            )
        ],
    )


def _series(run: Run, task: str) -> Iterator[Series]:
    arm = run.letter or None
    known = [(name, about) for name, about in run.heads(task).items() if about["slope"] is not None]
    label = f"{run.letter}: heads" if run.letter else "heads"
    style = look_of(run, label)
    yield Series(
        label,
        Look(label, style.colour, style.marker, size=3.5, layer=2.0),
        [float(place(name)[0]) for name, _ in known],
        [about["slope"] for _, about in known],
        [capital(f"{called(name)}: {at_a_glance(about)}") for name, about in known],
        stroke=None,
        arm=arm,
    )
    means = {layer: cells["slope"] for layer, cells in run.layers(task).items() if cells["slope"] is not None}
    label = run.label if run.letter else "mean of the layer"
    yield Series(
        label,
        look_of(run, label),
        [float(layer) for layer in means],
        list(means.values()),
        [f"Layer {layer}: mean slope {points(slope, 2)}" for layer, slope in means.items()],
        arm=arm,
    )


def _title(found: Sequence[Run], task: str) -> str:
    if not any(run.first(task) for run in found):
        return "No layer disperses on average"
    if len(found) > 1:
        said = [f"layer {run.first(task)[0]} in {run.letter}" for run in found if run.first(task)]
        return f"First to disperse: {joined(said)}"
    first = found[0].first(task)[:3]
    return f"Layer {first[0]} disperses first" + (f", then {joined(first[1:])}" if first[1:] else "")
