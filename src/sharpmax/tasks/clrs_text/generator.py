"""The text generators of `dm-clrs`, imported without the frameworks that the rest of that package needs.

They compute with numpy alone, but the modules they live in also name jax, tensorflow, chex and absl (for trees of one
level, types, checks of shapes and log lines). Stand-ins satisfy those names while the modules load; afterwards
`sys.modules` is what it was before, so the real packages, `clrs` itself included, import as if nothing had happened.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from sharpmax.errors import MissingExtraError

__all__ = ["RELEASE", "Generator", "generator"]

RELEASE = "dm-clrs==2.0.3"
_PURPOSE = "CLRS-Text"
_REPLACED = {"absl", "chex", "clrs", "jax", "tensorflow"}
_lock = threading.Lock()


@dataclass(frozen=True)
class Generator:
    """The modules of `dm-clrs` that make problems and write them as text."""

    samplers: Any
    probing: Any
    specs: Any
    algorithms: Any
    text: Any


def generator() -> Generator:
    """Import the generators, or say how to install them."""
    with _lock:  # the stand-ins of two threads must not meet
        return _generator()


@functools.cache
def _generator() -> Generator:
    for needed in ("clrs", "attr"):
        found = importlib.util.find_spec(needed)
        if found is None or not found.submodule_search_locations:
            raise MissingExtraError(needed, "clrs", _PURPOSE, alone=RELEASE)
        if needed == "clrs":
            home = Path(next(iter(found.submodule_search_locations)))
    with _imported_with({**_frameworks(), **_packages(home)}):
        names = ("samplers", "probing", "specs", "algorithms", "clrs_text.clrs_utils")
        return Generator(*(importlib.import_module(f"clrs._src.{name}") for name in names))


@contextmanager
def _imported_with(stand_ins: dict[str, ModuleType]) -> Iterator[None]:
    """Have imports find `stand_ins` inside the block, and no trace of them after it."""

    def taken_out() -> dict[str, ModuleType]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in _REPLACED}

    before = taken_out()
    try:
        sys.modules.update(stand_ins)
        yield
    finally:
        taken_out()
        sys.modules.update(before)


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    return module


def _frameworks() -> dict[str, ModuleType]:
    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    def tree_map(function: Any, *trees: Any) -> list[Any]:
        """Map over lists of data points, the only trees there are."""
        return [
            type(points[0])(
                points[0].name, points[0].location, points[0].type_, function(*(point.data for point in points))
            )
            for points in zip(*trees, strict=True)
        ]

    tree_util = _module("jax.tree_util", register_pytree_node_class=lambda kind: kind, tree_map=tree_map)
    logging = _module("absl.logging", log_first_n=nothing, info=nothing, warning=nothing, WARNING=0)
    return {
        "absl": _module("absl", logging=logging),
        "absl.logging": logging,
        "chex": _module("chex", assert_rank=nothing),
        "jax": _module("jax", Array=type("Array", (), {}), numpy=np, tree_util=tree_util),
        "jax.numpy": np,
        "jax.tree_util": tree_util,
        "tensorflow": _module("tensorflow", Tensor=type("Tensor", (), {})),
    }


def _packages(home: Path) -> dict[str, ModuleType]:
    """The packages around the generators, empty: their own `__init__` import the neural models."""
    inside = home / "_src"
    return {
        "clrs": _module("clrs", __path__=[str(home)]),
        "clrs._src": _module("clrs._src", __path__=[str(inside)]),
        "clrs._src.clrs_text": _module("clrs._src.clrs_text", __path__=[str(inside / "clrs_text")]),
    }
