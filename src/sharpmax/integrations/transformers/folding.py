"""`fold`: a constant per head written into the weights that make the queries."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor, nn

from sharpmax.arrays import ops_for
from sharpmax.errors import ArgumentError, UnsupportedError, reject, reject_type
from sharpmax.integrations.transformers.application import policy_for_model, restore
from sharpmax.integrations.transformers.fold_check import FoldCheck
from sharpmax.integrations.transformers.interface import modules_of
from sharpmax.integrations.transformers.projections import query_layer, scale_queries
from sharpmax.integrations.transformers.support import AttentionModule, check_all_reached, check_model
from sharpmax.models.language import context_of
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant
from sharpmax.policies.per_frequency import PerFrequency, constant_factors
from sharpmax.policies.per_head import PerHead, check_shape
from sharpmax.stats.statistics import RowStats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sharpmax.integrations.gguf import FoldedFile

M = TypeVar("M", bound="PreTrainedModel")


MARK = "sharpmax_folded"
"""The key of a configuration that says which policy is in the weights."""


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
    """A plain copy of the model that attends as if `policy`, one constant per head, were applied; no sharpmax needed.

    β is multiplied into each head's rows of the query projection, or into the gain of the query's normalisation where
    the family has one. The model given stays as it is. A policy that depends on the row cannot become a weight and is
    refused, with the nearest one that can; so are families whose logits are more than query times key, weights
    that several modules share, and a model that has been folded before.

    Before it is returned, the folded model is compared with the applied policy on a short random input, as a whole and
    in every layer that changes; where they differ, an `UnsupportedError` says which layer. `example_inputs` (keyword
    arguments for one call of the model) replace the random input of a model for which none can be made. Modules that
    cannot have a policy raise an error, or with `skip_unsupported` are left as they are, as in `sharpmax.apply`.

    A path or name in place of a model writes to `out`. From the folder of a checkpoint (or `smollm2`, or a hub id) it
    makes a new folder, tensor by tensor, whatever the size of the model; with `as_adapter` a PEFT (IA)³ adapter of a
    few kB. From a GGUF file, the format of llama.cpp, it makes a new GGUF file: the same blocks with other fp16 scales,
    nothing quantised again. Scales that overflow are refused; so is a head whose weights the rounding of scales would
    change by more than 0.8%.
    """
    if isinstance(model, (str, os.PathLike)):
        if example_inputs is not None or skip_unsupported:
            given = f"{str(model)!r} with example_inputs or skip_unsupported"
            reject("model", given, "those two for a loaded model alone")
        return _fold_files(model, policy, out, as_adapter)
    if out is not None or as_adapter:
        reject("out", repr(str(out)), "None for a loaded model", "save what fold returns with save_pretrained")
    chosen = policy_for_model(model, policy, foldable=True)
    if not skip_unsupported:
        check_all_reached(check_model(model))
    check_not_folded(type(model).__name__, getattr(model.config, MARK, None))
    modules = modules_of(model, skip_unsupported=skip_unsupported)
    family = type(model).__name__
    if any(weight.is_meta for weight in model.parameters()):
        reject("model", "weights on the meta device", "weights in memory", "load the model without offloading")
    betas = constants_of(model, modules, chosen)
    for layer in betas:
        check_not_shared(model, query_layer(modules[layer], f"layer {layer} of {family}"), layer)
    twin = restore(copy.deepcopy(model))
    check = FoldCheck(twin, modules_of(twin, skip_unsupported=True), chosen, betas)
    with torch.no_grad():
        check.before(example_inputs)
        for layer, beta in betas.items():
            scale_queries(check.modules[layer], beta, f"layer {layer} of {family}")
        check.after()
    if betas:
        setattr(twin.config, MARK, chosen.describe())
    return twin


def _fold_files(
    path: str | os.PathLike[str],
    policy: Policy | str | os.PathLike[str] | None,
    out: str | os.PathLike[str] | None,
    as_adapter: bool,
) -> FoldedFile:
    from sharpmax.integrations.gguf import fold_file, is_gguf
    from sharpmax.integrations.transformers.checkpoint import fold_checkpoint

    if out is None:
        reject("out", None, "the path of a new GGUF file or of a new folder")
    if not is_gguf(path):
        return fold_checkpoint(path, policy, out, as_adapter=as_adapter)
    if as_adapter:
        reject("as_adapter", f"True for {str(path)!r}", "False for a GGUF file")
    return fold_file(path, policy, out)


def check_not_folded(name: str, held: Any) -> None:
    """Refuse a model whose configuration says that there is a policy in its weights."""
    if held is not None:
        raise ArgumentError(f"model: {name!r} already holds a policy: {held}; fold the original instead")


def constants_of(model: PreTrainedModel, modules: Sequence[AttentionModule], policy: Policy) -> dict[int, Tensor]:
    """β `[heads]` in float64 of every layer that changes, or an error: for another model, for each row, not linear."""
    check_shape(policy, [one.heads for one in modules], type(model).__name__)
    check_constant(policy, context_of(model))
    betas = {layer: beta for layer, one in enumerate(modules) if (beta := _betas(policy, layer, one.heads)) is not None}
    for layer in betas:
        check_only_queries(modules[layer], layer, type(model).__name__)
    return betas


def nearest_constant(policy: Policy, length: int) -> Policy:
    """The constant policy that gives every row the β that `policy` gives a row of `length` visible keys.

    Only a policy that depends on nothing but that number has one; others have to be calibrated as constants.

    >>> from sharpmax.policies import LogLength
    >>> nearest_constant(LogLength(reference=16), 256)
    Constant(value=2.0)
    """
    if isinstance(length, bool) or not isinstance(length, int):
        reject_type("length", type(length).__name__, "a number of visible keys")
    if length < 1:
        reject("length", length, "1 or more visible keys")
    if isinstance(policy, PerHead):
        return PerHead(tuple(tuple(nearest_constant(one, length) for one in layer) for layer in policy.policies))
    if policy.needs - {"count"}:
        raise UnsupportedError(
            f"policy: {policy.describe()} depends on {', '.join(sorted(policy.needs - {'count'}))}, not on the length "
            "alone; calibrate a constant policy for this model with `sharpmax calibrate --foldable`"
        )
    stats = RowStats.anchored(torch.tensor([length]))
    return Constant(float(policy.rule(ops_for(stats.count), stats, None)))


def check_constant(policy: Policy, longest: Any) -> None:
    """Refuse a policy that depends on the row, with the nearest one that does not, for `longest` visible keys."""
    flat = [one for layer in policy.policies for one in layer] if isinstance(policy, PerHead) else [policy]
    needs = frozenset().union(*(one.needs for one in flat))
    if not needs:
        return
    nearest = "calibrate a constant policy with `sharpmax calibrate --foldable`"
    if needs == {"count"}:
        nearest = (
            "the nearest foldable one is sharpmax.integrations.transformers.folding.nearest_constant(policy, length)"
        )
        if isinstance(longest, int):
            values = sorted(nearest_constant(one, longest).to_dict()["value"] for one in flat)
            span = f"{values[0]:.4g}" + (f" … {values[-1]:.4g}" if values[-1] > values[0] else "")
            nearest += f", β = {span} at length {longest}"
    raise UnsupportedError(
        f"policy: {policy.describe()} depends on the row ({', '.join(sorted(needs))}), and a weight does not; {nearest}"
    )


def _betas(policy: Policy, layer: int, heads: int) -> Tensor | None:
    """β of every head of a layer, `[heads, 1]` or `[heads, D]` in float64, or None where all of them are 1."""
    row = policy.policies[layer] if isinstance(policy, PerHead) else (policy,) * heads
    if all(one.is_identity for one in row):
        return None
    return torch.tensor(constant_factors([_constant(one) for one in row]), dtype=torch.float64)


def _constant(policy: Policy) -> Policy:
    """A policy that reads nothing of a row, as one of the two kinds that a weight can hold."""
    return policy if isinstance(policy, PerFrequency) else nearest_constant(policy, 2)


def check_not_shared(model: PreTrainedModel, layer: nn.Module, number: int) -> None:
    """Refuse weights that another module uses too, which would get a β that is not its own."""
    spans = [_span(weight) for weight in layer.parameters()]
    for name, part in model.named_modules():
        for key, weight in part.named_parameters(recurse=False):
            start, end = _span(weight)
            if part is not layer and any(start < other_end and other_start < end for other_start, other_end in spans):
                raise UnsupportedError(
                    f"model: the weights of the queries of layer {number} of {type(model).__name__} are also "
                    f"{name}.{key}, so β cannot be folded into them; apply the policy instead (sharpmax.apply)"
                )


def _span(weight: Tensor) -> tuple[int, int]:
    """Where in memory a weight begins and ends."""
    return weight.data_ptr(), weight.data_ptr() + weight.numel() * weight.element_size()


def check_only_queries(one: AttentionModule, layer: int, family: str) -> None:
    """Refuse a layer whose logits do not grow in proportion to its queries."""
    if one.own_rule:
        raise UnsupportedError(
            f"model: {family} scales its queries by position (layer {layer}), which a policy replaces and weights "
            "cannot; apply the policy instead (sharpmax.apply)"
        )
    if getattr(one.module, "attn_logit_softcapping", None) is not None:
        raise UnsupportedError(
            f"model: {family} caps its logits (softcap, layer {layer}), so scaling the query is not scaling the logit "
            "and no weight can hold the policy; apply it instead (sharpmax.apply)"
        )
    if "position_bias" in one.arguments:
        raise UnsupportedError(
            f"model: {family} adds a position bias to its logits (layer {layer}), which scaling the query does not "
            "scale, so no weight can hold the policy; apply it instead (sharpmax.apply)"
        )
    clip = getattr(one.config, "clip_qkv", None)
    if clip is not None and math.isfinite(clip):
        raise UnsupportedError(
            f"model: {family} clips its queries (clip_qkv, layer {layer}), so scaling the projection is not scaling "
            "the query; apply the policy instead (sharpmax.apply)"
        )
