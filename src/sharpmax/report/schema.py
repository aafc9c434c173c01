"""What the tables of every command look like: whether something that cannot be told is the fault of the file.

Stories read tables without looking at every value. Where one fails, this says whether the tables are what the command
writes. If they are, the mistake is in the story.
"""

from __future__ import annotations

import itertools
import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

NUMBER, TEXT, FLAG = "a finite number", "a text", "true or false"
_KINDS: Mapping[str, tuple[type, ...]] = {NUMBER: (int, float), TEXT: (str,), FLAG: (bool,)}


@dataclass(frozen=True)
class Maybe:
    """A value that may be null."""

    shape: Any


@dataclass(frozen=True)
class Optional:
    """A value that may be null or not there at all: older files do not have it, or not every run does."""

    shape: Any


@dataclass(frozen=True)
class Alike:
    """An object or a list of lists that are equally long."""

    shape: Any


@dataclass(frozen=True)
class Either:
    """One of several."""

    shapes: tuple[Any, ...]


@dataclass(frozen=True)
class Each:
    """An object of any names; with `like` all its values are objects of the same names."""

    shape: Any
    like: bool = False


@dataclass(frozen=True)
class Sized:
    """An object by size, which is a whole number as text, or one of some `words`."""

    shape: Any
    words: tuple[str, ...] = ()


def _record(names: Iterable[str], shape: Any = NUMBER) -> dict[str, Any]:
    return dict.fromkeys(names, shape)


