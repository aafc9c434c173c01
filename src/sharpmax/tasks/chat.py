"""Ordinary questions to a chat model, which a change made for long inputs must not affect."""

from __future__ import annotations

from pathlib import Path

from sharpmax.tasks.prompt import Part, check_part, part_of_index

CHAT: tuple[str, ...] = tuple((Path(__file__).parent / "data" / "chat.txt").read_text(encoding="utf-8").splitlines())
"""Facts, explanations, advice, small talk, writing, arithmetic, code and language; the order is part of the split."""


def chat_questions(part: Part) -> list[str]:
    """The questions of one part: half of them for calibration, a quarter each for validation and test."""
    check_part(part)
    return [question for index, question in enumerate(CHAT) if part_of_index(index) == part]
