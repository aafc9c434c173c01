"""CLRS-Text datasets: kept, resumed, loaded; nothing half-written and nothing lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sharpmax.files import write_bytes
from sharpmax.tasks.clrs_text import datasets
from sharpmax.tasks.clrs_text.datasets import load_dataset, make_dataset
from sharpmax.tasks.clrs_text.generation import Example, examples
from sharpmax.tasks.clrs_text.sizes import train_sizes
from tests.tasks.test_clrs_text import needs_clrs

ROWS = [Example("minimum:\nkey: [1 2]\nmin:\n", "0\n\n", "minimum", 4), Example('é, "q"\n', "1\n\n", "bfs", 5)]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The cells that are generated from now on."""
    cells: list[tuple[str, int]] = []

    def counted(job):
        cells.append(job[1:3])
        return write(job)

    write = datasets._write_cell
    monkeypatch.setattr(datasets, "_write_cell", counted)
    return cells


@needs_clrs
def test_a_training_set_is_the_streams_of_its_cells(tmp_path: Path, drawn) -> None:
    notes: list[str] = []
    path = make_dataset(tmp_path, "train", ["bridges", "minimum"], per_cell=3, seed=5, note=notes.append)
    expected = [
        example
        for name in ("bridges", "minimum")
        for size in train_sizes(name)
        for example in examples(name, size, "train", 3, seed=5)
    ]
    assert load_dataset(path) == expected
    assert notes[0] == "train: bridges, size 4: 3 examples"
    assert len(notes) == len(drawn) == 12
    before = contents(tmp_path)
    assert make_dataset(tmp_path, "train", ["bridges", "minimum"], per_cell=3, seed=5) == path
    assert len(drawn) == 12
    assert contents(tmp_path) == before


@needs_clrs
def test_a_killed_run_goes_on(tmp_path: Path, drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = contents(make_dataset(tmp_path / "whole", "train", ["bridges", "bubble_sort"], per_cell=3))
    done: list[Path] = []

    def killed(path: Path, data: bytes) -> None:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(write_bytes(path, data))

    with monkeypatch.context() as patch:
        patch.setattr(datasets, "write_bytes", killed)
        with pytest.raises(KeyboardInterrupt):
            make_dataset(tmp_path / "killed", "train", ["bridges", "bubble_sort"], per_cell=3)
    assert len(contents(tmp_path / "killed")) == 3
    del drawn[:]
    path = make_dataset(tmp_path / "killed", "train", ["bridges", "bubble_sort"], per_cell=3)
    assert sorted(drawn) == [("bubble_sort", 5), ("bubble_sort", 10)]
    assert contents(path) == whole


@needs_clrs
def test_many_processes_write_the_same(tmp_path: Path) -> None:
    one = make_dataset(tmp_path / "one", "train", ["bridges"], per_cell=2)
    two = make_dataset(tmp_path / "two", "train", ["bridges"], per_cell=2, processes=2)
    assert contents(one) == contents(two)


@needs_clrs
def test_notes_report_fewer_questions_than_requested(tmp_path: Path) -> None:
    notes: list[str] = []
    path = make_dataset(tmp_path, "test", ["naive_string_matcher"], [4, 10], per_cell=60, note=notes.append)
    found = [example.length for example in load_dataset(path)]
    assert found.count(10) == 60
    assert notes[0] == (
        f"test: naive_string_matcher, size 4: {found.count(4)} examples of 60: there are no more problems of this size"
    )
    assert notes[1] == "test: naive_string_matcher, size 10: 60 examples"


def written(file: Path) -> Path:
    lines = [json.dumps({**vars(row), "use_hints": True}) + "\n" for row in ROWS]
    file.write_text("".join(lines) + "\n", encoding="utf-8")
    return file


def test_a_file_is_read(tmp_path: Path) -> None:
    assert load_dataset(written(tmp_path / "a.jsonl")) == load_dataset(str(tmp_path / "a.jsonl")) == ROWS


def test_a_folder_is_read_in_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    written(tmp_path / "data" / "b.jsonl")
    (tmp_path / "data" / "a.csv").write_text("a,b", encoding="utf-8")
    written(tmp_path / "data" / "a.jsonl")
    (tmp_path / "dataset_infos.json").write_text("{}", encoding="utf-8")
    (tmp_path / ".half.jsonl").write_text("{", encoding="utf-8")
    assert load_dataset(tmp_path) == ROWS * 2