_MAYBE = Maybe(NUMBER)
_MEAN = {"mean": NUMBER, "sem": _MAYBE}
_SHARE = {"mean": NUMBER, "low": NUMBER, "high": NUMBER}
_INTERVAL = {"mean": _MAYBE, "low": _MAYBE, "high": _MAYBE}
_CELL = _INTERVAL | {"sem": _MAYBE, "n": NUMBER}
_PAIR = {"gained": NUMBER, "lost": NUMBER, "p": NUMBER}
_GAIN = _SHARE | _PAIR
_MEASURED = Each(Sized(_CELL), like=True)
_IN_AND_OUT = Each(Maybe(_SHARE))
_RULE = Either(({"kind": TEXT}, None))
_ERRORS = Sized(
    {"heads": NUMBER, "entropy": _record(("median", "p90", "bias")), "top": _record(("median", "p90", "bias"))}
)
_OF_COMPARE = {
    "task": TEXT, "task_summary": TEXT, "unit": TEXT, "model": TEXT, "sizes": [NUMBER, ...], "scored_sizes": [NUMBER],
    "train_sizes": [NUMBER, NUMBER], "seeds": [NUMBER, ...], "steps": NUMBER, "batch": NUMBER, "samples": NUMBER,
    "learning_rate": NUMBER, "warmup": NUMBER, "device": TEXT, "level": NUMBER,
}  # fmt: skip
_EXAMPLES = {"algorithms": [TEXT], "per_cell": NUMBER, "dataset": Maybe(TEXT)}
_END = Either((NUMBER, TEXT, None))

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "reproduce": {
        "accuracy": Each(Sized(_MEAN), like=True),
        "comparison": Each(Sized({"gain": NUMBER, "p": _MAYBE, "of_ceiling": _MAYBE})),
        "entropy": Each(Sized(_MEAN), like=True),
        "top_weight": Each(Sized(_MEAN), like=True),
        "bounds": {
            "spread": _MEAN, "horizon_log10": _MEAN,
            **_record(("largest_weight", "least_entropy", "most_entropy"), Sized(NUMBER)),
            **_record(("limit_weight", "limit_entropy"), Optional(Sized(_MAYBE))),
        },
        "heat": {"sizes": [NUMBER, ...], "items": NUMBER, "sets": NUMBER, "arms": Each(Sized(Alike([[NUMBER]])))},
        "detection": Each(Sized({"auroc": _MAYBE, "low": _MAYBE, "high": _MAYBE, "wrong": NUMBER, "right": NUMBER},
            ("pooled",))),
        "fit": {
            "coefficients": [NUMBER], "fitted_on": [NUMBER, NUMBER], "threshold": NUMBER, "acts_on": Maybe([_MAYBE,
                _MAYBE]), "paper_acts_on": [NUMBER, NUMBER],
            **_record(("inputs", "wrong", "dropped", "r2")), "points": Alike(_record(("entropy", "beta"), [NUMBER])),
            "curve": Alike(_record(("entropy", "refit", "paper"), [NUMBER])),
        },
        "published": Each(Sized(NUMBER)),
        "weights": Each({"steps": NUMBER, "seeds": [NUMBER], "trained": Optional(Each(Either((NUMBER, TEXT,
            Each(Either((NUMBER, TEXT, None))), None))))}),
        "setting": {
            "recipes": Each({"describe": TEXT, "steps": NUMBER, "seeds": [NUMBER]}), "sizes": [NUMBER],
            "samples": NUMBER,
            "train_sizes": [NUMBER, NUMBER], "classes": NUMBER, "policies": Optional(Each(Each(TEXT))),
            "left_out": Optional(Each(Each(TEXT))),
        },
    },
    "compare": {
        **_record(("accuracy", "ranking", "hard", "close", "whole", "top_weight", "entropy"), _MEASURED),
        "per_seed": Each(Sized([NUMBER]), like=True),
        "league": Each({"rank": NUMBER, "leader": TEXT, "p": _MAYBE, "score": _CELL}),
        "training": Each({
            "loss": _CELL, "diverged": [NUMBER], "curve": [[Either((NUMBER, [_MAYBE]))]], "parameters": NUMBER,
            "seconds": NUMBER, "memory": _MAYBE, "loss_per_seed": [_MAYBE],
        }),
        "methods": Each({"name": TEXT, "normaliser": TEXT, "summary": TEXT, "options": {}, "recipe": {}, "data": {},
            "at_test": Maybe({"normaliser": TEXT, "options": {}})}),
        "setting": _OF_COMPARE,
        "capacity": Each([{
            "model": TEXT, "width": NUMBER, "heads": NUMBER, "depth": NUMBER, "parameters": NUMBER,
            "half_accuracy_size": _END,
            "half_top_weight_size": _END, "diverged": [NUMBER], **_record(("accuracy", "top_weight", "entropy"),
                Sized(_CELL)),
        }]),
        "laws": Each(_record(("accuracy", "top"), {
            "what": TEXT, "models": NUMBER, "used": NUMBER, "beyond": NUMBER,
            "exponents": Maybe(Each(_INTERVAL | {"mean": NUMBER})),
            "constant": _MAYBE, "r2": _MAYBE,
        })),
        "layers": Each(Each(Maybe({
            "measured": [NUMBER], "forecast": [NUMBER], "method": TEXT, "first_measured": NUMBER,
            "first_forecast": NUMBER,
            "entropy": Sized([NUMBER]),
        }))),
    },
    "evaluate": {
        "setting": {
            "model": TEXT, "layers": NUMBER, "heads": NUMBER, "sizes": [NUMBER], "prompts": NUMBER, "windows": NUMBER,
            "arms": Each({"describe": TEXT, "policy": _RULE, "touched": NUMBER, "calibrated_on": Maybe(TEXT),
                "remarks": [TEXT]}),
            "tasks": Each({"version": NUMBER, "summary": TEXT}), "context": NUMBER, "dtype": TEXT, "device": TEXT,
            "questions": NUMBER, "rounds": NUMBER,
            "text": Maybe({"source": TEXT, "fingerprint": TEXT, "tokens": NUMBER}),
        },
        "accuracy": Each(Sized(_SHARE), like=True),
        "paired": Each(Sized(_PAIR), like=True),
        "perplexity": Each(Sized({"mean": NUMBER, "rise": _MAYBE, "low": _MAYBE, "high": _MAYBE}, ("chat",)),
            like=True),
        "cost": Each({"prefill_ms": NUMBER, "decode_ms": NUMBER, "peak_mib": _MAYBE, "prefill_ratio": NUMBER,
            "decode_ratio": NUMBER}),
    },
    "calibrate": {
        "setting": {
            "model": TEXT, "task": TEXT, "leash": NUMBER, "layers": NUMBER, "heads": NUMBER, "sizes": [NUMBER, ...],
            "kinds": [TEXT],
            "steps": NUMBER, "touched": NUMBER, "seconds": Optional({"calibration": NUMBER}),
        },
        "curve": Each([[NUMBER, NUMBER], ...]),
        "candidates": Each({
            "kind": TEXT, "strength": NUMBER, "touched": NUMBER, "validation": NUMBER, "nll": Optional(NUMBER),
            "rise": Sized(NUMBER, ("chat",)),
            "foldable": FLAG,
        }),
        "before": {"nll": NUMBER, "right": NUMBER},
        "chosen": TEXT,
        "best_foldable": Maybe(TEXT),
        "heads": {"betas": Alike([[NUMBER], ...]), "touched": [[NUMBER, NUMBER, TEXT, NUMBER]]},
        "validation": Each(Sized(_SHARE), like=True),
    },
    "probe": {
        "setting": {
            "model": TEXT, "family": TEXT, "layers": NUMBER, "heads": NUMBER, "tasks": [TEXT], "sizes": Each([NUMBER,
                ...]),
            "unit": Each(TEXT), "context": _MAYBE, "prompts_of_size": Each(Sized(NUMBER)),
            "prompts": Optional(Each(NUMBER)), "rows": TEXT, "dtype": TEXT, "device": TEXT, "fit_up_to": Each(NUMBER),
            "kind_rule": Each(TEXT),
        },
        "verdict": [TEXT],
        "heads": Each({
            "kind": TEXT, "slope": _MAYBE, "slope_low": _MAYBE, "slope_high": _MAYBE,
            "curve": Sized(_record(("count", "entropy", "top", "sink", "spread", "local", "effective"), _MAYBE)),
            "forecast": Sized({"entropy": NUMBER, "top": NUMBER}),
            "horizon": {"tokens": _MAYBE, "low": _MAYBE, "high": _MAYBE},
        }),
        "layers": Each({"slope": _MAYBE, "rank": _MAYBE, "kinds": Each(NUMBER), "sink": _MAYBE, "top": _MAYBE}),
        "forecast": {"method": TEXT, "fitted": [NUMBER], "tested": _ERRORS, "methods": Each({"decided_by": _MAYBE,
            "tested": _ERRORS})},
        "chain": {"next": _MAYBE, "low": _MAYBE, "high": _MAYBE, "pairs": NUMBER},
    },
    "clrs": {
        "setting": {
            "arms": Each({"model": TEXT, "trained": FLAG, "policy": _RULE, "describe": TEXT, "touched": NUMBER}),
            "questions": {"count": NUMBER}, "data": _EXAMPLES, "dtype": TEXT, "device": TEXT,
            "too_long": Each([NUMBER]), "base": TEXT, "remarks": Each([TEXT]), "sizes": Each(_record(("trained",
                "examined"), [NUMBER])),
        },
        "accuracy": Each(Each(Sized(_SHARE))),
        "exact": Each(Each(Sized(_SHARE))),
        "majority": Each(Sized(_SHARE | {"n": NUMBER})),
        "paired": Each(Each(Sized(_PAIR))),
        "means": Each(Each(_SHARE | {"algorithms": NUMBER}), like=True),
        "means_exact": Each(Each(_SHARE | {"algorithms": NUMBER}), like=True),
        "gains": Each(Each(_GAIN), like=True),
        "by_algorithm": Each(Each(_IN_AND_OUT)),
        "gains_by_algorithm": Each(Each(Each(Maybe(_GAIN)))),
        "speed": Each({"tokens": NUMBER, "seconds": NUMBER, "tokens_per_second": _MAYBE}),
        "training": Each({"command": TEXT, "provenance": {}, "setting": {"data": _EXAMPLES,
            "examples": {"count": NUMBER}, "steps": NUMBER, "epochs": NUMBER, "batch_tokens": NUMBER},
            "curve": [[NUMBER, NUMBER]], "speed": Each(_MAYBE)}),
    },
}  # fmt: skip
"""The tables of every story by the first part of their names, as far as stories read them."""

