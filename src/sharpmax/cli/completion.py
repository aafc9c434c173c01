"""What the shell offers at Tab; names are looked up only then."""

from __future__ import annotations

from collections.abc import Callable, Iterable

__all__ = ["algorithms", "kinds", "methods", "policies", "sized_tasks", "tasks", "words"]

Offer = Callable[[str], list[str]]
"""From the beginning of a word to the words that it may become."""


def words(*known: str) -> Offer:
    """Offer these."""

    def offer(incomplete: str) -> list[str]:
        return _beginning(known, incomplete)

    return offer


def policies(incomplete: str) -> list[str]:
    """Offer the policies that come with the package."""
    from sharpmax.policies.store import NAMED

    return _beginning(NAMED, incomplete)


def kinds(incomplete: str) -> list[str]:
    """Offer kinds of policies that can be learned, after a comma the next one."""
    from sharpmax.calibrate.kinds import KINDS

    return _beginning(KINDS, incomplete)


def tasks(incomplete: str) -> list[str]:
    """Offer tasks for language models, after a comma the next one."""
    from sharpmax.tasks.registry import TASKS

    return _beginning(TASKS, incomplete)


def sized_tasks(incomplete: str) -> list[str]:
    """Offer tasks for small models."""
    from sharpmax.tasks.sized_registry import SIZED_TASKS

    return _beginning(SIZED_TASKS, incomplete)


def methods(incomplete: str) -> list[str]:
    """Offer what can be compared."""
    from sharpmax.experiments.compare.methods import LEAGUE

    return _beginning(LEAGUE, incomplete)


def algorithms(incomplete: str) -> list[str]:
    """Offer the algorithms of CLRS-Text, after a comma the next one."""
    from sharpmax.tasks.clrs_text import ALGORITHMS

    return _beginning(ALGORITHMS, incomplete)


def _beginning(known: Iterable[str], incomplete: str) -> list[str]:
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{word}" for word in known if word.startswith(last)]
