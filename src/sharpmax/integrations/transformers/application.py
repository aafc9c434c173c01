"""`apply`, `applied` and `restore`: put a policy into a transformers model and take it out."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from sharpmax.errors import UnsupportedError, reject
from sharpmax.integrations.torch_modules import applied_to, apply_to_module
from sharpmax.integrations.torch_modules import put as put_module
from sharpmax.integrations.transformers.attention import OutputGain
from sharpmax.integrations.transformers.interface import install, installed, modules_of, put, restoring
from sharpmax.integrations.transformers.support import check_all_reached, check_model, is_torch_module
from sharpmax.ops.sharpen import QueryScale, Rule, policies_of, rules_of
from sharpmax.policies.base import Policy, Warned
from sharpmax.policies.basic import OutputScale
from sharpmax.policies.per_head import check_shape
from sharpmax.policies.registry import AUTO, packaged_for_config, resolve_policy
from sharpmax.policies.registry import BESIDE as FILE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def policy_for_model(model: Any, policy: Policy | str | os.PathLike[str] | None, *, foldable: bool = False) -> Policy:
    """The policy that an argument names; "auto" is the packaged policy made for this model."""
    if isinstance(policy, str) and policy == AUTO:
        return packaged_for_config(check_model(model).config, foldable=foldable)[1]
    return resolve_policy(policy)


def save_with_policy(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """`save_pretrained` while a policy is applied: save the model without the policy, and the policy beside it."""
    state = installed(model)
    given = inspect.signature(type(model).save_pretrained).bind(model, *args, **kwargs).arguments
    if given.get("push_to_hub"):
        raise UnsupportedError(
            "push_to_hub: save_pretrained uploads before the policy is written; "
            "allowed: model.push_to_hub(...), which uploads the policy too"
        )
    own = (state.own if state is not None else {}).get("save_pretrained", partial(type(model).save_pretrained, model))
    own(*args, **kwargs)
    if state is not None and state.policy is not None and given.get("is_main_process", True):
        state.policy.save(Path(given["save_directory"]) / FILE)


M = TypeVar("M", bound=nn.Module)

_warned: WeakKeyDictionary[nn.Module, Warned] = WeakKeyDictionary()
"""The warnings that each model has given; they are not repeated when a policy is applied again."""


def apply(
    model: M,
    policy: Policy | str | os.PathLike[str] | None,
    *,
    example_inputs: Any = None,
    skip_unsupported: bool = False,
) -> M:
    """Let `policy` choose the temperature of every attention row of a model; return the model.

    `model` is a transformers model, or any torch module that attends by `scaled_dot_product_attention` or
    `nn.MultiheadAttention`. Such a module needs `example_inputs` for one forward pass: a tensor, a tuple of arguments
    or a mapping of keyword arguments. The attention calls of that pass are the rows of a `PerHead` policy;
    `sharpmax.integrations.torch_modules.call_sites` lists them. The rest of this text is about transformers models.

    `policy` is a policy, its name, the path of a policy file, or a folder written by `save_pretrained` of a model with
    a policy. "auto" is the packaged policy made for this model; without one, it is an error. None changes nothing.
    Weights and configuration do not change, and caches, beam search, padding and training work as before. The new
    policy replaces the old one. The policy cannot change while a thread runs the model.

    A `PerHead` policy has one row per attention module, in the order of `model.modules()`: in a decoder the layers,
    `module.layer_idx`; in an encoder–decoder model the encoder's layers, then self-attention and cross-attention of
    each decoder layer. Any other policy acts on every head of all modules, including cross-attention. In a
    sliding-window layer, n is at most the window.

    The model keeps its attention implementation (sdpa, eager, flash_attention_2, flash_attention_3, flex_attention),
    which gets β·q for q. Attention sinks (gpt-oss) keep their logit: β scales the other logits, and row statistics are
    those of the real keys.

    A policy other than the identity replaces the model's own temperature by position (Llama 4, Ministral 3, Mistral 4,
    Inkling), which is switched off in every layer while the policy is applied. The policy None gives the model as
    published, `policies.from_config(model.config)` its own rule.

    Modules that attend without transformers' attention interface (`nn.MultiheadAttention`, attention written out) raise
    an `UnsupportedError` that names them. With `skip_unsupported=True` they keep β = 1 and have no row in a `PerHead`
    policy. Probing and capturing then leave them out, too.

    While a policy is applied, `model.save_pretrained` also writes `sharpmax_policy.json` beside the weights, which load
    without sharpmax. With gradient checkpointing, keep the policy applied until `backward` is done.

    >>> import sharpmax.integrations.transformers as hf
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    ...                      num_attention_heads=4)
    >>> model = hf.apply(LlamaForCausalLM(config), "paper")
    >>> hf.policy_of(model).kind
    'polynomial'
    """
    if is_torch_module(model):
        return apply_to_module(model, resolve_policy(policy), example_inputs, skip_unsupported=skip_unsupported)
    if example_inputs is not None:
        reject("example_inputs", type(example_inputs).__name__, "None for a transformers model")
    language_model = check_model(model)
    chosen = policy_for_model(language_model, policy)
    if not skip_unsupported:
        check_all_reached(language_model)
    modules = modules_of(language_model, skip_unsupported=skip_unsupported)
    check_shape(chosen, [one.heads for one in modules], type(model).__name__)
    warned = _warned.setdefault(model, Warned())
    install(
        language_model,
        lambda layer: _rules_of(policies_of(chosen, layer), modules[layer].heads, warned),
        policy=chosen,
        methods=_METHODS,
        skip_unsupported=skip_unsupported,
    )
    return model


def _rules_of(policies: Sequence[Policy], heads: int, warned: Warned) -> tuple[Rule | QueryScale | OutputGain, ...]:
    """The rules of a layer with `heads` heads, and the scale of their outputs."""
    scales = [one.scale if isinstance(one, OutputScale) else 1.0 for one in policies]
    rules = rules_of([one.policy if isinstance(one, OutputScale) else one for one in policies], warned)
    if all(scale == 1.0 for scale in scales):
        return rules
    return (*rules, OutputGain(scales if len(scales) == heads else scales * heads))


@contextmanager
def applied(
    model: M,
    policy: Policy | str | os.PathLike[str] | None,
    *,
    example_inputs: Any = None,
    skip_unsupported: bool = False,
) -> Iterator[M]:
    """`apply` for a `with` block; afterwards the model has the policy that it had before, if any.

    Blocks can be nested. Until the outermost block ends, another thread or task cannot change the policy of a
    transformers model: `applied`, `apply` and `restore` raise an `UnsupportedError` there.
    """
    if is_torch_module(model):
        before = applied_to(model)
        try:
            yield apply(model, policy, example_inputs=example_inputs, skip_unsupported=skip_unsupported)
        finally:
            put_module(model, before)
        return
    with restoring(check_model(model)):
        yield apply(model, policy, example_inputs=example_inputs, skip_unsupported=skip_unsupported)


def restore(model: M) -> M:
    """Remove any policy from the model, which is then exactly as it was before; return the model."""
    if is_torch_module(model):
        put_module(model, None)
    else:
        put(check_model(model), None)
    return model


def policy_of(model: nn.Module) -> Policy | None:
    """The policy applied to a model, or None."""
    state = applied_to(model) if is_torch_module(model) else installed(check_model(model))
    return None if state is None else state.policy


def _no_other_attention(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError(
        "attn_implementation: it cannot change while a policy is applied; "
        "do sharpmax.restore(model) first and apply the policy again afterwards"
    )


def _no_continuous_batching(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError(
        "generate_batch: continuous batching packs several prompts into one row of keys through kernels of its own, "
        "which a policy cannot reach; use model.generate, or fold a constant policy into the weights (sharpmax.fold)"
    )


# Methods of the model instance while a policy is applied.
_METHODS = {
    "save_pretrained": save_with_policy,
    "set_attn_implementation": _no_other_attention,
    "init_continuous_batching": _no_continuous_batching,
    "generate_batch": _no_continuous_batching,
}
