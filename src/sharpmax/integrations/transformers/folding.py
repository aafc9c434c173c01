"""`fold`: multiply a constant per head into the query weights, and compare the result with the applied policy."""

from __future__ import annotations

import copy
import inspect
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sharpmax.errors import ArgumentError, UnsupportedError, reject
from sharpmax.integrations.constants import weight_factors
from sharpmax.integrations.torch_modules import evaluating
from sharpmax.integrations.transformers.application import applied, policy_for_model, restore
from sharpmax.integrations.transformers.attention import Layer
from sharpmax.integrations.transformers.interface import modules_of
from sharpmax.integrations.transformers.projections import query_layer, scale_queries
from sharpmax.integrations.transformers.support import (
    AttentionModule,
    check_all_reached,
    check_model,
    require_transformers,
)
from sharpmax.models.language import context_of
from sharpmax.ops.sharpen import policies_of, rules_of
from sharpmax.policies.base import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sharpmax.integrations.gguf import FoldedFile

M = TypeVar("M", bound="PreTrainedModel")

MARK = "sharpmax_folded"
"""The key of a configuration that describes the policy in the weights."""

_TOKENS = 24

# Tolerance in a layer, in float32 at least: relative to the change that the policy makes, and to the outputs.
_OF_CHANGE, _OF_SIZE = 1e-3, 2e-5
# Tolerance in the whole model, where the rounding of its own dtype accumulates: relative to the change, and in
# units of that rounding.
_OF_CHANGE_WHOLE, _ROUNDINGS_WHOLE = 0.25, 64


@overload
def fold(
    model: M,
    policy: Policy | str | os.PathLike[str] | None,
    *,
    example_inputs: Mapping[str, Any] | None = None,
    skip_unsupported: bool = False,
) -> M: ...
@overload
def fold(
    model: str | os.PathLike[str],
    policy: Policy | str | os.PathLike[str] | None,
    *,
    out: str | os.PathLike[str],
    as_adapter: bool = False,
) -> FoldedFile: ...
def fold(
    model: M | str | os.PathLike[str],
    policy: Policy | str | os.PathLike[str] | None,
    *,
    out: str | os.PathLike[str] | None = None,
    as_adapter: bool = False,
    example_inputs: Mapping[str, Any] | None = None,
    skip_unsupported: bool = False,
) -> M | FoldedFile:
    """A copy of the model with `policy`, one constant per head, in its weights; it runs without sharpmax.

    β is multiplied into each head's rows of the query projection, or into the gain of the query's normalisation if
    there is one. The given model does not change. An `UnsupportedError` refuses policies that depend on the row (it
    names the nearest constant), families whose logits are more than query times key, and weights that several modules
    share. An `ArgumentError` refuses a model that has been folded before.

    The folded model is compared with the applied policy on random tokens, as a whole and in every changed layer. If
    they differ, an `UnsupportedError` names the layer. A model of images or sound needs `example_inputs`, keyword
    arguments for one call that reaches every layer. Modules that cannot have a policy raise an error, or keep their
    weights with `skip_unsupported`, as in `sharpmax.apply`.

    With a path or name in place of a model, the result is written to `out`. The folder of a checkpoint (or `smollm2`,
    or a hub id) gives a new folder, written tensor by tensor, or with `as_adapter` a PEFT (IA)³ adapter of a few kB. A
    GGUF file, the format of llama.cpp, gives a new GGUF file: the same blocks with other fp16 scales, without
    requantisation. Scales that overflow raise an error, and so does a head whose weights would change by more than 0.8%
    through the rounding of scales.

    Files of a Llama or Mistral also take the length rule of Ministral 3 (`ministral3:4096`). It changes configuration
    or metadata; transformers, vLLM and llama.cpp compute it.
    """
    if isinstance(model, (str, os.PathLike)):
        from sharpmax.integrations.gguf import fold_file, is_gguf
        from sharpmax.integrations.transformers.checkpoint import fold_checkpoint

        if example_inputs is not None or skip_unsupported:
            given = f"{str(model)!r} with example_inputs or skip_unsupported"
            reject("model", given, "these options only for a loaded model")
        if out is None:
            reject("out", None, "the path of a new GGUF file or of a new folder")
        if not is_gguf(model):
            return fold_checkpoint(model, policy, out, as_adapter=as_adapter)
        if as_adapter:
            reject("as_adapter", f"True for {str(model)!r}", "False for a GGUF file")
        return fold_file(model, policy, out)
    if out is not None:
        reject("out", repr(str(out)), "None for a loaded model", "save what fold returns with save_pretrained")
    if as_adapter:
        reject("as_adapter", True, "False for a loaded model", "fold the folder of its checkpoint")
    chosen = policy_for_model(model, policy, foldable=True)
    if not skip_unsupported:
        check_all_reached(check_model(model))
    family = type(model).__name__
    check_not_folded(family, getattr(model.config, MARK, None))
    modules = modules_of(model, skip_unsupported=skip_unsupported)
    if any(weight.is_meta for weight in model.parameters()):
        reject("model", "weights on the meta device", "weights in memory", "load the model without offloading")
    betas = constants_of(model, modules, chosen)
    for layer in betas:
        check_not_shared(model, query_layer(modules[layer], f"layer {layer} of {family}"), layer)
    twin = restore(copy.deepcopy(model))
    if betas:
        with torch.no_grad():
            _fold_checked(twin, modules_of(twin, skip_unsupported=True), chosen, betas, example_inputs)
        setattr(twin.config, MARK, chosen.describe())
    return twin


def check_not_folded(name: str, held: Any) -> None:
    """Refuse a model that has a policy in its weights; `held` is the value of `MARK` in its configuration."""
    if held is not None:
        raise ArgumentError(f"model: {name!r} already holds a policy: {held}; fold the original instead")


def constants_of(model: PreTrainedModel, modules: Sequence[AttentionModule], policy: Policy) -> dict[int, Tensor]:
    """β of every layer that changes, `[heads, 1]` or `[heads, D]` in float64; an error if weights cannot hold them."""
    family = type(model).__name__
    factors = weight_factors(policy, [one.heads for one in modules], family, context_of(model))
    for layer in factors:
        check_only_queries(modules[layer], layer, family)
    return {layer: torch.tensor(beta, dtype=torch.float64) for layer, beta in factors.items()}


def check_not_shared(model: PreTrainedModel, layer: nn.Module, number: int) -> None:
    """Refuse query weights that another module shares."""

    def span(weight: Tensor) -> tuple[int, int]:  # its first and last address
        return weight.data_ptr(), weight.data_ptr() + weight.numel() * weight.element_size()

    own = [span(weight) for weight in layer.parameters()]
    for name, part in model.named_modules():
        for key, weight in part.named_parameters(recurse=False):
            start, end = span(weight)
            if part is not layer and any(start < other_end and other_start < end for other_start, other_end in own):
                raise UnsupportedError(
                    f"model: the weights of the queries of layer {number} of {type(model).__name__} are also "
                    f"{name}.{key}, so β cannot be folded into them; apply the policy instead (sharpmax.apply)"
                )


def check_only_queries(one: AttentionModule, layer: int, family: str) -> None:
    """Refuse a layer whose logits are not proportional to its queries."""
    clip = getattr(one.config, "clip_qkv", None)
    reasons = {
        "scales its queries by position, which a policy replaces": bool(one.rule_off),
        "caps its logits (softcap)": getattr(one.module, "attn_logit_softcapping", None) is not None,
        "adds a position bias to its logits": "position_bias" in one.arguments,
        "clips its queries (clip_qkv)": clip is not None and math.isfinite(clip),
    }
    if reason := next((reason for reason, there in reasons.items() if there), None):
        raise UnsupportedError(
            f"model: {family} {reason} (layer {layer}), so scaling the query is not scaling the logit and no weight "
            "can hold the policy; apply it instead (sharpmax.apply)"
        )


def _example(model: PreTrainedModel) -> dict[str, Tensor]:
    """Random tokens for one call of a model, without special tokens, which may mean an image or padding."""
    config = model.config.get_text_config()
    options = {**vars(model.config), **vars(config)}
    special = [value for key, value in options.items() if key.endswith(("_token_id", "_token_index"))]
    plain = [one for one in range(min(getattr(config, "vocab_size", 2), 4096)) if one not in special] or [0]
    names = [getattr(config, key, None) for key in ("max_position_embeddings", "n_positions", "max_target_positions")]
    longest = next((one for one in names if isinstance(one, int) and one > 0), _TOKENS + 4)
    shape = (1, max(2, min(_TOKENS, longest - 4)))
    drawn = torch.randint(len(plain), shape, generator=torch.Generator().manual_seed(0))
    taken = inspect.signature(model.forward).parameters
    tokens = torch.tensor(plain)[drawn].to(model.device)
    return {name: tokens for name in ("input_ids", "decoder_input_ids") if name in taken}


