"""One JSON document on stdout, and everything else beside it; needs neither Typer nor rich."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

_kept: list[TextIO] = []


@contextmanager
def only_answers() -> Iterator[None]:
    """Turn whatever a command and the libraries under it print to stderr, so that stdout is left to `answer`."""
    _kept.append(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _kept.pop()


def answer(document: Any) -> None:
    """Print a document of plain values as JSON, as files hold it."""
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    print(text, file=_kept[-1] if _kept else sys.stdout)
