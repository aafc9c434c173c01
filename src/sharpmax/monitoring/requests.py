"""What a monitor measures of a request: a row per pass, the rows of a batch of sequences, the request as a whole."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sharpmax.errors import UnsupportedError
from sharpmax.monitoring.scores import Report
from sharpmax.probing import capture
from sharpmax.stats.call import AttentionCall, without_autocast

if TYPE_CHECKING:
    from sharpmax.monitoring.monitor import Monitor


@dataclass(eq=False)
class Row:
    """One row of every sequence of a batch, measured layer by layer in one forward pass."""

    places: Tensor | None = None  # index of the row of each sequence `[B]`; None: the last row
    present: Tensor | None = None  # False for padding and for sequences that have ended `[B]`; None: all True
    generated: bool = False
    rows: str | None = None  # average these rows, "last", "log" or "all", instead of measuring one
    _layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def see(self, call: AttentionCall) -> None:
        """Measure the row of every sequence in one layer. Every operation here delays a generated token."""
        if call.queries == 0 or call.keys == 0:
            return
        if self.rows is not None:
            stats = capture.measured(call, capture.places(self.rows, call.queries))
            visible = stats["count"] > 0
            mean = stats["entropy"].sum(-1) / visible.sum(-1).clamp_min(1)
            self._layers[call.layer] = mean, stats["count"].amax(-1)
            return
        with without_autocast(call.q.device):
            chosen = call if self.places is None else call.of_rows(self.places)
            row = chosen.logits(slice(-1, None)).measure(frozenset({"mean"}))
        self._layers[call.layer] = row.entropy[..., 0], row.count[..., 0]

    def finish(self) -> bool:
        """Concatenate the layers; return False if none was measured.

        Sets `entropy` `[B, heads]` over the heads of all layers, `count` `[B]`, the number of visible keys, and `valid`
        `[B]`, False for sequences that do not have this row.
        """
        if not self._layers:
            return False
        found = [self._layers[layer] for layer in sorted(self._layers)]
        self._layers.clear()
        if len({len(one) for one, _ in found}) > 1:  # a module that attends within windows makes batches of its own
            found = [(one.mean(0, keepdim=True), many.amax(0, keepdim=True)) for one, many in found]
        device = found[0][0].device
        self.entropy = torch.cat([one.to(device) for one, _ in found], dim=1)
        # Layers with a sliding window see fewer keys, so count those of the layer that sees most.
        self.count = torch.stack([many.to(device).amax(1).expand(len(self.entropy)) for _, many in found]).amax(0)
        self.valid = torch.ones_like(self.count, dtype=torch.bool) if self.present is None else self.present
        return True


@dataclass(eq=False)
class Run:
    """The rows of one batch of sequences, from their prompts on."""

    generated: deque[Row]  # the latest rows of generated tokens
    ends: frozenset[int] = frozenset()
    """End-of-sequence tokens. What a model computes for a sequence after one of them is padding."""

    unread: int | None = None
    """Tokens of the prompt not read yet, if known; tokens of a pass beyond them are guesses."""

    cache: weakref.ref[Any] | None = None  # the key-value cache of these sequences
    prompt: Row | None = None
    _steps: int = 0
    _present: Tensor | None = None

    def begin(self, given: Mapping[str, Any], every: int) -> Row | None:
        """Return the row to measure in a pass with these arguments of the model, or None."""
        ids = given.get("input_ids")
        tokens = given.get("inputs_embeds") if ids is None else ids
        if not isinstance(tokens, Tensor) or tokens.ndim < 2:
            raise UnsupportedError("the model was given neither input_ids [B, L] nor inputs_embeds [B, L, D]")
        batch, length = tokens.shape[:2]
        # Several tokens before the first generated one are the next part of the prompt.
        if self.prompt is None or (length > 1 and self._steps == 0):
            guessed = 0 if self.unread is None else max(0, length - self.unread)
            self.unread = None if self.unread is None else max(0, self.unread - length)
            mask, places = given.get("attention_mask"), None
            if isinstance(mask, Tensor) and mask.ndim == 2 and 0 < length <= mask.shape[1]:
                real = mask[:, mask.shape[1] - length : mask.shape[1] - guessed] > 0
                places = real.shape[1] - 1 - real.flip(-1).to(torch.uint8).argmax(-1)
                self._present = real.any(-1)
            elif guessed:
                places = torch.full((batch,), length - 1 - guessed, device=tokens.device)
            return Row(places, self._present)
        self._steps += 1
        window = self.generated.maxlen
        if window and self.ends and isinstance(ids, Tensor) and len(ids) > 1:
            going_on = ~torch.isin(ids[:, 0], torch.tensor(sorted(self.ends), device=ids.device))
            self._present = going_on if self._present is None else going_on & self._present.to(going_on.device)
        if window == 0 or self._steps % every:
            return None
        # Of several tokens the first is the model's own; the others are guesses of speculative decoding.
        places = None if length == 1 else torch.zeros(batch, dtype=torch.long, device=tokens.device)
        return Row(places, self._present, generated=True)


class Request:
    """A request in progress or completed; `report` has its scores."""

    def __init__(self, monitor: Monitor, ends: frozenset[int] = frozenset()) -> None:
        self.monitor, self.ends = monitor, ends
        self.runs: list[Run] = []
        self.problem: str | None = None  # an error inside the monitor
        self.fresh = False  # whether the next pass reads new prompts
        self.length: int | None = None  # their length in tokens, if known
        self._report: Report | None = None

    @property
    def report(self) -> Report:
        """The report about the rows so far, or about all of them once the request is over."""
        return self.monitor.judge(self) if self._report is None else self._report

    def finish(self) -> Report:
        """Make the final report and free the rows."""
        self._report = self.report
        self.runs.clear()
        return self._report

    def run_of(self, cache: Any) -> Run:
        """The run that a pass with this cache continues, or a new one."""
        for run in self.runs:
            if cache is not None and run.cache is not None and run.cache() is cache and not self.fresh:
                return run
        read = 0 if cache is None or self.length is None else int(cache.get_seq_length())
        unread = None if self.length is None else self.length - read
        latest: deque[Row] = deque(maxlen=self.monitor.generated)
        run = Run(latest, self.ends, unread, None if cache is None else weakref.ref(cache))
        self.runs.append(run)
        self.fresh, self.length = False, None
        return run
