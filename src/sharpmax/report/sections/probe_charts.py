"""Facts and figures of `sharpmax probe`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from sharpmax.errors import FileFormatError
from sharpmax.report.interactive import traces
from sharpmax.report.plot import Axis, Board, BoardMap, Kind, Mark, Panel, Plot, Series, Spot
from sharpmax.report.section import NOTHING
from sharpmax.report.tables import RUNS, Tables, sizes
from sharpmax.report.theme import BLUE, CIRCLE, DIAMOND, SOFT, SQUARE, VERMILLION, Look
from sharpmax.report.words import capital, count, joined, nats, plural, points, whole


def said(value: float | None, words: Callable[[float], str]) -> str:
    """A number in its words, or the sign for none."""
    return NOTHING if value is None else words(value)


def signed(value: float | None) -> str:
    """A slope or a bias.

    >>> signed(0.744), signed(None)
    ('+0.74', '–')
    """
    return said(value, lambda one: points(one, 2))


def weight(value: float | None) -> str:
    """A weight between 0 and 1, in percent without its sign; among many keys most are next to nothing.

    >>> weight(0.25), weight(0.00001), weight(0.0)
    ('25.0', '< 0.1', '0.0')
    """
    return said(value, lambda one: "< 0.1" if 0.0 < one < 0.001 else f"{100.0 * one:.1f}")


def keys(value: float | None) -> str:
    """A number of keys that need not be whole.

    >>> keys(3.14), keys(1234.5)
    ('3.1', '1,234')
    """
    return said(value, lambda one: f"{one:.1f}" if one < 100.0 else count(one))


LOSES_FOCUS = ("dispersing", "uniform")
"""The kinds of heads that this is all about: those whose rows spread as inputs grow."""

UNKNOWN = "unknown"
"""The kind of a head without numbers."""

_HEADS = "heads/"


@dataclass(frozen=True)
class Run:
    """One probed model; where there are several, each has a letter."""

    letter: str
    name: str
    tables: Tables

    @property
    def label(self) -> str:
        """What a reader calls it."""
        return f"{self.letter}: {self.name}" if self.letter else self.name

    @property
    def setting(self) -> Mapping[str, Any]:
        """How it was probed."""
        found: Mapping[str, Any] = self.tables["setting"]
        return found

    def heads(self, task: str) -> Mapping[str, Any]:
        """Every head by its name, layer.head."""
        found: Mapping[str, Any] = self.tables[_HEADS + task]
        return found

    def layers(self, task: str) -> Mapping[str, Any]:
        """Every layer by its number; empty where the run says nothing of layers."""
        return self.tables.get(f"layers/{task}") or {}

    def forecast(self, task: str) -> Mapping[str, Any]:
        """The errors of the forecast; empty where nothing was forecast and measured."""
        return self.tables.get(f"forecast/{task}") or {}

    def chain(self, task: str) -> Mapping[str, Any]:
        """How layers go with those that follow; empty where the run does not say."""
        return self.tables.get(f"chain/{task}") or {}

    def unit(self, task: str) -> str:
        """What sizes are counted in."""
        return str(self.setting["unit"][task])

    def shape(self, task: str) -> tuple[list[int], int]:
        """The layers that have heads, and the most heads of a layer."""
        known = [place(name) for name in self.heads(task)]
        return sorted({layer for layer, _ in known}), 1 + max(head for _, head in known)

    def kinds(self, task: str) -> Counter[str]:
        """How many heads there are of each kind."""
        return Counter(str(about["kind"]) for about in self.heads(task).values())

    def known(self, task: str) -> int:
        """How many heads have numbers."""
        return len(self.heads(task)) - self.kinds(task)[UNKNOWN]

    def losing(self, task: str) -> int:
        """How many heads lose their focus."""
        return sum(self.kinds(task)[kind] for kind in LOSES_FOCUS)

    def horizons(self, task: str) -> dict[str, float]:
        """The horizons of all heads that have one."""
        found = {name: about["horizon"]["tokens"] for name, about in self.heads(task).items()}
        return {name: tokens for name, tokens in found.items() if tokens is not None}

    def ranked(self, task: str) -> list[str]:
        """The layers in the order in which they disperse."""
        known = self.layers(task)
        return sorted((layer for layer in known if known[layer]["rank"] is not None), key=lambda n: known[n]["rank"])

    def first(self, task: str) -> list[str]:
        """The layers that disperse at all, in that order."""
        return [layer for layer in self.ranked(task) if (self.layers(task)[layer]["slope"] or 0.0) > 0.0]

    def visible(self, task: str, size: str) -> float | None:
        """How many keys a head sees at a size, in the middle of all heads."""
        cells = [about["curve"].get(size) or {} for about in self.heads(task).values()]
        known = [cell["count"] for cell in cells if cell.get("count") is not None]
        return median(known) if known else None


def place(name: str) -> tuple[int, int]:
    """The layer and the head of a head's name.

    >>> place("12.3")
    (12, 3)
    """
    layer, _, head = name.partition(".")
    return int(layer), int(head)


def is_pair(tables: Tables) -> bool:
    """Whether two runs are told together."""
    return RUNS in tables


def runs(tables: Tables) -> list[Run]:
    """The run of these tables, or both."""
    if not is_pair(tables):
        return [Run("", _name(tables["setting"]), tables)]
    found = tables[RUNS]
    names = [_name(run["tables"]["setting"]) for run in found]
    if len(set(names)) < len(names):  # the models do not tell them apart, so their folders must
        names = [f"{name} ({run['name']})" for name, run in zip(names, found, strict=True)]
    elif len({run["tables"]["setting"]["model"] for run in found}) == 1:
        settings = [run["tables"]["setting"] for run in found]
        names = [name if of["policy"] else f"{name} as it comes" for name, of in zip(names, settings, strict=True)]
    return [Run(letter, name, run["tables"]) for letter, name, run in zip("AB", names, found, strict=True)]


def tasks(tables: Tables) -> list[str]:
    """The tasks of a run, in its order; of two runs those that both have."""
    first, *rest = ([n.removeprefix(_HEADS) for n in run.tables if n.startswith(_HEADS)] for run in runs(tables))
    shared = [task for task in first if all(task in other for other in rest)]
    if not shared:
        given = " and ".join(", ".join(known) for known in (first, *rest))
        raise FileFormatError(f"results: no task is in both of them ({given}); allowed: two runs that share a task")
    return shared


def chosen(tables: Tables, task: str) -> str:
    """The head to look at first: the one of the first run that disperses most, if possible one that all runs have."""
    found = runs(tables)
    heads = found[0].heads(task)

    def rank(name: str) -> tuple[bool, bool, float]:
        slope = heads[name]["slope"]
        shared = all(name in run.heads(task) for run in found)
        # A uniform head has nothing to lose; one that disperses has.
        return shared, heads[name]["kind"] == LOSES_FOCUS[0], -math.inf if slope is None else slope

    return max(heads, key=rank)


def forecast_error(run: Run, task: str) -> tuple[str, Mapping[str, Any]] | None:
    """The largest size at which the forecast was tested, and its errors there."""
    tested = run.forecast(task).get("tested") or {}
    known = sizes(tested)
    return (known[-1], tested[known[-1]]) if known else None


def _name(setting: Mapping[str, Any]) -> str:
    policy = setting.get("policy")
    return f"{setting['model']} with {policy}" if policy else str(setting["model"])


_LETTERS = {"dispersing": "D", "uniform": "U", "sharp": "S", "local": "L", "sink": "K", UNKNOWN: "?"}
"""From the least focused to those that hold on to something; sharp and sink cannot both be S."""


def letter_of(kind: str) -> str:
    """The letter of a kind; one that nobody knows has its first.

    >>> letter_of("sink"), letter_of("wide")
    ('K', 'W')
    """
    return _LETTERS.get(kind, kind[:1].upper())


def in_order(kinds: Iterable[str]) -> list[str]:
    """Kinds in their order, each once, those that nobody knows last.

    >>> in_order(["sink", "wide", "dispersing", "sink"])
    ['dispersing', 'sink', 'wide']
    """
    known = set(kinds)
    return [kind for kind in _LETTERS if kind in known] + sorted(known - _LETTERS.keys())


Head = Mapping[str, Any]

_HALF = 0.5
"""The top weight under which a head is beyond its horizon."""


def called(name: str) -> str:
    """What a head is called.

    >>> called("12.3")
    'layer 12, head 3'
    """
    layer, head = place(name)
    return f"layer {layer}, head {head}"


def measured_on(run: Run, task: str) -> str:
    """How many prompts of which sizes a run has read."""
    known, prompts = run.setting["sizes"][task], run.setting["prompts_of_size"][task].values()
    fewest, most = min(prompts), max(prompts)
    many = plural(most, "prompt") if most == fewest else f"{count(fewest)} to {plural(most, 'prompt')}"
    ends = count(known[0]) if len(known) == 1 else f"{count(known[0])} to {count(known[-1])}"
    return f"{many} of each size, {ends} {run.unit(task)}"


def at_a_glance(about: Head) -> str:
    """Kind and slope."""
    return f"{about['kind']}, slope {slope_words(about)}"


def in_numbers(about: Head) -> str:
    """Kind, slope, and what is left of its focus at the largest size."""
    last = _last(about)
    if last.get("effective") is None or last.get("top") is None:
        return at_a_glance(about)
    shared = f"{keys(last['effective'])} of {count(last['count'])} keys share the weight"
    return f"{at_a_glance(about)}; at the largest size {shared} in effect, the top one has {weight(last['top'])}%"


def slope_words(about: Head) -> str:
    """The slope with its interval."""
    if about["slope"] is None:
        return "not known"
    low, high = about.get("slope_low"), about.get("slope_high")
    between = "" if low is None or high is None else f" ({points(low, 2)} to {points(high, 2)})"
    return points(about["slope"], 2) + between


def horizon_words(about: Head) -> str:
    """The horizon with its interval, or on which side of the sizes it lies."""
    horizon = about["horizon"]
    if horizon["tokens"] is not None:
        low, high = horizon.get("low"), horizon.get("high")
        between = "" if low is None or high is None else f" ({whole(low)} to {whole(high)})"
        return f"{whole(horizon['tokens'])} tokens{between}"
    tops = [about["curve"][size].get("top") for size in sizes(about["curve"])]
    known = [top for top in tops if top is not None]
    if not known:
        return "not known"
    return "beyond the largest size" if known[-1] >= _HALF else "before the smallest size"


def everything(run: Run, task: str, about: Head | None) -> list[tuple[str, str]]:
    """What was measured of a head at the largest size, and what follows from all of them; None is no such head."""
    last = _last(about)
    seen = last.get("count")
    most = None if seen is None else math.log(max(seen, 1.0))
    return [
        ("kind", str(about["kind"]) if about else NOTHING),
        ("slope of entropy against ln n", slope_words(about) if about else NOTHING),
        ("horizon", horizon_words(about) if about else NOTHING),
        ("keys at the largest size, n", said(seen, count)),
        ("entropy, of at most ln n (nats)", _of(said(last.get("entropy"), nats), said(most, nats))),
        ("keys that share the weight, in effect", keys(last.get("effective"))),
        ("top weight (%)", weight(last.get("top"))),
        ("weight of the first token (%)", weight(last.get("sink"))),
        ("weight of the last 16 tokens (%)", weight(last.get("local"))),
        ("spread of the logits", said(last.get("spread"), nats)),
        *_forecast(run, task, about),
    ]


def _forecast(run: Run, task: str, about: Head | None) -> list[tuple[str, str]]:
    tested = sizes(run.forecast(task).get("tested") or {})
    if not tested:
        return []
    size = tested[-1]
    foretold = ((about or {}).get("forecast") or {}).get(size) or {}
    found = ((about or {}).get("curve") or {}).get(size) or {}
    ends = foretold.get("entropy"), found.get("entropy")
    off = None if ends[0] is None or ends[1] is None else ends[0] - ends[1]
    return [(f"forecast for {count(size)} {run.unit(task)} is off by (nats)", signed(off))]


def _last(about: Head | None) -> Mapping[str, Any]:
    """The largest size at which anything is known."""
    curve = about["curve"] if about else {}
    known = [size for size in sizes(curve) if curve[size].get("count") is not None]
    found: Mapping[str, Any] = curve[known[-1]] if known else {}
    return found


def _of(value: str, most: str) -> str:
    return value if NOTHING in (value, most) else f"{value} of {most}"


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


def layers(tables: Tables, task: str) -> Plot:
    """The slope of every head against its layer, and the mean of each layer as a line."""
    found = runs(tables)
    lines = [series for run in found for series in _series(run, task)]
    values = [0.0, 1.0, *(value for series in lines for value in series.y)]
    last = max((x for series in lines for x in series.x), default=0.0)
    room = 0.05 * (max(values) - min(values))
    return Plot(
        _layers_title(found, task),
        "; ".join(run.label for run in found) + f"; task {task}",
        "A dot for each head, a line through the means of the layers. A slope of 1 is dispersion without end, 0 is "
        "none. A mean near 0 can hide heads that disperse behind others that gather.",
        f"Slopes of entropy against ln n, by layer. {_layers_title(found, task)}.",
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


def _layers_title(found: Sequence[Run], task: str) -> str:
    if not any(run.first(task) for run in found):
        return "No layer disperses on average"
    if len(found) > 1:
        said = [f"layer {run.first(task)[0]} in {run.letter}" for run in found if run.first(task)]
        return f"First to disperse: {joined(said)}"
    first = found[0].first(task)[:3]
    return f"Layer {first[0]} disperses first" + (f", then {joined(first[1:])}" if first[1:] else "")


_CHANGED = "≠"


def board(tables: Tables, task: str) -> Board:
    """A cell for each head: its letter is its kind, its colour its slope."""
    found = runs(tables)
    maps = [_map(run, task) for run in found]
    pair = len(found) > 1
    if pair and same_shape(found, task):
        maps.append(_difference(found[0], found[1], task))
    said = joined([f"{_losing(run, task)} in {run.letter}" if pair else _losing(run, task) for run in found])
    return Board(
        f"Heads that lose focus as {task} prompts grow: {said}",
        "; ".join(run.label for run in found),
        _map_caption(found, task),
        f"Map of all heads, a row for each layer, with their kind and the slope of their entropy: {said} lose focus.",
        maps,
        _kinds(found, task),
        "layer",
        "head",
        "slope of entropy against ln n",
        ("gathers", "disperses"),
        chosen(tables, task),
    )


def same_shape(found: Sequence[Run], task: str) -> bool:
    """Whether the heads of these runs correspond to each other."""
    return len({tuple(sorted(run.heads(task))) for run in found}) == 1


def _map(run: Run, task: str) -> BoardMap:
    heads = run.heads(task)
    layers, columns = run.shape(task)

    def spot(name: str) -> Spot | None:
        about = heads.get(name)
        if about is None:
            return None
        words = capital(f"{called(name)}: {in_numbers(about)}")
        return Spot(name, about["slope"], letter_of(str(about["kind"])), str(about["kind"]), words)

    return _laid_out(run.label if run.letter else "", layers, columns, spot)


def _difference(before: Run, after: Run, task: str) -> BoardMap:
    layers, columns = before.shape(task)
    one, other = before.heads(task), after.heads(task)

    def spot(name: str) -> Spot | None:
        if name not in one:
            return None
        slopes = [heads[name]["slope"] for heads in (one, other)]
        apart = None if None in slopes else slopes[1] - slopes[0]
        kinds = [str(heads[name]["kind"]) for heads in (one, other)]
        changed = kinds[0] != kinds[1]
        words = f"slope {'not known' if apart is None else points(apart, 2)} from A to B; " + (
            f"{kinds[0]} becomes {kinds[1]}" if changed else f"stays {kinds[0]}"
        )
        return Spot(name, apart, _CHANGED if changed else "", kinds[1], capital(f"{called(name)}: {words}"))

    return _laid_out("B − A", layers, columns, spot)


def _laid_out(title: str, layers: Sequence[int], columns: int, spot: Callable[[str], Spot | None]) -> BoardMap:
    rows = [(str(layer), [spot(f"{layer}.{head}") for head in range(columns)]) for layer in layers]
    return BoardMap(title, [str(head) for head in range(columns)], rows)


def _kinds(found: Sequence[Run], task: str) -> list[Kind]:
    counts = [run.kinds(task) for run in found]
    return [
        Kind(letter_of(kind), kind, " / ".join(count(known[kind]) for known in counts))
        for kind in in_order(kind for known in counts for kind in known)
    ]


def _losing(run: Run, task: str) -> str:
    return f"{count(run.losing(task))} of {count(run.known(task))}"


def _shape(run: Run, task: str) -> str:
    layers, heads = run.shape(task)
    return f"{plural(len(layers), 'layer')} of {plural(heads, 'head')}"


def _map_caption(found: Sequence[Run], task: str) -> str:
    text = (
        "A cell for each head. Its letter is its kind; its colour is how fast the entropy of its rows grows with ln n: "
        "+1 (red) spreads over more and more keys without end, 0 (grey) keeps what focus it has, below 0 (blue) it "
        "gathers. Press a head to see its curves, or a kind to see it alone."
    )
    if len(found) == 1:
        return text
    if same_shape(found, task):
        return f"{text} The last map is the slope of B less that of A; {_CHANGED} where the kind changes."
    said = joined([f"{run.letter} has {_shape(run, task)}" for run in found])
    return f"{text} {said}, so no head of one stands for a head of the other: a head of the same number is shown."
