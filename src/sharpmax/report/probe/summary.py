"""What a probed model shows, and what two of them differ in, in plain sentences."""

from __future__ import annotations

from sharpmax.report.probe.facts import Run, runs, tasks
from sharpmax.report.probe.maps import same_shape
from sharpmax.report.probe.told import measured_on
from sharpmax.report.tables import Tables, readable
from sharpmax.report.words import count, percent, plural

__all__ = ["summary"]

_ALIKE = 0.01
"""Shares of heads that lie closer than this are called the same."""


def summary(tables: Tables) -> list[tuple[str, list[str]]]:
    """The verdict of a run; of two runs first what they differ in."""
    with readable("the summary", tables):
        found = runs(tables)
        verdicts = [(run.label if run.letter else "Verdict", _verdict(run)) for run in found]
        if len(found) == 1:
            return verdicts
        before, after = found
        differ = [_difference(before, after, task) for task in tasks(tables)]
        return [("The difference", differ), *verdicts]


def _verdict(run: Run) -> list[str]:
    return [str(sentence) for sentence in run.tables["verdict"]]


def _difference(before: Run, after: Run, task: str) -> str:
    shares = [run.losing(task) / max(1, run.known(task)) for run in (before, after)]
    apart = shares[1] - shares[0]
    alike = abs(apart) < _ALIKE
    word = "about the same share" if alike else "a smaller share" if apart < 0 else "a larger share"
    said = [
        f"On {task}, {word} of heads loses focus in B ({after.name}) {'as' if alike else 'than'} in A ({before.name}): "
        f"{_many(after, task)} against {_many(before, task)}."
    ]
    if same_shape([before, after], task):
        said.append(_head_by_head(before, after, task))
    ways = [measured_on(run, task) for run in (before, after)]
    if ways[0] != ways[1]:
        said.append(f"They were not measured alike, so take care: A on {ways[0]}, B on {ways[1]}.")
    return " ".join(said)


def _many(run: Run, task: str) -> str:
    n, total = run.losing(task), run.known(task)
    return f"{count(n)} of {plural(total, 'head')} ({percent(100.0 * n / max(1, total))})"


def _head_by_head(before: Run, after: Run, task: str) -> str:
    lower = higher = compared = 0
    for name, one in before.heads(task).items():
        other = after.heads(task)[name]
        ends = [about.get(end) for about in (one, other) for end in ("slope_low", "slope_high")]
        if None in ends:
            continue
        compared += 1
        lower += ends[3] < ends[0]
        higher += ends[2] > ends[1]
    if not compared:
        return "No slope is known in both."
    return (
        f"Head by head, the slope is lower in B in {count(lower)} and higher in {count(higher)} of {count(compared)}; "
        f"in the other {count(compared - lower - higher)} the 95% intervals overlap."
    )
