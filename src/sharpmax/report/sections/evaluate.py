"""The report section of `sharpmax evaluate`."""

from __future__ import annotations

from functools import partial
from typing import Any

from sharpmax.report.section import Figure, Grid, Part, Story, Tile
from sharpmax.report.sections import evaluate_charts
from sharpmax.report.sections.evaluate_charts import (
    Gain,
    accuracy,
    arms,
    base,
    columns,
    gain,
    home,
    policies,
    right_answers,
    tasks,
)
from sharpmax.report.tables import Tables, check_name, readable, sizes
from sharpmax.report.words import CHAT, count, joined, merged, percent, plural, points, probability, text_name


def measured(tables: Tables) -> list[str]:
    """What was measured."""
    with readable("the summary", tables):
        setting, known = tables["setting"], tasks(tables)
        number = plural(len(policies(tables)), "policy").replace("policys", "policies")
        shape = f"{plural(setting['layers'], 'layer')} of {plural(setting['heads'], 'attention head')}"
        asked = f"{setting['model']} ({shape}) answered {plural(setting['prompts'], 'prompt')} of each size of "
        asked += f"{_tasks(tables, known)}, as it comes"
        said = [asked + (f" and under {number}." if policies(tables) else ".")]
        if policies(tables):
            said.append("Every arm got the same prompts; no weight of the model is changed by a policy.")
        for arm in policies(tables):
            about = arms(tables)[arm]
            total = setting["layers"] * setting["heads"]
            said.append(
                f"The policy {arm}: {about['describe']}; acts in {count(about['touched'])} of {count(total)} heads."
            )
        return said


def lost(tables: Tables) -> list[str]:
    """What the model as it comes loses as lists grow."""
    with readable("the summary", tables):
        return [_change(tables, task) for task in tasks(tables)]


def gained(tables: Tables) -> list[str]:
    """What each policy gets back, on the task it was calibrated on where that is known, else on the first."""
    with readable("the summary", tables):
        return (
            [_gain(tables, gain(tables, home(tables, arm), arm)) for arm in policies(tables)] if tasks(tables) else []
        )


def elsewhere(tables: Tables) -> list[str]:
    """What each policy does to all other tasks, which are formats it was never calibrated on where that is known."""
    with readable("the summary", tables):
        said = []
        for arm in policies(tables):
            others = [gain(tables, task, arm) for task in tasks(tables) if task != home(tables, arm)]
            if others:
                said.append(_others(tables, arm, others))
        return said


def cost(tables: Tables) -> list[str]:
    """What each policy costs in perplexity, time and memory."""
    with readable("the summary", tables):
        said = []
        for arm in policies(tables):
            if known := columns(tables):
                said.append(f"The policy {arm}: {_rises(tables, arm, known)}.")
            if arm in tables.get("cost", {}):
                said.append(_times(tables, arm))
        return said


def remarks(tables: Tables) -> list[str]:
    """What a policy met that it was not made for."""
    with readable("the summary", tables):
        return [
            f"The policy {arm}: {remark}."
            for arm, about in arms(tables).items()
            for remark in merged(about.get("remarks", ()))
        ]


def _tasks(tables: Tables, known: list[str]) -> str:
    listed = joined([f"{task} ({tables['setting']['tasks'][task]['summary']})" for task in known])
    return f"the task {listed}" if len(known) == 1 else f"{len(known)} tasks: {listed}"


def _change(tables: Tables, task: str) -> str:
    cells = accuracy(tables, task, base(tables))
    small, large = sizes(cells)[0], sizes(cells)[-1]
    if small == large:
        return f"On {task}, the model as it comes is right in {percent(cells[small]['mean'])} at size {count(small)}."
    one, other = cells[small], cells[large]
    falls = other["high"] < one["low"]
    verb = "loses" if falls else "does not clearly lose"
    return (
        f"On {task}, the model as it comes {verb} accuracy as inputs grow: {percent(one['mean'])} right at size "
        f"{count(small)} and {percent(other['mean'])} at size {count(large)}."
    )


def _gain(tables: Tables, found: Gain) -> str:
    plain, cells = accuracy(tables, found.task, base(tables)), accuracy(tables, found.task, found.arm)
    total = len(found.points)
    if not found.better and not found.worse:
        return (
            f"The policy {found.arm} makes no difference on {found.task} that this run can show (largest change "
            f"{points(found.points[found.best])} points, at size {count(found.best)})."
        )
    if not found.better:
        return (
            f"The policy {found.arm} costs accuracy on {found.task}: worse at {len(found.worse)} of {total} sizes, "
            f"most at size {count(found.worst)} ({points(found.points[found.worst])} points)."
        )
    n = found.best
    p = tables[f"paired/{found.task}"][found.arm][n]["p"]
    worse = f"worse at {len(found.worse)}" if found.worse else "worse at none"
    return (
        f"The policy {found.arm} raises {found.task} from {percent(plain[n]['mean'])} to {percent(cells[n]['mean'])} "
        f"at size {count(n)} ({probability(p)}), its largest gain; it is shown to be better at {len(found.better)} "
        f"of {total} sizes and {worse}, {points(found.mean)} points on average."
    )


def _others(tables: Tables, arm: str, others: list[Gain]) -> str:
    known = arms(tables)[arm].get("calibrated_on") in tasks(tables)
    where = "on formats it was never calibrated on" if known else "on the other formats"
    listed = joined([f"{points(found.mean)} points on {found.task}" for found in others])
    worst = min(others, key=lambda found: found.points[found.worst])
    low = worst.points[worst.worst]
    shown = [found for found in others if found.worse]
    harm = (
        f"shown to be worse at {plural(sum(len(found.worse) for found in shown), 'size')} "
        f"({joined([found.task for found in shown])})"
        if shown
        else "shown to be worse nowhere"
    )
    edge = f"the lowest change is {points(low)} points ({worst.task}, size {count(worst.worst)})"
    return f"The policy {arm}, {where}: {listed}, on average over the sizes; {harm}, and {edge}."


def _rises(tables: Tables, arm: str, known: list[str]) -> str:
    cells, plain = tables["perplexity"][arm], tables["perplexity"][base(tables)]
    parts = []
    for column in known:
        name = "its own answers" if column == CHAT else text_name(column)
        change = f"{plain[column]['mean']:.2f} → {cells[column]['mean']:.2f}"
        parts.append(f"{points(cells[column]['rise'], 2)}% on {name} ({change})")
    text = tables["setting"].get("text")
    where = f" (text: {text['source']})" if text else ""
    return f"perplexity{where} changes by {joined(parts)}"


def _times(tables: Tables, arm: str) -> str:
    cells, plain = tables["cost"][arm], tables["cost"][base(tables)]
    memory = ""
    if cells["peak_mib"] is not None and plain["peak_mib"]:
        memory = f", and {cells['peak_mib'] / plain['peak_mib']:.2f}× of the memory"
    context = count(tables["setting"]["context"])
    return (
        f"The policy {arm} takes {cells['prefill_ratio']:.2f}× of the time to read {context} tokens and "
        f"{cells['decode_ratio']:.2f}× to say one more{memory}."
    )


def tiles(tables: Tables) -> list[Tile]:
    """Up to four numbers: what is lost as inputs grow, and what the best policy gains and costs."""
    arm = max(policies(tables), key=lambda one: _mean_gain(tables, one), default=None)
    found = [_lost(tables, tasks(tables)[0] if arm is None else home(tables, arm))]
    if arm is not None:
        found += [_gain_metric(tables, arm), _rise(tables, arm), _time(tables, arm)]
    return [tile for tile in found if tile]


def _mean_gain(tables: Tables, arm: str) -> float:
    return sum(gain(tables, task, arm).mean for task in tasks(tables))


def _lost(tables: Tables, task: str) -> Tile | None:
    cells = accuracy(tables, task, base(tables))
    small, large = sizes(cells)[0], sizes(cells)[-1]
    if small == large:
        return None
    ends = f"{percent(cells[small]['mean'])} → {percent(cells[large]['mean'])}"
    return Tile(ends, f"right answers as it comes, {task}", f"from size {count(small)} to size {count(large)}")


def _gain_metric(tables: Tables, arm: str) -> Tile:
    task = home(tables, arm)
    found = gain(tables, task, arm)
    n = found.best
    before, after = (accuracy(tables, task, one)[n]["mean"] for one in (base(tables), arm))
    sure = probability(tables[f"paired/{task}"][arm][n]["p"])
    detail = f"at size {count(n)}: {percent(before)} → {percent(after)} ({sure})"
    return Tile(f"{points(found.points[n])} points", f"largest gain of {arm}, {task}", detail)


def _rise(tables: Tables, arm: str) -> Tile | None:
    known = columns(tables)
    if not known:
        return None
    rises = {column: tables["perplexity"][arm][column]["rise"] for column in known}
    worst = max(known, key=rises.__getitem__)
    return Tile(f"{points(rises[worst], 2)}%", f"largest rise of perplexity, {arm}", f"on {text_name(worst)}")


def _time(tables: Tables, arm: str) -> Tile | None:
    cells = tables.get("cost", {}).get(arm)
    if not cells:
        return None
    context = count(tables["setting"]["context"])
    detail = f"{cells['decode_ratio']:.2f}× to say one more; 1 is the model as it comes"
    return Tile(f"{cells['prefill_ratio']:.2f}×", f"time to read {context} tokens, {arm}", detail)


_PART = "all"


def _tells(tables: Tables) -> bool:
    return any(name.startswith("paired/") for name in tables)


def _figures(tables: Tables) -> list[Figure]:
    names = [check_name(task, "task") for task in tasks(tables)]
    return [
        Figure("accuracy", _PART, f"accuracy-{task}", f"accuracy-{task}", partial(right_answers, tables, task))
        for task in names
    ]


def _parts(tables: Tables) -> list[Part]:
    found: list[Grid | None] = [
        *evaluate_charts.accuracy_grids(tables),
        evaluate_charts.perplexity_grid(tables),
        evaluate_charts.cost_grid(tables),
        evaluate_charts.harness_grid(tables),
        *evaluate_charts.paired_grids(tables),
    ]
    model = str(tables["setting"]["model"])
    return [Part(_PART, model, tiles=tiles(tables), grids=[grid for grid in found if grid])]


def _summary(tables: Tables) -> list[tuple[str, list[str]]]:
    parts = (
        ("What was measured", measured),
        ("What is lost as inputs grow", lost),
        ("What a policy gets back", gained),
        ("On other formats", elsewhere),
        ("What it costs", cost),
        ("Take care", remarks),
    )
    return [(title, said) for title, say in parts if (said := say(tables))]


def _method(tables: Tables) -> dict[str, Any]:
    setting = tables["setting"]
    return {
        "sizes": joined([count(n) for n in setting["sizes"]]),
        "prompts": count(setting["prompts"]),
        "tasks": [
            (name, f"{about['summary']} (version {about['version']})") for name, about in setting["tasks"].items()
        ],
        "arms": [(arm, about["describe"], count(about["touched"])) for arm, about in arms(tables).items()],
        "heads": count(setting["layers"] * setting["heads"]),
        "text": setting.get("text"),
        "questions": setting.get("questions"),
    }


STORY = Story("evaluate", _tells, _figures, _parts, _summary, _method)
