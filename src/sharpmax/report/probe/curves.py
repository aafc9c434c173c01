"""The curves of one head: entropy and top weight as inputs grow, with forecast, bounds and horizon."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sharpmax.report.grid import NOTHING
from sharpmax.report.interactive import traces
from sharpmax.report.looks import BLUE, CIRCLE, DIAMOND, SOFT, SQUARE, VERMILLION, Look
from sharpmax.report.plot import Axis, Mark, Panel, Plot, Series
from sharpmax.report.probe.facts import Run, runs
from sharpmax.report.probe.told import at_a_glance, called, everything
from sharpmax.report.tables import Tables, sizes
from sharpmax.report.words import capital, count, whole

__all__ = ["Frame", "curves", "frame", "heads_data", "look_of"]

_LOOKS = {"": (BLUE, CIRCLE), "A": (BLUE, CIRCLE), "B": (VERMILLION, SQUARE)}
_BOUND = Look("bounds", SOFT, width=1.2, layer=1.0)


def look_of(run: Run, label: str) -> Look:
    """How the lines of a run look."""
    colour, marker = _LOOKS[run.letter]
    return Look(label, colour, marker, layer=3.0)


@dataclass(frozen=True)
class Frame:
    """What the curves of all heads of a task share, so that one can be exchanged for another."""

    runs: Sequence[Run]
    task: str
    x: Axis
    marks: Sequence[Mark]
    foretold: frozenset[str]
    """The letters of the runs that forecast anything."""

    far: frozenset[str]
    """The letters of the runs in which any head has a horizon."""


def frame(tables: Tables, task: str) -> Frame:
    """The frame of a task."""
    found = runs(tables)
    foretold = [run for run in found if any(about.get("forecast") for about in run.heads(task).values())]
    starts = {run.visible(task, str(run.setting["fit_up_to"][task])) for run in foretold} - {None}
    # Where two runs start to forecast at different places, the dashes alone have to say it.
    marks = [Mark("x", start, "forecast from here", SOFT) for start in starts if start and len(starts) == 1]
    far = frozenset(run.letter for run in found if run.horizons(task))
    return Frame(found, task, _keys(found, task), marks, frozenset(run.letter for run in foretold), far)


def curves(within: Frame, head: str) -> Plot:
    """Entropy and top weight of a head against the number of keys it sees."""
    x, marks = within.x, within.marks
    seen = {run.letter: run.heads(within.task).get(head) for run in within.runs}
    said = [f"{letter} {at_a_glance(about)}".strip() for letter, about in seen.items() if about]
    return Plot(
        "What one head does as inputs grow",
        f"First shown: {called(head)}: {'; '.join(said)}",
        _caption(within),
        f"Entropy and top weight of {called(head)} against the number of keys.",
        [
            Panel(
                x,
                Axis("entropy (nats)", (-0.25, 1.05 * math.log(x.limits[1]))),
                [*_bounds(x, math.log, lambda n: 0.0), *_lines(within, head, "entropy")],
                marks,
                "Entropy",
            ),
            Panel(
                x,
                Axis("top weight", (0.0, 1.03), ticks=tuple((n / 4, f"{n / 4:g}") for n in range(5))),
                [*_bounds(x, lambda n: 1.0 / n), *_lines(within, head, "top"), *_horizons(within, head)],
                [*marks, Mark("y", 0.5, "", SOFT)],
                "Top weight",
            ),
        ],
    )


def heads_data(tables: Tables, task: str) -> dict[str, Any]:
    """For each head what the page shows when it is pressed: the points of its lines and all that is said of it."""
    within = frame(tables, task)
    names = dict.fromkeys(name for run in within.runs for name in run.heads(task))
    return {name: _head_data(within, name) for name in names}


def _head_data(within: Frame, name: str) -> dict[str, Any]:
    rows: dict[str, list[str]] = {}
    for place, run in enumerate(within.runs):
        for label, value in everything(run, within.task, run.heads(within.task).get(name)):
            # Runs that forecast other sizes have rows of their own.
            rows.setdefault(label, [NOTHING] * len(within.runs))[place] = value
    return {
        "called": capital(called(name)),
        "lines": [[_short(line["x"]), _short(line["y"])] for line in traces(curves(within, name))],
        "facts": [[label, *values] for label, values in rows.items()],
    }


def _short(numbers: Sequence[float]) -> list[float]:
    """Four digits are more than anybody sees, and every head is on the page."""
    return [float(f"{number:.4g}") for number in numbers]


def _keys(found: Sequence[Run], task: str) -> Axis:
    known = [point["count"] for run in found for about in run.heads(task).values() for point in _points(about, "count")]
    low, high = max(1.0, min(known, default=1.0)), max(known, default=2.0)
    limits = max(1.0, low / 1.2), 1.3 * max(high, low)
    doublings = range(math.ceil(math.log2(limits[0])), math.floor(math.log2(limits[1])) + 1)
    ticks = tuple((2.0**power, count(2.0**power)) for power in doublings) or ((high, count(high)),)
    return Axis("keys that the head sees, n (log scale)", limits, log=True, ticks=ticks, hover="%{x:,.0f} keys")


def _points(about: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """The sizes at which a number is known, in order."""
    curve = about["curve"] if about else {}
    cells = [{"size": size, **curve[size]} for size in sizes(curve)]
    return [cell for cell in cells if cell.get("count") is not None and cell.get(name) is not None]


def _bounds(x: Axis, *bounds: Any) -> list[Series]:
    places = [x.limits[0], *(at for at, _ in x.ticks or ()), x.limits[1]]
    return [
        Series(_BOUND.label, _BOUND, places, [bound(n) for n in places], "", stroke="dot", marker=None)
        for bound in bounds
    ]


def _lines(within: Frame, head: str, name: str) -> Iterator[Series]:
    unit = " nats" if name == "entropy" else ""
    for run in within.runs:
        about, arm = run.heads(within.task).get(head), run.letter or None
        known = _points(about, name)
        label = run.label if run.letter else "measured"
        style = look_of(run, label)
        x, y = [cell["count"] for cell in known], [cell[name] for cell in known]
        yield Series(label, style, x, y, f"{label}: %{{y:.3f}}{unit}", arm=arm)
        if run.letter in within.foretold:
            label = f"{run.letter}: forecast" if run.letter else "forecast"
            x, y = _foretold(str(run.setting["fit_up_to"][within.task]), about, known, name)
            yield Series(label, style, x, y, f"{label}: %{{y:.3f}}{unit}", stroke="dash", marker="hollow", arm=arm)


def _foretold(
    fitted: str, about: Mapping[str, Any] | None, known: Sequence[Mapping[str, Any]], name: str
) -> tuple[list[float], list[float]]:
    """The forecast, from the last point that it was fitted on."""
    forecast = (about or {}).get("forecast") or {}
    seen = {cell["size"]: cell for cell in known}
    points = [(seen[size]["count"], forecast[size].get(name)) for size in sizes(forecast) if size in seen]
    points = [point for point in points if point[1] is not None]
    last = seen.get(fitted)
    if last and points:
        points.insert(0, (last["count"], last[name]))
    return [x for x, _ in points], [y for _, y in points]


def _horizons(within: Frame, head: str) -> Iterator[Series]:
    for run in (run for run in within.runs if run.letter in within.far):
        label = f"{run.letter}: horizon" if run.letter else "horizon"
        about = run.heads(within.task).get(head)
        ends = [about["horizon"].get(end) for end in ("low", "tokens", "high")] if about else []
        x = [] if not ends or ends[1] is None else [end for end in ends if end is not None]
        colour, _ = _LOOKS[run.letter]
        style = Look(label, colour, DIAMOND, width=3.0, size=7.0, layer=2.0)
        words = [f"{label}: {whole(n)} tokens" for n in x]
        yield Series(label, style, x, [0.5] * len(x), words, marker="hollow", arm=run.letter or None)


def _caption(within: Frame) -> str:
    last = ", at their last token" if all(run.setting["rows"] == "last" for run in within.runs) else ""
    said = [
        f"Means over prompts{last}. Entropy lies between 0 (all weight on one key) and ln n (the same "
        "weight on every key), the top weight between 1/n and 1."
    ]
    if within.foretold:
        ends = {f"{count(run.setting['fit_up_to'][within.task])} {run.unit(within.task)}" for run in within.runs}
        said.append(f"Dashed: the forecast, made from sizes up to {' and '.join(sorted(ends))} alone.")
    if within.far:
        said.append("The horizon is where the top weight falls under one half for good, with its 95% interval.")
    return " ".join(said)
