"""The report section of `sharpmax reproduce`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from sharpmax.report.section import Figure, Part, Story, Tile
from sharpmax.report.sections.reproduce_charts import build, file_name, plottable
from sharpmax.report.sections.reproduce_tables import (
    LEVEL,
    REFERENCE,
    Verdict,
    change,
    crossing,
    describe,
    end_grid,
    grids,
    headline,
    horizon,
    in_order,
    look,
    part,
    recipe_name,
    recipes,
    row,
    signal,
    trust,
    verdict,
)
from sharpmax.report.tables import Tables, readable, sizes
from sharpmax.report.words import (
    Pairs,
    capital,
    count,
    joined,
    nats,
    origin_of_weights,
    percent,
    plural,
    points,
    probability,
    whole_from_log10,
)


def gain_sentences(tables: Tables, recipe: str, found: Verdict, under: str = "", *, brief: bool = False) -> list[str]:
    """What an arm gains or loses; `under` is put in front of the first sentence, `brief` leaves the test out."""
    subject, total = look(found.arm).subject, len(found.gains)
    if not any(found.gains.values()):
        return [capital(f"{under}{subject} is right exactly as often as plain softmax, at every size.")]
    if not found.tested:
        if found.gains[found.best] <= 0:
            return [capital(f"{under}{subject} is nowhere right more often than plain softmax, for this one seed.")]
        return [
            capital(f"{under}{subject} raises accuracy {_at(tables, recipe, found, found.best)}, its largest gain."),
            "One seed cannot tell such a gain from chance.",
        ]
    if not found.better and not found.worse:
        return [
            capital(
                f"{under}{subject} makes no difference that this run can show: p is below {LEVEL} at none of {total} "
                f"sizes (largest gain {points(found.gains[found.best])} points, at {count(found.best)} items)."
            )
        ]
    test = f"(p < {LEVEL}, paired t-test across seeds)"
    most = f"most at {count(found.worst)} items ({points(found.gains[found.worst])} points)"
    if not found.better:
        return [
            capital(
                f"{under}{subject} costs accuracy: it is better than plain softmax at none of {total} sizes and worse "
                f"at {len(found.worse)} {test}, {most}."
            )
        ]
    worse = f"worse at {len(found.worse)}, {most}" if found.worse else "worse at none"
    counted = f"better than plain softmax at {len(found.better)} of {total} sizes and {worse}"
    gain = f"{under}{subject} raises accuracy {_at(tables, recipe, found, found.best)}, its largest gain"
    if brief:
        return [capital(f"{gain}; it is {counted}.")]
    return [capital(f"{gain}."), f"It is {counted} {test}. No weight of the model is changed for that."]


def hard_sentence(found: Verdict) -> str:
    """How much an arm reaches of what hard argmax reaches with the same weights."""
    if found.arm == "hard" or not found.of_ceiling:
        return ""
    least = min(found.of_ceiling.values())
    much = "as much as" if least >= 99.9 else f"at least {percent(least)} of what"
    return (
        f"At every size it reaches {much} the same model reaches when the item with the largest logit takes the whole "
        "weight (hard argmax)."
    )


def others_sentence(tables: Tables, recipe: str, shown: str) -> str:
    """The largest gains of all other arms, in one sentence."""
    arms = [arm for arm in in_order(part(tables, "comparison", recipe) or {}) if arm not in (shown, "hard")]
    said = []
    for arm in arms:
        found = verdict(tables, recipe, arm)
        if found is None:
            continue
        gain = f"{points(found.gains[found.best])} points at {count(found.best)} items"
        if found.better or (not found.tested and found.gains[found.best] > 0):
            loss = f" (but worse at {len(found.worse)} sizes)" if found.worse else ""
            said.append(f"{gain} with {look(arm).subject}{loss}")
        else:
            said.append(f"none shown with {look(arm).subject}")
    return f"The largest gains of the others: {joined(said)}." if said else ""


def end_sentence(tables: Tables, recipe: str, under: str = "") -> str:
    """Where the paper's polynomial stops acting on these models; nothing if the run does not say."""
    fit, entropy = part(tables, "fit", recipe), row(tables, "entropy", recipe, "softmax")
    if not fit or not entropy or fit["paper_acts_on"][1] is None:
        return ""
    end = fit["paper_acts_on"][1]
    beyond = [n for n in sizes(entropy) if entropy[n]["mean"] > end]
    if not beyond:
        return capital(
            f"{under}the paper's polynomial acts up to an entropy of {nats(end)} nats, which plain softmax does not "
            "exceed on average at any size of this run."
        )
    where = crossing(entropy, end)
    start = f"at about {count(where)} items" if where else f"from {count(beyond[0])} items on"
    return capital(
        f"{under}the paper's polynomial does nothing to rows above {nats(end)} nats of entropy, which plain softmax "
        f"exceeds on average {start}."
    )


