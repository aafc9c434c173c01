"""Row statistics of every attention call that runs inside a `with` block, without the matrix of weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sharpmax.errors import reject
from sharpmax.hf.interface import watched
from sharpmax.hf.watching import Seen
from sharpmax.probe.functions import StockCalls
from sharpmax.probe.places import check_choice, places
from sharpmax.probe.statistics import STATISTICS, row_statistics
from sharpmax.rows.layout import without_autocast

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Call", "Capture", "capture", "measured"]

_LOGITS_AT_ONCE = 1 << 22


@dataclass(frozen=True, eq=False)
class Call:
    """One call of attention: the statistics (`sharpmax.probe.statistics`) of its rows at `places`."""

    layer: int
    """Which of the model's attention modules; without a model, the number of the call."""

    places: Tensor
    """Which of the call's queries, `[R]`."""

    keys: int
    """How many keys there were, visible or not."""

    statistics: dict[str, Tensor]
    """Each `[B, H, R]` in float32, on the device of the model."""


@dataclass(eq=False)
class Capture:
    """What attention did since the `with` block began, in the thread that it began in."""

    rows: str = "last"
    calls: list[Call] = field(default_factory=list)
    _thread: int = field(default_factory=threading.get_ident)

    def of_layer(self, layer: int) -> list[Call]:
        """The calls of one layer, in their order."""
        return [call for call in self.calls if call.layer == layer]

    def stack(self, name: str) -> Tensor:
        """One statistic in the last call of every layer, `[layers, B, H, R]`."""
        if name not in STATISTICS:
            reject("name", repr(name), f"one of {list(STATISTICS)}")
        last = {call.layer: call.statistics[name] for call in self.calls}
        if not last:
            reject("stack", "a capture without calls", "one that saw attention run")
        shapes = {tuple(value.shape) for value in last.values()}
        if len(shapes) > 1:
            given = f"layers whose rows differ in shape, {sorted(shapes)}"
            reject("stack", given, "layers with as many rows and heads", "read of_layer(n) instead")
        device = next(iter(last.values())).device
        return torch.stack([last[layer].to(device) for layer in sorted(last)])

    def clear(self) -> None:
        """Forget the calls so far."""
        self.calls.clear()

    def see(self, seen: Seen) -> None:
        """Measure a call, if it is one of this thread."""
        if threading.get_ident() == self._thread:
            chosen = places(self.rows, seen.queries)
            self.calls.append(Call(seen.layer, chosen, seen.keys, measured(seen, chosen)))


def capture(model: PreTrainedModel | None = None, rows: str = "last") -> AbstractContextManager[Capture]:
    """Measure rows of every attention call inside a block: `with capture(model) as c: …`, then read `c`.

    With a transformers model these are the calls of its attention modules, sharpened if a policy is applied, while it
    reads or generates. Without one they are the calls of `sharpmax.attention` and of torch's own
    `scaled_dot_product_attention`, numbered; those of `torch.nn.MultiheadAttention` are among them where it is not
    asked for weights, and inside the block it does not take its fused inference path, in which there is none.

    `rows` chooses: "last", "log" (about three per doubling of the length) or "all". Calls of other threads, and those
    in compiled code, are not seen. No output changes.

    >>> import torch, sharpmax as sm
    >>> q, k, v = torch.zeros(3, 1, 2, 8, 4).unbind()
    >>> with sm.capture() as c:
    ...     out = sm.attention(q, k, v, is_causal=True)
    >>> c.stack("entropy").exp().round()  # one call, one sequence, two heads, the last row: uniform over eight keys
    tensor([[[[8.],
              [8.]]]])
    """
    check_choice(rows)
    return _capturing(model, rows)


@contextmanager
def _capturing(model: PreTrainedModel | None, rows: str) -> Iterator[Capture]:
    found = Capture(rows)
    calls = StockCalls(found.see, lambda: len(found.calls)) if model is None else watched(model, found.see)
    with calls:
        yield found


def measured(seen: Seen, chosen: Tensor) -> dict[str, Tensor]:
    """The statistics of the rows at `chosen` `[R]`, a block of rows at a time: memory is that of a block."""
    one_row = seen.batch * seen.heads * seen.keys
    if one_row == 0 or len(chosen) == 0:
        shape = (seen.batch, seen.heads, len(chosen))
        return {name: seen.query.new_zeros(shape, dtype=torch.float32) for name in STATISTICS}
    with without_autocast(seen.query.device):
        step = max(1, _LOGITS_AT_ONCE // one_row)
        blocks = [row_statistics(seen.rows(block)) for block in torch.split(chosen, step)]
    return {name: torch.cat([block[name] for block in blocks], dim=-1) for name in STATISTICS}
