"""The attention function that transformers calls while a model has a policy or observers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sharpmax.errors import UnsupportedError
from sharpmax.integrations.transformers.support import INTERFACE, LAYER, eager_of, interface_call
from sharpmax.ops.sharpen import MOST_QUERIES, QueryScale, Rule, Sharpener, fitting_beta, scaled_mask, scaled_queries
from sharpmax.stats.call import (
    AttentionCall,
    Logits,
    as_autocast,
    autocasts,
    hidden_by,
    largest_for,
    without_autocast,
)
from sharpmax.stats.dispatch import is_plain, on_gpu
from sharpmax.stats.spans import packed_spans, spans_of

Observer = Callable[[AttentionCall], None]
"""Called with every attention call of a model, whose logits are those of its softmax, including β, masks and biases."""


@dataclass(eq=False)
class Observers:
    """The observers of one model. The tuple is replaced, never changed: another thread may be iterating over it."""

    active: tuple[Any, ...] = ()

    def __reduce__(self) -> tuple[type[Observers], tuple[()]]:
        """Copies and unpickled models have no observers."""
        return Observers, ()

    def interested(self) -> list[Observer]:
        """The observers of calls in this thread: all but those whose method `wants_call` returns False.

        Describing a call without observers would take 1% of the time of a generated token.
        """
        if torch.compiler.is_compiling():
            return []
        return [one for one in self.active if not hasattr(one, "wants_call") or one.wants_call()]


@dataclass(frozen=True, eq=False)
class Repeated:
    """Indices of the keys that each row attends to, `places` `[B, Lk']`; an index may repeat, −1 is padding."""

    places: Tensor

    def keys(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, additive: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and their mask: a row sees every copy of the keys it saw before; without a mask it is causal."""
        places = self.places.to(key.device)
        there, chosen, least = (places >= 0)[:, None, None], places.clamp_min(0), torch.finfo(query.dtype).min
        if mask is None:
            rows = torch.arange(query.shape[-2], device=key.device)[:, None]
            mask = (chosen[:, None] <= rows)[:, None]
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, least) if additive else mask
        else:
            mask = mask.expand(len(places), -1, -1, -1)
            mask = mask.gather(3, chosen[:, None, None].expand(-1, *mask.shape[1:3], -1))
        mask = mask.masked_fill(~there, least if mask.is_floating_point() else False)
        chosen = chosen[:, None, :, None]
        key, value = (x.gather(2, chosen.expand(-1, x.shape[1], -1, x.shape[3])) for x in (key, value))
        return key, value, mask


