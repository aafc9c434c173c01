"""What the tables of `sharpmax clrs evaluate` hold and show, before it is put into words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharpmax.report.tables import Tables

__all__ = [
    "IN",
    "LEARNT",
    "LEVEL",
    "OUT",
    "TOUCHSTONE",
    "above_chance",
    "algorithms",
    "arms",
    "base",
    "gains",
    "group_names",
    "groups",
    "lead",
    "learnt",
    "majority",
    "name_of",
    "others",
    "settings_apart",
    "shown",
    "training",
]

IN, OUT = "in", "out"
"""Sizes that the arms were trained on, and all others."""

LEVEL = 0.01
"""A difference counts as shown when its p value is below this and its interval holds no zero."""

TOUCHSTONE, LEARNT = "minimum", 90.0
"""The algorithm that is easiest to learn, and the right answers in percent at sizes trained on that say it was."""

_OF_THE_POLICY = {"policy_name", "policy_describe", "policy_rate", "learn", "touched", "trained_weights"}
"""Settings in which arms are meant to differ."""


def arms(tables: Tables) -> list[str]:
    """The arms, in the order of the run."""
    return list(tables["accuracy"])


def base(tables: Tables) -> str:
    """The arm that the others are compared with."""
    return str(tables["setting"]["base"])


def others(tables: Tables) -> list[str]:
    """All arms but the base."""
    return [arm for arm in arms(tables) if arm != base(tables)]


def algorithms(tables: Tables) -> list[str]:
    """The algorithms that were asked for."""
    return list(tables["majority"])


def name_of(algorithm: str) -> str:
    """An algorithm in words.

    >>> name_of("bubble_sort")
    'bubble sort'
    """
    return algorithm.replace("_", " ")


def groups(tables: Tables) -> list[str]:
    """Which of the two groups of sizes were asked for."""
    return [group for group in (IN, OUT) if group in tables["means"][base(tables)]]


def group_names(tables: Tables) -> dict[str, str]:
    """The groups in words: how much may be said depends on the arms and the sizes."""
    setting = tables["setting"]
    trained = any(about["trained"] for about in setting["arms"].values())
    larger = all(
        size in one["trained"] or size > max(one["trained"], default=0)
        for one in setting["sizes"].values()
        for size in one["examined"]
    )
    return {
        IN: "sizes trained on" if trained else "sizes meant for training",
        OUT: "larger sizes" if larger else "other sizes",
    }


def gains(tables: Tables, arm: str) -> Mapping[str, Any]:
    """What an arm gains over the base, by group."""
    found: Mapping[str, Any] = tables["gains"][arm]
    return found


def lead(tables: Tables) -> str | None:
    """The arm that gains most over the base where it was not trained, or None where there is only the base."""
    last = groups(tables)[-1]
    return max(others(tables), key=lambda arm: gains(tables, arm)[last]["mean"], default=None)


def shown(gain: Mapping[str, Any]) -> int:
    """1 for a gain that is shown, −1 for a loss that is, 0 for what may be chance."""
    if gain["p"] >= LEVEL or gain["low"] <= 0.0 <= gain["high"]:
        return 0
    # The test counts questions and the mean algorithms: where they point apart, nothing is shown.
    agrees = (gain["mean"] > 0.0) == (gain["gained"] > gain["lost"])
    return (1 if gain["mean"] > 0.0 else -1) if agrees else 0


def learnt(tables: Tables) -> dict[str, float] | None:
    """Right answers of each arm to the touchstone at sizes trained on; None where nobody was asked."""
    found = {arm: tables["by_algorithm"][arm].get(TOUCHSTONE, {}).get(IN) for arm in arms(tables)}
    return {arm: cell["mean"] for arm, cell in found.items()} if all(found.values()) else None


def majority(tables: Tables, algorithm: str, group: str) -> float | None:
    """What one would get right in a group of sizes by always saying the most frequent answer."""
    trained = tables["setting"]["sizes"][algorithm]["trained"]
    cells = tables["majority"][algorithm]
    values = [cell["mean"] for size, cell in cells.items() if (int(size) in trained) == (group == IN)]
    return sum(values) / len(values) if values else None


def above_chance(tables: Tables, arm: str, group: str) -> tuple[int, int]:
    """On how many algorithms, of how many, an arm's whole interval lies above the most frequent answer."""
    cells = {name: one[group] for name, one in tables["by_algorithm"][arm].items() if group in one}
    return sum(cell["low"] > (majority(tables, name, group) or 0.0) for name, cell in cells.items()), len(cells)


def training(tables: Tables) -> Mapping[str, Any]:
    """How arms were trained, where that is known."""
    found: Mapping[str, Any] = tables.get("training") or {}
    return found


def settings_apart(tables: Tables) -> dict[str, dict[str, Any]]:
    """Settings of training, the policy aside, in which arms differ: then not only the policy is compared."""
    known = {arm: one["setting"] for arm, one in training(tables).items()}
    names = dict.fromkeys(name for setting in known.values() for name in setting if name not in _OF_THE_POLICY)
    values = {name: {arm: setting.get(name) for arm, setting in known.items()} for name in names}
    return {name: by_arm for name, by_arm in values.items() if len({repr(value) for value in by_arm.values()}) > 1}
