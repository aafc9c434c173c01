"""What policies said while they were at work, as sentences of a page."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["merged"]

_SHARE = re.compile(r"(\d+(?:\.\d+)?)% ")
_OF_A_LOG = "; said once for this policy"


def merged(remarks: Sequence[str]) -> list[str]:
    """Each remark once: those that differ in the share they begin with, as several processes say them, become one.

    >>> merged(["3.0% of the rows are flat; said once for this policy", "1.5% of the rows are flat", "It is slow."])
    ['1.5 to 3.0% of the rows are flat', 'It is slow']
    """
    shares: dict[str, list[str]] = {}
    for remark in remarks:
        text = remark.removesuffix(_OF_A_LOG).rstrip(".")
        found = _SHARE.match(text)
        shares.setdefault(text[found.end() :] if found else text, []).extend([found[1]] if found else [])
    return [f"{_span(known)}{rest}" for rest, known in shares.items()]


def _span(shares: Sequence[str]) -> str:
    if not shares:
        return ""
    low, high = min(shares, key=float), max(shares, key=float)
    return f"{low}% " if low == high else f"{low} to {high}% "
