"""The figure of forecasts: what was foretold of every head at the largest size, and what was measured there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sharpmax.report.looks import SOFT, Look
from sharpmax.report.plot import Axis, Panel, Plot, Series
from sharpmax.report.probe.curves import look_of
from sharpmax.report.probe.facts import Run, forecast_error, runs
from sharpmax.report.probe.told import called
from sharpmax.report.tables import Tables
from sharpmax.report.words import capital, count, joined, nats

__all__ = ["forecasts"]

_EXACT = Look("exact", SOFT, width=1.2, layer=1.0)


def forecasts(tables: Tables, task: str) -> Plot:
    """Forecast against measurement, a dot for each head, for entropy and for the top weight."""
    found = [run for run in runs(tables) if forecast_error(run, task)]
    return Plot(
        _title(found, task),
        "; ".join(f"{run.label}, {_sizes(run, task)}" for run in found),
        "A dot for each head; on the dotted line the forecast is exact, above it there was more than foretold. "
        "The forecast never saw a size as large as this one.",
        "Measured against forecast entropy and top weight, a dot for each head.",
        [_panel(found, task, "entropy", "Entropy", " (nats)"), _panel(found, task, "top", "Top weight", "")],
    )


def _panel(found: Sequence[Run], task: str, name: str, title: str, unit: str) -> Panel:
    dots = [series for run in found for series in _dots(run, task, name)]
    most = max((value for series in dots for value in (*series.x, *series.y)), default=1.0)
    limits = -0.03 * most, 1.05 * most
    exact = Series(_EXACT.label, _EXACT, limits, limits, "", stroke="dot", marker=None)
    return Panel(
        Axis(f"forecast{unit}", limits), Axis(f"measured{unit}", limits), [exact, *dots], title=title, together=False
    )


def _dots(run: Run, task: str, name: str) -> Iterator[Series]:
    size = (forecast_error(run, task) or ("",))[0]
    both = []
    for head, about in run.heads(task).items():
        foretold = ((about.get("forecast") or {}).get(size) or {}).get(name)
        measured = (about["curve"].get(size) or {}).get(name)
        if foretold is not None and measured is not None:
            both.append((head, foretold, measured))
    label = run.label if run.letter else "heads"
    style = look_of(run, label)
    yield Series(
        label,
        Look(label, style.colour, style.marker, size=4.0),
        [foretold for _, foretold, _ in both],
        [measured for *_, measured in both],
        [capital(f"{called(head)}: forecast {nats(a)}, measured {nats(b)}") for head, a, b in both],
        stroke=None,
        arm=run.letter or None,
    )


def _sizes(run: Run, task: str) -> str:
    size = (forecast_error(run, task) or ("0",))[0]
    unit = run.unit(task)
    return f"fitted on {task} up to {count(run.setting['fit_up_to'][task])} {unit}, measured at {count(size)} {unit}"


def _title(found: Sequence[Run], task: str) -> str:
    said = []
    for run in found:
        errors = forecast_error(run, task)
        error = errors[1]["entropy"]["median"] if errors else None
        if error is not None:
            said.append(f"{nats(error)} nats" + (f" in {run.letter}" if run.letter else ""))
    return f"Entropy is forecast to within {joined(said)} in half of the heads" if said else "Forecast and measurement"
