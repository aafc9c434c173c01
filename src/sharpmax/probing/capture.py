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
"""What is measured of a row, in nats, weights, logits and numbers of keys."""

LOCAL = 16
"""How many of the last visible keys count as near."""

_NEEDS = frozenset({"count", "max", "lse", "mean"})


def row_statistics(logits: Logits) -> dict[str, Tensor]:
    """`STATISTICS` of every row of logits `[B, H, R, Lk]`, each `[B, H, R]` in float32.

    `entropy`, `top` (the largest weight) and `count` come from `RowStats`; `sink` is the weight of the first visible
    key, `spread` the largest minus the smallest visible logit, `local` the weight of the last `LOCAL` visible keys. A
    row without visible keys gives zeros; NaN in a visible logit makes all statistics of its row but `count` NaN.
    """
    values, hidden = logits.values, logits.hidden
    if values.numel() == 0:
        return {name: values.new_zeros(values.shape[:-1], dtype=torch.float32) for name in STATISTICS}
    stats = logits.measure(_NEEDS)
    x = logits.scaled(None).to(floats_at_least_32(values.dtype))
    weights = x.softmax(-1)
    if hidden is None:
        # A view would keep all of the weights alive for as long as somebody keeps the statistics.
        low, sink, local = x.amin(-1), weights[..., 0].contiguous(), weights[..., -LOCAL:].sum(-1)
    else:
        visible = ~hidden.expand(*hidden.shape[:-1], x.shape[-1])
        low = x.masked_fill(hidden, torch.inf).amin(-1)
        first = visible.to(torch.uint8).argmax(-1, keepdim=True)
        sink = weights.gather(-1, first.expand(*low.shape, 1)).squeeze(-1)
        # Counted from the end, over the mask's own shape: most masks are shared by all heads.
        near = visible.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1) <= LOCAL
        local = (weights * near).sum(-1)
    found = {"entropy": stats.entropy, "top": stats.top_weight, "sink": sink, "spread": stats.max - low, "local": local}
    if hidden is not None:
        found = {name: value.masked_fill(stats.count == 0, 0.0) for name, value in found.items()}
    return {name: value.to(torch.float32) for name, value in (found | {"count": stats.count}).items()}


CHOICES = ("last", "log", "all")
"""Which rows: the last; about three per doubling of the length, the last included; every row."""

_PER_DOUBLING = 3


def places(choice: str, queries: int) -> Tensor:
    """The rows of `choice` among so many, ascending and from 0, `[R]` in int64 on the CPU.

    >>> places("last", 50).tolist(), places("log", 50).tolist()
    ([49], [0, 1, 2, 3, 4, 5, 7, 9, 12, 15, 19, 24, 31, 39, 49])
    """
    check_choice(choice)
    if choice == "all" or queries == 0:
        return torch.arange(queries)
    if choice == "last":
        return torch.tensor([queries - 1])
    steps = range(_PER_DOUBLING * queries.bit_length())
    numbers = {round(2 ** (step / _PER_DOUBLING)) for step in steps}
    return torch.tensor(sorted({n - 1 for n in numbers if n <= queries} | {queries - 1}))


def check_choice(choice: object) -> None:
    """Refuse what is not one of `CHOICES`."""
    if choice not in CHOICES:
        reject("rows", repr(choice), f"one of {list(CHOICES)}")


_LOGITS_AT_ONCE = 1 << 22


@dataclass(frozen=True, eq=False)
class CapturedCall:
    """The statistics of one attention call, of its rows at `places`."""

    layer: int  # the number of the attention module; without a model, of the call
    places: Tensor  # which of the call's queries, `[R]`
    keys: int  # how many keys there were, visible or not
    statistics: dict[str, Tensor]  # by the names of `STATISTICS`, each `[B, H, R]` in float32 on the model's device


@dataclass(eq=False, repr=False)
class Capture:
    """The attention calls since the `with` block began, in the thread that it began in."""

    rows: str = "last"
    calls: list[CapturedCall] = field(default_factory=list)
    _thread: int = field(default_factory=threading.get_ident)

    def of_layer(self, layer: int) -> list[CapturedCall]:
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

    def observe(self, call: AttentionCall) -> None:
        """Measure a call, if it is one of this thread."""
        if threading.get_ident() == self._thread:
            chosen = places(self.rows, call.queries)
            self.calls.append(CapturedCall(call.layer, chosen, call.keys, measured(call, chosen)))

    def __repr__(self) -> str:
        return f"Capture(rows={self.rows!r}, calls={len(self.calls)}, layers={len({one.layer for one in self.calls})})"


def capture(model: nn.Module | None = None, rows: str = "last") -> AbstractContextManager[Capture]:
    """Measure rows of every attention call inside a block: `with capture(model) as c: …`, then read `c`.

    With a transformers model these are the calls of its attention modules, sharpened if a policy is applied, while it
    reads or generates. Without one they are the calls of `sharpmax.attention`, of torch's own
    `scaled_dot_product_attention` and of `torch.nn.MultiheadAttention`, numbered; with any other torch module those
    that it makes, numbered in each forward pass. Inside the block fused inference paths are not taken.

    `rows` chooses: "last", "log" (about three per doubling of the length) or "all". Calls of other threads, and those
    in compiled code, are not measured. No output changes.

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
def _capturing(model: nn.Module | None, rows: str) -> Iterator[Capture]:
    found = Capture(rows)
    if model is None:
        block: AbstractContextManager[object] = torch_modules.ObservedCalls(found.observe, lambda: len(found.calls))
    elif is_torch_module(model):
        block = torch_modules.observed(model, found.observe)
    else:
        block = observed(check_model(model), found.observe)
    with block:
        yield found


def measured(call: AttentionCall, chosen: Tensor) -> dict[str, Tensor]:
    """`row_statistics` of the rows at `chosen` `[R]`, a block of rows at a time to bound memory."""
    one_row = call.batch * call.heads * call.keys
    if one_row == 0 or len(chosen) == 0:
        shape = (call.batch, call.heads, len(chosen))
        return {name: call.q.new_zeros(shape, dtype=torch.float32) for name in STATISTICS}
    with without_autocast(call.q.device):
        step = max(1, _LOGITS_AT_ONCE // one_row)
        blocks = [row_statistics(call.logits(block)) for block in torch.split(chosen, step)]
    return {name: torch.cat([block[name] for block in blocks], dim=-1) for name in STATISTICS}
