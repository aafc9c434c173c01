"""What tests of the command line read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def is_one_error_line(text: str) -> bool:
    return text.startswith("sharpmax: error: ") and text.count("\n") == 1 and text.endswith("\n")


def saved(folder: Path, name: str = "results.json") -> Any:
    """The results of a run."""
    return json.loads((folder / name).read_text(encoding="utf-8"))


def names_no_folder(run: Path, *folders: Path) -> bool:
    """Whether no file of a run has the path of any of these folders in it."""
    texts = [file.read_bytes() for file in run.iterdir() if file.is_file()]
    return not any(str(folder).encode() in text for folder in folders for text in texts)
