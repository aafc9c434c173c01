"""Which normalisers are the package's own, whatever else has been defined in this process."""

from __future__ import annotations

import sys

from sharpmax.normalisers.base import Normaliser, normalisers


def shipped() -> dict[str, type[Normaliser]]:
    """By name. An example in a docstring is of a module of the package by its name, but not in it."""
    named = {name: kind for name, kind in normalisers().items() if kind.__module__.startswith("sharpmax.normalisers.")}
    return {name: kind for name, kind in named.items() if hasattr(sys.modules[kind.__module__], kind.__name__)}