def _at(tables: Tables, recipe: str, found: Verdict, n: str) -> str:
    """From where to where at a size, as the end of "raises accuracy …"."""
    p = found.p[n]
    gain = f"{points(found.gains[n])} points" + (f", {probability(p)}" if p is not None else "")
    before, after = row(tables, "accuracy", recipe, "softmax"), row(tables, "accuracy", recipe, found.arm)
    if not before or not after or n not in before or n not in after:
        return f"at {count(n)} items ({gain})"
    return f"at {count(n)} items from {percent(before[n]['mean'])} to {percent(after[n]['mean'])} ({gain})"


def measured(tables: Tables) -> list[str]:
    """What was measured."""
    with readable("the summary", tables):
        setting, names = tables.get("setting", {}), recipes(tables)
        said = []
        if setting.get("train_sizes") and setting.get("sizes"):
            low, high = setting["train_sizes"]
            said.append(
                "A model with a single attention head learned to name the class of the item with the highest priority "
                f"in sets of {count(low)} to {count(high)} items. It was then asked the same about sets of "
                f"{_from_to(setting['sizes'])} items, without further training."
            )
        if sets := setting.get("samples"):
            said.append(f"Every model is tested on {plural(sets, 'set')} of each size{_seeds(setting, names)}.")
        if len(names) > 1:
            lines = [recipe_name(name) + (f" ({line})" if (line := describe(tables, name)) else "") for name in names]
            said.append(f"Models of {len(names)} ways of training were measured: {joined(lines)}.")
        return said


def meant(tables: Tables) -> list[str]:
    """What happens to plain softmax as sets grow, and what theory and the paper say about it."""
    with readable("the summary", tables):
        said = []
        for place, recipe in enumerate(recipes(tables)):
            plain = _plain(tables, recipe, first=place == 0)
            if place == 0:
                said += [*plain, *_horizon(tables, recipe), *_published(tables, recipe)]
            else:
                said += [" ".join(plain)] if plain else []
        return said + _training(tables)


def fixed(tables: Tables) -> list[str]:
    """What sharpening buys without training the model again."""
    with readable("the summary", tables):
        said = []
        for place, recipe in enumerate(recipes(tables)):
            under = _under(tables, recipe)
            found = headline(tables, recipe)
            if found:
                said += gain_sentences(tables, recipe, found, under, brief=place > 0)
            # What is true of the first recipe in detail would only tire a reader of the second.
            if place == 0:
                said += [hard_sentence(found), others_sentence(tables, recipe, found.arm)] if found else []
                said.append(end_sentence(tables, recipe, under))
        return [sentence for sentence in said if sentence]


def detected(tables: Tables) -> list[str]:
    """Whether wrong answers can be told from right ones."""
    with readable("the summary", tables):
        found = [_detection(tables, recipe, first=place == 0) for place, recipe in enumerate(recipes(tables))]
        return [sentence for said in found for sentence in said]


def _from_to(known: list[int]) -> str:
    low, high = min(known), max(known)
    return count(low) if low == high else f"{count(low)} to {count(high)}"


def _seeds(setting: Mapping[str, Any], names: list[str]) -> str:
    known = {len(setting["recipes"][name]["seeds"]) for name in names if name in setting.get("recipes", {})}
    if len(known) != 1:
        return ""
    seeds = known.pop()
    if seeds == 1:
        return "; there is one of them (a single seed), so no difference here can be tested for significance"
    return f"; numbers are means over {plural(seeds, 'seed')} (models trained alike from different random starts)"