def _fold_checked(
    model: PreTrainedModel,
    modules: Sequence[AttentionModule],
    policy: Policy,
    betas: Mapping[int, Tensor],
    given: Mapping[str, Any] | None,
) -> None:
    """Multiply the β of layers, `[heads, 1]` or `[heads, D]`, into the weights of `model` and compare with `policy`.

    Each layer is compared on its own inputs when the model runs on an example: the module in float32 with the policy
    applied, and with β in its weights. This way errors of layers do not accumulate, and low precision does not hide
    them. Then the outputs of the whole model are compared.
    """
    family, left, problem = type(model).__name__, set(betas), "it is not called"
    inputs = _example(model) if given is None else given

    def compare(layer: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if layer in left:
            left.discard(layer)  # the compared copy of the module has this hook, too
            _compare_layer(modules[layer], layer, family, policy, betas[layer], *_call_in_float32((args, kwargs)))

    handles = [
        modules[layer].module.register_forward_pre_hook(partial(compare, layer), with_kwargs=True) for layer in betas
    ]
    try:
        plain = _outputs(model, inputs)
    except UnsupportedError:
        raise
    except Exception as raised:  # models raise many types of errors for wrong inputs
        left, problem = set(betas), f"{type(raised).__name__}: {raised}".splitlines()[0][:200]
        if given is not None:
            shown = f"{sorted(given)}, for which the model raised {problem}"
            reject("example_inputs", shown, "keyword arguments of one call of the model")
    finally:
        for handle in handles:
            handle.remove()
    if left:
        first = min(left)
        raise UnsupportedError(
            f"model: no example reaches layer {first} of {family} ({type(modules[first].module).__name__}), one of "
            f"{len(left)} such layers, so the folded model cannot be compared with the policy ({problem}); pass "
            "example_inputs=, keyword arguments for one call of the model that does"
        )
    with applied(model, policy, skip_unsupported=True):
        sharp = _outputs(model, inputs)
    for layer, beta in betas.items():
        scale_queries(modules[layer], beta, f"layer {layer} of {family}")
    error, change, size = (float(x.square().mean().sqrt()) for x in _differences(sharp, _outputs(model, inputs), plain))
    if not error <= max(_OF_CHANGE_WHOLE * change, _ROUNDINGS_WHOLE * torch.finfo(model.dtype).eps * size):
        raise UnsupportedError(
            f"model: the folded {family} is not the model with the policy applied: its outputs differ by {error:.2g}, "
            f"where the policy changes them by {change:.2g} (root mean square); apply it instead (sharpmax.apply)"
        )


def _compare_layer(
    one: AttentionModule, layer: int, family: str, policy: Policy, beta: Tensor, args: Any, kwargs: Any
) -> None:
    """Compare a copy of a module with the policy applied and with β in its weights, for the arguments of a call."""
    module: Any = copy.deepcopy(one.module)
    if any(weight.dtype.itemsize < 4 for weight in module.parameters() if weight.is_floating_point()):
        module.float()

    def outputs() -> Tensor:  # a call may change its arguments in place
        own = pytree.tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, (args, kwargs))
        return _floats(module(*own[0], **own[1]))

    plain = outputs()
    alone = replace(one, module=module, config=module.config, published={"config": module.config})
    rules = rules_of(policies_of(policy, layer))
    alone.attach(Layer(one.inner, one.function, one.heads, rules, layer), without_rule=False)
    sharp = outputs()
    alone.detach()
    scale_queries(alone, beta, f"layer {layer} of {family}")
    error, change, size = (float(x.abs().max()) for x in _differences(sharp, outputs(), plain))
    if not error <= _OF_CHANGE * change + _OF_SIZE * size:
        raise UnsupportedError(
            f"model: in layer {layer} of {family} ({type(module).__name__}) a logit is more than query times key, "
            "as where a bias is part of the mask or is added to the query: with β in the weights its output "
            f"differs by {error:.2g}, where the policy changes it by {change:.2g}; apply the policy instead "
            "(sharpmax.apply)"
        )


def _outputs(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """The outputs of a model in evaluation mode, with the same random numbers in every call."""
    devices = {weight.device.index for weight in model.parameters() if weight.is_cuda}
    with evaluating(model), torch.random.fork_rng(devices):
        return _floats(model(**inputs))


def _call_in_float32(call: Any) -> Any:
    """The arguments of a call in float32 at least, without caches, which a call would change."""
    cache = require_transformers("cache_utils").Cache

    def one(value: Any) -> Any:
        if isinstance(value, cache):
            return None
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype.itemsize >= 4:
            return value
        hidden = value <= torch.finfo(value.dtype).min  # in a mask
        return value.float().masked_fill(hidden, torch.finfo(torch.float32).min)

    return pytree.tree_map(one, call, is_leaf=lambda value: isinstance(value, cache))


def _floats(outputs: Any) -> Tensor:
    """All floating-point numbers of a model's outputs, flattened, in float64 on the CPU."""
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.cat([torch.zeros(1), *(leaf.detach().cpu().flatten() for leaf in leaves)]).double()


def _differences(sharp: Tensor, other: Tensor, plain: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The error, the change by the policy, and the outputs; 0 where two outputs are the same infinity or both NaN."""
    off, change = ((sharp - x).masked_fill((sharp == x) | (sharp.isnan() & x.isnan()), 0.0) for x in (other, plain))
    return off, change, sharp.nan_to_num(0.0, 0.0, 0.0)
