"""The algorithms of CLRS-Text, the sizes they are trained at and those they are tested at."""

from __future__ import annotations

import math

from sharpmax.errors import reject

_SIZES = (4, 5, 10, 11, 12, 15, 19, 23, 28, 31)

# The largest official training size of each algorithm, which depends on how much text a problem takes.
_UP_TO = {
    5: "bridges",
    10: "bubble_sort floyd_warshall heapsort lcs_length matrix_chain_order mst_kruskal optimal_bst quicksort",
    12: "jarvis_march",
    15: "strongly_connected_components",
    19: "articulation_points dag_shortest_paths",
    23: "dfs topological_sort",
    28: "dijkstra mst_prim",
    31: """
        activity_selector bellman_ford bfs binary_search find_maximum_subarray_kadane graham_scan insertion_sort
        kmp_matcher minimum naive_string_matcher quickselect segments_intersect task_scheduling
    """,
}
_LARGEST = {name: largest for largest, names in _UP_TO.items() for name in names.split()}

ALGORITHMS = tuple(sorted(_LARGEST))
"""The thirty algorithms by name, sorted."""

SMALLEST = _SIZES[0]
"""Some algorithms have no smaller problems."""

# The text of a matrix grows with the square of the size, so tests of these go less far beyond training.
_WITH_MATRIX = {
    *("articulation_points", "bellman_ford", "bfs", "bridges", "dag_shortest_paths", "dfs", "dijkstra"),
    *("floyd_warshall", "lcs_length", "matrix_chain_order", "mst_kruskal", "mst_prim", "optimal_bst"),
    *("strongly_connected_components", "topological_sort"),
}
_BEYOND = (1.25, 1.5, 2.0)
_BEYOND_WITH_MATRIX = (1.15, 1.3, 1.5)


def train_sizes(algorithm: str) -> tuple[int, ...]:
    """Return the sizes of `algorithm` in the official training set.

    >>> train_sizes("jarvis_march")
    (4, 5, 10, 11, 12)
    """
    check_algorithm(algorithm)
    return tuple(size for size in _SIZES if size <= _LARGEST[algorithm])


def test_sizes(algorithm: str) -> tuple[int, ...]:
    """Return the training sizes of `algorithm` and three larger ones.

    They reach twice the largest training size, or 1.5 times where the text holds a matrix. `segments_intersect`, which
    has two segments at every size, has one size.

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


test_sizes.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it as a test


def check_algorithm(algorithm: str) -> None:
    """Raise ArgumentError for a name that is not one of `ALGORITHMS`."""
    if algorithm not in _LARGEST:
        reject("algorithm", repr(algorithm), ", ".join(ALGORITHMS))
