"""The algorithms of CLRS-Text, the sizes they are trained at and those they are tested at."""

from __future__ import annotations

import math

from sharpmax.errors import reject, reject_type

# Of the official training sizes, each algorithm has those up to one of its own, by how much text they cost.
_SIZES = (4, 5, 10, 11, 12, 15, 19, 23, 28, 31)
_LARGEST = {
    "activity_selector": 31,
    "articulation_points": 19,
    "bellman_ford": 31,
    "bfs": 31,
    "binary_search": 31,
    "bridges": 5,
    "bubble_sort": 10,
    "dag_shortest_paths": 19,
    "dfs": 23,
    "dijkstra": 28,
    "find_maximum_subarray_kadane": 31,
    "floyd_warshall": 10,
    "graham_scan": 31,
    "heapsort": 10,
    "insertion_sort": 31,
    "jarvis_march": 12,
    "kmp_matcher": 31,
    "lcs_length": 10,
    "matrix_chain_order": 10,
    "minimum": 31,
    "mst_kruskal": 10,
    "mst_prim": 28,
    "naive_string_matcher": 31,
    "optimal_bst": 10,
    "quickselect": 31,
    "quicksort": 10,
    "segments_intersect": 31,
    "strongly_connected_components": 15,
    "task_scheduling": 31,
    "topological_sort": 23,
}

ALGORITHMS = tuple(_LARGEST)
"""The thirty algorithms by name, sorted."""

SMALLEST = _SIZES[0]

# The text of a matrix grows with the square of the size, so these go less far beyond training.
_WITH_MATRIX = {
    *("articulation_points", "bellman_ford", "bfs", "bridges", "dag_shortest_paths", "dfs", "dijkstra"),
    *("floyd_warshall", "lcs_length", "matrix_chain_order", "mst_kruskal", "mst_prim", "optimal_bst"),
    *("strongly_connected_components", "topological_sort"),
}
_BEYOND = (1.25, 1.5, 2.0)
_BEYOND_WITH_MATRIX = (1.15, 1.3, 1.5)


def train_sizes(algorithm: str) -> tuple[int, ...]:
    """Return the sizes at which the official training set has `algorithm`.

    >>> train_sizes("jarvis_march")
    (4, 5, 10, 11, 12)
    """
    check_algorithm(algorithm)
    return tuple(size for size in _SIZES if size <= _LARGEST[algorithm])


def test_sizes(algorithm: str) -> tuple[int, ...]:
    """Return the training sizes of `algorithm` and three beyond, up to twice the largest (1.5 times where the text
    holds a matrix). `segments_intersect` has two segments at every size, so one stands for all.

    >>> test_sizes("minimum")
    (4, 5, 10, 11, 12, 15, 19, 23, 28, 31, 39, 47, 62)
    >>> test_sizes("segments_intersect")
    (4,)
    """
    trained = train_sizes(algorithm)
    if algorithm == "segments_intersect":
        return trained[:1]
    factors = _BEYOND_WITH_MATRIX if algorithm in _WITH_MATRIX else _BEYOND
    return trained + tuple(math.ceil(factor * trained[-1]) for factor in factors)


test_sizes.__test__ = False  # type: ignore[attr-defined]  # pytest takes the name of an imported function for a test's


def check_algorithm(algorithm: str) -> None:
    """Refuse a name that is not one of the thirty."""
    if algorithm not in _LARGEST:
        reject("algorithm", repr(algorithm), ", ".join(ALGORITHMS))


def check_size(size: int, name: str = "size") -> None:
    """Refuse a size at which some algorithm has no problems."""
    if not isinstance(size, int) or isinstance(size, bool):
        reject_type(name, repr(size), f"a whole number from {SMALLEST}")
    if size < SMALLEST:
        reject(name, size, f"a whole number from {SMALLEST}", "smaller problems do not exist for every algorithm")
