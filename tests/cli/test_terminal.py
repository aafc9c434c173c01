"""Progress and tables, at a terminal and in a pipe."""

from __future__ import annotations

import re

import pytest

from sharpmax.cli import terminal


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds since the start, as the commands see them; the test moves them."""
    now = [100.0]
    monkeypatch.setattr(terminal, "monotonic", lambda: now[0])
    return now


def as_terminal(monkeypatch: pytest.MonkeyPatch, columns: int, **more: str) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": str(columns), **more}.items():
        monkeypatch.setenv(name, value)


def test_progress_is_plain_lines_at_most_every_ten_seconds(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with terminal.progress() as show:
        show("loading smollm2")
        show("loading smollm2")
        for step in range(1, 31):
            show("learning", step, 30, f"loss {1 / step:.2f}")
            clock[0] += 1
        show("checking", 1, 0, "")
    with terminal.bar("evaluating", 4) as advance:
        advance(1, "kv")
        clock[0] += 10
        advance(2, "kv")
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.splitlines() == [
        "loading smollm2",
        "learning: 1 of 30 (3%) loss 1.00",
        "learning: 11 of 30 (37%) loss 0.09",
        "learning: 21 of 30 (70%) loss 0.05",
        "checking",
        "evaluating: 1 of 4 (25%) kv",
        "evaluating: 3 of 4 (75%) kv",
    ]


def test_progress_is_a_bar_at_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    as_terminal(monkeypatch, 100)
    with terminal.progress() as show:
        show("learning rows", 3, 9, "loss 1.234")
        show("measuring rows")
    written = capsys.readouterr()
    assert written.out == ""
    assert "measuring rows" in written.err


def test_a_wide_table_becomes_several_that_fit_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = ["algorithm", *(f"n = {2**power}" for power in range(4, 16))]
    rows = [[name, *(f"{power}.5" for power in range(12))] for name in ("minimum", "bubble_sort")]
    terminal.print_table("Accuracy (%)", columns, rows)
    piped = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in piped if "bubble_sort" in line] == [rows[1]]
    as_terminal(monkeypatch, 80, NO_COLOR="1")
    terminal.print_table("Accuracy (%)", columns, rows)
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80
    parts = [line.split() for line in lines if "bubble_sort" in line]
    assert [part[0] for part in parts] == ["bubble_sort"] * 2
    assert [cell for part in parts for cell in part[1:]] == rows[1][1:]
