"""What both parts of `sharpmax clrs` make of their options."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sharpmax.errors import reject

if TYPE_CHECKING:
    import torch

__all__ = ["data_folder", "dtype_named", "shown"]

_DTYPES = ("auto", "bfloat16", "float32")


def data_folder(given: Path | None) -> Path:
    """Where examples are made: what arms share, so that it is not in the folder of one of them."""
    from sharpmax.models.smollm2 import cache_folder

    return cache_folder() / "clrs-text" if given is None else given


def dtype_named(name: str, device: torch.device) -> str:
    """The dtype a user asked for; "auto" is bfloat16 on a GPU."""
    if name not in _DTYPES:
        reject("--dtype", repr(name), ", ".join(_DTYPES))
    if name == "auto":
        return "bfloat16" if device.type == "cuda" else "float32"
    return name


def shown(word: str) -> str:
    """A model or a folder as results name it, without anything of this machine."""
    return Path(word).resolve().name if Path(word).exists() else word
