"""The loss of every step, on disk while the run goes on."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sharpmax.errors import FileFormatError, SharpmaxError
from sharpmax.experiments.clrs.answers_only import answer_loss
from sharpmax.files import append_bytes, parse_json, write_text

__all__ = ["FILE_NAME", "Curve"]

FILE_NAME = "curve.jsonl"


class Curve:
    """Losses and times by step. Losses stay on the device until they are written, so that no step waits for it."""

    def __init__(
        self, path: Path, tokens: Callable[[int], int], every: int, main: bool = True, typical: float | None = None
    ) -> None:
        self.entries: list[dict[str, Any]] = []
        self._path, self._tokens, self._every, self._main, self._typical = path, tokens, every, main, typical
        self._parts: list[Tensor] = []
        self._waiting: list[tuple[int, Tensor]] = []
        self._since = time.perf_counter()
        self._fresh = True

    def go_on_after(self, step: int) -> None:
        """Take up the entries of an interrupted run up to `step`; what came after will come again."""
        lines = self._path.read_bytes().split(b"\n")[:-1] if self._path.is_file() else []
        for number, line in enumerate(lines, 1):
            try:
                entry = parse_json(line)
                known = {"step": int(entry["step"]), "loss": float(entry["loss"]), "tokens": int(entry["tokens"])}
                seconds = None if entry["seconds"] is None else float(entry["seconds"])
            except (ValueError, KeyError, TypeError):
                raise FileFormatError(
                    f"--out: line {number} of {str(self._path)!r} is not what sharpmax wrote; bring it back, or train "
                    "again in another folder"
                ) from None
            if known["step"] <= step:
                self.entries.append({**known, "seconds": seconds})

    def begin(self) -> None:
        """The first step begins."""
        self._since = time.perf_counter()
        if self._main:
            write_text(self._path, "".join(json.dumps(entry) + "\n" for entry in self.entries))

    def loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int) -> Tensor:
        """The loss of a part of a step, as transformers' Trainer asks for it."""
        loss = answer_loss(outputs.logits, labels, num_items_in_batch, self._typical)
        # A copy: with several devices the Trainer multiplies the loss in place.
        self._parts.append(loss.detach().clone())
        return loss

    def step_done(self, step: int, last: bool) -> None:
        """Note a step; now and then write what there is."""
        self._waiting.append((step, torch.stack(self._parts).sum()))
        self._parts.clear()
        if last or len(self._waiting) >= self._every:
            self.flush()

    def flush(self) -> None:
        """Write what is waiting."""
        if not self._waiting:
            return
        losses = torch.stack([loss for _, loss in self._waiting])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(losses)
        values = losses.tolist()
        now = time.perf_counter()
        seconds = (now - self._since) / len(values)
        new = [
            # The first steps of a process warm it up: their time says nothing of the others.
            {"step": step, "loss": value, "tokens": self._tokens(step), "seconds": None if self._fresh else seconds}
            for (step, _), value in zip(self._waiting, values, strict=True)
        ]
        self._waiting, self._since, self._fresh = [], now, False
        for entry in new:
            if not math.isfinite(entry["loss"]):
                raise SharpmaxError(
                    f"clrs train: the loss is not a number at step {entry['step']}; try a smaller --lr, or "
                    "--dtype float32"
                )
        self.entries += new
        if self._main:
            append_bytes(self._path, "".join(json.dumps(entry) + "\n" for entry in new).encode())

    def tokens_per_second(self) -> float | None:
        """Over the steps whose time is known."""
        timed = [entry for entry in self.entries if entry["seconds"]]
        seconds = math.fsum(entry["seconds"] for entry in timed)
        return sum(entry["tokens"] for entry in timed) / seconds if seconds else None
