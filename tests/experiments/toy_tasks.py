"""Toy tasks; travels as a plugin to where they are done, so it must not import from tests."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

from sharpmax.errors import MissingExtraError, reject
from sharpmax.experiments.run_folder import Outcome


def touch(folder: str | None, name: str) -> int:
    """Leave a trace of an execution, with the process that started this one in it; the number of those before."""
    if folder is None:
        return 0
    before = len(list(Path(folder).glob(f"{name}.*")))
    (Path(folder) / f"{name}.{os.getpid()}.{time.time_ns()}").write_text(str(os.getppid()), encoding="utf-8")
    return before


def learn(seed: int, size: int = 64, trace: str | None = None, beside: int = 1) -> Outcome:
    """Weights that depend on the seed, and on every rounding on the way; waits until `beside` trainings have begun."""
    touch(trace, f"learn-{seed}")
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
    """A number that depends on the weights; with a scale above 0 it waits for the file `gate`."""
    touch(trace, f"examine-{scale}")
    while gate is not None and scale > 0 and not Path(gate).exists():
        time.sleep(0.02)
    weights = torch.frombuffer(bytearray(blob), dtype=torch.float32)
    return Outcome({"mean": float((weights * scale).exp().mean())})


def die(trace: str, times: int) -> Outcome:
    """Its process is killed the first few times."""
    if touch(trace, "die") < times:
        os.kill(os.getpid(), signal.SIGKILL)
    return Outcome({"lived": True})


def fail(trace: str, times: int) -> Outcome:
    """Raises the first few times."""
    if touch(trace, "fail") < times:
        raise RuntimeError("out of\nluck")
    return Outcome({"lived": True})


def mistake(trace: str) -> Outcome:
    """What a user can put right, and trying again cannot."""
    touch(trace, "mistake")
    reject("--width", 7, "an even number")


def lacking(trace: str) -> Outcome:
    """An error whose constructor takes something else than its text."""
    touch(trace, "lacking")
    raise MissingExtraError("scipy", "fit", "fitting")


def not_json() -> Outcome:
    return Outcome({"loss": float("nan")})


def nothing() -> None:
    return None