_LEAGUE = ("accuracy", "ranking", "hard", "close", "whole", "top_weight", "entropy")
_NEEDED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "compare": {"league": (*_LEAGUE, "per_seed", "training", "methods", "setting"), "capacity": ("laws", "layers",
        "setting")},
    "evaluate": {"accuracy": ("setting", "cost", "paired")},
    "calibrate": {"candidates": ("setting", "curve", "chosen", "heads", "validation")},
    "probe": {"heads": ("setting", "verdict", "layers")},
    "clrs": {"accuracy": ("setting", "exact", "majority", "paired", "means", "means_exact", "gains", "by_algorithm",
        "gains_by_algorithm", "speed", "training")},
}  # fmt: skip
"""Tables that must be there where there is this one."""


def damage(name: str, tables: Mapping[str, Any]) -> str | None:
    """What tables of the story `name` have that its command does not write; None where they are as it writes them."""
    shapes = SHAPES[name]
    for table, value in tables.items():
        kind = table.partition("/")[0]
        if kind in shapes and (found := _wrong(shapes[kind], value, [table])) is not None:
            return found
    kinds = {table.partition("/")[0] for table in tables}
    for table, needed in _NEEDED.get(name, {}).items():
        if table in kinds and (missing := [one for one in needed if one not in kinds]):
            return f"there is no {missing[0]!r}"
    return _other_names(name, tables)


