"""What a monitor has learned, in a file: a service need not learn again."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sharpmax.errors import FileFormatError, reject
from sharpmax.files import read_json, write_text
from sharpmax.models.language import has_weights, weights_fingerprint
from sharpmax.probe.watch.judging import Learned
from sharpmax.probe.watch.scores import RULES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["load_learned", "save_learned"]

_SCHEMA, _KIND = 1, "sharpmax.monitor"


def save_learned(path: str | Path, model: PreTrainedModel, settings: Mapping[str, Any], known: Learned) -> Path:
    """Write what was learned with the weights of a model, and the settings of the monitor, as JSON."""
    weights = weights_fingerprint(model)
    body = {"schema": _SCHEMA, "kind": _KIND, "weights": weights, **settings, "learned": known.to_dict()}
    return write_text(path, json.dumps(body, allow_nan=False) + "\n")


def load_learned(path: str | Path, model: PreTrainedModel, settings: Sequence[str]) -> tuple[dict[str, Any], Learned]:
    """The settings and what was learned, from a file for the weights of a model."""
    name = repr(str(path))
    body = read_json(path, "monitor")
    if not isinstance(body, dict) or body.get("kind") != _KIND:
        raise FileFormatError(f"monitor: {name} is not what Monitor.save writes")
    if body.get("schema") != _SCHEMA:
        raise FileFormatError(f"monitor: {name} has schema {body.get('schema')!r}; allowed: {_SCHEMA}")
    if not has_weights(model, body.get("weights")):
        given = f"{name}, learned with the weights {body.get('weights')}"
        allowed = f"a file for the weights of this model, {weights_fingerprint(model)}"
        reject("path", given, allowed, "learn again: sharpmax.monitor")
    field = _Field(name, "", body)
    field["false_alarms"].number(above=0.0, below=1.0)
    field["every"].whole(1)
    field["generated"].whole(0)
    _check_learned(field["learned"])
    return {one: body[one] for one in settings}, Learned.from_dict(body["learned"])


def _check_learned(learned: _Field) -> None:
    heads = learned["heads"].items(None)
    if not heads:
        learned["heads"].wrong("one or more heads")
    for head in heads:
        for number in head.items(2):
            number.whole(0)
    _check_kind(learned["prompt"], len(heads))
    if learned["generated"].value is not None:
        _check_kind(learned["generated"], len(heads))


def _check_kind(kind: _Field, heads: int) -> None:
    kind["threshold"].number()
    for limit in kind["limits"].items(heads):
        if limit.value is not None:
            limit.number()
    baseline = kind["baseline"]
    if not isinstance(baseline["rule"].value, str) or baseline["rule"].value not in RULES:
        baseline["rule"].wrong(f"one of {list(RULES)}")
    for number in baseline["mean"].items(heads):
        number.number()
    for number in baseline["scale"].items(heads):
        number.number(above=0.0)
    mean, spread = baseline["range"].items(2)
    mean.number()
    spread.number(above=0.0)
    part = baseline["part"]
    if baseline["rule"].value == "highest":
        part.number(above=0.0, below=heads + 1.0)
        return
    for row in part.items(None) if baseline["rule"].value == "distance" else [part]:
        for number in row.items(heads):
            number.number()


@dataclass(frozen=True)
class _Field:
    """A value in a file, and its place there: what it must be is asked of it, and an error names both."""

    file: str
    place: str
    value: Any

    def __getitem__(self, name: str) -> _Field:
        if not isinstance(self.value, dict):
            self.wrong("an object")
        if name not in self.value:
            raise FileFormatError(f"monitor: {self.file} is damaged: it has no {self._inside(name)!r}; learn again")
        return _Field(self.file, self._inside(name), self.value[name])

    def items(self, count: int | None) -> list[_Field]:
        """The entries of a list of this length, or of any."""
        if not isinstance(self.value, list) or (count is not None and len(self.value) != count):
            self.wrong("a list" if count is None else f"a list of {count}")
        return [_Field(self.file, f"{self.place}[{at}]", one) for at, one in enumerate(self.value)]

    def number(self, above: float = -math.inf, below: float = math.inf) -> None:
        """A finite number between two ends."""
        fine = type(self.value) in (int, float) and above < self.value < below
        if not (fine and math.isfinite(self.value)):
            ends = [f"above {above:g}"] * (above > -math.inf) + [f"below {below:g}"] * (below < math.inf)
            self.wrong(" ".join(["a finite number", " and ".join(ends)]).strip())

    def whole(self, least: int) -> None:
        """A whole number of at least so much."""
        if type(self.value) is not int or not least <= self.value < 2**31:
            self.wrong(f"a whole number of at least {least}")

    def wrong(self, allowed: str) -> NoReturn:
        """Say what stands here and what is allowed."""
        given = f"a list of {len(self.value)}" if isinstance(self.value, list) else reprlib.repr(self.value)
        raise FileFormatError(
            f"monitor: {self.file} is damaged: {self.place!r} is {given}; allowed: {allowed}; learn again"
        )

    def _inside(self, name: str) -> str:
        return f"{self.place}.{name}" if self.place else name
