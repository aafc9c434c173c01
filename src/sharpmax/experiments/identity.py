"""Whether what lies in a folder was begun with the settings of now: only then may a run go on with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sharpmax.errors import ArgumentError

__all__ = ["check_identity", "plain"]

_SHORT = 60


def plain(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they are when they come back from a JSON file."""
    found: dict[str, Any] = json.loads(json.dumps(identity))
    return found


def check_identity(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with `path` where a setting was another `before`, and name that setting."""
    for key, value in now.items():
        if (other := before.get(key)) == value:
            continue
        short = max(len(str(other)), len(str(value))) <= _SHORT
        how = f"with {key} {other} and now got {value}" if short else f"with other {key}"
        raise ArgumentError(f"--resume: {str(path)!r} was begun {how}; use the same {key}, or choose another folder")
