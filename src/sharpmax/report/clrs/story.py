"""`sharpmax clrs evaluate`, told: its figures, numbers, tables, summary and method."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from sharpmax.report.clrs import grids, summary
from sharpmax.report.clrs.facts import LEVEL, arms, group_names, training
from sharpmax.report.clrs.plots import curves, right_answers
from sharpmax.report.clrs.tiles import tiles
from sharpmax.report.origin import Pairs, origin_of_run
from sharpmax.report.story import Figure, Part, Story
from sharpmax.report.tables import Tables
from sharpmax.report.words import count, plural

__all__ = ["STORY"]

_PART = "all"


def _tells(tables: Tables) -> bool:
    return "by_algorithm" in tables


def _figures(tables: Tables) -> list[Figure]:
    found = [Figure("accuracy", _PART, "accuracy", "accuracy", partial(right_answers, tables))]
    if any(one["curve"] for one in training(tables).values()):
        found.append(Figure("curve", _PART, "curve", "curve", partial(curves, tables)))
    return found


def _parts(tables: Tables) -> list[Part]:
    found = [grids.means_grid(tables), grids.gains_grid(tables), grids.algorithms_grid(tables)]
    return [Part(_PART, "CLRS-Text", tiles=tiles(tables), grids=[grid for grid in found if grid])]


def _summary(tables: Tables) -> list[tuple[str, list[str]]]:
    parts = (
        ("Verdict", summary.verdict),
        ("What was asked", summary.asked),
        ("Algorithm by algorithm", summary.single),
        ("Take care", summary.care),
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
