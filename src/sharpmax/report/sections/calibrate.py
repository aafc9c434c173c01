"""The report section of `sharpmax calibrate`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from sharpmax.report.plot import Axis, Heat, HeatPanel, Mark, Panel, Plot, Series
from sharpmax.report.section import NOTHING, Cell, Figure, Grid, Part, Story, Tile
from sharpmax.report.tables import Tables, readable, sizes
from sharpmax.report.theme import BLACK, SOFT, Look, in_turn
from sharpmax.report.words import count, joined, percent, points, share, text_name, texts_in_order

RISE = "rise/"
"""What the names of perplexity's lines in the training curve begin with."""

_SMALLEST = 1e-3


def chosen(tables: Tables) -> Mapping[str, Any]:
    """The candidate that became the policy."""
    found: Mapping[str, Any] = tables["candidates"][tables["chosen"]]
    return found


def leash(tables: Tables) -> float:
    """How far perplexity may rise, in percent."""
    return float(tables["setting"]["leash"])


def total_heads(tables: Tables) -> int:
    """Heads of the whole model."""
    return int(tables["setting"]["layers"]) * int(tables["setting"]["heads"])


def worst_rise(candidate: Mapping[str, Any]) -> tuple[str, float]:
    """The text on which perplexity rises most, and how far in percent."""
    rises = candidate["rise"]
    column = max(texts_in_order(rises), key=rises.__getitem__)
    return column, float(rises[column])


def kept(tables: Tables, candidate: Mapping[str, Any]) -> bool:
    """Whether a candidate stays within the leash."""
    return worst_rise(candidate)[1] <= leash(tables)


def log_betas(tables: Tables) -> list[list[float]]:
    """ln β of every head, a row for each head and a column for each layer."""
    grid = tables["heads"]["betas"]
    return [[math.log(max(layer[head], _SMALLEST)) for layer in grid] for head in range(len(grid[0]))]


_SHOWN = 60


def candidates_grid(tables: Tables) -> Grid:
    """Every policy that was learned and could have been chosen."""
    with readable("the candidates", tables):
        table = tables["candidates"]
        known = texts_in_order(column for about in table.values() for column in about["rise"])
        return Grid(
            "Candidates",
            "Right answers on validation prompts and the rise of perplexity on each text, which may be "
            f"{leash(tables):g}% at most. Bold: the policy that was chosen. A foldable policy can be written into "
            "the weights and then costs nothing.",
            [
                *map(Cell, ("candidate", "kind", "strength", "heads touched", "right answers (%)")),
                *(Cell(f"rise on {text_name(column)} (%)") for column in known),
                Cell("foldable"),
            ],
            [_candidate(tables, name, known) for name in table],
        )


def heads_grid(tables: Tables) -> Grid | None:
    """The heads that the policy touches, those it changes most first."""
    with readable("the heads", tables):
        touched = tables["heads"]["touched"]
        if not touched:
            return None
        some = f" The {_SHOWN} that change most of {count(len(touched))}." if len(touched) > _SHOWN else ""
        return Grid(
            "Touched heads",
            f"β at a row of typical length, with the rule that gives it; layers and heads count from 0.{some}",
            [Cell(text) for text in ("layer", "head", "β", "rule")],
            [
                [Cell(count(layer)), Cell(count(head)), Cell(f"{beta:.2f}", strong=beta > 1.0), Cell(str(rule))]
                for layer, head, rule, beta in touched[:_SHOWN]
            ],
        )


def validation_grid(tables: Tables) -> Grid | None:
    """Right answers on validation prompts, by size."""
    table = tables.get("validation")
    if not table:
        return None
    with readable("the validation", tables):
        known = sizes(*table.values())
        return Grid(
            "Right answers on validation prompts (%)",
            f"Task {tables['setting']['task']}; prompts that were not learned from.",
            [Cell("arm"), *(Cell(f"n = {count(n)}") for n in known)],
            [[Cell(arm), *(_right(cells.get(n)) for n in known)] for arm, cells in table.items()],
        )


def _candidate(tables: Tables, name: str, known: list[str]) -> list[Cell]:
    about, won = tables["candidates"][name], name == tables["chosen"]
    rises = [about["rise"].get(column) for column in known]
    return [
        Cell(name, "chosen" if won else "", strong=won),
        Cell(str(about["kind"])),
        Cell(f"{about['strength']:.2f}"),
        Cell(count(about["touched"])),
        Cell(share(about["validation"]), strong=won),
        *(_rise(rise, leash(tables)) for rise in rises),
        Cell("yes" if about["foldable"] else "no"),
    ]


def _rise(rise: float | None, most: float) -> Cell:
    if rise is None:
        return Cell(NOTHING)
    return Cell(points(rise, 2), "beyond the leash" if rise > most else "")


