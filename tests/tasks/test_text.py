"""Plain text and chat questions: parts that share nothing, and windows that do not overlap."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from sharpmax.tasks.text import CHAT, PARTS, Part, chat_questions, plain_text, text_from_file, windows

SHARES = {"calibration": 0.5, "validation": 0.25, "test": 0.25}


def paragraphs(text: str) -> set[str]:
    """The paragraphs that are not empty, without their indentation."""
    return {words for paragraph in text.split("\n\n") if (words := " ".join(paragraph.split()))}


def test_parts_have_their_shares() -> None:
    whole = sum(len(plain_text(part)) for part in PARTS)
    for part in PARTS:
        assert len(plain_text(part)) / whole == pytest.approx(SHARES[part], abs=0.05)
        # A token is about four characters: three windows of 6,000 tokens.
        assert len(plain_text(part)) > 3 * 4 * 6000


def test_no_paragraph_is_in_two_parts() -> None:
    """Topics hold whole sections of one another ('compound' has all of 'for' and 'while'), so names are not enough."""
    for one, other in itertools.combinations(PARTS, 2):
        assert not paragraphs(plain_text(one)) & paragraphs(plain_text(other))


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffGrüße, β\nund mehr".encode())
    assert text_from_file(path) == text_from_file(str(path)) == "Grüße, β\nund mehr"


@pytest.mark.parametrize(("total", "length", "most"), [(7, 1, 3), (21, 6, 2), (1000, 7, 1000), (1000, 1, 3)])
def test_windows_are_equal_apart_and_spread(total: int, length: int, most: int) -> None:
    found = windows(list(range(total)), length, most)
    assert len(found) == min(most, total // length)
    for window in found:
        assert window == list(range(window[0], window[0] + length))
    gaps = [after[0] - before[0] for before, after in itertools.pairwise(found)]
    assert all(gap >= length for gap in gaps)
    assert not gaps or max(gaps) - min(gaps) <= 1
    # The last window comes as near to the end as even steps let it.
    assert total - found[-1][0] <= -(-total // len(found))


def test_chat_questions_are_many_varied_and_split() -> None:
    assert len(CHAT) >= 96
    assert len({question.lower() for question in CHAT}) == len(CHAT)
    assert len({question.split()[0] for question in CHAT}) >= 25
    assert max(map(len, CHAT)) > 3 * min(map(len, CHAT))
    parts: dict[Part, list[str]] = {part: chat_questions(part) for part in PARTS}
    assert {part: len(questions) / len(CHAT) for part, questions in parts.items()} == SHARES
    assert sorted(itertools.chain(*parts.values())) == sorted(CHAT)
