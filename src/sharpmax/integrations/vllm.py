"""vLLM plugin: `SHARPMAX_POLICY=policy.json vllm serve MODEL` runs the model with a policy.

vLLM loads it in each of its processes (entry point `vllm.general_plugins`). Without the variable it does nothing. With
it, every attention backend is replaced by a subclass that multiplies the query by β before the backend's own kernel.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sharpmax.errors import ArgumentError, SharpmaxError, UnsupportedError
from sharpmax.ops.sharpen import COUNT, Sharpener, policies_of, rules_of, scaled_queries
from sharpmax.policies.base import Policy, Warned
from sharpmax.policies.per_head import PerHead, check_shape
from sharpmax.policies.registry import AUTO, from_config, load_policy, packaged_for_config
from sharpmax.stats.call import AttentionCall

VARIABLE = "SHARPMAX_POLICY"
"""The environment variable that names the policy: `auto`, or what `sharpmax.load_policy` takes."""

TESTED = ("0.32.0",)
"""The versions of vLLM that the tests run on."""

BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN", "FLASHINFER")
"""The attention backends that a policy can run in."""

_SMALL = 1e6
"""Smaller β cannot take a query of float32 or bfloat16 out of its range."""

_FOLD = "fold a constant policy into the weights instead (sharpmax fold)"


def register() -> None:
    """Replace vLLM's attention backends if the variable names a policy; called by vLLM, more than once."""
    if not os.environ.get(VARIABLE):
        return
    import vllm
    from vllm.logger import init_logger
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    name, log = os.environ[VARIABLE], init_logger("vllm.sharpmax")
    with _variable_named():
        described = "the packaged policy of the model" if name == AUTO else load_policy(name).describe()
    if vllm.__version__.split("+")[0] not in TESTED:
        log.warning("sharpmax is tested with vLLM %s, this is %s", ", ".join(TESTED), vllm.__version__)
    log.info("%s: %s", VARIABLE, described)
    for backend in AttentionBackendEnum:
        if backend.value:
            register_backend(backend, f"{__name__}.{backend.name}")


def __getattr__(name: str) -> Any:
    """The subclass of a backend, by the backend's name: vLLM looks it up when it needs it."""
    if not name.isupper():
        raise AttributeError(name)
    return _backend(name)


@contextmanager
def _variable_named() -> Iterator[None]:
    """Let errors begin with the name of the variable."""
    try:
        yield
    except (SharpmaxError, OSError) as problem:
        raise ArgumentError(f"{VARIABLE}: {problem}") from None


@functools.cache
def _backend(name: str) -> type:
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if name not in AttentionBackendEnum.__members__:
        raise AttributeError(name)
    base = resolve_obj_by_qualname(AttentionBackendEnum[name].value)

    def implementation() -> type:
        if name not in BACKENDS:
            kind = "multi-head latent attention, " if "MLA" in name else ""
            raise UnsupportedError(
                f"{VARIABLE}: no policy can run in vLLM's backend {name} ({kind}--attention-backend); allowed: "
                f"{', '.join(BACKENDS)}, or {_FOLD}"
            )
        return _implementation(base.get_impl_cls())

    return type(name, (base,), {"__module__": __name__, "get_impl_cls": staticmethod(implementation)})


@functools.cache
def _implementation(base: type) -> type:
    return type(f"Sharp{base.__name__}", (SharpAttention, base), {"__module__": __name__})


