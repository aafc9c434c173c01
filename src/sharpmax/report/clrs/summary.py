"""An examination in plain sentences, each of them computed from its tables: nothing is said that they do not show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharpmax.report.clrs.facts import (
    IN,
    LEARNT,
    OUT,
    TOUCHSTONE,
    above_chance,
    algorithms,
    arms,
    base,
    gains,
    group_names,
    groups,
    learnt,
    name_of,
    others,
    settings_apart,
    shown,
)
from sharpmax.report.remarks import merged
from sharpmax.report.tables import Tables, readable
from sharpmax.report.words import capital, count, joined, percent, plural, points, probability, share

__all__ = ["asked", "care", "single", "verdict"]

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
