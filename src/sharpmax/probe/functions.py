"""Calls of torch's own attention function, seen from outside: nothing is patched, torch itself reports them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from sharpmax.attention.sharp import is_repeated
from sharpmax.errors import UnsupportedError
from sharpmax.hf.watching import Seen
from sharpmax.rows.api import problem_of
from sharpmax.rows.layout import broadcast

__all__ = ["StockCalls", "stock_call"]


class StockCalls(TorchFunctionMode):
    """Shows `see` every call of `scaled_dot_product_attention` in this thread, that of `sharpmax.attention` included.

    A call gets the number that `number` gives. What is compiled shows nothing.
    """

    def __init__(self, see: Callable[[Seen], None], number: Callable[[], int]) -> None:
        super().__init__()
        self._see = see
        self._number = number

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do what was asked for, and show it."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward and set(types) <= {Tensor, Parameter}:
            with self:
                return _multi_head_attention(*args, **kwargs)
        out = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention and not is_repeated():
            with torch.no_grad():
                self._see(stock_call(self._number(), *args, **kwargs))
        return out


def _body(function: FunctionType) -> Callable[..., Any]:
    """A Python function of torch that does not hand itself to the mode it runs in: what it calls is then seen."""
    names = {**function.__globals__, "has_torch_function": lambda given: False}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_multi_head_attention = _body(cast(FunctionType, F.multi_head_attention_forward))


def stock_call(
    number: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Seen:
    """A call that torch accepts, with these arguments of it, as a `Seen` whose batch is all axes before the heads."""
    if query.is_nested or key.is_nested:
        raise UnsupportedError("capture: rows of nested tensors cannot be measured; pass padded tensors with a mask")
    plain = [x for x in (query, key, attn_mask) if type(x) is Tensor]
    if max(query.ndim, key.ndim) > 2:
        # torch lets every axis before the last two broadcast.
        batch = broadcast(*(x.shape[:-3] for x in plain)) or ()
        heads = max(x.shape[-3] for x in plain if x.ndim > 2)
        key_heads = key.shape[-3] if key.ndim > 2 else 1
        query = query.expand(*batch, heads, *query.shape[-2:])
        key = key.expand(*batch, key_heads, *key.shape[-2:])
    problem = problem_of(query.detach(), key.detach(), attn_mask, "upper-left" if is_causal else None, scale, True)
    mask = problem.mask
    if mask is not None:
        mask = mask.detach().flatten(1, 2).expand(-1, -1, -1, problem.keys)
    query, offset = problem.q.flatten(1, 2), problem.offset
    return Seen(number, query, problem.k, mask, offset is not None, problem.scale, offset=offset or 0)