class OutputGain:
    """Factors of the heads' outputs, `[H]`."""

    def __init__(self, scales: Sequence[float]) -> None:
        self._scales = torch.tensor(scales)

    def factors(self, device: torch.device) -> Tensor:
        """The factors on a device."""
        if self._scales.device != device:
            self._scales = self._scales.to(device)
        return self._scales

    def __call__(self, found: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """The output `[B, Lq, H, D]` times the factors, and the unchanged weights."""
        out, weights = found
        return out * self.factors(out.device)[:, None].to(out.dtype), weights


def _under_its_name(function: Any, name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return function(_Instead(module, config=_Instead(module.config, _attn_implementation=name)), *args, **kwargs)


class _Instead:
    """An object with some attributes replaced."""

    def __init__(self, original: Any, **attributes: Any) -> None:
        vars(self).update(attributes, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_original"], name)


@dataclass(eq=False)
class Layer:
    """The state of an attention module while rules are installed."""

    inner: str
    function: Callable[..., Any]
    heads: int
    rules: tuple[Rule | QueryScale | OutputGain, ...]
    number: int = 0  # the index among the model's attention modules
    observers: Observers = field(default_factory=Observers)
    repeated: Repeated | None = None  # replicated keys, inside `repeating`
    sharpener: Sharpener = field(init=False)
    query_scale: QueryScale | None = field(init=False)
    output_gain: OutputGain | None = field(init=False)
    plain: bool = field(init=False)  # whether the implementation is sdpa and the rules come from policies

    def __post_init__(self) -> None:
        if "flash" in self.inner:  # it looks up its own name in the configuration, which has ours
            self.function = functools.partial(_under_its_name, self.function, self.inner)
        self.output_gain = next((rule for rule in self.rules if isinstance(rule, OutputGain)), None)
        self.sharpener = Sharpener([rule for rule in self.rules if not isinstance(rule, OutputGain)], self.heads)
        self.rules, self.query_scale = self.sharpener.rules, self.sharpener.query_scale
        self.plain = self.inner == "sdpa" and bool(self.sharpener.policies)


def sharp_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Any:
    """The attention function that transformers calls: query `[B, H, Lq, D]`, key and value `[B, Hkv, Lk, D]`."""
    layer: Layer | None = getattr(module, LAYER, None)
    if layer is None:  # another thread removed the last observer between the lookup of this function and its call
        uses, name = interface_call(type(module)), module.config._attn_implementation
        if uses is None:
            raise UnsupportedError(f"model: {type(module).__name__} does not use transformers' attention interface")
        own = uses.__globals__[INTERFACE].get_interface(name, eager_of(uses))
        return own(module, query, key, value, attention_mask, **kwargs)
    if layer.query_scale is not None:
        query = layer.query_scale(query)
    found = _sharp_attention(layer, module, query, key, value, attention_mask, **kwargs)
    return found if layer.output_gain is None else layer.output_gain(found)


def _sharp_attention(
    layer: Layer, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> Any:
    observers = layer.observers.interested() if layer.observers.active else []
    if layer.repeated is None and not observers:
        if not layer.rules:
            return layer.function(module, query, key, value, attention_mask, **kwargs)
        if layer.plain and (attention_mask is None or attention_mask.dtype == torch.bool):
            found = _fast_path(layer, module, query, key, value, attention_mask, kwargs)
            if found is not None:
                return found
    if layer.inner not in ("sdpa", "eager"):
        return _flash_or_flex(layer, observers, module, query, key, value, attention_mask, **kwargs)
    # β times a bias, and the logits that eager attention keeps, can leave the range of float16.
    narrow = layer.inner == "eager" or kwargs.get("position_bias") is not None
    if layer.rules and narrow and as_autocast(query)[0].dtype == torch.float16:
        return _attend_in_float32(layer, module, query, key, value, attention_mask, **kwargs)
    if layer.repeated is not None:
        key, value, attention_mask = layer.repeated.keys(query, key, value, attention_mask, layer.inner == "eager")
    if not (observers or layer.rules):
        return layer.function(module, query, key, value, attention_mask, **kwargs)
    bias, cap, scaling = kwargs.get("position_bias"), kwargs.get("softcap"), kwargs.get("scaling")
    causal = attention_mask is None and _is_causal(layer, module, query, kwargs.get("is_causal"))

    def show(query: Tensor, mask: Tensor | None, bias: Tensor | None = None, beta: Tensor | None = None) -> None:
        """Pass the call to the observers, with the final query, mask and bias."""
        if observers:
            with torch.no_grad():
                hiding = mask if bias is None else _hiding(bias, mask, causal)
                q, k, hiding = as_autocast(query.detach(), key.detach(), hiding)
                call = AttentionCall.in_model(
                    q, k, hiding, causal and bias is None, scaling,
                    softcap=cap if layer.inner == "eager" else None, after_cap=beta, layer=layer.number,
                )  # fmt: skip
                for observer in observers:
                    observer(call)

    if not layer.rules:
        show(query, attention_mask, bias)
        return layer.function(module, query, key, value, attention_mask, **kwargs)
    query, key, value, attention_mask = as_autocast(query, key, value, attention_mask)
    if kwargs.get("s_aux") is not None and layer.inner == "sdpa":
        raise UnsupportedError("model: sdpa leaves sinks (s_aux) out; do model.set_attn_implementation('eager') first")
    sharpener = layer.sharpener
    if cap is not None and layer.inner == "eager":

        def beta_after_cap(logits: Logits) -> Tensor:
            beta = sharpener.beta(logits)
            show(query, scaled_mask(attention_mask, beta), beta=beta)
            return beta

        return _capped_attention(module, query, key, value, attention_mask, beta_after_cap, **kwargs)
    if bias is not None:
        hiding = _hiding(bias, attention_mask, causal)
        beta = sharpener.beta(AttentionCall.in_model(query, key, hiding, False, scaling))
        beta = fitting_beta(query, hiding, beta)
        kwargs["position_bias"] = bias = (bias * beta[..., None]).to(bias.dtype)
        query = scaled_queries(query, beta)
        show(query, attention_mask, bias)
        return layer.function(module, query, key, value, attention_mask, **kwargs)
    plain = layer.inner == "sdpa" and not kwargs.get("dropout")
    # For a generated token on the CPU, the logits that were measured also give the output.
    on_cpu = query.device.type == "cpu" and query.dtype.itemsize > 2
    if plain and on_cpu and query.shape[-2] == 1 and sharpener.measures:
        logits = _single_query_logits(query, key, attention_mask, scaling)
        beta = sharpener.beta(logits)
        if observers:
            beta = fitting_beta(query, attention_mask, beta)
            show(scaled_queries(query, beta), scaled_mask(attention_mask, beta))
        return _single_query_attention(logits, beta, value), None
    if plain and not causal and not observers:
        out = sharpener.decode(query, key, value, attention_mask, scaling)
        if out is not None:
            return out.transpose(1, 2).contiguous(), None
    spans = None
    if attention_mask is not None and on_gpu(query) and sharpener.measures and is_plain(query, key, attention_mask):
        spans = spans_of(attention_mask)
    dense = attention_mask if spans is None else None
    call = AttentionCall.in_model(query, key, dense, causal, scaling, spans=spans)
    query, attention_mask = sharpener.sharpen(call, query, attention_mask)
    show(query, attention_mask)
    return layer.function(module, query, key, value, attention_mask, **kwargs)


def _flash_or_flex(
    layer: Layer, observers: list[Observer], module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """`sharp_attention` with flash or flex attention. Observed rows do not contain attention sinks."""
    if layer.repeated is not None:
        raise UnsupportedError(
            f"model: keys cannot be replicated under attn_implementation={layer.inner!r}; allowed: sdpa and eager; do "
            "model.set_attn_implementation('sdpa') first"
        )
    if observers or layer.rules:
        added = mask if isinstance(mask, Tensor) and mask.ndim == 4 else None
        reads = bool(observers) or any(rule.needs for rule in layer.sharpener.rules)
        call = _implementation_call(layer.inner, module, query, key, mask, kwargs, reads)
        if layer.rules:
            query, scaled = layer.sharpener.sharpen(call, query, added)
            mask = mask if added is None else scaled
        if observers:
            shown = call if added is None else AttentionCall.in_model(query, key, mask, False, kwargs.get("scaling"))
            visible = shown.mask if shown.spans is None else ~shown.hidden()
            q = query.detach().reshape(shown.q.shape)
            shown = replace(shown, q=q, k=shown.k.detach(), mask=visible, spans=None, layer=layer.number)
            with torch.no_grad():
                for observer in observers:
                    observer(shown)
    return layer.function(module, query, key, value, mask, **kwargs)


def _fast_path(
    layer: Layer, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: Any
) -> Any:
    """`sharp_attention` for plain logits where β, or the kernel launches that compute it, are already known.

    Returns None in all other cases, such as the first call of a layout, autocast or gradients of measured rows.
    """
    for name in ("position_bias", "softcap", "s_aux"):  # these change the logits
        if kwargs.get(name) is not None:
            return None
    sharpener = layer.sharpener
    scaling = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    uniform = sharpener.uniform
    if uniform is not None and scale > 0.0:
        return layer.function(module, query, key, value, mask, **{**kwargs, "scaling": scale * uniform})
    if autocasts(query.device.type):
        return None
    scaled = None
    if sharpener.by_constants is not None:
        scaled = sharpener.by_constants(query)
    elif on_gpu(query):
        causal = mask is None and _is_causal(layer, module, query, kwargs.get("is_causal"))
        if not causal and query.shape[2] <= MOST_QUERIES:
            out = None if kwargs.get("dropout") else sharpener.decode(query, key, value, mask, scale)
            return None if out is None else (out.transpose(1, 2).contiguous(), None)
        if mask is None:
            keys = key[:, :, : query.shape[2]] if causal and key.shape[2] > query.shape[2] else key
            scaled = sharpener.sharpen_unmasked(query, keys, 0 if causal else None, scale)
    return None if scaled is None else layer.function(module, scaled, key, value, mask, **kwargs)


def _attend_in_float32(
    layer: Layer, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> Any:
    """`_sharp_attention` of float16 inputs, computed in float32; the output is float16."""
    kwargs["position_bias"] = _in_float32(kwargs.get("position_bias"))
    with without_autocast(query.device):
        wide = query.float(), key.float(), value.float(), _in_float32(mask)
        out, weights = _sharp_attention(layer, module, *wide, **kwargs)
    return out.half(), None if weights is None else weights.half()


def _in_float32(x: Tensor | None) -> Tensor | None:
    """A mask or bias in float16 as float32, others unchanged; entries that hide a key still hide it."""
    if x is None or x.dtype != torch.float16:
        return x
    return x.float().masked_fill(hidden_by(x), torch.finfo(torch.float32).min)


def _is_causal(layer: Layer, module: nn.Module, query: Tensor, given: bool | None) -> bool:
    """Whether a missing mask means causal. To eager attention it means that every key is visible."""
    if layer.inner == "eager" or query.shape[-2] == 1:
        return False
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _hiding(bias: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """The position bias, with −inf at keys that are not visible."""
    if mask is not None and mask.is_floating_point():
        return bias + mask
    if mask is not None:
        return torch.where(mask, bias, -torch.inf)
    if causal:
        visible = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
        return torch.where(visible, bias, -torch.inf)
    return bias


def _single_query_logits(query: Tensor, key: Tensor, mask: Tensor | None, scaling: float | None) -> Logits:
    """The logits of one query `[B, H, 1, D]` per head; each key is read once for all heads that share it."""
    batch, key_heads, keys, width = key.shape
    q = query * (width**-0.5 if scaling is None else scaling)
    s = torch.bmm(q.reshape(batch * key_heads, -1, width), key.flatten(0, 1).transpose(1, 2))
    return Logits.masked(s.view(batch, -1, 1, keys), mask)


def _single_query_attention(logits: Logits, beta: Tensor, value: Tensor) -> Tensor:
    """The output `[B, 1, H, Dv]` from measured logits, without reading the keys a second time."""
    batch, key_heads, keys, width = value.shape
    weights = logits.scaled(beta).softmax(-1)
    return torch.bmm(weights.view(batch * key_heads, -1, keys), value.flatten(0, 1)).view(batch, 1, -1, width)


def _capped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    beta_of: Callable[[Logits], Tensor], *, softcap: float, scaling: float | None = None, dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The eager attention of Gemma 2 with β between the cap and the mask."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    s = torch.tanh(torch.matmul(query, key.transpose(2, 3)) * scale / softcap) * softcap
    beta = beta_of(Logits.masked(s, attention_mask))
    s = s * beta.clamp_max(largest_for(s.dtype) / softcap)[..., None].to(s.dtype)
    mask = scaled_mask(attention_mask, beta)
    weights = F.softmax(s if mask is None else s + mask, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


_REFUSED = {
    "softcap": "caps its logits, so that scaling the query does not scale the capped logits",
    "position_bias": "adds a position bias to its logits, which scaling the query does not scale",
    "cache": "reads a paged cache",
    "block_table": "reads a paged cache",
}


def _implementation_call(
    inner: str, module: nn.Module, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any], reads: bool
) -> AttentionCall:
    """A call of flash or flex attention as an `AttentionCall`: query `[B, H, Lq, D]`, key `[B, Hkv, Lk, D]`.

    Flash attention has a padding mask `[B, Lk]` or packed sequences (`cu_seq_lens_q`, or `position_ids` that start
    again), causal limits aligned to the last key, and sliding windows. Flex attention has a `BlockMask`, which is
    expanded to a boolean matrix, or an additive mask. Without `reads`, the visible keys are not needed.
    """
    for name, why in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise UnsupportedError(
                f"model: {type(module).__name__} {why} ({name}), under attn_implementation={inner!r}; allowed: eager; "
                "do model.set_attn_implementation('eager') first"
            )
    spans: Tensor | None = None
    visible: Tensor | None = None
    if reads and inner == "flex_attention":
        flex = sys.modules.get("torch.nn.attention.flex_attention")
        if flex is not None and isinstance(mask, flex.BlockMask):
            shape, device = (*mask.shape[:2], query.shape[2], key.shape[2]), str(query.device)
            visible = flex.create_mask(mask.mask_mod, *shape, device=device)
        elif mask is not None:
            visible = mask[..., : key.shape[2]]
    elif reads:
        if mask is not None and mask.shape[1] < key.shape[2]:  # a static cache, written up to here
            key = key[:, :, : mask.shape[1]]
        spans = _flash_spans(module, query, key, mask, kwargs)
    return AttentionCall.in_model(query, key, visible, False, kwargs.get("scaling"), spans=spans)


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
        place = packed_spans(*starts, queries, keys, True, device)[:, 1] - 1
    elif mask is not None:
        shown = mask.bool().to(torch.int32)
        low = shown.argmax(1, keepdim=True).to(torch.int32).expand(-1, queries)
        high = low + shown.sum(1, keepdim=True, dtype=torch.int32)
        # The spans describe one run of visible keys per row.
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
    """The starts of packed sequences among the rows and among the keys, followed by the end of the last sequence."""
    rows, keys, positions = (kwargs.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "position_ids"))
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
