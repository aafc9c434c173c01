"""What several commands make of the words given to them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpmax.errors import ArgumentError, reject
from sharpmax.files import parse_json

if TYPE_CHECKING:
    import torch

    from sharpmax.policies import Policy

__all__ = [
    "DEVICES",
    "DTYPES",
    "NamedPolicy",
    "data_folder",
    "device_named",
    "dtype_named",
    "files_given",
    "policies_named",
    "policy_named",
    "share_from",
    "sizes_from",
    "word_shown",
]

DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def sizes_from(text: str, *, least: int = 2, option: str = "--sizes") -> list[int]:
    """Numbers of items from "16,32,64", or doubling from "8..64"; ascending and each once.

    >>> sizes_from("64, 16,16"), sizes_from("8..100,512")
    ([16, 64], [8, 16, 32, 64, 512])
    """
    found: set[int] = set()
    for word in text.split(","):
        ends = [_whole(end, least) for end in word.strip().replace("_", "").split("..")]
        if None in ends or len(ends) > 2 or ends != sorted(filter(None, ends)):
            allowed = (
                f"whole numbers from {least} to 16777216 with commas between them, as 16,32,64, or 8..64 for doubling"
            )
            reject(option, repr(text), allowed)
        low, high = (end for end in (ends[0], ends[-1]) if end is not None)
        while low <= high:
            found.add(low)
            low *= 2
    return sorted(found)


def _whole(word: str, least: int) -> int | None:
    return int(word) if word.isascii() and word.isdigit() and least <= int(word) <= 2**24 else None


def share_from(option: str, text: str, *, most: float = 1.0) -> float:
    """A share above 0 and up to `most` from "0.5%" or "0.005".

    A bare number of 1 or more, or above `most`, is rejected: "1" could mean 1% or 100%.

    >>> share_from("--leash", "0.5%"), share_from("--leash", "0.005")
    (0.005, 0.005)
    """
    word = text.strip()
    number, mark, rest = word.partition("%")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not mark and math.isfinite(value) and (value >= 1.0 or value > most):
        raise ArgumentError(f"{option}: got {word}; write {word}% or {value / 100.0:g}")
    share = value / 100.0 if mark else value
    if rest or not 0.0 < share <= most:
        reject(option, repr(text), f"a share above 0 and up to {100 * most:g}%, as 0.5% or 0.005")
    return share


def device_named(name: str) -> torch.device:
    """The device a user asked for; "auto" is a GPU where there is one."""
    import torch

    if name not in DEVICES:
        reject("--device", repr(name), ", ".join(DEVICES))
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device("cuda" if there["cuda"] else "cpu")
    if not there[name]:
        reject("--device", repr(name), "a device of this machine", "use --device cpu")
    return torch.device(name)


def dtype_named(name: str, device: torch.device, *, without: str = "") -> str:
    """The dtype a user asked for; "auto" is bfloat16 on a GPU. `without` is one that a command cannot use."""
    allowed = [known for known in DTYPES if known != without]
    if name not in allowed:
        reject("--dtype", repr(name), ", ".join(allowed))
    if name == "auto":
        return "bfloat16" if device.type == "cuda" else "float32"
    return name


def data_folder(given: Path | None) -> Path:
    """Where examples of CLRS-Text are made: what arms share, so that it is not in the folder of one of them."""
    from sharpmax.models.smollm2 import cache_folder

    return cache_folder() / "clrs-text" if given is None else given


@dataclass(frozen=True)
class NamedPolicy:
    """A policy, what to call it, and the task it was calibrated on where that is written beside it."""

    name: str
    policy: Policy
    calibrated_on: str | None = None


def policy_named(text: str) -> NamedPolicy:
    """The policy a user asked for: a name, a file, a folder that holds one, `log-length:64` or `constant:1.5`.

    >>> policy_named("constant:1.5").policy.describe()
    'β = 1.5'
    """
    from sharpmax.policies.store import NAMED, load_policy

    policy, path = load_policy(text), Path(text)
    if text in NAMED or not path.exists():
        return NamedPolicy(text, policy)
    folder = path if path.is_dir() else path.parent
    return NamedPolicy(path.resolve().name if path.is_dir() else path.stem, policy, _calibrated_on(folder))


def word_shown(word: str) -> str:
    """A name as it is; a file or folder without anything of this machine, as `files_given` calls it."""
    from sharpmax.provenance import without_machine

    return without_machine(Path(word)) if _is_path(word) else word


def files_given(words: Sequence[str | Path | None], data: Sequence[str | Path | None] = ()) -> list[dict[str, Any]]:
    """What results say of the files that a command names, each by its name in the command.

    Of `words` (policies, tasks, normalisers) with their text, so that the command can be run again from the results
    alone; of `data` (texts, datasets, weights) with what tells them from others. Words that are no files are left out.
    """
    found = []
    for word in map(str, filter(None, [*words, *data])):
        if not _is_path(word):
            continue
        path = Path(word)
        file = _policy_in(path) or path if path.is_dir() else path
        if not file.is_file():
            continue
        content = file.read_bytes()
        about = {"name": word_shown(word), "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        if word in map(str, filter(None, words)):
            about["text"] = content.decode("utf-8-sig", errors="replace")
        found.append(about)
    return found


def _is_path(word: str) -> bool:
    from sharpmax.policies.store import NAMED
    from sharpmax.tasks.registry import TASKS

    return word not in NAMED and word not in TASKS and Path(word).exists()


def _policy_in(folder: Path) -> Path | None:
    from sharpmax.policies.store import IN_FOLDERS

    return next((folder / name for name in IN_FOLDERS if (folder / name).is_file()), None)


def policies_named(texts: Sequence[str], taken: Sequence[str] = ()) -> list[NamedPolicy]:
    """Several policies, each with a name of its own."""
    found: list[NamedPolicy] = []
    for text in texts:
        one = policy_named(text)
        known = {*taken, *(other.name for other in found)}
        numbered = (f"{one.name} ({number})" for number in range(2, len(known) + 3))
        name = one.name if one.name not in known else next(n for n in numbered if n not in known)
        found.append(NamedPolicy(name, one.policy, one.calibrated_on))
    return found


def _calibrated_on(folder: Path) -> str | None:
    """What the results of `sharpmax calibrate` beside a policy say; nothing where there are none."""
    try:
        saved = parse_json((folder / "results.json").read_bytes())
        command, task = saved["command"], saved["tables"]["setting"]["task"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return task if str(command).startswith("sharpmax calibrate") and isinstance(task, str) else None
