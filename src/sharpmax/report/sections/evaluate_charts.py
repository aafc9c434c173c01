"""Facts, tables and figures of `sharpmax evaluate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sharpmax.report.plot import Axis, Panel, Plot, Series, gain_panel, size_axis
from sharpmax.report.section import NOTHING, Cell, Grid
from sharpmax.report.tables import Tables, readable, sizes
from sharpmax.report.theme import in_turn
from sharpmax.report.words import (
    capital,
    count,
    milliseconds,
    percent,
    plural,
    points,
    probability,
    share,
    text_name,
    texts_in_order,
)

LEVEL = 0.01
"""A difference counts as shown when its p value is below this: there are many sizes and tasks to be wrong about."""


def tasks(tables: Tables) -> list[str]:
    """The tasks of a run, in its order."""
    return [name.partition("/")[2] for name in tables if name.startswith("accuracy/")]


def arms(tables: Tables) -> Mapping[str, Any]:
    """What the run says of its arms, in its order: the model as it comes first."""
    known: Mapping[str, Any] = tables["setting"]["arms"]
    return known


def base(tables: Tables) -> str:
    """The arm without a policy."""
    return next(arm for arm, about in arms(tables).items() if about["policy"] is None)


def policies(tables: Tables) -> list[str]:
    """The arms with a policy."""
    return [arm for arm, about in arms(tables).items() if about["policy"] is not None]


def home(tables: Tables, arm: str) -> str:
    """The task that a policy was calibrated on where that is known and was run, else the first task."""
    known = tasks(tables)
    task = arms(tables)[arm].get("calibrated_on")
    return task if task in known else known[0]


def accuracy(tables: Tables, task: str, arm: str) -> Mapping[str, Any]:
    """An arm's cells in a task, by size."""
    cells: Mapping[str, Any] = tables[f"accuracy/{task}"][arm]
    return cells


def columns(tables: Tables) -> list[str]:
    """The texts that perplexity was measured on: lengths of windows, and the model's own answers last."""
    return texts_in_order(column for cells in tables.get("perplexity", {}).values() for column in cells)


@dataclass(frozen=True)
class Gain:
    """What a policy changes in one task: points by size, sizes at which a change is shown, and the mean change."""

    task: str
    arm: str
    points: Mapping[str, float]
    better: tuple[str, ...]
    worse: tuple[str, ...]

    @property
    def mean(self) -> float:
        """Mean change over the sizes."""
        return sum(self.points.values()) / len(self.points)

    @property
    def best(self) -> str:
        """The size of the largest gain."""
        return max(self.points, key=self.points.__getitem__)

    @property
    def worst(self) -> str:
        """The size of the largest loss."""
        return min(self.points, key=self.points.__getitem__)


def gain(tables: Tables, task: str, arm: str) -> Gain:
    """What a policy changes in a task."""
    plain, cells, tests = accuracy(tables, task, base(tables)), accuracy(tables, task, arm), tables[f"paired/{task}"]
    apart = {n: cells[n]["mean"] - plain[n]["mean"] for n in sizes(cells)}
    shown = [n for n in apart if tests[arm][n]["p"] < LEVEL]
    return Gain(
        task,
        arm,
        apart,
        better=tuple(n for n in shown if apart[n] > 0),
        worse=tuple(n for n in shown if apart[n] < 0),
    )


_MARK = "*"


def accuracy_grids(tables: Tables) -> list[Grid]:
    """For each task the share of right answers of every arm at every size."""
    with readable("the accuracies", tables):
        return [_accuracy(tables, task) for task in tasks(tables)]


def paired_grids(tables: Tables) -> list[Grid]:
    """For each task the prompts that a policy gained and lost, and the test of it."""
    with readable("the comparisons", tables):
        return [_paired(tables, task) for task in tasks(tables) if policies(tables)]


def perplexity_grid(tables: Tables) -> Grid | None:
    """Perplexity of every arm on text and on the model's own answers, and how far it rises."""
    if not tables.get("perplexity"):
        return None
    with readable("perplexity", tables):
        known, table = columns(tables), tables["perplexity"]
        return Grid(
            "Perplexity",
            "Lower is better. With the rise against the model as it comes, and its 95% interval over the same texts. "
            + _texts(tables),
            [Cell("arm"), *(Cell(text_name(column)) for column in known)],
            [
                [Cell(arm), *(_perplexity(table[arm].get(c), arm == base(tables)) for c in known)]
                for arm in arms(tables)
            ],
        )


