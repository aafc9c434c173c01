"""Problems drawn one after another, each stream with a seed of its own."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sharpmax.errors import reject
from sharpmax.tasks.clrs_text.example import Example
from sharpmax.tasks.clrs_text.generator import Generator, generator
from sharpmax.tasks.clrs_text.sizes import check_algorithm, check_size

__all__ = ["SPLITS", "Split", "check_count", "examples", "stream"]

Split = Literal["train", "test"]
SPLITS = ("train", "test")

_DECIMALS = 3  # as the generator for the public datasets
_TEST_SHARE = 32  # of the 256 values of a byte
_PATIENCE = 10_000  # draws in a row without a new problem, after which there are taken to be none
_HULLS = ("graham_scan", "jarvis_march")
_HULL_ATTEMPTS = 1000
_COLLINEAR = 1e-12


def examples(
    algorithm: str, size: int, split: Split, count: int, *, trace: bool = False, seed: int = 0
) -> Iterator[Example]:
    """Yield `count` examples, the same for the same arguments; a longer run begins with the shorter one.

    Every algorithm, size and split has a stream of its own. Training may draw a question twice, as the official set
    does; test questions are all different, and fewer than `count` where there are no more. With `trace` the same
    problems are asked for every state on the way to the answer.
    """
    check_count("count", count)
    return itertools.islice(stream(algorithm, size, split, trace=trace, seed=seed), count)


def stream(algorithm: str, size: int, split: Split, *, trace: bool = False, seed: int = 0) -> Iterator[Example]:
    """Yield the examples of `examples` for as long as there are any."""
    check_algorithm(algorithm)
    check_size(size)
    if split not in SPLITS:
        reject("split", repr(split), " or ".join(SPLITS))
    return _examples(generator(), algorithm, size, split, trace, seed)


def check_count(name: str, count: int) -> None:
    """Refuse to draw fewer than one example."""
    if not isinstance(count, int) or count < 1:
        reject(name, repr(count), "a whole number from 1")


def _examples(clrs: Generator, algorithm: str, size: int, split: str, trace: bool, seed: int) -> Iterator[Example]:
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


def _drawer(clrs: Generator, algorithm: str, size: int, seed: int) -> Callable[[], list[Any]]:
    """Return what draws the input of one problem, the numbers cut to three decimals."""
    sampler, _ = clrs.samplers.build_sampler(
        algorithm, -1, seed=seed, length=size, track_max_steps=False, truncate_decimals=_DECIMALS
    )
    sample = partial(_points, sampler, algorithm, size) if algorithm in _HULLS else partial(sampler._sample_data, size)
    return lambda: sampler._trunc_array(sample())


def _points(sampler: Any, algorithm: str, size: int) -> list[NDArray[np.float64]]:
    """Points of a disk of radius 2, no three in a line: the draws of dm-clrs, all triples tested at once."""
    first, second, third = _triples(size)
    for _ in range(_HULL_ATTEMPTS):
        angles = sampler._random_sequence(length=size, low=0.0, high=2.0 * np.pi)
        radii = 2.0 * np.sqrt(sampler._random_sequence(length=size, low=0.0, high=1.0))
        x = sampler._trunc_array(radii * np.cos(angles) + 0.0)
        y = sampler._trunc_array(radii * np.sin(angles) + 0.0)
        cross = (x[second] - x[first]) * (y[third] - y[first]) - (y[second] - y[first]) * (x[third] - x[first])
        if not (abs(cross) < _COLLINEAR).any():
            return [x, y]
    reject(
        "size", size, f"sizes at which {algorithm} finds points of which no three lie in a line", "take a smaller one"
    )


@cache
def _triples(size: int) -> NDArray[np.intp]:
    triples: NDArray[np.intp] = np.array(list(itertools.combinations(range(size), 3)), dtype=np.intp).T
    return triples


def _writer(clrs: Generator, algorithm: str, trace: bool) -> Callable[[list[Any]], tuple[str, str]]:
    """Return what solves the problem of an input and writes both down."""
    solve = getattr(clrs.algorithms, algorithm)
    spec = clrs.specs.SPECS[algorithm]
    wanted = spec if trace else {name: kind for name, kind in spec.items() if kind[0] != clrs.specs.Stage.HINT}

    def write(data: list[Any]) -> tuple[str, str]:
        _, probes = solve(*data)
        inputs, outputs, states = clrs.probing.split_stages(probes, wanted)
        features = clrs.samplers.Features(inputs, states, None)
        written: tuple[str, str] = clrs.text.format_clrs_example(
            algorithm, clrs.samplers.Feedback(features, outputs), use_hints=trace
        )
        return written

    return write
