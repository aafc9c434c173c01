"""One head in words: a line for a glance, and everything that was measured of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sharpmax.report.grid import NOTHING
from sharpmax.report.probe.facts import Run, place
from sharpmax.report.probe.numbers import keys, said, signed, weight
from sharpmax.report.tables import sizes
from sharpmax.report.words import count, nats, plural, points, whole

__all__ = ["at_a_glance", "called", "everything", "horizon_words", "in_numbers", "measured_on", "slope_words"]

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
