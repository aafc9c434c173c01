"""The texts that perplexity is measured on: windows of so many tokens, and the model's own answers."""

from __future__ import annotations

from collections.abc import Iterable

from sharpmax.report.tables import sizes

__all__ = ["CHAT", "text_name", "texts_in_order"]

CHAT = "chat"
"""The column of the model's own answers among the lengths of windows."""


def texts_in_order(columns: Iterable[str]) -> list[str]:
    """Lengths in order, and the model's own answers last; each once.

    >>> texts_in_order(["chat", "6144", "2048", "chat"])
    ['2048', '6144', 'chat']
    """
    known = set(columns)
    return [*sizes(dict.fromkeys(known - {CHAT})), *([CHAT] if CHAT in known else [])]


def text_name(column: str) -> str:
    """A column in words.

    >>> text_name("2048"), text_name("chat")
    ('2,048 tokens of text', 'own answers')
    """
    return "own answers" if column == CHAT else f"{int(column):,} tokens of text"
