"""`fold`: a constant per head written into the weights that make the queries."""

from __future__ import annotations

import copy
import math
import os
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from sharpmax.arrays import ops_for
from sharpmax.errors import UnsupportedError, reject, reject_type
from sharpmax.hf.application import restore
from sharpmax.hf.beside import policy_from
from sharpmax.hf.interface import modules_of
from sharpmax.hf.queries import scale_queries
from sharpmax.hf.rules import check_shape
from sharpmax.hf.support import AttentionModule
from sharpmax.models.language import context_of
from sharpmax.policies import Constant, PerHead, Policy
from sharpmax.rows.stats import RowStats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["fold", "nearest_constant"]

M = TypeVar("M", bound="PreTrainedModel")


def fold(model: M, policy: Policy | str | os.PathLike[str] | None) -> M:
    """A plain copy of the model that attends as if `policy`, one constant per head, were applied; no sharpmax needed.

    β is multiplied into each head's rows of the query projection, or into the gain of the query's normalisation where
    the family has one. The model given stays as it is. A policy that depends on the row cannot become a weight and is
    refused, with the nearest one that can; so are families whose logits are more than query times key.
    """
    chosen = policy_from(policy)
    modules = modules_of(model)
    family = type(model).__name__
    check_shape(chosen, [one.heads for one in modules], family)
    _check_constant(chosen, context_of(model))
    betas = [_betas(chosen, layer, one.heads) for layer, one in enumerate(modules)]
    for layer, (one, beta) in enumerate(zip(modules, betas, strict=True)):
        if beta is not None:
            _check_only_queries(one, layer, family)
    twin = restore(copy.deepcopy(model))
    with torch.no_grad():
        for layer, (one, beta) in enumerate(zip(modules_of(twin), betas, strict=True)):
            if beta is not None:
                scale_queries(one, beta, f"layer {layer} of {family}")
    return twin


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


def _check_constant(policy: Policy, longest: Any) -> None:
    flat = [one for layer in policy.policies for one in layer] if isinstance(policy, PerHead) else [policy]
    needs = frozenset().union(*(one.needs for one in flat))
    if not needs:
        return
    nearest = "calibrate a constant policy with `sharpmax calibrate --foldable`"
    if needs == {"count"}:
        nearest = "the nearest foldable one is sharpmax.hf.nearest_constant(policy, length)"
        if isinstance(longest, int):
            values = sorted(nearest_constant(one, longest).to_dict()["value"] for one in flat)
            span = f"{values[0]:.4g}" + (f" … {values[-1]:.4g}" if values[-1] > values[0] else "")
            nearest += f", β = {span} at length {longest}"
    raise UnsupportedError(
        f"policy: {policy.describe()} depends on the row ({', '.join(sorted(needs))}), and a weight does not; {nearest}"
    )


def _betas(policy: Policy, layer: int, heads: int) -> Tensor | None:
    """β of every head of a layer in float64, or None where all of them are 1."""
    row = policy.policies[layer] if isinstance(policy, PerHead) else (policy,) * heads
    if all(one.is_identity for one in row):
        return None
    stats = RowStats.anchored(torch.tensor([2]))
    return torch.cat([one.rule(ops_for(stats.count), stats, None).double() for one in row])


def _check_only_queries(one: AttentionModule, layer: int, family: str) -> None:
    """Refuse a layer whose logits do not grow in proportion to its queries."""
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
