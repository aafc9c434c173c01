"""What tests of the command line read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def is_one_error_line(text: str) -> bool:
    return text.startswith("sharpmax: error: ") and text.count("\n") == 1 and text.endswith("\n")


def saved(folder: Path) -> Any:
    """The results of a run."""
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))
