"""What the arms, signals and other lines of `sharpmax reproduce` look like."""

from __future__ import annotations

from collections.abc import Iterable

from sharpmax.report.looks import (
    BLACK,
    BLUE,
    CIRCLE,
    DIAMOND,
    DOWN,
    GREEN,
    ORANGE,
    PURPLE,
    SOFT,
    SQUARE,
    STAR,
    UP,
    VERMILLION,
    Look,
)

__all__ = ["BEST", "BOUND", "LARGE_N", "PUBLISHED", "in_order", "look", "signal"]

# Lines that meet stay visible: what tends to lie underneath is wide, what lies on top of it is thin.
_ARMS = {
    "softmax": Look(
        "plain softmax",
        BLACK,
        CIRCLE,
        "plain softmax",
        "The model as it was trained, with β = 1 everywhere.",
        width=1.5,
        size=4.5,
        layer=4.0,
    ),
    "paper": Look(
        "paper's polynomial",
        VERMILLION,
        SQUARE,
        "the paper's polynomial",
        "β is a polynomial of the row's entropy, with the coefficients the paper prints.",
        size=6.0,
    ),
    "refit": Look(
        "refitted polynomial",
        PURPLE,
        DOWN,
        "the refitted polynomial",
        "A polynomial of the same kind, with coefficients fitted to inputs that these very models rank wrongly.",
    ),
    "log-length": Look(
        "log-length",
        BLUE,
        UP,
        "the log-length law",
        "β grows with ln n, the logarithm of the number of items.",
    ),
    "entropy-target": Look(
        "entropy target",
        GREEN,
        DIAMOND,
        "the entropy target",
        "β is solved for each row so that its entropy stays where it was during training.",
        layer=3.0,
    ),
    "hard": Look(
        "hard argmax",
        ORANGE,
        STAR,
        "hard argmax",
        "All weight on the item with the largest logit, the limit β → ∞; other arms can pass it slightly.",
        width=4.5,
        size=11.0,
        layer=1.0,
    ),
}

_SIGNALS = {
    "confidence": Look(
        "classifier's confidence", BLUE, CIRCLE, "the classifier's confidence", "Largest class probability."
    ),
    "entropy": Look(
        "attention entropy", VERMILLION, SQUARE, "the entropy of attention", "Entropy of the attention row."
    ),
    "both": Look(
        "both together",
        GREEN,
        DIAMOND,
        "both together",
        "Logistic regression on confidence and entropy, fitted on other items.",
    ),
}

PUBLISHED = Look("published in the paper", SOFT, CIRCLE)
BOUND = Look("theory's bound for plain softmax", SOFT, width=1.3, layer=1.5)
LARGE_N = Look("theory's limit for large n", SOFT, width=1.6, layer=1.5)
BEST = Look("best β of a wrongly ranked input", SOFT, CIRCLE, size=3.0, layer=1.0)


def look(arm: str) -> Look:
    """How an arm looks; one nobody has heard of is grey and goes by its own name."""
    return _ARMS.get(arm) or Look(arm, SOFT, CIRCLE, arm)


def signal(name: str) -> Look:
    """How a signal of failure detection looks."""
    return _SIGNALS.get(name) or Look(name, SOFT, CIRCLE, name)


def in_order(names: Iterable[str]) -> list[str]:
    """Arms or signals in the order in which they are always shown; unknown ones last, by name.

    >>> in_order(["mine", "hard", "softmax"])
    ['softmax', 'hard', 'mine']
    """
    known = [*_ARMS, *_SIGNALS]
    return sorted(names, key=lambda name: (known.index(name) if name in known else len(known), name))
