"""The report section of `sharpmax clrs evaluate`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from sharpmax.report.section import Figure, Part, Story, Tile
from sharpmax.report.sections import clrs_charts
from sharpmax.report.sections.clrs_charts import (
    IN,
    LEARNT,
    LEVEL,
    OUT,
    TOUCHSTONE,
    above_chance,
    algorithms,
    arms,
    base,
    curves,
    gains,
    group_names,
    groups,
    lead,
    learnt,
    name_of,
    others,
    right_answers,
    settings_apart,
    shown,
    training,
)
from sharpmax.report.tables import Tables, readable
from sharpmax.report.words import (
    Pairs,
    capital,
    count,
    joined,
    merged,
    origin_of_run,
    percent,
    plural,
    points,
    probability,
    share,
)

_VERBS = {1: "is better than", 0: "is not shown to differ from", -1: "is worse than"}


def verdict(tables: Tables) -> list[str]:
    """What came out: the means, what each arm gains, and whether the easiest algorithm was learnt at all."""
    with readable("the summary", tables):
        return [_means(tables), *(_gain(tables, arm) for arm in others(tables)), _touchstone(tables)]


def asked(tables: Tables) -> list[str]:
    """What was asked of whom."""
    with readable("the summary", tables):
        setting, known = tables["setting"], arms(tables)
        same = "the same " if len(known) > 1 else ""
        said = [
            f"{plural(len(known), 'arm')} answered {same}{plural(setting['questions']['count'], 'question')} of "
            f"{plural(len(algorithms(tables)), 'algorithm')} as text; a question is right if the final answer is, "
            "letter by letter."
        ]
        for arm in known:
            about = setting["arms"][arm]
            trained = (
                f"trained for {plural(about['steps'], 'step')}" if about["trained"] else "as it comes, not trained"
            )
            said.append(f"“{arm}”: {about['model']}, {trained}, with {about['describe']}.")
        return said


def single(tables: Tables) -> list[str]:
    """On which algorithms an arm is shown to be better or worse, where it was not trained if that was asked for."""
    with readable("the summary", tables):
        return [_algorithms(tables, arm) for arm in others(tables)]


def care(tables: Tables) -> list[str]:
    """What stands against believing all this."""
    with readable("the summary", tables):
        said = []
        for name, by_arm in settings_apart(tables).items():
            values = joined([f"{_value(value)} for “{arm}”" for arm, value in by_arm.items()])
            said.append(f"The arms were not trained alike: {name.replace('_', ' ')} is {values}.")
        said += [_chance(tables)] if IN in groups(tables) else []
        said += _left_out(tables["setting"])
        for arm, remarks in tables["setting"]["remarks"].items():
            said += [f"“{arm}”: {remark}." for remark in merged(remarks)]
        return said


def _left_out(setting: Mapping[str, Any]) -> list[str]:
    sizes = {name: joined([count(size) for size in left]) for name, left in setting.get("too_long", {}).items()}
    listed = [f"{name_of(name)} of size {left}" for name, left in sizes.items()]
    if "longest" in setting and listed:
        return [f"Questions of up to {count(setting['longest'])} tokens were asked, so not {'; '.join(listed)}."]
    return [f"There is no room in the models for {one}, which is left out." for one in listed]


def _means(tables: Tables) -> str:
    names, parts = group_names(tables), []
    sides = {IN: "in distribution", OUT: "out of distribution"}
    for group in groups(tables):
        cells = {arm: tables["means"][arm][group] for arm in arms(tables)}
        first, *rest = (
            (f"“{arm}”", f"{percent(cell['mean'])}", f"({share(cell['low'])} to {share(cell['high'])})")
            for arm, cell in cells.items()
        )
        listed = [f"{first[0]} gets {first[1]} of the final answers right {first[2]}", *(" ".join(one) for one in rest)]
        over = plural(cells[base(tables)]["algorithms"], "algorithm")
        parts.append(f"at {names[group]} ({sides[group]}) {joined(listed)}, on average over {over}")
    return capital("; ".join(parts)) + " (with 95% intervals)."


def _gain(tables: Tables, arm: str) -> str:
    found, names = gains(tables, arm), group_names(tables)
    first, *rest = reversed(groups(tables))
    said = f"“{arm}” {_VERBS[shown(found[first])]} “{base(tables)}” at {names[first]}: {_numbers(found[first])}"
    for group in rest:
        verb = _VERBS[shown(found[group])].removesuffix(" from").removesuffix(" than")
        said += f"; at {names[group]} it {verb}: {_numbers(found[group])}"
    return said + "."


def _numbers(gain: Mapping[str, Any]) -> str:
    return (
        f"{points(gain['mean'])} points ({points(gain['low'])} to {points(gain['high'])}; "
        f"{count(gain['gained'])} questions gained, {count(gain['lost'])} lost, McNemar {probability(gain['p'])})"
    )


def _touchstone(tables: Tables) -> str:
    found = learnt(tables)
    if found is None:
        return (
            f"Whether “{TOUCHSTONE}” was learnt is not known, as nobody was asked for it at {group_names(tables)[IN]}: "
            "a model that has not learnt a task says nothing about sharpness."
        )
    listed = joined([f"“{arm}” {percent(mean)}" for arm, mean in found.items()])
    missed = [f"“{arm}”" for arm, mean in found.items() if mean < LEARNT]
    asks = f"{LEARNT:.0f}% right at {group_names(tables)[IN]} are asked for"
    if not missed:
        return f"“{TOUCHSTONE}”, the easiest of the algorithms, was learnt by every arm: {listed}, where {asks}."
    return (
        f"“{TOUCHSTONE}”, the easiest of the algorithms, was not learnt by {joined(missed)}: {listed}, where {asks}. A "
        "model that has not learnt a task says nothing about sharpness, so the numbers above say little."
    )


def _algorithms(tables: Tables, arm: str) -> str:
    group = groups(tables)[-1]
    cells = {name: one[group] for name, one in tables["gains_by_algorithm"][arm].items() if group in one}
    start = f"“{arm}” against “{base(tables)}”, at {group_names(tables)[group]}:"
    parts = []
    for side, word in ((1, "better"), (-1, "worse")):
        found = [name for name, cell in cells.items() if shown(cell) == side]
        if not found:
            parts.append(f"{word} on none")
            continue
        most = max(found, key=lambda name: side * cells[name]["mean"])
        parts.append(f"{word} on {len(found)}, most on {name_of(most)} ({points(cells[most]['mean'])} points)")
    return f"{start} of {plural(len(cells), 'algorithm')} it is shown to be {' and '.join(parts)}."


def _chance(tables: Tables) -> str:
    found = {arm: above_chance(tables, arm, IN) for arm in arms(tables)}
    listed = joined([f"“{arm}” on {above}" for arm, (above, _) in found.items()])
    known = found[base(tables)][1]
    less = "; the others have not been shown to be learnt" if any(above < known for above, _ in found.values()) else ""
    return (
        f"Above what the most frequent answer would get right at {group_names(tables)[IN]}: {listed} of "
        f"{plural(known, 'algorithm')}{less}."
    )


def _value(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value) if isinstance(value, str | float) else "its own"


def tiles(tables: Tables) -> list[Tile]:
    """Up to four numbers: right answers of the base and the leading arm, their difference, and the touchstone."""
    arm = lead(tables)
    found = [_mean(tables, group, arm) for group in groups(tables)]
    if arm is not None:
        found.append(_gain_metric(tables, arm))
    return [*found, *_touchstone_metric(tables)]


def _mean(tables: Tables, group: str, arm: str | None) -> Tile:
    cells = [tables["means"][one][group] for one in (base(tables), arm) if one is not None]
    who = base(tables) if arm is None else f"{base(tables)} → {arm}"
    over = plural(cells[0]["algorithms"], "algorithm")
    value = " → ".join(percent(cell["mean"]) for cell in cells)
    return Tile(value, f"right answers at {group_names(tables)[group]}", f"{who}, mean over {over}")


def _gain_metric(tables: Tables, arm: str) -> Tile:
    group = groups(tables)[-1]
    gain = gains(tables, arm)[group]
    between = f"{points(gain['low'])} to {points(gain['high'])}, {probability(gain['p'])}"
    verdict = "" if shown(gain) else "; not shown to differ"
    return Tile(
        f"{points(gain['mean'])} points",
        f"{arm} against {base(tables)}, {group_names(tables)[group]}",
        between + verdict,
    )


def _touchstone_metric(tables: Tables) -> list[Tile]:
    found = learnt(tables)
    if found is None:
        return []
    arm, low = min(found.items(), key=lambda pair: pair[1])
    verdict = "learnt by every arm" if low >= LEARNT else f"not learnt by {arm}"
    return [Tile(percent(low), f"“{TOUCHSTONE}” of the weakest arm", f"{verdict}; {LEARNT:.0f}% are asked for")]


_PART = "all"


def _tells(tables: Tables) -> bool:
    return "by_algorithm" in tables


def _figures(tables: Tables) -> list[Figure]:
    found = [Figure("accuracy", _PART, "accuracy", "accuracy", partial(right_answers, tables))]
    if any(one["curve"] for one in training(tables).values()):
        found.append(Figure("curve", _PART, "curve", "curve", partial(curves, tables)))
    return found


def _parts(tables: Tables) -> list[Part]:
    found = [clrs_charts.means_grid(tables), clrs_charts.gains_grid(tables), clrs_charts.algorithms_grid(tables)]
    return [Part(_PART, "CLRS-Text", tiles=tiles(tables), grids=[grid for grid in found if grid])]


def _summary(tables: Tables) -> list[tuple[str, list[str]]]:
    parts = (
        ("Verdict", verdict),
        ("What was asked", asked),
        ("Algorithm by algorithm", single),
        ("Take care", care),
    )
    return [(title, said) for title, say in parts if (said := say(tables))]


def _method(tables: Tables) -> dict[str, Any]:
    setting, data = tables["setting"], tables["setting"]["data"]
    return {
        "level": f"{LEVEL:g}",
        "groups": group_names(tables),
        "dataset": data["dataset"],
        "unseen": all(_made(tables, arm) for arm in arms(tables)),
        "trace": data.get("trace", False),
        "dtype": setting["dtype"],
        "device": setting["device"],
        "arms": [(arm, _trained(tables, arm), _said(tables, arm)) for arm in arms(tables)],
    }


def _made(tables: Tables, arm: str) -> bool:
    """Whether an arm is known to have learned from made examples alone, which are never those of an examination."""
    one = training(tables).get(arm)
    return one is not None and one["setting"]["data"]["dataset"] is None


def _trained(tables: Tables, arm: str) -> str:
    """How an arm was trained, as far as its results say."""
    about = tables["setting"]["arms"][arm]
    start = f"{about['model']}, {about['describe']}"
    one = training(tables).get(arm)
    if one is None:
        return f"{start}; " + (f"{plural(about['steps'], 'step')}" if about["trained"] else "not trained")
    setting = one["setting"]
    learning = f", highest learning rate {setting['rate']:g}" if "rate" in setting else ""
    return (
        f"{start}; {plural(setting['steps'], 'step')} of {count(setting['batch_tokens'])} tokens{learning}, "
        f"{setting['epochs']:.3g} passes over {count(setting['examples']['count'])} examples, in {setting['dtype']}"
    )


def _said(tables: Tables, arm: str) -> str:
    """What an arm's training and answering took."""
    parts = []
    one = training(tables).get(arm)
    if one is not None and (speed := one["speed"]).get("tokens_per_second"):
        share = (
            "" if speed.get("share") is None else f" ({100 * speed['share']:.0f}% of the GPU's measured matrix rate)"
        )
        parts.append(f"trained on {count(speed['tokens_per_second'])} tokens a second{share}")
    answering: Mapping[str, Any] = tables["speed"][arm]
    if answering["tokens_per_second"]:
        tokens = f"{count(answering['tokens'])} tokens at {count(answering['tokens_per_second'])} a second"
        parts.append(f"answered with {tokens}")
    return "; ".join(parts)


def _origins(tables: Tables) -> list[tuple[str, Pairs]]:
    return [
        (f"Training of {arm}", origin_of_run(one["command"], one["provenance"], {}))
        for arm, one in training(tables).items()
    ]


STORY = Story("clrs", _tells, _figures, _parts, _summary, _method, _origins)
