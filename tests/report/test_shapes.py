"""Whose fault it is when results cannot be told: a damaged file is named, and our own mistakes are not blamed on it."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sharpmax.cli import main
from sharpmax.errors import FileFormatError
from sharpmax.report.figures import made
from sharpmax.report.page import write_page
from sharpmax.report.registry import STORIES, story_of
from sharpmax.report.schema import SHAPES, damage
from sharpmax.report.tables import readable
from tests.report import calibrate_tables, clrs_tables, compare_tables, evaluate_tables, probe_tables, reproduce_tables

RESULTS = sorted((Path(__file__).parents[2] / "results").glob("*/results.json"))
MADE_UP: dict[str, Callable[[], dict[str, Any]]] = {
    "calibrate": calibrate_tables.make_tables,
    "clrs": lambda: clrs_tables.make_tables(("minimum", "bfs")),
    "compare": lambda: compare_tables.make_tables(methods=("softmax", "ssmax", "hard")),
    "capacity": compare_tables.make_capacity,
    "evaluate": lambda: evaluate_tables.make_tables(("kv", "houses")),
    "probe": probe_tables.tiny_tables,
    "reproduce": reproduce_tables.make_tables,
}


def good(name: str) -> Any:
    return json.loads(json.dumps(MADE_UP[name]()))


def told(tables: Any) -> None:
    """Everything a page says of tables, before it is laid out."""
    story = story_of(tables)
    assert story is not None
    with readable("the report", tables):
        for figure in story.figures(tables):
            made(figure, tables)
        for part in (story.summary, story.parts, story.method, story.origins):
            part(tables)


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inside:
        yield (*way, name)
        yield from places(one, (*way, name))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.parent.name)
def test_committed_results_are_what_commands_write(path: Path) -> None:
    tables = json.loads(path.read_text(encoding="utf-8"))["tables"]
    story = story_of(tables)
    assert story is None or damage(story.name, tables) is None


@pytest.mark.parametrize("name", MADE_UP)
def test_a_mistake_of_ours_is_a_traceback(name: str) -> None:
    """Whatever it looks like, and although the tables name the very key."""
    tables = good(name)
    told(tables)
    for problem in (KeyError("accuracy"), KeyError("softmax"), TypeError("x"), ValueError("x"), IndexError("x")):
        with pytest.raises(type(problem)), readable("the report", tables):
            raise problem
    with pytest.raises(ZeroDivisionError), readable("the report", tables):
        1 / 0  # noqa: B018


def test_a_mistake_in_a_story_reaches_the_user_as_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sharpmax.report.sections import evaluate_charts as facts

    provenance = dict.fromkeys(("commit", "versions", "hardware", "seed", "date"))
    body = {"schema": 1, "command": "sharpmax evaluate x", "provenance": provenance, "tables": good("evaluate")}
    (tmp_path / "results.json").write_text(json.dumps(body), encoding="utf-8")
    monkeypatch.setattr(facts, "arms", lambda tables: dict[str, Any]()["no such arm"])
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "drawn")]) == 1
    said = capsys.readouterr().err
    assert "KeyError: 'no such arm'" in said
    assert "damaged" not in said
    assert "a mistake of sharpmax, not of yours" in said


@pytest.mark.parametrize("name", MADE_UP)
def test_damage_anywhere_is_blamed_on_the_file(name: str) -> None:
    """A value that is gone or of another kind: it is told all the same, or the file is named, never our code."""
    whole = good(name)
    by_depth: dict[int, list[Any]] = {}
    for way in places(whole):
        by_depth.setdefault(len(way), []).append(way)
    rng = random.Random(2)
    messages = []
    for _ in range(150):
        tables = copy.deepcopy(whole)
        *way, last = rng.choice(by_depth[rng.choice(sorted(by_depth))])
        inside = tables
        for word in way:
            inside = inside[word]
        other = rng.choice(["gone", 3, "x", None, [], {}, [1.0], {"softmax": 3}])
        if other == "gone":
            del inside[last]
        else:
            inside[last] = other
        if story_of(tables) is None:
            continue
        try:
            told(tables)
        except FileFormatError as problem:
            messages.append(str(problem))
    assert len(messages) > 20
    assert not any("\n" in message for message in messages)


def test_the_place_is_named(tmp_path: Path) -> None:
    tables = good("compare")
    tables["accuracy"]["ssmax"]["64"]["mean"] = "much"
    with pytest.raises(FileFormatError, match=r"damaged \(accuracy/ssmax/64/mean is 'much' and not a finite number\)"):
        write_page("sharpmax compare", {}, tables, tmp_path)


def test_every_story_has_its_shapes() -> None:
    assert {story.name for story in STORIES} == set(SHAPES)
