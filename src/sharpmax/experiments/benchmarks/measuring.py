"""Shared by all benchmarks: checked cases, rounds, memory, fresh interpreters, targets."""

from __future__ import annotations

import inspect
import json
import math
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

import sharpmax
from sharpmax.errors import SharpmaxError
from sharpmax.lazy import require
from sharpmax.stats.dispatch import row_stats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")

Note = Callable[[str], None]
"""Called with what is being measured."""


_QUEUE_CYCLES = 2_000_000  # about a millisecond, in which the host queues a call


def silent(text: str) -> None:
    """Show no progress."""


def targets(limits: Mapping[str, float], entry: Mapping[str, Any], judged: bool = True) -> dict[str, dict[str, Any]]:
    """Each quantity's limit, and whether the entry is within it (None if not `judged`). Lists count by length.

    >>> targets({"ratio": 1.5}, {"ratio": 1.2})
    {'ratio': {'at_most': 1.5, 'reached': True}}
    """
    found = {}
    for quantity, limit in limits.items():
        value = entry.get(quantity)
        number = len(value) if isinstance(value, list) else value
        found[quantity] = {"at_most": limit, "reached": number <= limit if judged and number is not None else None}
    return found


def summary(
    values: Sequence[float], unit: str, base: Sequence[float] | None, limits: Mapping[str, float], judged: bool
) -> dict[str, Any]:
    """An entry: median and minimum of the values, the median of their ratios to `base` in a round, and targets."""
    entry: dict[str, Any] = {f"median_{unit}": statistics.median(values), f"min_{unit}": min(values)}
    entry |= {} if base is None else {"ratio": median_ratio(values, base)}
    return entry | {"rounds": len(values), "targets": targets(limits, entry, judged)}


def in_rounds(measure: Mapping[str, Callable[[], T]], rounds: int, note: Note = silent) -> dict[str, list[T]]:
    """Take every measurement once per round, so that noise of the machine affects all alike."""
    found: dict[str, list[T]] = {name: [] for name in measure}
    for done in range(1, rounds + 1):
        for name, one in measure.items():
            note(f"round {done} of {rounds}: {name}")
            found[name].append(one())
    return found


def median_ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """The median of the ratios in each round."""
    return statistics.median(one / other for one, other in zip(values, base, strict=True))


def distance(given: Tensor, wanted: Tensor) -> float:
    """Largest error, relative where the expected value exceeds 1; NaN, which no limit allows, if any is NaN."""
    wanted = wanted.double()
    return float(((given.double() - wanted).abs() / wanted.abs().clamp_min(1.0)).max())


def finite(value: float) -> float | None:
    """The number; None for NaN and ±∞, which JSON cannot hold."""
    return value if math.isfinite(value) else None


class Case(NamedTuple):
    """A call to time, its errors against the reference by name, and the largest error allowed for each."""

    run: Callable[[], Any]
    errors: Callable[[Any], Mapping[str, float]]
    allowed: Mapping[str, float]


class Checked(NamedTuple):
    """Errors of a case, whether all are allowed, and the exception that it raised, if any."""

    errors: Mapping[str, float]
    agrees: bool
    problem: str | None = None


def checked(case: Case) -> Checked:
    """Run a case once. An exception counts as an incorrect result."""
    with warnings.catch_warnings():
        # Backends warn about why they cannot run.
        warnings.simplefilter("ignore")
        try:
            errors = case.errors(case.run())
        except Exception as problem:  # kernel compilers raise errors of many kinds
            first_line = next(iter(str(problem).splitlines()), "")
            return Checked({}, agrees=False, problem=f"{type(problem).__name__}: {first_line}")
    # NaN must not pass.
    return Checked(errors, agrees=all(error <= case.allowed[name] for name, error in errors.items()))


def in_fresh_interpreter(function: Callable[..., Any], *arguments: str | int) -> Any:
    """Call a function of this package in a fresh interpreter; its result travels as JSON."""
    call = f"{function.__name__}(*{arguments!r})"
    return run_python(f"import json; from {function.__module__} import {function.__name__}; print(json.dumps({call}))")


def run_python(code: str) -> Any:
    """Run code in a fresh interpreter that can import this package, and read the JSON on its last line."""
    home = str(Path(sharpmax.__file__).resolve().parent.parent)
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([home, *others])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise SharpmaxError(f"bench: a measurement in a fresh interpreter failed ({reason})")
    return json.loads(done.stdout.splitlines()[-1])


def resident_bytes() -> tuple[int, int] | None:
    """Memory of this process, now and at its peak; None if the system does not report it."""
    # Not ru_maxrss, which on Linux a child inherits from its parent.
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    if "VmRSS" not in found or "VmHWM" not in found:
        return None
    now, peak = (int(found[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
    return now, peak


def extra_bytes(length: int, heads: int, width: int) -> int | None:
    """Memory that `row_stats(impl="streaming")` adds to this process; None if unknown."""
    with torch.no_grad():
        q, k = torch.randn(2, 1, heads, length, width).unbind()
        # The first call loads libraries and starts thread pools.
        row_stats(q[:, :, :64], k[:, :, :64], is_causal=True, impl="streaming")
        before = resident_bytes()
        row_stats(q, k, is_causal=True, impl="streaming")
        after = resident_bytes()
    # An upper bound, since the peak may be from the start-up.
    return after[1] - before[0] if before and after else None


def reset_peak(device: torch.device) -> bool:
    """Reset the recorded peak of memory. Return whether this machine can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # Linux: resets the peak
    except OSError:
        return False
    return device.type == "cpu" and resident_bytes() is not None


def peak_mib(device: torch.device) -> float | None:
    """Peak memory in MiB since `reset_peak`: of tensors on a GPU, of the whole process elsewhere."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / 2**20
    held = resident_bytes()
    return None if held is None else held[1] / 2**20


def synchronise(device: torch.device) -> None:
    """Wait until a device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    """The time of a call, with its work on the device."""
    synchronise(device)
    began = time.perf_counter()
    run()
    synchronise(device)
    return 1e3 * (time.perf_counter() - began)


class Spent(NamedTuple):
    """Milliseconds of device work, and until the call returned on the host."""

    device_ms: float
    host_ms: float


def spent(run: Callable[[], Any], device: torch.device, wait: int = _QUEUE_CYCLES) -> Spent:
    """Time one call.

    On a GPU it is queued behind a wait of that many cycles, so that Python's time is not part of the device's.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        taken = 1e3 * (time.perf_counter() - start)
        return Spent(taken, taken)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call, unused-ignore]
    torch.cuda.synchronize(device)
    torch.cuda._sleep(wait)  # type: ignore[no-untyped-call, unused-ignore]
    begin.record()
    start = time.perf_counter()
    run()
    launched = 1e3 * (time.perf_counter() - start)
    end.record()
    end.synchronize()
    return Spent(begin.elapsed_time(end), launched)


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int | None:
    """Peak memory of a call with its outputs and without its inputs; None where there is no GPU."""
    if device.type != "cuda":
        run()
        return None
    torch.cuda.synchronize(device)
    # A cached block may be larger than requested, and counts in full.
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


class CachedReader:
    """Times a model that reads tokens into a key-value cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cache = require("transformers", "hf", "measuring costs").DynamicCache(config=model.config)
        known = inspect.signature(model.forward).parameters
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in known else {}

    def read(self, ids: Tensor) -> float:
        """Read tokens `[1, n]`; return milliseconds."""
        options = {"input_ids": ids, "past_key_values": self._cache, "use_cache": True, **self._last}
        return milliseconds(partial(self._model, **options), self._model.device)


def random_tokens(model: PreTrainedModel, count: int, seed: int = 0) -> Tensor:
    """Random tokens `[1, count]` of the model's vocabulary, on its device."""
    generator = torch.Generator().manual_seed(seed)
    size = model.config.get_text_config().vocab_size
    return torch.randint(size, (1, count), generator=generator).to(model.device)