class SharpAttention:
    """What a subclass of a backend's implementation adds to it: β times the query."""

    sharpener: Sharpener

    def __init__(self, *args: Any, **options: Any) -> None:
        from vllm.config import get_current_vllm_config

        super().__init__(*args, **options)
        self._config = get_current_vllm_config()
        self._order: Tensor | None = None
        self._constants: dict[Any, tuple[Tensor, bool]] = {}

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take the rules of this layer and this rank's heads; all layers exist by now."""
        from vllm.distributed import get_tensor_model_parallel_rank

        super().process_weights_after_loading(act_dtype)  # type: ignore[misc]
        policy, layers = _policy_and_layers(self._config)
        number, layer = next(found for found in enumerate(layers) if found[1].impl is self)
        policies = policies_of(policy, number)
        if len(policies) > 1:
            first = get_tensor_model_parallel_rank() * layer.num_heads
            policies = policies[first : first + layer.num_heads]
        self.sharpener = Sharpener(rules_of(policies, _warned), layer.num_heads)
        self._constants.clear()
        self._needs = frozenset[str]().union(*(rule.needs for rule in self.sharpener.rules))
        self._measures = bool(self._needs - COUNT)
        _check_backend(layer.backend.name, self._needs)
        self._window = layer.sliding_window
        self._shared = policy if len(policies) == 1 else self.sharpener

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any, *args: Any,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        """The backend's own attention with β·q in place of `query` `[tokens, heads, D]`; no metadata: a trial run."""
        if self.sharpener.query_scale is not None:
            query = self.sharpener.query_scale(query.transpose(0, 1)).transpose(0, 1).contiguous()
        if attn_metadata is not None and self.sharpener.rules:
            if self._measures:
                beta, small = self._measured(layer, query, kv_cache, attn_metadata), False
            else:
                beta, small = self._beta(attn_metadata, query)
            query = (query * beta[..., None]).to(query.dtype) if small else scaled_queries(query, beta)
        out: Tensor = super().forward(layer, query, key, value, kv_cache, attn_metadata, *args, **options)  # type: ignore[misc]
        return out

    def _beta(self, metadata: Any, query: Tensor) -> tuple[Tensor, bool]:
        """β `[tokens or 1, heads]` of rules that read the number of keys alone; whether no β·q can leave its range.

        Constants are kept for good, others for this step, in which layers with the same rules share them.
        """
        kept = vars(metadata).setdefault("sharpmax", {}) if self._needs else self._constants
        place = (self._shared, self._window) if self._needs else query.device
        if place not in kept:
            heads, tokens = query.shape[1], query.shape[0] if self._needs else 1
            spans = torch.zeros(1, 2, tokens, dtype=torch.int32, device=query.device)
            if self._needs:
                spans[0, 1] = self._counts(metadata, tokens)
            # Keys without memory behind them: as many as there may be, so that the spans alone limit what rows see.
            keys = query.new_empty(()).expand(1, 1, 1 << 30, 1)
            rows = query.new_empty(()).expand(1, 1, heads, tokens, 1)
            call = AttentionCall(rows, keys, None, None, 1.0, (1, heads, tokens), spans=spans)
            beta = self.sharpener.beta(call).expand(1, heads, tokens)[0].T.contiguous()
            # On a GPU to look would mean to wait for it, and scaling is one launch there.
            small = beta.device.type == "cpu" and query.dtype != torch.float16 and float(beta.max()) < _SMALL
            kept[place] = beta, small
        found: tuple[Tensor, bool] = kept[place]
        return found

    def _counts(self, metadata: Any, tokens: int) -> Tensor:
        """Visible keys of every token: its sequence's length less the tokens that come after it there."""
        ends, lengths = metadata.query_start_loc[1:], metadata.seq_lens
        token = torch.arange(tokens, device=ends.device, dtype=ends.dtype)
        sequence = torch.searchsorted(ends, token, right=True).clamp_max(lengths.shape[0] - 1)
        counts = (lengths[sequence] - ends[sequence] + token + 1).clamp_min(1)
        visible: Tensor = counts if self._window is None else counts.clamp_max(self._window)
        return visible

    def _measured(self, layer: Any, query: Tensor, kv_cache: Tensor, metadata: Any) -> Tensor:
        """β `[tokens, heads]` of rules that read the row: each sequence is measured over its keys in the cache."""
        beta = query.new_ones(query.shape[:2], dtype=torch.float32)
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        for start, end, length, blocks in zip(starts, starts[1:], lengths, metadata.block_table, strict=False):
            if end == start:
                continue
            keys = self._keys(layer, kv_cache, blocks, length)[None]
            queries = query[start:end].transpose(0, 1)[None]
            call = AttentionCall.of(queries, keys, causal="lower-right", scale=self.scale, enable_gqa=True)  # type: ignore[attr-defined]
            if self._window is not None:
                last = torch.arange(length - (end - start) + 1, length + 1, dtype=torch.int32)
                call = replace(call, spans=torch.stack(((last - self._window).clamp_min(0), last))[None])
            beta[start:end] = self.sharpener.beta(call).expand(1, query.shape[1], end - start)[0].T
        return beta

    def _keys(self, layer: Any, kv_cache: Tensor, blocks: Tensor, length: int) -> Tensor:
        """The keys of one sequence, `[key heads, length, D]`, out of the blocks of the cache."""
        _, heads, size, _ = kv_cache.shape
        if self._order is None:
            self._order = self._key_order(layer, kv_cache)
        chosen = kv_cache[blocks[: -(-length // size)].long()].flatten(2)[..., self._order]
        return chosen.view(-1, heads, size, self._order.numel() // size).transpose(0, 1).flatten(1, 2)[:, :length]

    def _key_order(self, layer: Any, kv_cache: Tensor) -> Tensor:
        """Where in a block of the cache the numbers of its keys are, by slot and dimension.

        It depends on the processor. So keys whose numbers say where they come from are stored in a block of its own
        and looked up, 7 bits at a time: bfloat16 has no more digits.
        """
        _, heads, size, width = kv_cache.shape
        slots, total = torch.arange(size), size * width // 2
        codes = torch.arange(total).view(size, 1, width // 2).expand(-1, heads, -1)
        found = torch.zeros(size * width, dtype=torch.int64)
        for shift in range(0, total.bit_length(), 7):
            cache = torch.zeros(1, *kv_cache.shape[1:], dtype=kv_cache.dtype)
            digits = (codes >> shift & 127).to(kv_cache.dtype).contiguous()
            # Values are negative, so that no place of theirs is taken for a key's.
            self.do_kv_cache_update(layer, digits, torch.full_like(digits, -1.0), cache, slots)  # type: ignore[attr-defined]
            found += torch.where(cache[0, 0].flatten() < 0, -total, cache[0, 0].flatten().long() << shift)
        places = (found >= 0).nonzero().flatten()
        order = places[found[places].argsort()]
        if not torch.equal(found[order], torch.arange(total)):
            raise UnsupportedError(
                f"{VARIABLE}: how vLLM stores keys on this processor is not known, and this policy reads them; use a "
                "policy of constants or of the length"
            )
        return order


_warned = Warned()


def _policy_and_layers(config: Any) -> tuple[Policy, list[Any]]:
    """The policy of a model and the attention layers of this rank in their order; what cannot be right is refused."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    model, parallel, name = config.model_config, config.parallel_config, os.environ[VARIABLE]
    with _variable_named():
        policy = packaged_for_config(model.hf_config, model.model)[1] if name == AUTO else load_policy(name)
    stages = parallel.pipeline_parallel_size
    reasons = {
        "speculative decoding (--speculative-config)": config.speculative_config is not None,
        "a multimodal model": model.is_multimodal_model,
        "cascade attention (remove --no-disable-cascade-attn)": not getattr(model, "disable_cascade_attn", True),
        "context parallelism": parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1,
        "a policy per head with --pipeline-parallel-size": stages > 1 and isinstance(policy, PerHead),
        "a model with a temperature rule of its own": from_config(model.hf_text_config) is not None,
    }
    layers = []
    for where, layer in config.compilation_config.static_forward_context.items():
        if not isinstance(layer, AttentionLayerBase) or isinstance(layer, MambaBase):
            continue
        layers.append(layer)
        impl: Any = layer.impl
        reasons[f"{where}, a {type(layer).__name__}"] = type(layer) is not Attention or layer.attn_type != "decoder"
        reasons[f"{where}, in vLLM's {type(impl).__name__}"] = not isinstance(impl, SharpAttention)
        reasons[f"logits that {where} caps (softcap)"] = bool(getattr(impl, "logits_soft_cap", None))
        reasons[f"a position bias in {where} (ALiBi)"] = getattr(impl, "alibi_slopes", None) is not None
        reasons[f"attention sinks in {where}"] = getattr(layer, "has_sink", False)
        dtype, quantised = getattr(layer, "kv_cache_dtype", "auto"), getattr(layer, "query_quant", None) is not None
        fp8 = quantised or dtype not in ("auto", "float16", "bfloat16")
        reasons[f"fp8 queries or keys (--kv-cache-dtype {dtype})"] = fp8
    if found := next((reason for reason, there in reasons.items() if there), None):
        raise UnsupportedError(f"{VARIABLE}: no policy can run with {found}; {_FOLD}")
    heads = [layer.num_heads * parallel.tensor_parallel_size for layer in layers]
    with _variable_named():
        check_shape(policy, heads, str(model.served_model_name or model.model))
    return policy, layers


def _check_backend(name: str, needs: frozenset[str]) -> None:
    """Refuse a rule that a backend cannot run."""
    if needs - COUNT and name != "CPU_ATTN":
        raise UnsupportedError(
            f"{VARIABLE}: the policy reads {', '.join(sorted(needs - COUNT))} of every row, which the plugin measures "
            "in CPU_ATTN alone; use a policy of constants (sharpmax calibrate --foldable) or of the length"
        )
    if needs and name == "FLASHINFER":
        raise UnsupportedError(
            f"{VARIABLE}: FLASHINFER does not say how long the sequences are, which the policy reads; "
            "use --attention-backend FLASH_ATTN"
        )
