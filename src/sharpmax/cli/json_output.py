"""JSON output: one document on stdout and everything else on stderr; needs neither Typer nor rich."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

_stdout: list[TextIO] = []


@contextmanager
def only_answers() -> Iterator[None]:
    """Redirect whatever commands and libraries print to stderr, so that stdout holds what `answer` prints."""
    _stdout.append(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _stdout.pop()


def answer(document: Any) -> None:
    """Print a document of plain values as JSON, as files hold it."""
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    print(text, file=_stdout[-1] if _stdout else sys.stdout)