def _under(tables: Tables, recipe: str) -> str:
    return f"with {recipe_name(recipe)}, " if len(recipes(tables)) > 1 else ""


def _plain(tables: Tables, recipe: str, *, first: bool) -> list[str]:
    said = []
    if weight := change(row(tables, "top_weight", recipe, "softmax")):
        entropy = change(row(tables, "entropy", recipe, "softmax"))
        what = "spreads its weight as sets grow" if weight.falls else "does not lose focus at these sizes"
        nats_too = f" (entropy: {nats(entropy.first)} and {nats(entropy.last)} nats)" if entropy else ""
        said.append(
            f"{_under(tables, recipe)}plain softmax {what}: the heaviest item holds {percent(weight.first)} of the "
            f"weight among {count(weight.small)} items and {percent(weight.last)} among "
            f"{count(weight.large)}{nats_too}."
        )
    if plain := change(row(tables, "accuracy", recipe, "softmax")):
        subject = "its accuracy" if said else f"{_under(tables, recipe)}the accuracy of plain softmax"
        classes = tables.get("setting", {}).get("classes")
        guess = (
            f" (guessing among {count(classes)} classes gives {percent(100.0 / classes)})" if classes and first else ""
        )
        verb = "falls from" if plain.falls else "rises from" if plain.rises else "hardly changes:"
        said.append(
            f"{subject} {verb} {percent(plain.first)} at {count(plain.small)} items to {percent(plain.last)} at "
            f"{count(plain.large)}{guess}."
        )
    return [capital(sentence) for sentence in said]


def _horizon(tables: Tables, recipe: str) -> list[str]:
    bounds = part(tables, "bounds", recipe)
    if not bounds:
        return []
    spread, items = nats(bounds["spread"]["mean"]), whole_from_log10(horizon(bounds))
    largest = sizes(bounds["largest_weight"])[-1]
    if horizon(bounds) <= math.log10(int(largest)):
        said = [
            f"Theory sets a limit: the logits of a row differ by up to {spread} nats, and with that one item can hold "
            f"half of the weight among at most {items} items."
        ]
    else:
        said = [
            f"Theory's worst case is not reached: the logits of a row differ by up to {spread} nats, which lets one "
            f"item hold half of the weight among up to {items} items."
        ]
    weight = row(tables, "top_weight", recipe, "softmax")
    if "limit_weight" in bounds and weight and largest in weight:
        said.append(
            f"For many items drawn at random, theory expects the heaviest of {count(largest)} to hold "
            f"{percent(bounds['limit_weight'][largest])} of the weight; measured: {percent(weight[largest]['mean'])}."
        )
    return said


def _published(tables: Tables, recipe: str) -> list[str]:
    ours, theirs = row(tables, "accuracy", recipe, "softmax"), tables.get("published", {}).get("softmax")
    shared = [n for n in sizes(ours or {}) if n in (theirs or {})]
    if recipe != REFERENCE or not shared:
        return []
    worst = max(shared, key=lambda n: abs(ours[n]["mean"] - theirs[n]))
    apart = abs(ours[worst]["mean"] - theirs[worst])
    return [
        f"The accuracy of plain softmax that the paper publishes lies within {apart:.1f} points of this run's at every "
        f"size in both (furthest apart at {count(worst)} items: {percent(theirs[worst])} there, "
        f"{percent(ours[worst]['mean'])} here)."
    ]


def _training(tables: Tables) -> list[str]:
    said, reference = [], row(tables, "accuracy", REFERENCE, "softmax")
    for name in recipes(tables):
        cells = row(tables, "accuracy", name, "softmax")
        shared = [n for n in sizes(reference or {}) if n in (cells or {})]
        if name == REFERENCE or not shared:
            continue
        most = max(shared, key=lambda n: abs(cells[n]["mean"] - reference[n]["mean"]))
        mine, other = cells[most], reference[most]
        doubt = 2.0 * math.hypot(mine["sem"] or 0.0, other["sem"] or 0.0)
        numbers = (
            f"at {count(most)} items plain softmax is right in {percent(mine['mean'])} of the sets with "
            f"{recipe_name(name)} and in {percent(other['mean'])} with the paper's"
        )
        if abs(mine["mean"] - other["mean"]) > max(1.0, doubt):
            said.append(f"The way of training matters as well: {numbers}.")
        else:
            said.append(f"The way of training makes no clear difference: {numbers}, where they differ most.")
    return said


