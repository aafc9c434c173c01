"""The attention function that transformers calls while a policy is applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sharpmax.errors import UnsupportedError
from sharpmax.integrations.transformers.logits import (
    COUNT,
    DenseLogits,
    Logits,
    capped_attention,
    single_query_attention,
    single_query_logits,
)
from sharpmax.integrations.transformers.observers import Seen, Watchers
from sharpmax.integrations.transformers.passes import layer_of
from sharpmax.integrations.transformers.rules import PolicyRule, Rule
from sharpmax.integrations.transformers.support import own_attention
from sharpmax.ops.attention import (
    differentiates,
    fitting_beta,
    learns,
    scaled_mask,
    scaled_queries,
    serves,
    sharpened,
    warn_now_and_then,
)
from sharpmax.ops.decode import MOST_QUERIES
from sharpmax.ops.kernels import decode_launch
from sharpmax.policies.base import Policy, Said
from sharpmax.policies.closed_form import closed_form
from sharpmax.policies.constant import Constant
from sharpmax.stats.call import as_autocast, as_beta, floats_at_least_32, hidden_by, without_autocast


@dataclass(frozen=True)
class Lowered:
    """What the rules of a layer say of each of its heads; plain values, which a compiler takes for constants."""

    policies: tuple[Policy, ...]
    needs: tuple[str, ...]
    code: str
    solved: bool
    """Whether some β is the solution of an equation."""

    smooth: bool
    """Whether the kernels know the gradient of β."""

    said: Said = field(default_factory=Said, repr=False, compare=False)
    """What the model has been warned of."""

    def newest(self, logits: Logits, value: Tensor) -> Tensor | None:
        """Attention of a few queries to keys and values that are read once, `[B, Lq, H, D]`; None where that cannot be.

        Which keys a row sees is what `logits` says. A missing mask hides nothing here, however few queries there are:
        encoders and cross-attention have few of them too.
        """
        q, k, mask = logits.q, logits.k, logits.mask
        if logits.causal or q.shape[2] > MOST_QUERIES or not _on_gpu(q) or decode_launch.obstacle(q, value) is not None:
            return None
        if learns(q, k, value, mask):
            return None
        scale = q.shape[-1] ** -0.5 if logits.scaling is None else logits.scaling
        out: Tensor = decode_launch.decode_op(q, k, value, None, None, mask, scale, self.code, False, causal=False)[0]
        return out.transpose(1, 2).contiguous()

    def sharpened(self, logits: Logits) -> tuple[Tensor, Tensor | None] | None:
        """β·q and the mask that goes with it; None where the kernels cannot be used."""
        q, mask = logits.q, logits.mask
        if self.solved or not _on_gpu(q) or (learns(q, logits.k, mask) and not differentiates(mask, self.smooth)):
            return None
        problem = logits.problem()
        if not serves(problem, q):
            return None
        counts = None if mask is None else problem.counts()
        queries, beta, parts = sharpened(problem, q, counts, self.needs, self.code)
        if not torch.compiler.is_compiling():
            warn_now_and_then(self.policies, problem, parts, self.said)
        if mask is not None and mask.is_floating_point():
            beta = fitting_beta(q, mask, beta)
            queries = scaled_queries(q, beta)
        return queries, scaled_mask(mask, beta)


def _on_gpu(q: Tensor) -> bool:
    return q.is_cuda


def lowered(rules: Sequence[Rule], heads: int) -> Lowered | None:
    """The rules of a layer in that form, if they are made of policies that have one."""
    policies: list[Policy] = [Constant(1.0)] * heads
    said = Said()
    for rule in rules:
        if not isinstance(rule, PolicyRule):
            return None
        said = rule.said
        for place, head in enumerate(range(heads) if rule.heads is None else rule.heads):
            policies[head] = rule.policies[min(place, len(rule.policies) - 1)]
    form = closed_form(policies) if rules else None
    if form is None:
        return None
    return Lowered(tuple(policies), tuple(sorted(form.needs)), form.code, form.solved, form.smooth, said)


@dataclass(frozen=True, eq=False)
class Repeated:
    """Keys in the order and as often as they are to be seen: `places` `[B, Lk']` among the keys, −1 for none."""

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
    rules: tuple[Rule, ...]
    number: int = 0
    """Which of the model's attention modules this is."""

    watchers: Watchers = field(default_factory=Watchers)
    model: nn.Module | None = field(default=None, repr=False)
    """The model that the rules are installed in."""

    guard: RemovableHandle | None = field(default=None, repr=False)
    """The hook of that model by which passes are noted."""

    repeated: Repeated | None = None
    """Which keys count more than once, for as long as somebody says so."""

    _places: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict)
    lowered: Lowered | None = field(init=False)
    """The same rules as kernels on a GPU can be given them."""

    def __post_init__(self) -> None:
        self.lowered = lowered(self.rules, self.heads)

    @property
    def measures(self) -> bool:
        """Whether a rule needs more of a row than its mask tells."""
        return any(rule.needs - COUNT for rule in self.rules)

    @property
    def noted(self) -> bool:
        """Whether each pass through the model that begins now is noted."""
        return self.model is not None and self.guard is not None and self.guard.id in self.model._forward_pre_hooks

    def beta(self, logits: Logits | DenseLogits) -> Tensor:
        """β of every row, broadcasting to `[B, H, Lq]`, in the dtype of statistics."""
        dtype = floats_at_least_32(logits.like.dtype)
        if len(self.rules) == 1 and self.rules[0].heads is None:
            rule = self.rules[0]
            return as_beta(rule.beta(*logits.statistics(rule.needs, None)), dtype)
        beta = logits.like.new_ones(logits.rows, dtype=dtype)
        for number, rule in enumerate(self.rules):
            places = self._place(number, beta.device)
            part = as_beta(rule.beta(*logits.statistics(rule.needs, places)), dtype)
            beta = beta.index_copy(1, places, part.expand(beta.shape[0], len(places), beta.shape[2]))
        return beta

    def _place(self, number: int, device: torch.device) -> Tensor:
        """The heads of a rule as an index, made once per device."""
        found = self._places.get((number, device))
        if found is None:
            heads = self.rules[number].heads
            found = torch.tensor(range(self.heads) if heads is None else heads, device=device)
            if not torch.compiler.is_compiling():
                self._places[number, device] = found
        return found


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
    # β times a bias, and the logits that eager attention keeps, can leave the range of float16.
    narrow = layer.inner == "eager" or kwargs.get("position_bias") is not None
    if layer.rules and narrow and as_autocast(query)[0].dtype == torch.float16:
        return _in_float32(module, query, key, value, attention_mask, **kwargs)
    if layer.repeated is not None:
        key, value, attention_mask = layer.repeated.keys(query, key, value, attention_mask, layer.inner == "eager")
    looking = layer.watchers.looking()
    if not (looking or layer.rules):
        return layer.function(module, query, key, value, attention_mask, **kwargs)
    bias, cap, scaling = kwargs.get("position_bias"), kwargs.get("softcap"), kwargs.get("scaling")
    causal = attention_mask is None and _is_causal(layer, module, query, kwargs.get("is_causal"))

    def show(query: Tensor, mask: Tensor | None, bias: Tensor | None = None, beta: Tensor | None = None) -> None:
        """Tell whoever watches, with the arguments as they are in the end."""
        if looking:
            with torch.no_grad():
                call = Seen(
                    layer.number, query.detach(), key.detach(), mask if bias is None else _hiding(bias, mask, causal),
                    causal and bias is None, scaling, cap if layer.inner == "eager" else None, beta,
                )  # fmt: skip
                for watcher in looking:
                    watcher(call)

    if not layer.rules:
        show(query, attention_mask, bias)
        return layer.function(module, query, key, value, attention_mask, **kwargs)
    query, key, value, attention_mask = as_autocast(query, key, value, attention_mask)
    if kwargs.get("s_aux") is not None:
        raise UnsupportedError("model: attention sinks (s_aux) are logits that scaling the query does not scale")
    if cap is not None and layer.inner == "eager":

        def capped_beta(logits: DenseLogits) -> Tensor:
            beta = layer.beta(logits)
            show(query, scaled_mask(attention_mask, beta), beta=beta)
            return beta

        return capped_attention(module, query, key, value, attention_mask, capped_beta, **kwargs)
    if bias is None and _is_single_query(layer, query, kwargs.get("dropout")):
        dense = single_query_logits(query, key, attention_mask, scaling)
        beta = layer.beta(dense)
        if looking:
            beta = fitting_beta(query, attention_mask, beta)
            show(scaled_queries(query, beta), scaled_mask(attention_mask, beta))
        return single_query_attention(dense, beta, value), None
    if bias is None:
        logits = Logits(query, key, attention_mask, causal, scaling)
        if layer.lowered is not None and not looking:
            plain = layer.inner == "sdpa" and not kwargs.get("dropout")
            newest = layer.lowered.newest(logits, value) if plain else None
            if newest is not None:
                return newest, None
            if (found := layer.lowered.sharpened(logits)) is not None:
                return layer.function(module, found[0], key, value, found[1], **kwargs)
        beta = fitting_beta(query, attention_mask, layer.beta(logits))
        attention_mask = scaled_mask(attention_mask, beta)
    else:
        hiding = _hiding(bias, attention_mask, causal)
        beta = fitting_beta(query, hiding, layer.beta(Logits(query, key, hiding, False, scaling)))
        kwargs["position_bias"] = bias = (bias * beta[..., None]).to(bias.dtype)
    query = scaled_queries(query, beta)
    show(query, attention_mask, bias)
    return layer.function(module, query, key, value, attention_mask, **kwargs)


def _in_float32(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> Any:
    """`sharp_attention` of inputs in float16, computed in float32; the output is in float16 again."""
    if kwargs.get("position_bias") is not None:
        kwargs["position_bias"] = _widened(kwargs["position_bias"])
    with without_autocast(query.device):
        out, weights = sharp_attention(module, query.float(), key.float(), value.float(), _widened(mask), **kwargs)
    return out.half(), None if weights is None else weights.half()


def _widened(x: Tensor | None) -> Tensor | None:
    """Floats in float32; what hides a key in a mask of float16 still hides it."""
    if x is None or x.dtype != torch.float16:
        return x
    return x.float().masked_fill(hidden_by(x), torch.finfo(torch.float32).min)


def _is_single_query(layer: Layer, query: Tensor, dropout: float | None) -> bool:
    """A generated token on the CPU whose logits are measured: cheaper to finish with them than to start again."""
    plain = layer.inner == "sdpa" and not dropout
    return layer.measures and plain and query.shape[-2] == 1 and query.device.type == "cpu" and query.dtype.itemsize > 2


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
