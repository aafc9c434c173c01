"""The figures of `sharpmax calibrate`: the heads that are touched, and how they were learned."""

from __future__ import annotations

from collections.abc import Sequence

from sharpmax.report.calibrate.facts import RISE, leash, log_betas, total_heads
from sharpmax.report.looks import BLACK, SOFT, Look, in_turn
from sharpmax.report.plot import Axis, Heat, HeatPanel, Mark, Panel, Plot, Series
from sharpmax.report.tables import Tables
from sharpmax.report.texts import text_name, texts_in_order
from sharpmax.report.words import count, joined, points

__all__ = ["curve", "heads"]

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
