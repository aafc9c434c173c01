"""Examples of docstrings as code: they are written as Python's doctest wants them, and Markdown would quote them."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)


class Doctests(griffe.Extension):
    """Puts a fence around every example."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        """Called with every module, class, function and attribute."""
        if obj.docstring is not None and "```" not in obj.docstring.value:
            obj.docstring.value = _EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
