"""Safetensors files with a kind and a schema, and the trained single heads shipped with the package."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sharpmax.errors import FileFormatError, reject
from sharpmax.files import parse_json, write_bytes
from sharpmax.lazy import require
from sharpmax.models.stacked import SingleHeads

SCHEMA = 1
"""The version of the format; a reader refuses a newer one."""

_MARK = "sharpmax"


def save_tensors(path: str | Path, kind: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Path:
    """Write tensors and their description to a file in one step; return its path."""
    safetensors = require("safetensors.torch", "reproduce", "saving weights")
    header = {_MARK: kind, "schema": str(SCHEMA), "about": json.dumps(about, ensure_ascii=False, allow_nan=False)}
    return write_bytes(path, safetensors.save(dict(tensors), metadata=header))


def load_tensors(path: str | Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the description in a file of `save_tensors`; a FileFormatError for any other file."""
    safetensors = require("safetensors", "reproduce", "reading weights")
    shown = repr(str(path))
    if not Path(path).is_file():
        raise FileFormatError(f"weights: no file {shown}; `sharpmax reproduce --train --out DIR` writes one")
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        found = header.get(_MARK, "nothing of sharpmax"), header.get("schema")
        about = parse_json(header.get("about", "{}"))
    except (OSError, ValueError, safetensors.SafetensorError) as problem:
        raise FileFormatError(
            f"weights: {shown} is damaged or not a safetensors file ({problem}); train again or give another file"
        ) from None
    if found != (kind, str(SCHEMA)) or not isinstance(about, dict):
        raise FileFormatError(
            f"weights: {shown} holds {found[0]}, schema {found[1]}; "
            f"allowed: {kind}, schema {SCHEMA}, written by sharpmax"
        )
    return tensors, about


@contextmanager
def must_fit(path: str | Path, what: str, todo: str) -> Iterator[None]:
    """Turn errors inside the block into a FileFormatError: the content of the file does not fit `what`."""
    try:
        yield
    except (LookupError, TypeError, ValueError, RuntimeError) as problem:
        reason = " ".join(str(problem).split())
        raise FileFormatError(
            f"weights: {str(path)!r} does not fit this version of {what} ({reason}); {todo}"
        ) from None


_KIND = "single-heads"


@dataclass(frozen=True)
class Trained:
    """Trained weights of single heads with their seeds and provenance."""

    recipe: str
    steps: int
    seeds: tuple[int, ...]
    tensors: Mapping[str, Tensor]  # stacked over seeds, by the names of `SingleHeads`
    provenance: Mapping[str, Any]

    def save(self, path: str | Path) -> Path:
        """Write everything to one safetensors file."""
        about = {"recipe": self.recipe, "steps": self.steps, "seeds": list(self.seeds), "trained": self.provenance}
        return save_tensors(path, _KIND, self.tensors, about)

    @classmethod
    def load(cls, path: str | Path) -> Trained:
        """Read the file that `save` wrote."""
        tensors, about = load_tensors(path, _KIND)
        with must_fit(path, "the single head", "train again or give another file"):
            trained = cls(about["recipe"], about["steps"], tuple(about["seeds"]), tensors, about["trained"])
            if any(len(tensor) != len(trained.seeds) for tensor in tensors.values()):
                raise ValueError(f"not every tensor holds {len(trained.seeds)} seeds")
            trained.heads()
        return trained

    def first(self, count: int) -> Trained:
        """The first `count` seeds alone."""
        if not 1 <= count <= len(self.seeds):
            reject("seeds", count, f"1 … {len(self.seeds)}, the number of seeds in these weights")
        cut = {name: tensor[:count] for name, tensor in self.tensors.items()}
        return Trained(self.recipe, self.steps, self.seeds[:count], cut, self.provenance)

    def heads(self, which: Sequence[int] | None = None) -> SingleHeads:
        """The model with the weights of all seeds, or of the seeds at the indices `which`."""
        chosen = list(range(len(self.seeds)) if which is None else which)
        model = SingleHeads(len(chosen))
        model.load_state_dict({name: tensor[chosen] for name, tensor in self.tensors.items()})
        return model.requires_grad_(False)


def shipped_path(recipe: str) -> Path:
    """The path of the packaged weights of a recipe."""
    return Path(__file__).parent / "data" / f"max-retrieval-{recipe}.safetensors"