def _right(cell: Mapping[str, Any] | None) -> Cell:
    if cell is None:
        return Cell(NOTHING)
    known = cell.get("low") is not None and cell.get("high") is not None
    return Cell(share(cell["mean"]), f"{share(cell['low'])}–{share(cell['high'])}" if known else "")


_FAINTEST = 0.05
"""The least that full colour stands for: noise must not look like a policy."""


def heads(tables: Tables) -> Heat:
    """A cell for each head of each layer: red is sharpened, blue is softened, pale is left alone."""
    values, setting = log_betas(tables), tables["setting"]
    if len({len(row) for row in values}) != 1 or not values[0]:
        raise ValueError("a heat map needs lines of equal length")
    edge = max([_FAINTEST, *(abs(value) for row in values for value in row)])
    flat = [value for row in values for value in row]
    up, down = sum(value > 0 for value in flat), sum(value < 0 for value in flat)
    said = f"{count(up)} sharpened, {count(down)} softened, {count(len(flat) - up - down)} left as they are"
    return Heat(
        f"{count(setting['touched'])} of {count(total_heads(tables))} attention heads are touched",
        f"{setting['model']}; policy {tables['chosen']}",
        "Each cell is one attention head; its colour is ln β at a row of typical length: red heads are sharpened "
        f"(β > 1), blue ones softened, pale ones left as they are. {said[0].upper()}{said[1:]}.",
        f"Heat map of ln β, layers across and heads down: {said}.",
        {"beta": [HeatPanel("", values)]},
        {"beta": ""},
        "layer",
        "head",
        "ln β",
        (-edge, edge),
        "layer %{x}, head %{y}: ln β = %{z:.3f}",
        first=0,
    )


def curve(tables: Tables) -> Plot:
    """Loss on the task and rise of perplexity, step by step."""
    lines, limit = tables["curve"], leash(tables)
    last = max(step for points_ in lines.values() for step, _ in points_)
    loss = _line("loss on the task", Look("loss on the task", BLACK), lines["nll"], "{:.3f} nats")
    known = texts_in_order(name.removeprefix(RISE) for name in lines if name.startswith(RISE))
    rises = [
        _line(f"rise on {text_name(c)}", in_turn(c, place), lines[RISE + c], "{}%", signed=True)
        for place, c in enumerate(known, start=1)
    ]
    steps = Axis("step", (0.0, max(1.0, last * 1.02)), hover="step %{x}")
    panels = [Panel(steps, _axis("loss (nats)", loss.y, floor=0.0), [loss], title="Loss on the task")]
    if rises:
        values = [limit, *(value for line in rises for value in line.y)]
        marks = [Mark("y", limit, f"leash {limit:g}%", SOFT), Mark("y", 0.0, "", SOFT)]
        panels.append(Panel(steps, _axis("rise (%)", values), rises, marks, "Rise of perplexity"))
    texts = joined([text_name(c) for c in known])
    return Plot(
        "How the policy was learned",
        f"{tables['setting']['model']}; {count(tables['setting']['steps'])} steps",
        "Loss on the task: that of the right answers to the prompts of the calibration. "
        + (f"Rise of perplexity: how far it lies above that of the model as it comes, on {texts}." if known else ""),
        "The loss on the task against the step of the calibration"
        + (", beside it the rise of perplexity in percent." if known else "."),
        panels,
    )


def _line(label: str, look: Look, values: Sequence[Sequence[float]], words: str, *, signed: bool = False) -> Series:
    steps, numbers = [step for step, _ in values], [value for _, value in values]
    said = [f"{label}: " + words.format(points(value, 2) if signed else value) for value in numbers]
    plain = Look(label, look.colour, width=look.width)
    return Series(label, plain, steps, numbers, said, marker=None)


def _axis(label: str, values: Sequence[float], floor: float | None = None) -> Axis:
    low, high = min(0.0, *values), max(0.0, *values)
    room = 0.06 * max(high - low, 1e-6)
    return Axis(label, (low - room if floor is None else floor, high + room))


def done(tables: Tables) -> list[str]:
    """What was learned from what."""
    with readable("the summary", tables):
        setting = tables["setting"]
        known = sorted(setting["sizes"])
        ends = count(known[0]) if len(known) == 1 else f"{count(known[0])} to {count(known[-1])}"
        return [
            f"A rule for the temperature of each attention head of {setting['model']} was learned on the task "
            f"{setting['task']} with sizes of {ends}. No weight of the model was changed.",
            f"Kinds of rules that were tried: {joined([str(kind) for kind in setting['kinds']])}.",
            f"The leash: perplexity may rise by no more than {leash(tables):g}% on any of the texts it is measured on.",
        ]