def _other_names(name: str, tables: Mapping[str, Any]) -> str | None:
    """Where tables that speak of the same things do not name the same."""
    for table, names, why in _names(name, tables):
        if odd := sorted(set(map(str, names)) ^ set(_inside(tables, table))):
            return f"{table!r} and {why} do not both have {odd[0]!r}"
    if name == "compare" and "league" in tables:
        seeds = len(tables["setting"]["seeds"])
        for method, cells in tables["per_seed"].items():
            if odd := [size for size, values in cells.items() if len(values) != seeds]:
                return f"'per_seed' of {method!r} has not {seeds} seeds at {odd[0]}"
        sizes = set(map(str, tables["setting"]["sizes"]))
        for table in (*_LEAGUE, "per_seed"):
            for method, cells in tables[table].items():
                if odd := sorted(sizes ^ set(cells)):
                    return f"{table!r} of {method!r} and 'setting/sizes' do not both have {odd[0]!r}"
    if name == "compare" and not all(tables.get("capacity", {"": [1]}).values()):
        return "'capacity' has a method without models"
    if name == "evaluate" and all(about["policy"] is not None for about in tables["setting"]["arms"].values()):
        return "'setting/arms' has no model without a policy"
    if name == "probe" and (empty := [table for table in tables if table.startswith("heads/") and not tables[table]]):
        return f"{empty[0]!r} is empty"
    if name == "calibrate":
        chosen = {tables["chosen"], tables.get("best_foldable") or tables["chosen"]}
        if (odd := sorted(chosen - set(tables["candidates"]))) or "nll" not in tables["curve"]:
            return f"'candidates' has no {odd[0]!r}" if odd else "'curve' has no 'nll'"
    if name == "reproduce":
        if empty := [table for table, value in tables.items() if not value and table.partition("/")[0] != "setting"]:
            return f"{empty[0]!r} is empty"
        for table in (one for one in tables if one.partition("/")[0] == "heat"):
            for arm, drawn in tables[table]["arms"].items():
                if odd := [size for size in tables[table]["sizes"] if str(size) not in drawn]:
                    return f"{table!r} has no size {odd[0]} of {arm!r}"
    return None


def _inside(tables: Mapping[str, Any], place: str) -> Any:
    """What lies in a place, as `setting/arms`; nothing where there is no such place."""
    if place in tables:
        return tables[place]
    name, _, rest = place.partition("/")
    return _inside(tables[name], rest) if name in tables else ()


def _names(name: str, tables: Mapping[str, Any]) -> Iterator[tuple[str, Iterable[Any], str]]:
    """Tables, the names they must have, and where these come from."""
    if name == "compare":
        for whole, others in (
            ("league", (*_LEAGUE, "per_seed", "training", "methods")),
            ("capacity", ("laws", "layers")),
        ):
            yield from ((table, tables[whole], repr(whole)) for table in others if whole in tables)
    if name == "evaluate":
        arms = tables["setting"]["arms"]
        policies = [arm for arm, about in arms.items() if about["policy"] is not None]
        tasks = [table.partition("/")[2] for table in tables if table.startswith("accuracy/")]
        yield from ((table, arms, "'setting/arms'") for table in ("perplexity", "cost") if table in tables)
        yield "setting/tasks", tasks, "the tables of accuracies"
        for task in tasks:
            yield f"accuracy/{task}", arms, "'setting/arms'"
            yield f"paired/{task}", policies, "the policies in 'setting/arms'"
    if name == "probe":
        tasks = [table.partition("/")[2] for table in tables if table.startswith("heads/")]
        for setting in ("sizes", "unit", "fit_up_to", "prompts_of_size"):
            # There may be settings of a task whose heads are not told here.
            yield f"setting/{setting}", {*tasks, *tables["setting"][setting]}, "the tables of heads"
        for task in tasks:
            yield f"setting/prompts_of_size/{task}", tables["setting"]["sizes"][task], f"'setting/sizes/{task}'"
    if name == "clrs":
        arms, base = tables["setting"]["arms"], tables["setting"]["base"]
        for table in ("accuracy", "exact", "means", "means_exact", "by_algorithm", "speed"):
            yield table, arms, "'setting/arms'"
        for table, rows in (
            (table, tables[table]) for table in ("accuracy", "exact", "by_algorithm", "gains_by_algorithm")
        ):
            yield from ((f"{table}/{arm}", tables["majority"], "'majority'") for arm in rows)
        yield "setting/sizes", tables["majority"], "'majority'"
        for table in ("gains", "gains_by_algorithm", "paired"):
            yield table, [arm for arm in arms if arm != base], "the arms that are compared with 'setting/base'"
        yield from ((f"gains/{arm}", tables["means"].get(base, ()), "'means'") for arm in tables["gains"])
        yield "setting", {*tables["setting"], *(() if base in arms else [base])}, "'setting/base'"
        if not all(tables["majority"].values()) or not tables["majority"]:
            yield "majority", [*tables["majority"], "a size of every algorithm"], "'accuracy'"


