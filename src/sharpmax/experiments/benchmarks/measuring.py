"""Time, memory and fresh interpreters, as every benchmark measures them; and whether a target is reached."""

from __future__ import annotations

import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

import sharpmax
from sharpmax.errors import SharpmaxError
from sharpmax.lazy import require

if TYPE_CHECKING:
    from transformers import PreTrainedModel


T = TypeVar("T")

Note = Callable[[str], None]
"""Called with what is being done."""


def silent(text: str) -> None:
    """Show no progress."""


def targets(limits: Mapping[str, float], entry: Mapping[str, Any], judged: bool = True) -> dict[str, dict[str, Any]]:
    """Each quantity's limit and whether the entry stays within it (a list by its length); None if not `judged`.

    >>> targets({"ratio": 1.5}, {"ratio": 1.2})
    {'ratio': {'at_most': 1.5, 'reached': True}}
    """
    found = {}
    for quantity, limit in limits.items():
        value = entry.get(quantity)
        number = len(value) if isinstance(value, list) else value
        found[quantity] = {"at_most": limit, "reached": number <= limit if judged and number is not None else None}
    return found


def in_rounds(measure: Mapping[str, Callable[[], T]], rounds: int, note: Note = silent) -> dict[str, list[T]]:
    """Take every measurement once per round, so that noise of the machine affects all of them alike."""
    found: dict[str, list[T]] = {name: [] for name in measure}
    for done in range(1, rounds + 1):
        for name, one in measure.items():
            note(f"round {done} of {rounds}: {name}")
            found[name].append(one())
    return found


def median_ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """The median of the ratios within a round."""
    return statistics.median(one / other for one, other in zip(values, base, strict=True))


def distance(given: Tensor, wanted: Tensor) -> float:
    """Largest error, relative where the wanted value exceeds 1; NaN, which no limit allows, if any is NaN."""
    wanted = wanted.double()
    return float(((given.double() - wanted).abs() / wanted.abs().clamp_min(1.0)).max())


def run_python(arguments: list[str]) -> Any:
    """Run a fresh interpreter that can import this package, and read the JSON on its last line."""
    home = str(Path(sharpmax.__file__).resolve().parent.parent)
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([home, *others])}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise SharpmaxError(f"bench: a measurement in a fresh interpreter failed ({reason})")
    return json.loads(done.stdout.splitlines()[-1])


def resident_bytes() -> tuple[int, int] | None:
    """Memory of this process now, and its peak; None where the system does not report it."""
    # Not ru_maxrss: on Linux a child starts with the peak of its parent.
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    if "VmRSS" not in found or "VmHWM" not in found:
        return None
    now, peak = (int(found[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
    return now, peak


def reset_peak(device: torch.device) -> bool:
    """Forget earlier peaks of memory; whether this machine can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # Linux: the peak of this process starts anew
    except OSError:
        return False
    return device.type == "cpu" and resident_bytes() is not None


def peak_mib(device: torch.device) -> float | None:
    """Peak memory in MiB since `reset_peak`: of tensors on a GPU, of the whole process elsewhere."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / 2**20
    held = resident_bytes()
    return None if held is None else held[1] / 2**20


class CachedReader:
    """A model that reads tokens into a key-value cache, and the time that takes."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cache = require("transformers", "hf", "measuring costs").DynamicCache(config=model.config)
        known = inspect.signature(model.forward).parameters
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in known else {}

    def read(self, ids: Tensor) -> float:
        """Read tokens `[1, n]`; milliseconds."""
        self._wait()
        began = time.perf_counter()
        self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, **self._last)
        self._wait()
        return 1e3 * (time.perf_counter() - began)

    def _wait(self) -> None:
        device = self._model.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type == "mps":
            torch.mps.synchronize()


def random_tokens(model: PreTrainedModel, count: int, seed: int = 0) -> Tensor:
    """Random tokens `[1, count]` of the model's vocabulary, on its device."""
    generator = torch.Generator().manual_seed(seed)
    size = model.config.get_text_config().vocab_size
    return torch.randint(size, (1, count), generator=generator).to(model.device)
