"""A league in plain sentences, each of them computed from its tables: nothing is said that they do not show."""

from __future__ import annotations

from sharpmax.report.compare.facts import (
    SOFTMAX,
    cell,
    gap,
    largest,
    leader,
    level_with,
    loss_of,
    measured,
    methods,
    sizes_of,
)
from sharpmax.report.tables import Tables, readable
from sharpmax.report.words import capital, count, joined, nats, percent, plural, points, share

__all__ = ["asked", "care", "ranks", "verdict"]

_NAMED = 4
"""So many methods are named before the rest is counted."""

_MOSTLY = 2 / 3
"""What is lost is called mostly one thing if it makes this share."""

_LITTLE = 1.0
"""Fewer points than this are as good as nothing."""

_LEARNT = 90.0
"""Right answers in percent at the smallest size without which nothing was learnt."""


def verdict(tables: Tables) -> list[str]:
    """Who leads at the largest size, what softmax does there, and whether what is lost is dispersion or ranking."""
    with readable("the summary", tables):
        return [_leads(tables), _compared(tables), _lost(tables)]


def asked(tables: Tables) -> list[str]:
    """What was asked of whom."""
    with readable("the summary", tables):
        setting = tables["setting"]
        low, high = setting["train_sizes"]
        said = [
            f"{plural(len(methods(tables)), 'method')} in the same model ({setting['model']}) on the task "
            f"“{setting['task']}”, {setting['task_summary'].rstrip('.')}: trained at {low} to {high} "
            f"{setting['unit']}, tested at {_span(sizes_of(tables))}.",
            f"{plural(len(setting['seeds']), 'seed')} of each, {plural(setting['steps'], 'step')} of "
            f"{plural(setting['batch'], 'example')}; {plural(setting['samples'], 'example')} of each size and seed at "
            "test, the same for all methods.",
        ]
        own = [name for name, one in tables["methods"].items() if one["recipe"] or one["data"]]
        if own:
            said.append(f"With a recipe or training examples of their own: {joined([f'“{name}”' for name in own])}.")
        return said


def ranks(tables: Tables) -> list[str]:
    """Who shares the first rank, over all sizes beyond training."""
    with readable("the summary", tables):
        known = methods(tables)
        if len(known) < 2:
            return []
        scored = [str(size) for size in tables["setting"]["scored_sizes"]]
        over = f"on average over {_span(scored)} {tables['setting']['unit']}"
        first = [name for name in known if tables["league"][name]["rank"] == 1]
        said = [f"“{name}” {percent(tables['league'][name]['score']['mean'])}" for name in first]
        if len(first) == 1:
            second = f"“{known[1]}” {percent(tables['league'][known[1]]['score']['mean'])}"
            return [f"First in the league, {over}: {said[0]}, ahead of {second}."]
        return [f"First in the league, {over}, and not to be told apart: {joined(said)}."]


def care(tables: Tables) -> list[str]:
    """What stands against believing all this."""
    with readable("the summary", tables):
        said = []
        if len(tables["setting"]["seeds"]) == 1:
            said.append("One seed: no difference was tested, ranks are by the mean alone.")
        for name in methods(tables):
            if gone := tables["training"][name]["diverged"]:
                which = joined([str(seed) for seed in gone])
                noun, whose = ("seed", "its") if len(gone) == 1 else ("seeds", "their")
                said.append(f"“{name}” diverged for {noun} {which}; {whose} answers count as wrong.")
        smallest = sizes_of(tables)[0]
        weak = [n for n in methods(tables) if cell(tables, "accuracy", n, smallest)["mean"] < _LEARNT]
        if weak:
            listed = joined([f"“{n}” ({percent(cell(tables, 'accuracy', n, smallest)['mean'])})" for n in weak])
            said.append(
                f"Not learnt even at {count(smallest)} {tables['setting']['unit']}, where under {_LEARNT:.0f}% are "
                f"right: {listed}; what larger sizes do to them says little about attention."
            )
        if not measured(tables, "close"):
            said.append("The task has no near-ties, so rankings of these were not measured.")
        return said


