"""The attention function that transformers calls while a policy is applied or somebody observes the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sharpmax.errors import UnsupportedError
from sharpmax.integrations.transformers.implementations import implementation_call, own_attention, under_its_name
from sharpmax.integrations.transformers.passes import layer_of
from sharpmax.ops.attention import MOST_QUERIES, QueryScale, Rule, Sharpener, fitting_beta, scaled_mask, scaled_queries
from sharpmax.stats.call import (
    AttentionCall,
    Logits,
    as_autocast,
    autocasts,
    hidden_by,
    largest_for,
    spans_of,
    without_autocast,
)
from sharpmax.stats.dispatch import is_plain, on_gpu

Observer = Callable[[AttentionCall], None]
"""Gets every attention call of a model, with the logits that its softmax gets: β, masks and biases are in them."""


@dataclass(eq=False)
class Observers:
    """The observers of one model. The tuple is replaced, never changed, so that a call in another thread may go on."""

    active: tuple[Observer, ...] = field(default=())

    def __deepcopy__(self, memo: Any) -> Observers:
        """Nobody observes a copy."""
        return Observers()

    def __reduce__(self) -> tuple[type[Observers], tuple[()]]:
        """Nor what comes back from a pickle."""
        return Observers, ()

    def interested(self) -> list[Observer]:
        """Those who want a call of this thread.

        An observer that has a method `wants_call` is asked by it: describing a call for nobody would cost a token that
        is generated one percent of its time.
        """
        if torch.compiler.is_compiling():
            return []
        return [one for one in self.active if getattr(one, "wants_call", _always)()]


def _always() -> bool:
    return True


@dataclass(frozen=True, eq=False)
class Repeated:
    """Indices of the keys that each row attends to, `places` `[B, Lk']`; an index may repeat, −1 is padding."""

    places: Tensor

    def keys(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, additive: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and mask over them: a row sees every copy of what it saw before (no mask is causal)."""
        places = self.places.to(key.device)
        there, chosen = (places >= 0)[:, None, None], places.clamp_min(0)
        if mask is None:
            rows = torch.arange(query.shape[-2], device=key.device)[:, None]
            mask = (chosen[:, None] <= rows)[:, None]
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, _least(query)) if additive else mask
        else:
            mask = mask.expand(len(places), -1, -1, -1)
            mask = mask.gather(3, chosen[:, None, None].expand(-1, *mask.shape[1:3], -1))
        mask = mask.masked_fill(~there, _least(query) if mask.is_floating_point() else False)
        chosen = chosen[:, None, :, None]
        key, value = (x.gather(2, chosen.expand(-1, x.shape[1], -1, x.shape[3])) for x in (key, value))
        return key, value, mask


def _least(like: Tensor) -> float:
    return float(torch.finfo(like.dtype).min)


@dataclass(eq=False)
class Layer:
    """What an attention module holds while rules are installed."""

    inner: str
    function: Callable[..., Any]
    heads: int
    rules: tuple[Rule | QueryScale, ...]
    number: int = 0
    """Which of the model's attention modules this is."""

    observers: Observers = field(default_factory=Observers)
    model: nn.Module | None = field(default=None, repr=False)
    """The model that the rules are installed in."""

    guard: RemovableHandle | None = field(default=None, repr=False)
    """The hook of that model by which passes are noted."""

    repeated: Repeated | None = None
    """Which keys count more than once, for as long as somebody says so."""

    sharpener: Sharpener = field(init=False)
    query_scale: QueryScale | None = field(init=False)

    plain: bool = field(init=False)
    """Whether PyTorch's attention is behind this layer, with rules that are made of policies."""

    def __post_init__(self) -> None:
        self.function = under_its_name(self.function, self.inner)
        self.sharpener = Sharpener(self.rules, self.heads)
        self.rules, self.query_scale = self.sharpener.rules, self.sharpener.query_scale
        self.plain = self.inner == "sdpa" and bool(self.sharpener.policies)

    @property
    def noted(self) -> bool:
        """Whether each pass through the model that begins now is noted."""
        return self.model is not None and self.guard is not None and self.guard.id in self.model._forward_pre_hooks


