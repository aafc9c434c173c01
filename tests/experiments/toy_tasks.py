"""Toy tasks. The file is sent to workers as a plugin, so it must not import from tests."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

from sharpmax.errors import reject
from sharpmax.experiments.run_folder import Outcome


def leave_trace(folder: str | None, name: str) -> None:
    """Leave a file for each execution, with the id of the parent process in it."""
    if folder is not None:
        trace = Path(folder) / f"{name}.{os.getpid()}.{time.time_ns()}"
        trace.write_text(str(os.getppid()), encoding="utf-8")


def learn(seed: int, size: int = 64, trace: str | None = None, beside: int = 1) -> Outcome:
    """Weights that depend on the seed and on every rounding; waits until `beside` trainings have begun."""
    leave_trace(trace, f"learn-{seed}")
    while trace is not None and len(list(Path(trace).glob("learn-*"))) < beside:
        time.sleep(0.02)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(size, size, generator=generator)
    for _ in range(20):
        weights = torch.tanh(weights @ weights.T / size**0.5) + 0.1 * weights
    tiny = float((torch.full((1,), 1e-30) * 1e-10).item())
    record = {"loss": float(weights.sum()), "threads": torch.get_num_threads(), "denormal": tiny, "name": "Größe"}
    return Outcome(record, weights.numpy().tobytes())


def examine(blob: bytes, scale: float, trace: str | None = None, gate: str | None = None) -> Outcome:
    """A number that depends on the weights; waits for the file `gate` if the scale is above 0."""
    leave_trace(trace, f"examine-{scale}")
    while gate is not None and scale > 0 and not Path(gate).exists():
        time.sleep(0.02)
    weights = torch.frombuffer(bytearray(blob), dtype=torch.float32)
    return Outcome({"mean": float((weights * scale).exp().mean())})


def fail(trace: str, how: str) -> Outcome:
    """Kill the process ("die"), report a user's "mistake", or raise another error."""
    leave_trace(trace, how)
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "mistake":
        reject("--width", 7, "an even number")
    raise RuntimeError("out of\nluck")