def _leads(tables: Tables) -> str:
    first, size, known = leader(tables), largest(tables), methods(tables)
    where = f"At {_n(tables)}"
    best = f"{percent(cell(tables, 'accuracy', first, size)['mean'])}{_between(tables, first)}"
    if len(known) == 1:
        return f"{where} “{first}”, the only method, answers {best} rightly."
    second = max((name for name in known if name != first), key=lambda n: cell(tables, "accuracy", n, size)["mean"])
    ahead = gap(tables, first, second, size)
    reach = "" if ahead.low is None or ahead.high is None else f" ({points(ahead.low)} to {points(ahead.high)})"
    rival = f"“{second}” ({percent(cell(tables, 'accuracy', second, size)['mean'])})"
    start = f"{where} “{first}” leads with {best}, {share(ahead.mean)} points{reach} more than {rival}"
    if ahead.low is None:
        return f"{start}; with one seed, that may be chance."
    level = [f"“{name}”" for name in level_with(tables)]
    if not level:
        return f"{start}; it is shown to be ahead of every other method."
    listed = (
        joined(level[:_NAMED])
        if len(level) <= _NAMED
        else f"{', '.join(level[:_NAMED])} and {len(level) - _NAMED} more"
    )
    return f"{start}; it is not shown to be ahead of {listed}."


def _compared(tables: Tables) -> str:
    """What softmax does there, or the last of the league where softmax was not asked for."""
    name, size = _subject(tables), largest(tables)
    start, end = (cell(tables, "accuracy", name, n)["mean"] for n in (sizes_of(tables)[0], size))
    last = "" if name == SOFTMAX or len(methods(tables)) == 1 else ", last in the league,"
    said = f"“{name}”{last} gets {percent(end)} right there"
    if len(sizes_of(tables)) > 1:
        said += f", {percent(start)} at {count(sizes_of(tables)[0])}"
    entropy, top = (
        [cell(tables, t, name, n)["mean"] for n in (sizes_of(tables)[0], size)] for t in ("entropy", "top_weight")
    )
    if None in entropy or None in top:
        return f"{said}."
    if len(sizes_of(tables)) == 1:
        return f"{said}; the entropy of its attention is {nats(entropy[1])} nat, its largest weight {percent(top[1])}."
    verb = "goes from" if round(entropy[0], 2) != round(entropy[1], 2) else "stays, from"
    return (
        f"{said}; the entropy of its attention {verb} {nats(entropy[0])} to {nats(entropy[1])} nat, its largest weight "
        f"from {percent(top[0])} to {percent(top[1])}."
    )


def _lost(tables: Tables) -> str:
    chosen = list(dict.fromkeys([_subject(tables), leader(tables)]))
    parts = [part for name in chosen if (part := _loss(tables, name))]
    if not parts:
        return "Whether what is lost is dispersion or wrong ranking was not measured."
    return capital("; ".join(parts)) + "."


def _loss(tables: Tables, name: str) -> str:
    size = largest(tables)
    loss = loss_of(tables, name, size)
    if loss is None:
        return ""
    spread, wrong = loss
    missing = 100.0 - cell(tables, "accuracy", name, size)["mean"]
    if missing < _LITTLE:
        return f"“{name}” loses next to nothing ({share(missing)} points)"
    start = f"of the {share(missing)} points that “{name}” loses, "
    near = cell(tables, "close", name, size)["mean"]
    ties = "" if near is None else f", and in near-ties it ranks {percent(near)} rightly"
    if spread <= -0.05:
        return f"{start}none is dispersion: hard attention would get {share(-spread)} points less right{ties}"
    spread = max(0.0, spread)
    kind = (
        "all of it wrong ranking"
        if spread < 0.05
        else "mostly dispersion" if spread > _MOSTLY * missing
        else "mostly wrong ranking" if wrong > _MOSTLY * missing
        else "both"
    )  # fmt: skip
    return f"{start}{share(spread)} are dispersion and {share(wrong)} wrong ranking ({kind}){ties}"


def _subject(tables: Tables) -> str:
    known = methods(tables)
    return SOFTMAX if SOFTMAX in known else known[-1]


def _between(tables: Tables, name: str) -> str:
    one = cell(tables, "accuracy", name, largest(tables))
    return "" if one["low"] is None else f" ({share(max(0.0, one['low']))} to {share(min(100.0, one['high']))})"


def _n(tables: Tables) -> str:
    return f"{count(largest(tables))} {tables['setting']['unit']}"


def _span(known: list[str]) -> str:
    return f"{count(known[0])} to {count(known[-1])}" if len(known) > 1 else count(known[0])
