"""Which story a results file tells: its tables decide."""

from __future__ import annotations

from sharpmax.errors import FileFormatError
from sharpmax.report.calibrate.story import STORY as CALIBRATE
from sharpmax.report.clrs.story import STORY as CLRS
from sharpmax.report.compare.story import STORY as COMPARE
from sharpmax.report.evaluate.story import STORY as EVALUATE
from sharpmax.report.probe.story import STORY as PROBE
from sharpmax.report.reproduce.story import STORY as REPRODUCE
from sharpmax.report.story import Story
from sharpmax.report.tables import Tables

__all__ = ["STORIES", "no_story", "story_of"]

STORIES = (CLRS, COMPARE, EVALUATE, CALIBRATE, PROBE, REPRODUCE)
"""Every story, the more particular first."""


def story_of(tables: Tables) -> Story | None:
    """The story of these tables, or None if nobody can tell it."""
    return next((story for story in STORIES if story.tells(tables)), None)


def no_story(tables: Tables, what: str) -> FileFormatError:
    """The error for tables that nothing can be made of."""
    known = ", ".join(sorted(story.name for story in STORIES))
    return FileFormatError(f"results: nothing to {what} in tables {sorted(tables)}; allowed: those of sharpmax {known}")