def _detection(tables: Tables, recipe: str, *, first: bool) -> list[str]:
    table = part(tables, "detection", recipe) or {}
    pooled = {name: table[name]["pooled"] for name in in_order(table) if "pooled" in table[name]}
    known = {name: cell for name, cell in pooled.items() if cell["auroc"] is not None}
    under = _under(tables, recipe)
    if not known:
        nothing = f"{under}plain softmax gave no wrong answer that could be told from right ones." if pooled else ""
        return [capital(nothing)] if nothing else []
    listed = joined([f"{cell['auroc']:.2f} by {signal(name).subject}" for name, cell in known.items()])
    scale = " (0.5 is chance, 1 is certainty)" if first else ""
    over = "over all sizes together, " if first else ""
    said = [f"{under}{over}wrong answers of plain softmax are told from right ones with an AUROC of {listed}{scale}."]
    if (found := trust(table.get("confidence", {}))) and found.falls:
        said.append(
            f"within one size confidence says less the larger the sets are: {found.first:.2f} among "
            f"{count(found.small)} items and {found.last:.2f} among {count(found.large)}."
        )
    if lost := [signal(name).subject for name, cell in known.items() if cell["low"] <= 0.5]:
        said.append(f"{joined(lost)}: not shown to be better than chance.")
    if first and {"confidence", "both"} <= set(known):
        alone, both = known["confidence"], known["both"]
        if both["low"] > alone["high"]:
            said.append("Entropy adds to confidence: the 95% intervals with and without it do not overlap.")
        else:
            said.append("This run does not show that entropy adds to confidence: the 95% intervals overlap.")
    return [capital(sentence) for sentence in said]


def tiles(tables: Tables, recipe: str) -> list[Tile]:
    """Up to four numbers: what plain softmax loses, what the fix gains, how focus is lost, where something ends."""
    found = [
        _change(tables, recipe, "accuracy", "accuracy of plain softmax"),
        _gain(tables, recipe),
        _horizon_metric(tables, recipe)
        or _change(tables, recipe, "top_weight", "weight of the heaviest item, plain softmax"),
        _end(tables, recipe) or _detection_metric(tables, recipe),
    ]
    return [tile for tile in found if tile]


def _change(tables: Tables, recipe: str, name: str, label: str) -> Tile | None:
    plain = change(row(tables, name, recipe, "softmax"))
    if not plain:
        return None
    ends = f"{percent(plain.first)} → {percent(plain.last)}"
    return Tile(ends, label, f"from {count(plain.small)} to {count(plain.large)} items")


def _horizon_metric(tables: Tables, recipe: str) -> Tile | None:
    bounds = part(tables, "bounds", recipe)
    # Far beyond the sizes of the run the horizon is a bound that tells nobody anything.
    if not bounds or horizon(bounds) > 1.0 + math.log10(int(sizes(bounds["largest_weight"])[-1])):
        return None
    spread = nats(bounds["spread"]["mean"])
    detail = f"beyond it no item can hold half of the weight, with logits within {spread} nats"
    return Tile(f"{whole_from_log10(horizon(bounds))} items", "sharpness horizon", detail)


def _end(tables: Tables, recipe: str) -> Tile | None:
    fit, entropy = part(tables, "fit", recipe), row(tables, "entropy", recipe, "softmax")
    end = fit["paper_acts_on"][1] if fit else None
    if not entropy or end is None or (where := crossing(entropy, end)) is None:
        return None
    detail = f"from there on the mean entropy exceeds {nats(end)} nats and β = 1"
    return Tile(f"≈ {count(where)} items", "end of the paper's polynomial", detail)


