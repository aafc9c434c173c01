"""The report section of `sharpmax compare`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from sharpmax.report.section import NOTHING, Cell, Figure, Grid, Part, Story, Tile
from sharpmax.report.sections import capacity
from sharpmax.report.sections.capacity import (
    MEASURES,
    capacity_map,
    capacity_methods,
    deep,
    end_of,
    end_words,
    exponent_text,
    exponents,
    laws_grid,
    layers,
    models_grid,
    models_of,
)
from sharpmax.report.sections.compare_charts import (
    SOFTMAX,
    accuracy,
    causes,
    cell,
    gap,
    has_capacity,
    has_league,
    largest,
    leader,
    level_with,
    loss_of,
    measured,
    methods,
    place_of,
    sharpness,
    shown_sizes,
    sizes_of,
)
from sharpmax.report.tables import Tables, readable
from sharpmax.report.words import capital, count, joined, nats, percent, plural, points, share


def league_grid(tables: Tables) -> Grid:
    """Rank, score and accuracies of every method, and what its training took."""
    with readable("the league", tables):
        setting, last = tables["setting"], largest(tables)
        scored = setting["scored_sizes"]
        span = f"{count(scored[0])} to {count(scored[-1])}" if len(scored) > 1 else count(scored[0])
        return Grid(
            f"Accuracy (%) of {setting['model']} on {setting['task']}",
            f"By the mean accuracy at {span} {setting['unit']}; methods that a paired test over seeds cannot tell from "
            f"the first of their group share its rank (=). {_intervals(tables)} If hard: what attention to the item "
            "with the largest weight alone would get right; ranked first: how often that is the right item.",
            [
                Cell("method"), Cell("rank"), Cell("mean", f"at {span}"),
                *(Cell(count(n), setting["unit"]) for n in shown_sizes(tables)),
                Cell("if hard", f"at {count(last)}"), Cell("ranked first", f"at {count(last)}"),
                Cell("training", "seconds"), Cell("memory", "MB"),
            ],
            [_place(tables, method) for method in methods(tables)],
        )  # fmt: skip


def causes_grid(tables: Tables) -> Grid:
    """What each method loses at the largest size, and to what."""
    with readable("the losses", tables):
        last = largest(tables)
        near = measured(tables, "close")
        return Grid(
            f"Dispersion or wrong ranking, at {count(last)} {tables['setting']['unit']}",
            "Points of accuracy that are missing from 100: to dispersion, where hard attention to the same scores "
            "would be right (below 0 where it would be right less often), and to wrong ranking, where it would not. "
            "The largest weight and the entropy are means over the rows of the last layer.",
            [
                Cell("method"), Cell("accuracy", "%"), Cell("if hard", "%"), Cell("lost to dispersion", "points"),
                Cell("lost to wrong ranking", "points"), Cell("ranked first", "%"),
                *([Cell("ranked first in near-ties", "%")] if near else []),
                Cell("largest weight", "%"), Cell("entropy", "nat"),
            ],
            [_cause(tables, method, last, near=near) for method in methods(tables)],
        )  # fmt: skip


def near_ties_grid(tables: Tables) -> Grid | None:
    """How often the right item is ranked first where another is nearly as good, size by size."""
    if not measured(tables, "close"):
        return None
    with readable("the near-ties", tables):
        chosen = shown_sizes(tables)
        return Grid(
            "Near-ties: right item ranked first (%)",
            "Only the half of the examples whose best two items are least apart. A method that ranks these wrongly "
            f"cannot be helped by sharpening. {_intervals(tables)}",
            [Cell("method"), *(Cell(count(n), tables["setting"]["unit"]) for n in chosen)],
            [[Cell(method), *(_mean(cell(tables, "close", method, n)) for n in chosen)] for method in methods(tables)],
        )


def _place(tables: Tables, method: str) -> list[Cell]:
    training, last = tables["training"][method], largest(tables)
    first = method == leader(tables)
    gone = training["diverged"]
    memory = training["memory"]
    return [
        Cell(method, f"diverged: {len(gone)} of {plural(len(tables['setting']['seeds']), 'seed')}" if gone else ""),
        Cell(place_of(tables, method), strong=place_of(tables, method).rstrip("=") == "1"),
        _mean(tables["league"][method]["score"]),
        *(_mean(cell(tables, "accuracy", method, n), strong=first and n == last) for n in shown_sizes(tables)),
        _mean(cell(tables, "hard", method, last)),
        _mean(cell(tables, "ranking", method, last)),
        Cell(f"{training['seconds']:,.1f}"),
        Cell(NOTHING, faint=True) if memory is None else Cell(f"{memory / 1e6:,.0f}"),
    ]


def _cause(tables: Tables, method: str, size: str, *, near: bool) -> list[Cell]:
    loss = loss_of(tables, method, size)
    nothing = Cell(NOTHING, faint=True)
    spread, wrong = (nothing, nothing) if loss is None else (_lost(value, max(loss)) for value in loss)
    return [
        Cell(method), _short(cell(tables, "accuracy", method, size)), _short(cell(tables, "hard", method, size)),
        spread, wrong, _short(cell(tables, "ranking", method, size)),
        *([_short(cell(tables, "close", method, size))] if near else []),
        _short(cell(tables, "top_weight", method, size)), _nats(cell(tables, "entropy", method, size)),
    ]  # fmt: skip


def _lost(value: float, most: float) -> Cell:
    return Cell(f"{value:.1f}".replace("-0.0", "0.0").replace("-", "−"), strong=value == most and value >= 1.0)


def _intervals(tables: Tables) -> str:
    seeds = len(tables["setting"]["seeds"])
    if seeds == 1:
        return "One seed: no intervals, and ranks are by the mean alone."
    return f"Below means Student's 95% intervals over {plural(seeds, 'seed')}."


def _mean(one: Mapping[str, Any], *, strong: bool = False) -> Cell:
    if one["mean"] is None:
        return Cell(NOTHING, faint=True)
    if one["low"] is None:
        return Cell(share(one["mean"]), strong=strong)
    return Cell(share(one["mean"]), f"{share(max(0.0, one['low']))}–{share(min(100.0, one['high']))}", strong=strong)


def _short(one: Mapping[str, Any]) -> Cell:
    return Cell(NOTHING, faint=True) if one["mean"] is None else Cell(share(one["mean"]))


def _nats(one: Mapping[str, Any]) -> Cell:
    return Cell(NOTHING, faint=True) if one["mean"] is None else Cell(nats(one["mean"]))


_AT_LARGEST = {"hard": "if hard", "ranking": "ranked first", "close": "near-ties"}


def league_lines(tables: Tables) -> list[str]:
    """The lines of the table, the best method first; bold is the leader at the largest size."""
    with readable("the league", tables):
        known = shown_sizes(tables)
        kinds = [table for table in _AT_LARGEST if measured(tables, table)]
        head = ["method", "rank", *(count(n) for n in known), *(_AT_LARGEST[table] for table in kinds), "train s"]
        rows = [
            [
                f"`{method}`",
                place_of(tables, method),
                *(
                    _number(cell(tables, "accuracy", method, n), method == leader(tables) and n == known[-1])
                    for n in known
                ),
                *(_number(cell(tables, table, method, largest(tables))) for table in kinds),
                f"{tables['training'][method]['seconds']:.0f}",
            ]
            for method in methods(tables)
        ]
        return [_line(head), _line(["---", *["---:"] * (len(head) - 1)]), *map(_line, rows)]


def _number(one: Mapping[str, Any], strong: bool = False) -> str:
    if one["mean"] is None:
        return NOTHING
    text = f"{one['mean']:.1f}"
    return f"**{text}**" if strong else text


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


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
        return [_leads(tables), _compared(tables), _lost_sentence(tables)]


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


def _lost_sentence(tables: Tables) -> str:
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


_EXPONENTS = 2
"""Exponents that have a tile of their own: with more, tiles would not fill their rows."""


def league_tiles(tables: Tables) -> list[Tile]:
    """The leader at the largest size, softmax there, what softmax loses to dispersion, and the leader to ranking."""
    first, last = leader(tables), largest(tables)
    where = f"at {count(last)} {tables['setting']['unit']}"
    best = percent(cell(tables, "accuracy", first, last)["mean"])
    others = len(level_with(tables))
    doubt = f"; not shown to be ahead of {plural(others, 'other')}" if others else ""
    found = [Tile(best, f"{first}, the most right {where}", f"rank {place_of(tables, first)} of the league{doubt}")]
    if SOFTMAX in methods(tables) and first != SOFTMAX:
        ahead = gap(tables, first, SOFTMAX, last)
        reach = (
            "one seed" if ahead.low is None or ahead.high is None else f"{points(ahead.low)} to {points(ahead.high)}"
        )
        plain = percent(cell(tables, "accuracy", SOFTMAX, last)["mean"])
        found.append(Tile(f"{points(ahead.mean)} points", f"{first} against softmax ({plain})", reach))
    for name in dict.fromkeys([SOFTMAX if SOFTMAX in methods(tables) else methods(tables)[-1], first]):
        loss = loss_of(tables, name, last)
        if loss is not None:
            kinds = sorted(zip((max(0.0, value) for value in loss), ("dispersion", "wrong ranking"), strict=True))
            (less, other), (most, kind) = kinds
            found.append(
                Tile(f"{share(most)} points", f"{name} loses to {kind}", f"and {share(less)} to {other}, {where}")
            )
    return found


def capacity_tiles(tables: Tables, method: str) -> list[Tile]:
    """The range of sizes at which accuracy halves, the exponents of the law, and how good the forecast of layers is."""
    models, law = models_of(tables, method), tables["laws"][method]["accuracy"]
    inside = [model for model in models if isinstance(end_of(model, "accuracy"), float)]
    found = []
    if inside:
        ends = sorted(inside, key=lambda model: float(end_of(model, "accuracy") or 0.0))
        value = " to ".join(dict.fromkeys(end_words(tables, model, "accuracy") for model in (ends[0], ends[-1])))
        found.append(
            Tile(
                value,
                f"{tables['setting']['unit']} at which accuracy halves",
                f"{len(inside)} of {plural(len(models), 'model')}",
            )
        )
    else:
        found.append(
            Tile(plural(len(models), "model"), "whose accuracy does not halve at a size tested", _tested(tables))
        )
    steepest = sorted(exponents(law).items(), key=lambda pair: -abs(pair[1]["mean"]))
    for name, one in steepest[:_EXPONENTS]:
        reach = "one seed: no interval"
        if one["low"] is not None:
            reach = f"{exponent_text(one['low'])} to {exponent_text(one['high'])}"
            reach += "; not shown to matter" if one["low"] <= 0.0 <= one["high"] else ""
        found.append(Tile(f"{name}^{exponent_text(one['mean'])}", f"how that size goes with {name}", reach))
    if known := deep(tables, method):
        same = sum(one["first_measured"] == one["first_forecast"] for one in known.values())
        found.append(
            Tile(f"{same} of {len(known)}", "deep models disperse first in the layer forecast", "from sizes up to 64")
        )
    return found


def _tested(tables: Tables) -> str:
    known = sizes_of(tables)
    return f"{count(known[0])} to {count(known[-1])}"


_LEAGUE = "league"
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,40}")


def _tells(tables: Tables) -> bool:
    return has_league(tables) or has_capacity(tables)


def _figures(tables: Tables) -> list[Figure]:
    found: list[Figure] = []
    if has_league(tables):
        for name, make in (("accuracy", accuracy), ("sharpness", sharpness), ("causes", causes)):
            found.append(Figure(name, _LEAGUE, name, name, partial(make, tables)))
    for method, name in _capacities(tables).items():
        # A map of models that all end outside the sizes shows nothing that a sentence does not.
        telling = [
            measure
            for measure in MEASURES
            if any(isinstance(end_of(model, measure), float) for model in models_of(tables, method))
        ]
        drawn = [(one, partial(capacity_map, tables, method, one)) for one in telling or list(MEASURES)[:1]]
        if deep(tables, method):
            drawn.append(("layers", partial(layers, tables, method)))
        for kind, map_of in drawn:
            file = f"{name}-{kind}"
            found.append(Figure(kind, name, file, file, map_of))
    return found


def _capacities(tables: Tables) -> dict[str, str]:
    """Names of parts and files by method; a name that no file should have is counted instead."""
    known = capacity_methods(tables) if has_capacity(tables) else []
    return {
        method: f"capacity-{method if _PLAIN.fullmatch(method) else place}"
        for place, method in enumerate(known, start=1)
    }


def _parts(tables: Tables) -> list[Part]:
    found = []
    if has_league(tables):
        ties = near_ties_grid(tables)
        tabled = [causes_grid(tables), *([ties] if ties else [])]
        found.append(
            Part(
                _LEAGUE, "League", tiles=league_tiles(tables), grids=tabled,
                more={"league": league_grid(tables)},
            )
        )  # fmt: skip
    for method, name in _capacities(tables).items():
        tabled = [laws_grid(tables, method), models_grid(tables, method)]
        found.append(Part(name, f"Capacity: {method}", tiles=capacity_tiles(tables, method), grids=tabled))
    return found


def _summary(tables: Tables) -> list[tuple[str, list[str]]]:
    said: list[tuple[str, list[str]]] = []
    if has_league(tables):
        said += [
            ("Verdict", verdict(tables)),
            ("The league", ranks(tables)),
            ("What was asked", asked(tables)),
            ("Take care", care(tables)),
        ]
    if has_capacity(tables):
        said += [
            ("What capacity changes" if said else "Verdict", capacity.capacity_verdict(tables)),
            ("About the laws" if said else "Take care", capacity.capacity_care(tables)),
        ]
    return [(title, sentences) for title, sentences in said if sentences]


def _method(tables: Tables) -> dict[str, Any]:
    setting = tables["setting"]
    return {
        "league": has_league(tables),
        "capacity": has_capacity(tables),
        "task": setting["task"],
        "about": setting["task_summary"].rstrip("."),
        "unit": setting["unit"],
        "trained": setting["train_sizes"],
        "steps": plural(setting["steps"], "step"),
        "batch": plural(setting["batch"], "example"),
        "rate": f"{setting['learning_rate']:g}",
        "warmup": plural(setting["warmup"], "step"),
        "device": setting["device"],
        "level": f"{setting['level']:g}",
        "methods": [_about(tables, name) for name in methods(tables)] if has_league(tables) else [],
    }


def _about(tables: Tables, name: str) -> tuple[str, str, str]:
    """A method: its name, what it is, and what else is its own."""
    one = tables["methods"][name]
    own = [f"{what}: {_pairs(one[what])}" for what in ("options", "recipe", "data") if one[what]]
    if one["at_test"] is not None:
        own.append(f"at test: {one['at_test']['normaliser']}")
    if one["feed_forward"] != "gelu":
        own.append(f"feed-forward layers: {one['feed_forward']}")
    parameters = f"{tables['training'][name]['parameters']:,} parameters"
    return name, one["summary"] or one["normaliser"], "; ".join([*own, parameters])


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items())


STORY = Story("compare", _tells, _figures, _parts, _summary, _method)