def found(tables: Tables) -> list[str]:
    """What was chosen, and what it reaches."""
    with readable("the summary", tables):
        about = chosen(tables)
        said = [
            f"Chosen: {tables['chosen']} ({about['kind']}), which touches {count(about['touched'])} of "
            f"{count(total_heads(tables))} heads and is right in {percent(about['validation'])} of the validation "
            "prompts."
        ]
        before = tables.get("before")
        if before is not None and about["nll"] >= before["nll"]:
            said.append(
                "It does not answer better than the model as it comes (by the loss of the answers): do not use it."
            )
        return said + [sentence for sentence in [_change(tables)] if sentence]


def cost(tables: Tables) -> list[str]:
    """What the chosen policy costs, and whether the leash held."""
    with readable("the summary", tables):
        about = chosen(tables)
        columns = texts_in_order(about["rise"])
        listed = joined([f"{points(about['rise'][column], 2)}% on {text_name(column)}" for column in columns])
        held = "The leash holds" if kept(tables, about) else "The leash does not hold"
        return [f"Perplexity changes by {listed}. {held} ({leash(tables):g}%)."]


def folded(tables: Tables) -> list[str]:
    """The best policy that can be written into the weights."""
    with readable("the summary", tables):
        name = tables.get("best_foldable")
        if name is None:
            return ["No candidate can be folded into the weights."]
        if name == tables["chosen"]:
            return ["The chosen policy can be folded into the weights: any engine then runs it at no cost."]
        about = tables["candidates"][name]
        column, rise = worst_rise(about)
        return [
            f"The best policy that can be folded into the weights, and then costs nothing in any engine, is {name}: "
            f"right in {percent(about['validation'])} of the validation prompts, with a rise of at most "
            f"{points(rise, 2)}% (on {text_name(column)})."
        ]


def tiles(tables: Tables) -> list[Tile]:
    """Four numbers: heads, right answers, the rise and what can be folded."""
    about = chosen(tables)
    column, rise = worst_rise(about)
    limit = f"on {text_name(column)}; the leash is {leash(tables):g}%"
    parts = [
        Tile(f"{count(about['touched'])} of {count(total_heads(tables))}", "heads touched", "no weight is changed"),
        Tile(percent(about["validation"]), "right answers in validation", _before(tables)),
        Tile(f"{points(rise, 2)}%", "largest rise of perplexity", limit),
    ]
    if (name := tables.get("best_foldable")) is not None:
        other = tables["candidates"][name]
        detail = f"right answers of {name}, at no cost in any engine"
        parts.append(Tile(percent(other["validation"]), "best policy to fold into the weights", detail))
    return parts


def _ends(tables: Tables) -> tuple[str, Mapping[str, Any], Mapping[str, Any]] | None:
    """The largest size of the validation, and the cells there before and after."""
    table = tables.get("validation") or {}
    arms = list(table)
    if len(arms) < 2 or tables["chosen"] not in table:
        return None
    before, after = table[arms[0]], table[tables["chosen"]]
    shared = [n for n in sizes(before) if n in after]
    return (shared[-1], before[shared[-1]], after[shared[-1]]) if shared else None


def _change(tables: Tables) -> str:
    ends = _ends(tables)
    if ends is None:
        return ""
    n, before, after = ends
    return f"At size {count(n)} right answers go from {percent(before['mean'])} to {percent(after['mean'])}."


def _before(tables: Tables) -> str:
    ends = _ends(tables)
    return "" if ends is None else f"at size {count(ends[0])}: {percent(ends[1]['mean'])} → {percent(ends[2]['mean'])}"


_PART = "all"
_FIGURES: Mapping[str, Callable[[Tables], Plot | Heat]] = {"heads": heads, "curve": curve}


def _tells(tables: Tables) -> bool:
    return "candidates" in tables


def _figures(tables: Tables) -> list[Figure]:
    return [Figure(name, _PART, name, name, partial(make, tables)) for name, make in _FIGURES.items() if name in tables]


def _parts(tables: Tables) -> list[Part]:
    found = [validation_grid(tables), candidates_grid(tables), heads_grid(tables)]
    model = str(tables["setting"]["model"])
    return [Part(_PART, model, tiles=tiles(tables), grids=[grid for grid in found if grid])]


def _summary(tables: Tables) -> list[tuple[str, list[str]]]:
    parts = (
        ("What was learned", done),
        ("What came out", found),
        ("What it costs", cost),
        ("Without any cost at all", folded),
    )
    return [(title, said) for title, say in parts if (said := say(tables))]


def _method(tables: Tables) -> dict[str, Any]:
    setting = tables["setting"]
    return {
        "task": setting["task"],
        "sizes": joined([count(n) for n in setting["sizes"]]),
        "steps": count(setting["steps"]),
        "leash": f"{leash(tables):g}%",
        "kinds": joined([str(kind) for kind in setting["kinds"]]),
    }


STORY = Story("calibrate", _tells, _figures, _parts, _summary, _method)
