"""Numbers as they are written everywhere: in sentences, tables, figures and hover texts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sharpmax.theory import bounds

__all__ = [
    "SUPERSCRIPTS",
    "capital",
    "count",
    "estimate",
    "joined",
    "milliseconds",
    "nats",
    "percent",
    "plural",
    "points",
    "probability",
    "share",
    "whole",
    "whole_from_log10",
]

SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹"


def count(n: float | str) -> str:
    """A number of items.

    >>> count("16384")
    '16,384'
    """
    return f"{round(float(n)):,}"


def whole(n: float | str) -> str:
    """A horizon as a number of items, the largest that fits: never rounded up.

    >>> whole(55.598)
    '55'
    """
    return f"{bounds.whole(float(n)):,}"


def whole_from_log10(exponent: float) -> str:
    """A horizon that may be enormous, from its logarithm to base 10; never rounded up.

    >>> whole_from_log10(3.4745), whole_from_log10(23.7)
    ('2,981', '10²³')
    """
    if exponent < 7.0:
        return whole(10.0**exponent)
    return "10" + "".join(SUPERSCRIPTS[int(digit)] for digit in str(math.floor(exponent)))


def plural(n: int, noun: str) -> str:
    """A number with its noun.

    >>> plural(1, "seed"), plural(10, "seed")
    ('1 seed', '10 seeds')
    """
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def share(value: float) -> str:
    """A percentage without its sign; small ones keep a digit that says something.

    >>> share(98.88), share(0.4321), share(0.0123)
    ('98.9', '0.43', '0.012')
    """
    if value >= 1.0 or value == 0.0:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def percent(value: float) -> str:
    """A percentage.

    >>> percent(53.81)
    '53.8%'
    """
    return share(value) + "%"


def points(value: float, places: int = 1) -> str:
    """A difference of percentages, always signed, with a real minus.

    >>> points(15.32), points(-0.4), points(0.01), points(0.01, 2)
    ('+15.3', '−0.4', '0.0', '+0.01')
    """
    text = f"{value:+.{places}f}"
    return text.replace("-", "−") if float(text) else text[1:]


def milliseconds(value: float) -> str:
    """A time, without its unit.

    >>> milliseconds(4821.3), milliseconds(48.21), milliseconds(4.821)
    ('4,821', '48.2', '4.82')
    """
    return count(value) if value >= 100.0 else f"{value:.1f}" if value >= 10.0 else f"{value:.2f}"


def nats(value: float) -> str:
    """An entropy or a spread of logits, without its unit.

    >>> nats(5.9442), nats(232.52)
    ('5.94', '233')
    """
    return (f"{value:.0f}" if abs(value) >= 100.0 else f"{value:.2f}").replace("-", "−")


def estimate(mean: str, error: float | None) -> str:
    """A mean with its standard error, where there is one, to as many places.

    >>> estimate("49.9", 0.8123), estimate("99.9", 0.002), estimate("49.9", None)
    ('49.9 ± 0.8', '99.9 ± 0.002', '49.9')
    """
    if error is None:
        return mean
    places = len(mean.partition(".")[2])
    text = f"{error:.{places}f}"
    return f"{mean} ± {text if float(text) or not error else f'{error:.1g}'}"


def probability(p: float) -> str:
    """A p value.

    >>> probability(0.25), probability(0.0123), probability(1e-9)
    ('p = 0.25', 'p = 0.012', 'p < 0.001')
    """
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def joined(parts: Sequence[str]) -> str:
    """Parts of a sentence with commas and an "and".

    >>> joined(["a", "b", "c"])
    'a, b and c'
    """
    return ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else "".join(parts)


def capital(text: str) -> str:
    """The text with a capital in front, the rest as it is."""
    return text[:1].upper() + text[1:]
