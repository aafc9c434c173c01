"""What of a training is in its folder already."""

from __future__ import annotations

from pathlib import Path

from sharpmax.files import parse_json

__all__ = ["last_checkpoint"]


def last_checkpoint(folder: Path) -> tuple[Path, int] | None:
    """The last complete state of a training and its step: the file that is written last can be read."""
    found = []
    for path in folder.glob("checkpoint-*"):
        try:
            step = int(parse_json((path / "trainer_state.json").read_bytes())["global_step"])
        except (OSError, KeyError, TypeError, ValueError):
            continue
        found.append((step, path))
    if not found:
        return None
    step, path = max(found)
    return path, step