def _wrong(shape: Any, value: Any, place: list[str]) -> str | None:
    """The first place where a value is not of a shape, and what there is instead."""
    if isinstance(shape, (Maybe, Optional)):
        return None if value is None else _wrong(shape.shape, value, place)
    if isinstance(shape, Alike):
        return _wrong(shape.shape, value, place) or _unlike(value, place)
    if isinstance(shape, Either):
        found = [_wrong(one, value, place) for one in shape.shapes]
        return None if None in found else found[0]
    if isinstance(shape, list):
        if not isinstance(value, (list, tuple)):
            return _instead("a list", value, place)
        one_by_one = len(shape) > 1 and shape[-1] is not ...
        if (one_by_one and len(value) != len(shape)) or (shape[-1] is ... and not value):
            return f"{'/'.join(place)} is a list of {len(value)}"
        shapes = shape if one_by_one else itertools.repeat(shape[0])
        pairs = enumerate(zip(shapes, value, strict=False))
        return _first(_wrong(kind, one, [*place, str(at)]) for at, (kind, one) in pairs)
    if isinstance(shape, (dict, Each, Sized)):
        return _wrong_object(shape, value, place)
    fine = value is None if shape is None else isinstance(value, _KINDS[shape])
    if shape == NUMBER:
        fine = fine and not isinstance(value, bool) and math.isfinite(value)
    return None if fine else _instead("null" if shape is None else shape, value, place)


def _wrong_object(shape: Any, value: Any, place: list[str]) -> str | None:
    if not isinstance(value, Mapping):
        return _instead("an object", value, place)
    if isinstance(shape, dict):
        missing = [name for name, one in shape.items() if name not in value and not isinstance(one, Optional)]
        if missing:
            return f"{'/'.join(place)} has no {missing[0]!r}"
        return _first(_wrong(one, value[name], [*place, name]) for name, one in shape.items() if name in value)
    if isinstance(shape, Sized) and (odd := [name for name in value if not (name.isdecimal() or name in shape.words)]):
        return f"{'/'.join(place)} has {odd[0]!r}, which is no size"
    found = _first(_wrong(shape.shape, one, [*place, name]) for name, one in value.items())
    if found is None and isinstance(shape, Each) and shape.like:
        every = dict.fromkeys(name for one in value.values() for name in one)
        for name, one in value.items():
            if lacking := [key for key in every if key not in one]:
                return f"{'/'.join([*place, name])} has no {lacking[0]!r}"
    return found


def _unlike(value: Any, place: list[str]) -> str | None:
    lengths = {len(one) for one in (value.values() if isinstance(value, Mapping) else value)}
    return f"{'/'.join(place)} holds lists of {sorted(lengths)} values" if len(lengths) > 1 else None


def _first(found: Iterable[str | None]) -> str | None:
    return next((one for one in found if one is not None), None)


def _instead(wanted: str, value: Any, place: list[str]) -> str:
    given = "an object" if isinstance(value, Mapping) else "a list" if isinstance(value, list) else reprlib.repr(value)
    return f"{'/'.join(place)} is {given} and not {wanted}"
