"""`capture`: row statistics of every attention call inside a `with` block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sharpmax.errors import reject
from sharpmax.integrations import torch_modules
from sharpmax.integrations.transformers.interface import observed
from sharpmax.integrations.transformers.support import check_model, is_torch_module
from sharpmax.stats.call import AttentionCall, Logits, floats_at_least_32, without_autocast

STATISTICS = ("entropy", "top", "sink", "spread", "local", "count")
"""What is measured of a row: see `measured`."""

LOCAL = 16
"""The number of last visible keys whose weight counts as local."""

_LOGITS_AT_ONCE = 1 << 22


def measured(call: AttentionCall, chosen: Tensor) -> dict[str, Tensor]:
    """Return the `STATISTICS` of the rows of a call at `chosen` `[R]`, each `[B, H, R]` in float32.

    `entropy` is in nats, `top` the largest weight, `sink` the weight of the first visible key, `spread` the largest
    minus the smallest visible logit, `local` the weight of the last `LOCAL` visible keys, `count` their number. All are
    0 for a row without visible keys. NaN in a visible logit makes all of them NaN except `count`. Logits are computed
    for a block of rows at a time.
    """
    one_row = call.batch * call.heads * call.keys
    if one_row == 0 or len(chosen) == 0:
        shape = (call.batch, call.heads, len(chosen))
        return {name: call.q.new_zeros(shape, dtype=torch.float32) for name in STATISTICS}
    with without_autocast(call.q.device):
        step = max(1, _LOGITS_AT_ONCE // one_row)
        blocks = [_statistics(call.logits(block)) for block in torch.split(chosen, step)]
    return {name: torch.cat([block[name] for block in blocks], dim=-1) for name in STATISTICS}


def _statistics(logits: Logits) -> dict[str, Tensor]:
    stats = logits.measure(frozenset({"mean"}))
    x = logits.scaled(None).to(floats_at_least_32(logits.values.dtype))
    weights = x.softmax(-1)
    # Keep the shape of the mask, which most heads share.
    hidden = x.new_zeros(x.shape[-1:], dtype=torch.bool) if logits.hidden is None else logits.hidden
    visible = ~hidden.expand(*hidden.shape[:-1], x.shape[-1])
    first = visible.to(torch.uint8).argmax(-1, keepdim=True)
    near = visible.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1) <= LOCAL
    found = {
        "entropy": stats.entropy,
        "top": stats.top_weight,
        "sink": weights.gather(-1, first.expand(*x.shape[:-1], 1)).squeeze(-1),
        "spread": stats.max - x.masked_fill(hidden, torch.inf).amin(-1),
        "local": (weights * near).sum(-1),
    }
    found = {name: value.masked_fill(stats.count == 0, 0.0) for name, value in found.items()}
    return {name: value.to(torch.float32) for name, value in (found | {"count": stats.count}).items()}


CHOICES = ("last", "log", "all")
"""Which rows to measure: the last, about three per doubling of the length and the last, or all."""

_PER_DOUBLING = 3


def places(choice: str, queries: int) -> Tensor:
    """Return the indices of the chosen rows, ascending, `[R]` in int64 on the CPU.

    >>> places("last", 50).tolist(), places("log", 50).tolist()
    ([49], [0, 1, 2, 3, 4, 5, 7, 9, 12, 15, 19, 24, 31, 39, 49])
    """
    if choice == "all" or queries == 0:
        return torch.arange(queries)
    if choice == "last":
        return torch.tensor([queries - 1])
    steps = range(_PER_DOUBLING * queries.bit_length())
    numbers = {round(2 ** (step / _PER_DOUBLING)) for step in steps}
    return torch.tensor(sorted({n - 1 for n in numbers if n <= queries} | {queries - 1}))


def check_choice(choice: object) -> None:
    """Raise ArgumentError if `choice` is not one of `CHOICES`."""
    if choice not in CHOICES:
        reject("rows", repr(choice), f"one of {list(CHOICES)}")


@dataclass(frozen=True, eq=False)
class CapturedCall:
    """The statistics of some rows of one attention call."""

    layer: int  # the number of the attention module; without a model, of the call
    places: Tensor  # the indices of the rows, `[R]`
    keys: int  # the number of keys, visible or not
    statistics: dict[str, Tensor]  # `STATISTICS` by name, each `[B, H, R]` in float32 on the model's device


@dataclass(eq=False, repr=False)
class Capture:
    """The attention calls of a `with` block in the thread that entered it."""

    rows: str = "last"
    calls: list[CapturedCall] = field(default_factory=list)
    _thread: int = field(default_factory=threading.get_ident)

    def stack(self, name: str) -> Tensor:
        """Return one statistic of the last call of every layer, `[layers, B, H, R]`."""
        if name not in STATISTICS:
            reject("name", repr(name), f"one of {list(STATISTICS)}")
        last = {call.layer: call.statistics[name] for call in self.calls}
        if not last:
            reject("stack", "a capture without calls", "a capture with attention calls")
        shapes = {tuple(value.shape) for value in last.values()}
        if len(shapes) > 1:
            given = f"layers whose rows differ in shape, {sorted(shapes)}"
            reject("stack", given, "layers with as many rows and heads", "read each of .calls instead")
        device = next(iter(last.values())).device
        return torch.stack([last[layer].to(device) for layer in sorted(last)])

    def observe(self, call: AttentionCall) -> None:
        """Measure a call of this thread; ignore calls of other threads."""
        if threading.get_ident() == self._thread:
            chosen = places(self.rows, call.queries)
            self.calls.append(CapturedCall(call.layer, chosen, call.keys, measured(call, chosen)))

    def __repr__(self) -> str:
        return f"Capture(rows={self.rows!r}, calls={len(self.calls)}, layers={len({one.layer for one in self.calls})})"


def capture(model: nn.Module | None = None, rows: str = "last") -> AbstractContextManager[Capture]:
    """Measure rows of every attention call inside a block: `with capture(model) as c: …`, then read `c`.

    With a transformers model, the calls are those of its attention modules, after the policy applied to it, if any.
    With any other torch module they are numbered in each forward pass. Without a model they are all calls of
    `sharpmax.attention`, `scaled_dot_product_attention` and `torch.nn.MultiheadAttention`, numbered. Fused inference
    paths are off inside the block.

    `rows` is "last", "log" (about three per doubling of the length) or "all". Calls of other threads and in compiled
    code are not measured. Outputs do not change.

    >>> import torch, sharpmax as sm
    >>> q, k, v = torch.zeros(3, 1, 2, 8, 4).unbind()
    >>> with sm.capture() as c:
    ...     out = sm.attention(q, k, v, is_causal=True)
    >>> c.stack("entropy").exp().round()  # one call, one sequence, two heads, the last row: uniform over eight keys
    tensor([[[[8.],
              [8.]]]])
    """
    check_choice(rows)
    found = Capture(rows)
    if model is None:
        block: AbstractContextManager[object] = torch_modules.ObservedCalls(found.observe, lambda: len(found.calls))
    elif is_torch_module(model):
        block = torch_modules.observed(model, found.observe)
    else:
        block = observed(check_model(model), found.observe)
    return _inside(block, found)


@contextmanager
def _inside(block: AbstractContextManager[object], found: Capture) -> Iterator[Capture]:
    with block:
        yield found
