"""The section that a results file belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sharpmax.errors import FileFormatError
from sharpmax.report.section import Story
from sharpmax.report.sections.calibrate import STORY as CALIBRATE
from sharpmax.report.sections.clrs import STORY as CLRS
from sharpmax.report.sections.compare import STORY as COMPARE
from sharpmax.report.sections.evaluate import STORY as EVALUATE
from sharpmax.report.sections.probe import STORY as PROBE
from sharpmax.report.sections.reproduce import STORY as REPRODUCE
from sharpmax.report.tables import RUNS, Tables

STORIES = (CLRS, COMPARE, EVALUATE, CALIBRATE, PROBE, REPRODUCE)
"""Every story, the more particular first."""


def story_of(tables: Tables) -> Story | None:
    """The story of these tables, or None if nobody can tell it."""
    return next((story for story in STORIES if story.tells(tables)), None)


def no_story(tables: Tables, what: str) -> FileFormatError:
    """The error for tables that nothing can be made of."""
    known = ", ".join(sorted(story.name for story in STORIES))
    return FileFormatError(f"results: nothing to {what} in tables {sorted(tables)}; allowed: those of sharpmax {known}")


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
