"""The figures of `sharpmax evaluate`: right answers of every arm against size, a figure for each task."""

from __future__ import annotations

from sharpmax.report.axes import gain_panel, size_axis
from sharpmax.report.evaluate.facts import LEVEL, accuracy, arms, base, gain, policies
from sharpmax.report.looks import in_turn
from sharpmax.report.plot import Axis, Panel, Plot, Series
from sharpmax.report.tables import Tables, sizes
from sharpmax.report.words import count, percent, plural, points, probability, share

__all__ = ["right_answers"]


def right_answers(tables: Tables, task: str) -> Plot:
    """Right answers of every arm, and beside it what each policy adds."""
    known = sizes(*tables[f"accuracy/{task}"].values())
    about = tables["setting"]["tasks"][task]
    return Plot(
        _title(tables, task),
        f"{tables['setting']['model']}; {task}, version {about['version']}; "
        f"{plural(tables['setting']['prompts'], 'prompt')} of each size, the same for every arm",
        f"The task: {about['summary']}. Right is an answer that greedy decoding gives word by word. Bars: Wilson's 95% "
        "intervals; arms are compared on the same prompts, so overlapping bars may still differ.",
        _alt(tables, task),
        [
            Panel(
                _sizes(known),
                Axis("right answers (%)", (0.0, 102.0)),
                [_line(tables, task, arm, place) for place, arm in enumerate(arms(tables))],
                title="Right answers",
            ),
            *_gain_panel(tables, task, known),
        ],
    )


def _sizes(known: list[str]) -> Axis:
    return size_axis(known, label="size n", hover="n = %{x:,.0f}")


def _line(tables: Tables, task: str, arm: str, place: int) -> Series:
    cells = accuracy(tables, task, arm)
    known, style = sizes(cells), in_turn(arm, place)
    return Series(
        style.label,
        style,
        [int(n) for n in known],
        [cells[n]["mean"] for n in known],
        [f"{arm}: {percent(c['mean'])} ({share(c['low'])} to {share(c['high'])})" for c in map(cells.get, known) if c],
        low=[cells[n]["low"] for n in known],
        high=[cells[n]["high"] for n in known],
        arm=arm,
    )


def _gain_panel(tables: Tables, task: str, known: list[str]) -> list[Panel]:
    series = []
    for place, arm in enumerate(arms(tables)):
        if arm == base(tables):
            continue
        found, tests = gain(tables, task, arm), tables[f"paired/{task}"][arm]
        words = [f"{arm}: {points(value)} points ({probability(tests[n]['p'])})" for n, value in found.points.items()]
        x = [int(n) for n in found.points]
        series.append(Series(arm, in_turn(arm, place), x, list(found.points.values()), words, arm=arm))
    if not series:
        return []
    return [gain_panel(_sizes(known), series, "Gain over the model as it comes")]


def _title(tables: Tables, task: str) -> str:
    plain = accuracy(tables, task, base(tables))
    known = sizes(plain)
    falls = len(known) > 1 and plain[known[-1]]["high"] < plain[known[0]]["low"]
    start = f"{task}: the model as it comes loses track as inputs grow" if falls else f"{task}: right answers by size"
    gains = [found for arm in policies(tables) if (found := gain(tables, task, arm)).better and not found.worse]
    if not gains:
        return start
    best = max(gains, key=lambda found: found.mean)
    return (
        f"{start}; {best.arm} gains {share(best.points[best.best])} points at size {count(best.best)} (p < {LEVEL:g})"
    )


def _alt(tables: Tables, task: str) -> str:
    said = []
    for arm in arms(tables):
        cells = accuracy(tables, task, arm)
        first, last = sizes(cells)[0], sizes(cells)[-1]
        said.append(f"{arm} from {percent(cells[first]['mean'])} to {percent(cells[last]['mean'])}")
    return f"Right answers in percent against size in the task {task}, a line for each arm: {', '.join(said)}."
