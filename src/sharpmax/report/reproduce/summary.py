"""A run in plain sentences, each of them computed from its tables: nothing is said that they do not show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sharpmax.report.reproduce.facts import change, headline, horizon, trust
from sharpmax.report.reproduce.gains import end_sentence, gain_sentences, hard_sentence, others_sentence
from sharpmax.report.reproduce.looks import in_order, signal
from sharpmax.report.reproduce.tables import REFERENCE, describe, part, recipe_name, recipes, row
from sharpmax.report.tables import Tables, readable, sizes
from sharpmax.report.words import capital, count, joined, nats, percent, plural, whole_from_log10

__all__ = ["detected", "fixed", "meant", "measured"]


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
