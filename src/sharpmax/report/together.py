"""Two saved results as the tables of one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sharpmax.errors import FileFormatError
from sharpmax.report.stories import no_story, story_of
from sharpmax.report.tables import RUNS, Tables

__all__ = ["together"]


def together(saved: Sequence[tuple[str, Mapping[str, Any]]]) -> Tables:
    """The tables of results, each given with its name, that are told together; they must be of one command."""
    stories = [story_of(results["tables"]) for _, results in saved]
    for story, (_, results) in zip(stories, saved, strict=True):
        if story is None:
            raise no_story(results["tables"], "compare")
    told = [story.name for story in stories if story]
    if len(set(told)) > 1 or not all(story and story.compares for story in stories):
        given = " and ".join(f"{name!r} ({story})" for (name, _), story in zip(saved, told, strict=True))
        raise FileFormatError(f"results: {given} cannot be compared; allowed: two results of sharpmax probe")
    return {RUNS: [{"name": name, **results} for name, results in saved]}
