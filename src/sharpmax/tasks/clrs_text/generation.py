"""Generate CLRS-Text problems with dm-clrs, without JAX and TensorFlow, which its other modules need."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sharpmax.errors import MissingExtraError, reject, reject_type
from sharpmax.tasks.clrs_text.sizes import SMALLEST, check_algorithm


@dataclass(frozen=True)
class Example:
    """One row of a dataset; with a trace the answer is `"<states> | <final answer>"`."""

    question: str
    answer: str
    algo_name: str
    length: int

    def line(self) -> str:
        """Return the example as a line of JSONL."""
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"


def final_answer(text: str) -> str:
    """Return the final answer in a text: what follows the last `|`, with single spaces.

    An answer ends at its first blank line. What a model writes after that does not count.

    >>> final_answer("[3 1 2], [1 3 2] |  [1 2 3]\\n\\n")
    '[1 2 3]'
    """
    answer = text.lstrip().partition("\n\n")[0]
    return " ".join(answer.rpartition("|")[2].split())


RELEASE = "dm-clrs==2.0.3"
_REPLACED = {"absl", "chex", "clrs", "jax", "tensorflow"}
_lock = threading.Lock()


def generator() -> SimpleNamespace:
    """Import the generators of `dm-clrs`. Raises MissingExtraError, with the command that installs it."""
    with _lock:  # stubs in `sys.modules` are shared by all threads
        return _generator()


@functools.cache
def _generator() -> SimpleNamespace:
    homes = {}
    for needed in ("clrs", "attr"):
        found = importlib.util.find_spec(needed)
        if found is None or not found.submodule_search_locations:
            raise MissingExtraError(needed, "clrs", "CLRS-Text", alone=RELEASE)
        homes[needed] = Path(next(iter(found.submodule_search_locations)))

    def taken_out() -> dict[str, ModuleType]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in _REPLACED}

    before = taken_out()
    try:
        # Stub the packages around the generators: their own `__init__` import the neural models.
        for name, place in (("", ""), ("._src", "_src"), ("._src.clrs_text", "_src/clrs_text")):
            sys.modules[f"clrs{name}"] = _module(f"clrs{name}", __path__=[str(homes["clrs"] / place)])
        sys.modules.update(_frameworks())
        names = ("samplers", "probing", "specs", "algorithms", "clrs_text.clrs_utils")
        modules = {name.partition(".")[0]: importlib.import_module(f"clrs._src.{name}") for name in names}
    finally:  # remove the stubs
        taken_out()
        sys.modules.update(before)
    return SimpleNamespace(**modules)


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    return module


def _frameworks() -> dict[str, ModuleType]:
    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    def tree_map(function: Any, *trees: Any) -> list[Any]:
        """Map over lists of data points, the only trees in these modules."""
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


Split = Literal["train", "test"]
SPLITS = ("train", "test")

_DECIMALS = 3  # as in the public datasets
_TEST_SHARE = 32  # of the 256 values of a byte
_PATIENCE = 10_000  # consecutive draws without a new problem before giving up
_HULLS = ("graham_scan", "jarvis_march")
_HULL_ATTEMPTS = 1000
_COLLINEAR = 1e-12


def examples(
    algorithm: str, size: int, split: Split, count: int, *, trace: bool = False, seed: int = 0
) -> Iterator[Example]:
    """Yield `count` examples, a prefix of the same stream for any `count`.

    Every algorithm, size, split and seed has its own stream. Training questions may repeat, as in the official dataset.
    Test questions are all different, and fewer than `count` if there are no more. With `trace` the answers to the same
    problems include every state on the way to the final answer.
    """
    check_count("count", count)
    check_algorithm(algorithm)
    if not isinstance(size, int) or isinstance(size, bool):
        reject_type("size", repr(size), f"a whole number from {SMALLEST}")
    if size < SMALLEST:
        reject("size", size, f"a whole number from {SMALLEST}", "smaller problems do not exist for every algorithm")
    if split not in SPLITS:
        reject("split", repr(split), " or ".join(SPLITS))
    return itertools.islice(_stream(generator(), algorithm, size, split, trace, seed), count)


def check_count(name: str, count: int) -> None:
    """Raise ArgumentError unless `count` is a whole number from 1."""
    if not isinstance(count, int) or count < 1:
        reject(name, repr(count), "a whole number from 1")


def _stream(clrs: SimpleNamespace, algorithm: str, size: int, split: str, trace: bool, seed: int) -> Iterator[Example]:
    """Yield examples until there are no new ones."""
    write = _writer(clrs, algorithm, trace)
    draw = _drawer(clrs, algorithm, size, _seed_of(algorithm, size, split, seed))
    drawn: set[bytes] = set()
    in_vain = 0
    while in_vain < _PATIENCE:
        data = draw()
        content = hashlib.blake2b(digest_size=16)
        for part in data:
            content.update(np.asarray(part, dtype=np.float64).tobytes())
        key = content.digest()
        for_tests = key[0] < _TEST_SHARE
        if for_tests != (split == "test") or key in drawn:
            in_vain += 1
            continue
        in_vain = 0
        if for_tests:
            drawn.add(key)
        question, answer = write(data)
        yield Example(question, answer, algorithm, size)


def _seed_of(algorithm: str, size: int, split: str, seed: int) -> int:
    name = f"{algorithm} {size} {split} {seed}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "big")


def _drawer(clrs: SimpleNamespace, algorithm: str, size: int, seed: int) -> Callable[[], list[Any]]:
    """Return a function that draws the input of one problem, with numbers cut to three decimals."""
    sampler, _ = clrs.samplers.build_sampler(
        algorithm, -1, seed=seed, length=size, track_max_steps=False, truncate_decimals=_DECIMALS
    )
    sample = partial(_points, sampler, algorithm, size) if algorithm in _HULLS else partial(sampler._sample_data, size)
    return lambda: sampler._trunc_array(sample())


def _points(sampler: Any, algorithm: str, size: int) -> list[NDArray[np.float64]]:
    """Draw points of a disk of radius 2, no three in a line, as dm-clrs does but testing all triples at once."""
    first, second, third = _triples(size)
    for _ in range(_HULL_ATTEMPTS):
        angles = sampler._random_sequence(length=size, low=0.0, high=2.0 * np.pi)
        radii = 2.0 * np.sqrt(sampler._random_sequence(length=size, low=0.0, high=1.0))
        x = sampler._trunc_array(radii * np.cos(angles) + 0.0)
        y = sampler._trunc_array(radii * np.sin(angles) + 0.0)
        cross = (x[second] - x[first]) * (y[third] - y[first]) - (y[second] - y[first]) * (x[third] - x[first])
        if not (abs(cross) < _COLLINEAR).any():
            return [x, y]
    reject("size", size, f"sizes at which {algorithm} finds points with no three in a line", "take a smaller one")


@cache
def _triples(size: int) -> NDArray[np.intp]:
    triples: NDArray[np.intp] = np.array(list(itertools.combinations(range(size), 3)), dtype=np.intp).T
    return triples


def _writer(clrs: SimpleNamespace, algorithm: str, trace: bool) -> Callable[[list[Any]], tuple[str, str]]:
    """Return a function that turns the input of a problem into its question and answer."""
    solve = getattr(clrs.algorithms, algorithm)
    spec = clrs.specs.SPECS[algorithm]
    wanted = spec if trace else {name: kind for name, kind in spec.items() if kind[0] != clrs.specs.Stage.HINT}

    def write(data: list[Any]) -> tuple[str, str]:
        _, probes = solve(*data)
        inputs, outputs, states = clrs.probing.split_stages(probes, wanted)
        features = clrs.samplers.Features(inputs, states, None)
        written: tuple[str, str] = clrs.clrs_text.format_clrs_example(
            algorithm, clrs.samplers.Feedback(features, outputs), use_hints=trace
        )
        return written

    return write
