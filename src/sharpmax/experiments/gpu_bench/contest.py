"""Ours and every stock backend in the same rounds, after a check: what is wrong gets no time."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sharpmax.errors import UnsupportedError
from sharpmax.experiments.gpu_bench.clock import Spent, peak_bytes, spent

__all__ = ["Outcome", "Runner", "contest", "fastest", "times"]

Errors = Mapping[str, float]


@dataclass(frozen=True)
class Runner:
    """Something to time, how far its result is off, and how far each error may be off."""

    run: Callable[[], Any]
    errors: Callable[[Any], Errors]
    allowed: Errors


@dataclass(frozen=True)
class Outcome:
    """What the check found, and for what is right the median times and the peak of memory."""

    errors: Errors
    agrees: bool
    problem: str | None = None
    ms: float | None = None
    host_ms: float | None = None
    peak: int | None = None


def times(factor: float, errors: Errors) -> dict[str, float]:
    """So many times the errors of a yardstick, as what is allowed."""
    return {name: factor * error for name, error in errors.items()}


def contest(
    ours: Mapping[str, Runner],
    stock: Mapping[str, Runner],
    *,
    device: torch.device,
    rounds: int,
    note: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, Outcome], dict[str, Outcome]]:
    """Outcomes of ours and of the stock backends that take the case and are right about it.

    The check, the measuring of memory and an unrecorded round are the warm-up.
    """
    note("checking")
    found = {name: _checked(runner) for name, runner in ours.items()}
    rivals = {name: outcome for name, runner in stock.items() if (outcome := _checked(runner)).agrees}
    if not rivals:
        raise UnsupportedError(f"--gpu: none of the stock kernels {', '.join(stock)} takes a case on this device")
    running = {("ours", name): ours[name].run for name, outcome in found.items() if outcome.agrees}
    running |= {("stock", name): stock[name].run for name in rivals}
    peaks = {key: peak_bytes(run, device) for key, run in running.items()}
    taken: dict[tuple[str, str], list[Spent]] = {key: [] for key in running}
    for done in range(rounds + 1):
        note(f"round {done} of {rounds}" if done else "warming up")
        for key, run in running.items():
            one = spent(run, device)
            if done:
                taken[key].append(one)

    def timed(side: str, name: str, outcome: Outcome) -> Outcome:
        key = side, name
        if key not in taken:
            return outcome
        ms, host_ms = (statistics.median(column) for column in zip(*taken[key], strict=True))
        return Outcome(outcome.errors, agrees=True, ms=ms, host_ms=host_ms, peak=peaks[key])

    return (
        {name: timed("ours", name, outcome) for name, outcome in found.items()},
        {name: timed("stock", name, outcome) for name, outcome in rivals.items()},
    )


def fastest(stock: Mapping[str, Outcome]) -> tuple[str, Outcome]:
    """The name and the outcome of the fastest stock kernel."""
    return min(stock.items(), key=lambda one: math.inf if one[1].ms is None else one[1].ms)


def _checked(runner: Runner) -> Outcome:
    with warnings.catch_warnings():
        # Backends say in warnings why they refuse.
        warnings.simplefilter("ignore")
        try:
            errors = runner.errors(runner.run())
        except Exception as problem:  # compilers of kernels raise errors of many kinds
            first_line = next(iter(str(problem).splitlines()), "")
            return Outcome({}, agrees=False, problem=f"{type(problem).__name__}: {first_line}")
    # Written this way round so that NaN does not pass.
    return Outcome(errors, agrees=all(error <= runner.allowed[name] for name, error in errors.items()))