def sharp_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Any:
    """The attention function that transformers calls: query `[B, H, Lq, D]`, key and value `[B, Hkv, Lk, D]`."""
    layer = layer_of(module)
    if layer is None:
        # Rules are installed in another model with the same configuration, or for passes that began at another moment.
        config: Any = module.config
        own = own_attention(type(module), config._attn_implementation)
        return own(module, query, key, value, attention_mask, **kwargs)
    if layer.query_scale is not None:
        query = layer.query_scale(query)
    return _sharp_attention(layer, module, query, key, value, attention_mask, **kwargs)


def _sharp_attention(
    layer: Layer,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> Any:
    observers = layer.observers.interested() if layer.observers.active else []
    if layer.repeated is None and not observers:
        if not layer.rules:
            return layer.function(module, query, key, value, attention_mask, **kwargs)
        if layer.plain and (attention_mask is None or attention_mask.dtype == torch.bool):
            found = _quickly(layer, module, query, key, value, attention_mask, kwargs)
            if found is not None:
                return found
    if layer.inner not in ("sdpa", "eager"):
        return _handed_on(layer, module, query, key, value, attention_mask, **kwargs)
    # β times a bias, and the logits that eager attention keeps, can leave the range of float16.
    narrow = layer.inner == "eager" or kwargs.get("position_bias") is not None
    if layer.rules and narrow and as_autocast(query)[0].dtype == torch.float16:
        return _in_float32(layer, module, query, key, value, attention_mask, **kwargs)
    if layer.repeated is not None:
        key, value, attention_mask = layer.repeated.keys(query, key, value, attention_mask, layer.inner == "eager")
    if not (observers or layer.rules):
        return layer.function(module, query, key, value, attention_mask, **kwargs)
    bias, cap, scaling = kwargs.get("position_bias"), kwargs.get("softcap"), kwargs.get("scaling")
    causal = attention_mask is None and _is_causal(layer, module, query, kwargs.get("is_causal"))

    def show(query: Tensor, mask: Tensor | None, bias: Tensor | None = None, beta: Tensor | None = None) -> None:
        """Tell the observers, with the arguments as they are in the end."""
        if observers:
            with torch.no_grad():
                call = AttentionCall.in_model(
                    query.detach(), key.detach(), mask if bias is None else _hiding(bias, mask, causal),
                    causal and bias is None, scaling,
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

        return capped_attention(module, query, key, value, attention_mask, beta_after_cap, **kwargs)
    if bias is not None:
        hiding = _hiding(bias, attention_mask, causal)
        beta = sharpener.beta(AttentionCall.in_model(query, key, hiding, False, scaling))
        beta = fitting_beta(query, hiding, beta)
        kwargs["position_bias"] = bias = (bias * beta[..., None]).to(bias.dtype)
        query = scaled_queries(query, beta)
        show(query, attention_mask, bias)
        return layer.function(module, query, key, value, attention_mask, **kwargs)
    plain = layer.inner == "sdpa" and not kwargs.get("dropout")
    if plain and _is_single_query(layer, query):
        logits = single_query_logits(query, key, attention_mask, scaling)
        beta = sharpener.beta(logits)
        if observers:
            beta = fitting_beta(query, attention_mask, beta)
            show(scaled_queries(query, beta), scaled_mask(attention_mask, beta))
        return single_query_attention(logits, beta, value), None
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


def _handed_on(
    layer: Layer, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> Any:
    """`sharp_attention` in front of flash or flex attention, which get β·q; sinks are no part of what a row shows."""
    if layer.repeated is not None:
        raise UnsupportedError(
            f"model: keys cannot be replicated under attn_implementation={layer.inner!r}; allowed: sdpa and eager; do "
            "model.set_attn_implementation('sdpa') first"
        )
    observers = layer.observers.interested() if layer.observers.active else []
    if observers or layer.rules:
        added = mask if isinstance(mask, Tensor) and mask.ndim == 4 else None
        reads = bool(observers) or any(rule.needs for rule in layer.sharpener.rules)
        call = implementation_call(layer.inner, module, query, key, mask, kwargs, reads=reads)
        if layer.rules:
            query, scaled = layer.sharpener.sharpen(call, query, added)
            mask = mask if added is None else scaled
        if observers:
            seen = call if added is None else AttentionCall.in_model(query, key, mask, False, kwargs.get("scaling"))
            visible = seen.mask if seen.spans is None else ~seen.hidden()
            q = query.detach().reshape(seen.q.shape)
            seen = replace(seen, q=q, k=seen.k.detach(), mask=visible, spans=None, layer=layer.number)
            with torch.no_grad():
                for observer in observers:
                    observer(seen)
    return layer.function(module, query, key, value, mask, **kwargs)


_PARTS_OF_LOGITS = ("position_bias", "softcap", "s_aux")


def _quickly(
    layer: Layer, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: Any
) -> Any:
    """`sharp_attention` where logits are products alone, and β or the launches that find it are known beforehand.

    None where there is more to do: the first call of a layout, float16, autocast, gradients of measured rows.
    """
    for name in _PARTS_OF_LOGITS:
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
    if sharpener.constants:
        scaled = sharpener.by_constants(query)
    elif on_gpu(query):
        causal = mask is None and _is_causal(layer, module, query, kwargs.get("is_causal"))
        if not causal and query.shape[2] <= MOST_QUERIES:
            out = None if kwargs.get("dropout") else sharpener.decode(query, key, value, mask, scale)
            return None if out is None else (out.transpose(1, 2).contiguous(), None)
        if mask is None:
            seen = key[:, :, : query.shape[2]] if causal and key.shape[2] > query.shape[2] else key
            scaled = sharpener.known(query, seen, 0 if causal else None, scale)
    return None if scaled is None else layer.function(module, scaled, key, value, mask, **kwargs)


def _in_float32(
    layer: Layer, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> Any:
    """`_sharp_attention` of inputs in float16, computed in float32; the output is in float16 again."""
    if kwargs.get("position_bias") is not None:
        kwargs["position_bias"] = _widened(kwargs["position_bias"])
    with without_autocast(query.device):
        wide = query.float(), key.float(), value.float(), _widened(mask)
        out, weights = _sharp_attention(layer, module, *wide, **kwargs)
    return out.half(), None if weights is None else weights.half()


def _widened(x: Tensor | None) -> Tensor | None:
    """Floats in float32; what hides a key in a mask of float16 still hides it."""
    if x is None or x.dtype != torch.float16:
        return x
    return x.float().masked_fill(hidden_by(x), torch.finfo(torch.float32).min)


def _is_single_query(layer: Layer, query: Tensor) -> bool:
    """A generated token on the CPU whose logits are measured: cheaper to finish with them than to start again."""
    on_cpu = query.device.type == "cpu" and query.dtype.itemsize > 2
    return on_cpu and query.shape[-2] == 1 and layer.sharpener.measures


def _is_causal(layer: Layer, module: nn.Module, query: Tensor, given: bool | None) -> bool:
    """What a missing mask means: to sdpa it may mean causal, to eager attention that every key is visible."""
    if layer.inner == "eager" or query.shape[-2] == 1:
        return False
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _hiding(bias: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """A position bias, −inf where its key is not visible."""
    if mask is not None and mask.is_floating_point():
        return bias + mask
    if mask is not None:
        return torch.where(mask, bias, -torch.inf)
    if causal:
        visible = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
        return torch.where(visible, bias, -torch.inf)
    return bias


def single_query_logits(query: Tensor, key: Tensor, mask: Tensor | None, scaling: float | None) -> Logits:
    """The logits of one query `[B, H, 1, D]` per head; each key is read once for all heads that share it."""
    batch, key_heads, keys, width = key.shape
    q = query * (width**-0.5 if scaling is None else scaling)
    s = torch.bmm(q.reshape(batch * key_heads, -1, width), key.flatten(0, 1).transpose(1, 2))
    return Logits.masked(s.view(batch, -1, 1, keys), mask)


def single_query_attention(logits: Logits, beta: Tensor, value: Tensor) -> Tensor:
    """The output `[B, 1, H, Dv]` from logits that were measured before: reading every key twice would cost more."""
    batch, key_heads, keys, width = value.shape
    weights = logits.scaled(beta).softmax(-1)
    return torch.bmm(weights.view(batch * key_heads, -1, keys), value.flatten(0, 1)).view(batch, 1, -1, width)


def capped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    beta_of: Callable[[Logits], Tensor],
    *,
    softcap: float,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The eager attention of Gemma 2, step by step, with β between the cap and the mask."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    s = torch.tanh(torch.matmul(query, key.transpose(2, 3)) * scale / softcap) * softcap
    beta = beta_of(Logits.masked(s, attention_mask))
    s = s * beta.clamp_max(largest_for(s.dtype) / softcap)[..., None].to(s.dtype)
    mask = scaled_mask(attention_mask, beta)
    if mask is not None:
        s = s + mask
    weights = F.softmax(s, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights
