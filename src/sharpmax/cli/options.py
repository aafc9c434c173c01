"""What several commands read from their options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sharpmax.errors import reject

if TYPE_CHECKING:
    import torch

__all__ = ["device_named", "sizes_from"]

_KINDS = ("auto", "cpu", "cuda", "mps")


def sizes_from(text: str) -> list[int]:
    """Numbers of items, two or more each, from "16,32,64"; ascending and each once.

    >>> sizes_from("64, 16,16")
    [16, 64]
    """
    words = [word.strip().replace("_", "") for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 2 <= int(word) <= 2**24 for word in words):
        reject("--sizes", repr(text), "whole numbers from 2 to 16777216 with commas between them, as 16,32,64")
    return sorted({int(word) for word in words})


def device_named(name: str) -> torch.device:
    """The device a user asked for; "auto" is a GPU where there is one."""
    import torch

    if name not in _KINDS:
        reject("--device", repr(name), ", ".join(_KINDS))
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device("cuda" if there["cuda"] else "cpu")
    if not there[name]:
        reject("--device", repr(name), "a device of this machine", "use --device cpu")
    return torch.device(name)
