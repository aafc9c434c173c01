"""What a monitor has learned, in a file: a service need not learn again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpmax.errors import FileFormatError, reject
from sharpmax.files import write_text
from sharpmax.models.language import has_weights, weights_fingerprint
from sharpmax.probe.watch.judging import Learned

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
    try:
        body = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as problem:
        raise FileFormatError(f"monitor: {name} cannot be read as JSON ({problem})") from None
    if not isinstance(body, dict) or body.get("kind") != _KIND:
        raise FileFormatError(f"monitor: {name} is not what Monitor.save writes")
    if body.get("schema") != _SCHEMA:
        raise FileFormatError(f"monitor: {name} has schema {body.get('schema')!r}; allowed: {_SCHEMA}")
    if not has_weights(model, body.get("weights")):
        given = f"{name}, learned with the weights {body.get('weights')}"
        allowed = f"a file for the weights of this model, {weights_fingerprint(model)}"
        reject("path", given, allowed, "learn again: sharpmax.monitor")
    try:
        return {one: body[one] for one in settings}, Learned.from_dict(body["learned"])
    except (KeyError, TypeError, ValueError) as problem:
        raise FileFormatError(f"monitor: {name} is damaged ({type(problem).__name__}: {problem})") from None