def cost_grid(tables: Tables) -> Grid | None:
    """Time and memory of every arm."""
    if not tables.get("cost"):
        return None
    with readable("the costs", tables):
        setting, table = tables["setting"], tables["cost"]
        memory = any(cells["peak_mib"] is not None for cells in table.values())
        held = "memory of its tensors" if setting["device"] == "cuda" else "memory of the whole process"
        return Grid(
            "Time and memory",
            f"Reading {count(setting['context'])} tokens, then saying one more with a filled cache, on "
            f"{setting['device']} in {setting['dtype']}; medians of {plural(setting['rounds'], 'round')} in which all "
            "arms take turns. With ratios to the model as it comes."
            + (f" Memory: the most that was held meanwhile ({held})." if memory else ""),
            [Cell("arm"), Cell("reading (ms)"), Cell("one token (ms)"), *([Cell("memory (MiB)")] if memory else [])],
            [
                [
                    Cell(arm),
                    *(
                        Cell(milliseconds(cells[f"{k}_ms"]), f"{cells[f'{k}_ratio']:.2f}×")
                        for k in ("prefill", "decode")
                    ),
                    *([Cell(count(cells["peak_mib"]))] if memory else []),
                ]
                for arm, cells in table.items()
            ],
        )


def harness_grid(tables: Tables) -> Grid | None:
    """What EleutherAI's harness found of every arm."""
    table = tables.get("harness")
    if not table:
        return None
    with readable("the harness", tables):
        names = [(task, metric) for task, metrics in table[base(tables)].items() for metric in metrics]
        return Grid(
            "EleutherAI's harness",
            "With the standard errors that the harness gives.",
            [Cell("arm"), *(Cell(task, metric) for task, metric in names)],
            [[Cell(arm), *(_harness(table[arm][task][metric]) for task, metric in names)] for arm in table],
        )


def _accuracy(tables: Tables, task: str) -> Grid:
    known, about = sizes(accuracy(tables, task, base(tables))), tables["setting"]["tasks"][task]
    tests = tables[f"paired/{task}"]
    rows = []
    for arm in arms(tables):
        cells = accuracy(tables, task, arm)
        rows.append([Cell(arm), *(_right(cells[n], tests.get(arm, {}).get(n)) for n in known)])
    return Grid(
        f"Right answers (%): {task}",
        f"{capital(about['summary'])}. {_prompts(tables)} of each size, the same for every arm; with Wilson's 95% "
        f"intervals. {_MARK} differs from the model as it comes (McNemar's exact test, p < {LEVEL:g}, not corrected "
        "for the number of comparisons).",
        [Cell("arm"), *(Cell(f"n = {count(n)}") for n in known)],
        rows,
    )


def _prompts(tables: Tables) -> str:
    return plural(tables["setting"]["prompts"], "prompt")


def _right(cell: Mapping[str, Any], test: Mapping[str, Any] | None) -> Cell:
    shown = test is not None and test["p"] < LEVEL
    return Cell(
        share(cell["mean"]) + (_MARK if shown else ""), f"{share(cell['low'])}–{share(cell['high'])}", strong=shown
    )


def _paired(tables: Tables, task: str) -> Grid:
    table = tables[f"paired/{task}"]
    known = sizes(*table.values())
    return Grid(
        f"Prompts gained and lost: {task}",
        f"Of {_prompts(tables)} of each size: answered rightly under the policy alone (+) and by the model as it comes "
        "alone (−), with McNemar's exact test.",
        [Cell("arm"), *(Cell(f"n = {count(n)}") for n in known)],
        [[Cell(arm), *(_discordant(table[arm].get(n)) for n in known)] for arm in table],
    )


def _discordant(cell: Mapping[str, Any] | None) -> Cell:
    if cell is None:
        return Cell(NOTHING)
    return Cell(f"+{cell['gained']} −{cell['lost']}", probability(cell["p"]), strong=cell["p"] < LEVEL)


def _perplexity(cell: Mapping[str, Any] | None, plain: bool) -> Cell:
    if cell is None:
        return Cell(NOTHING)
    if plain:
        return Cell(f"{cell['mean']:.2f}")
    between = "" if cell["low"] is None else f", {points(cell['low'], 2)} to {points(cell['high'], 2)}"
    return Cell(f"{cell['mean']:.2f}", f"{points(cell['rise'], 2)}%{between}")


def _texts(tables: Tables) -> str:
    setting = tables["setting"]
    said = []
    if text := setting.get("text"):
        windows = plural(setting["windows"], "window")
        said.append(f"Text: {text['source']} (fingerprint {text['fingerprint']}), up to {windows} of each length.")
    if setting.get("questions"):
        asked = plural(setting["questions"], "ordinary question")
        said.append(f"Own answers: what the model as it comes says to {asked}.")
    return " ".join(said)


def _harness(cell: Mapping[str, Any]) -> Cell:
    error = cell["sem"]
    return Cell(f"{cell['mean']:.4g}", "" if error is None else f"± {error:.2g}")


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
