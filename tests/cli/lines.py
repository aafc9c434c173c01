"""What a user's mistake looks like at the terminal."""

from __future__ import annotations


def is_one_error_line(text: str) -> bool:
    return text.startswith("sharpmax: error: ") and text.count("\n") == 1 and text.endswith("\n")
