"""The attention functions of transformers that a sharpened call is handed on to.

Of flash and flex attention this module says which keys each row sees, so that a policy can read the row first. Both get
β·q in place of q, and attention sinks (`s_aux`) as they are. Constants measure nothing. Other policies measure the rows
over the keys that the implementation is going to see.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sharpmax.errors import UnsupportedError
from sharpmax.integrations.transformers.support import INTERFACE, Instead, eager_of, interface_call, plain_name
from sharpmax.stats.call import AttentionCall
from sharpmax.stats.dispatch import packed_spans

_REFUSED = {
    "softcap": "caps its logits, and scaling the query is not scaling what comes out of the cap",
    "position_bias": "adds a position bias to its logits, which scaling the query does not scale",
    "cache": "reads a paged cache",
    "block_table": "reads a paged cache",
}


def implementation_call(
    inner: str, module: nn.Module, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any], *, reads: bool
) -> AttentionCall:
    """The call of flash or flex attention as rows of logits: query `[B, H, Lq, D]`, key `[B, Hkv, Lk, D]`.

    Flash attention has a mask of padding `[B, Lk]`, or sequences packed into one (`cu_seq_lens_q`, or `position_ids`
    that start again), causal limits aligned to the last key and sliding windows. Flex attention has a `BlockMask`,
    whose rows are looked at in a boolean matrix, or a mask that is added to the logits. Without `reads` nobody asks
    what a row sees.
    """
    for name, why in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise UnsupportedError(
                f"model: {type(module).__name__} {why} ({name}), under attn_implementation={inner!r}; allowed: eager; "
                "do model.set_attn_implementation('eager') first"
            )
    scaling = kwargs.get("scaling")
    if not reads:
        return AttentionCall.in_model(query, key, None, False, scaling)
    if inner == "flex_attention":
        return AttentionCall.in_model(query, key, _flex_mask(query, key, mask), False, scaling)
    if mask is not None and mask.shape[1] < key.shape[2]:  # a static cache, written up to here
        key = key[:, :, : mask.shape[1]]
    spans = _flash_spans(module, query, key, mask, kwargs)
    return AttentionCall.in_model(query, key, None, False, scaling, spans=spans)


def _flex_mask(query: Tensor, key: Tensor, mask: Any) -> Tensor | None:
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is not None and isinstance(mask, flex.BlockMask):
        batch, heads = mask.shape[:2]
        visible: Tensor = flex.create_mask(
            mask.mask_mod, batch, heads, query.shape[2], key.shape[2], device=str(query.device)
        )
        return visible
    return None if mask is None else mask[..., : key.shape[2]]


def _flash_spans(module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> Tensor:
    """The first key of each row and the one after its last, int32 `[B or 1, 2, Lq]`."""
    queries, keys, device = query.shape[2], key.shape[2], query.device
    given = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if given is None else given)
    place = torch.arange(queries, dtype=torch.int32, device=device)[None] + (keys - queries)
    low, high = torch.zeros_like(place), torch.full_like(place, keys)
    starts = _starts(query, kwargs) if mask is None else None
    if starts is not None:
        low, high = packed_spans(*starts, queries, keys, causal, device).unbind(1)
        ends = packed_spans(*starts, queries, keys, True, device)[:, 1]
        place = ends - 1
    elif mask is not None:
        shown = mask.bool().to(torch.int32)
        low = shown.argmax(1, keepdim=True).to(torch.int32).expand(-1, queries)
        high = low + shown.sum(1, keepdim=True, dtype=torch.int32)
        # What is visible has to be one run of keys, or the places within it would not be those of the mask.
        if mask.device.type == "cpu" and bool((shown.flip(1).argmax(1) != keys - high[:, 0]).any()):
            raise UnsupportedError("attention_mask: padding between tokens; allowed: before the first, after the last")
    window = kwargs.get("sliding_window")
    if causal:
        high = torch.minimum(high, place + 1)
    if window is not None and keys > window:
        low, high = torch.maximum(low, place - window + 1), torch.minimum(high, place + window)
    high = torch.maximum(high, low)
    return torch.stack((low.expand_as(high), high), dim=1)


def _starts(query: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Where packed sequences start among the rows and among the keys, and where the last one ends."""
    rows, keys = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    positions = kwargs.get("position_ids")
    if rows is None or keys is None:
        if positions is None or query.shape[0] != 1 or query.shape[2] == 1:
            return None
        first = (positions.reshape(-1) == 0).nonzero().flatten()
        if len(first) < 2:
            return None
        rows = keys = torch.cat([first, first.new_tensor([query.shape[2]])])
    if query.shape[0] != 1:
        raise UnsupportedError(f"query: {query.shape[0]} rows of packed sequences; allowed: one (a batch of 1)")
    return rows, keys


class _Own:
    """The attention functions that `own_attention` has found: a compiler follows attributes of a class one by one."""


def own_attention(kind: type[nn.Module], name: str) -> Callable[..., Any]:
    """The attention function that a kind of module uses without rules, where its configuration says `name`."""
    key: str = _find_own(kind, name)
    found: Callable[..., Any] = getattr(_Own, key)
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _find_own(kind: type[nn.Module], name: str) -> str:
    key = f"{kind.__name__}_{id(kind)}_{plain_name(name)}"  # without a dot, which the compiler does not take
    if not hasattr(_Own, key):
        uses = interface_call(kind)
        if uses is None:
            raise UnsupportedError(f"model: {kind.__name__} does not use transformers' attention interface")
        function = uses.__globals__[INTERFACE].get_interface(plain_name(name), eager_of(uses))
        setattr(_Own, key, staticmethod(under_its_name(function, plain_name(name))))
    return key


def under_its_name(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """An attention function; flash attention asks the configuration for its own name, which then says ours."""
    return functools.partial(_as_named, function, name) if "flash" in name else function


def _as_named(function: Callable[..., Any], name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return function(Instead(module, config=Instead(module.config, _attn_implementation=name)), *args, **kwargs)