def _detection_metric(tables: Tables, recipe: str) -> Tile | None:
    table = part(tables, "detection", recipe) or {}
    known = {name: cells["pooled"] for name, cells in table.items() if cells.get("pooled", {}).get("auroc") is not None}
    if not known:
        return None
    best = max(in_order(known), key=lambda name: known[name]["auroc"])
    detail = f"by {signal(best).subject}; 0.5 is chance, 1 is certainty"
    return Tile(f"AUROC {known[best]['auroc']:.2f}", "telling wrong answers from right ones", detail)


def _gain(tables: Tables, recipe: str) -> Tile | None:
    fix = headline(tables, recipe)
    if not fix:
        return None
    loss = bool(fix.worse) and not fix.better
    n = fix.worst if loss else fix.best
    p = fix.p[n]
    if not fix.tested:
        sure = "a single seed, no test"
    elif p is None:
        sure = "no difference"
    else:
        sure = probability(p) if n in (*fix.better, *fix.worse) else f"not shown to differ from zero, {probability(p)}"
    return Tile(
        f"{points(fix.gains[n])} points",
        f"largest {'loss' if loss else 'gain'} of {look(fix.arm).subject}",
        f"at {count(n)} items ({sure})",
    )


def _tells(tables: Tables) -> bool:
    return bool(plottable(tables))


def _figures(tables: Tables) -> list[Figure]:
    return [
        Figure(name, recipe, f"{name}-{recipe}", file_name(name, recipe), partial(build, tables, name, recipe))
        for name, recipe in plottable(tables)
    ]


def _parts(tables: Tables) -> list[Part]:
    return [_part(tables, recipe) for recipe in recipes(tables)]


def _part(tables: Tables, recipe: str) -> Part:
    fit = part(tables, "fit", recipe) or {}
    return Part(
        recipe,
        capital(recipe_name(recipe)),
        describe(tables, recipe),
        tiles(tables, recipe),
        grids(tables, recipe),
        {
            "end": end_sentence(tables, recipe),
            "end_grid": end_grid(tables, recipe) if fit else None,
            "end_span": fit.get("paper_acts_on"),
        },
    )


def _summary(tables: Tables) -> list[tuple[str, list[str]]]:
    parts = (
        ("What was measured", measured),
        ("What it means", meant),
        ("What the fix buys", fixed),
        ("Can failures be noticed?", detected),
    )
    return [(title, said) for title, say in parts if (said := say(tables))]


def _method(tables: Tables) -> dict[str, Any]:
    setting = tables.get("setting") or {}
    arms = in_order({arm for recipe in recipes(tables) for arm in part(tables, "accuracy", recipe) or {}})
    policies = setting.get("policies") or {}
    return {
        "train_sizes": [count(n) for n in setting.get("train_sizes") or []],
        "classes": setting.get("classes"),
        "samples": setting.get("samples"),
        "sizes": joined([count(n) for n in setting.get("sizes") or []]),
        "recipes": [
            {
                "label": capital(recipe_name(recipe)),
                "describe": describe(tables, recipe),
                "steps": count(chosen["steps"]),
                "seeds": len(chosen["seeds"]),
            }
            for recipe, chosen in (setting.get("recipes") or {}).items()
        ],
        "arms": [
            {"label": capital(look(arm).label), "about": look(arm).about, "rules": _rules(policies, arm)}
            for arm in arms
        ],
    }


def _rules(policies: Mapping[str, Any], arm: str) -> list[tuple[str, str]]:
    """The rule of an arm for each recipe, or once if it is the same for all."""
    rules = [(capital(recipe_name(recipe)), str(known[arm])) for recipe, known in policies.items() if known.get(arm)]
    return rules[:1] if len({rule for _, rule in rules}) == 1 else rules


def _origins(tables: Tables) -> list[tuple[str, Pairs]]:
    weights = (tables.get("weights") or {}).items()
    return [(f"Models of {recipe_name(recipe)}", origin_of_weights(about)) for recipe, about in weights]


STORY = Story("reproduce", _tells, _figures, _parts, _summary, _method, _origins)
