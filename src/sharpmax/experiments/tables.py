"""Results of `calibrate` and `horizon` as tables."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from sharpmax.calibration.budget import percent
from sharpmax.calibration.calibrate import CalibrationResult
from sharpmax.errors import UnsupportedError
from sharpmax.experiments.statistics import accuracy
from sharpmax.policies.base import Policy
from sharpmax.policies.per_frequency import PerFrequency
from sharpmax.policies.per_head import PerHead
from sharpmax.probing.certified import REACH, Certificate, HeadCertificate
from sharpmax.probing.measurement import KINDS, MeasuredHead, MeasuredHorizons
from sharpmax.stats.statistics import RowStats
from sharpmax.theory.bounds import whole

REFERENCE_ROW = "a row of 1,024 keys with H/ln n = 0.5 and a top weight of 0.25"
"""The row whose β stands for a head where heads are compared."""

_POINTS = 120  # of a training curve in results


def calibrated_tables(found: CalibrationResult, model: str) -> dict[str, Any]:
    """The tables of a calibration."""
    setting, profile = dict(found.setting), found.setting["profile"]
    chosen, foldable = found.chosen, found.foldable
    size = str(max(profile["sizes"]))
    return {
        "setting": {
            **setting,
            "model": model,
            "sizes": profile["sizes"],
            "kinds": profile["kinds"],
            "steps": profile["steps"],
            "touched": chosen.modified_heads,
            "reference_row": REFERENCE_ROW,
        },
        "curve": _curves(found.curves[chosen.kind]),
        "candidates": {
            kind: {
                "kind": kind,
                "strength": one.strength,
                "touched": one.modified_heads,
                "validation": 100.0 * one.accuracy,
                "nll": one.nll,
                "kl": {name: change.kl for name, change in one.changes.items()},
                "rise": {name: percent(change.rise) for name, change in one.changes.items()},
                "foldable": one.foldable,
            }
            for kind, one in found.candidates.items()
        },
        "before": dict(found.before),
        "chosen": chosen.kind,
        "best_foldable": None if foldable is None else foldable.kind,
        "heads": _heads(chosen.policy),
        "validation": {
            "as it comes": {size: _cell(found.before["right"], found.prompts)},
            **{kind: {size: _cell(one.accuracy, found.prompts)} for kind, one in found.candidates.items()},
        },
    }


def _cell(share: float, prompts: int) -> dict[str, Any]:
    right = round(share * prompts)
    return asdict(accuracy([1] * right + [0] * (prompts - right)))


def _curves(steps: Sequence[Mapping[str, float]]) -> dict[str, list[list[float]]]:
    every = max(1, math.ceil(len(steps) / _POINTS))
    kept = steps[::every]
    names = dict.fromkeys(name for step in steps for name in step if name not in ("step", "nll"))
    curve = {"nll": [[step["step"], step["nll"]] for step in kept]}
    for name in names:
        curve[f"kl/{name}"] = [[step["step"], step[name]] for step in kept if name in step]
    return curve


def _heads(policy: PerHead) -> dict[str, Any]:
    betas = [[_beta(one) for one in layer] for layer in policy.policies]
    modified: list[list[Any]] = [
        [i, j, one.describe(), betas[i][j]]
        for i, layer in enumerate(policy.policies)
        for j, one in enumerate(layer)
        if not one.is_identity
    ]
    modified.sort(key=lambda entry: -abs(math.log(entry[3])))
    return {"betas": betas, "touched": modified}


def _beta(policy: Policy) -> float:
    if isinstance(policy, PerFrequency):
        return math.exp(sum(math.log(max(value, 1e-3)) for value in policy.values) / len(policy.values))
    n, entropy, top = 1024, 0.5 * math.log(1024), 0.25
    lse = -math.log(top)
    # With the largest logit at 0 the top weight is e^−lse.
    row = RowStats(*(torch.tensor([value]) for value in (n, 0.0, lse, lse - entropy, 1.0)))
    return float(policy.beta(row))


RULE = (
    f"a certificate is informative if its horizon is at most {REACH} times the model's context, or the sliding window, "
    "or the table of learned positions, where a row sees no more; else it is vacuous"
)


def horizon_tables(
    certificate: Certificate, measured: MeasuredHorizons | None, setting: Mapping[str, Any]
) -> dict[str, Any]:
    """The tables of horizons; `setting` holds model and options."""
    layers = range(certificate.layers)
    heads = [len(certificate.of_layer(number)) for number in layers]
    return {
        "setting": {
            **setting,
            "family": certificate.family,
            "layers": certificate.layers,
            "heads": max(heads),
            "mass": certificate.mass,
            "context": certificate.context,
            "reach": max(one.reach for one in certificate.heads),
            "rule": RULE,
            "prompts": None
            if measured is None
            else {
                "task": measured.task,
                "sizes": list(measured.sizes),
                "prompts": measured.prompts,
                "shortest": measured.shortest,
                "longest": measured.longest,
            },
        },
        "verdict": [_certified_verdict(certificate), *([] if measured is None else [_measured_verdict(measured)])],
        "certified": {**_certified_together(certificate.heads), "median_by": certificate.median_by()},
        "measured": None if measured is None else _measured_together(measured.heads),
        "layers": {
            str(number): {
                "certified": _certified_together(certificate.of_layer(number)),
                "measured": None if measured is None else _measured_together(measured.of_layer(number)),
            }
            for number in layers
        },
        "heads": _horizon_heads(certificate, measured),
    }


def check_consistent(certificate: Certificate, measured: MeasuredHorizons, dtype: torch.dtype) -> None:
    """Refuse a model whose logits spread further than certified: it computes something else than its weights say."""
    rounding = 8.0 * torch.finfo(dtype).eps
    for certain, seen in zip(certificate.heads, measured.heads, strict=True):
        if seen.widest > certain.spread * (1.0 + rounding):
            raise UnsupportedError(
                f"model: in layer {certain.layer}, head {certain.head} a spread of {seen.widest:.4g} was measured and "
                f"{certain.spread:.4g} certified; this {certificate.family} computes more than its weights say"
            )


def _horizon_heads(certificate: Certificate, measured: MeasuredHorizons | None) -> dict[str, Any]:
    seen = {} if measured is None else {(one.layer, one.head): one for one in measured.heads}
    certified = ("spread", "by", "bounds", "log10_tokens", "tokens", "informative", "reach")
    observed = ("spread", "widest", "slope", "slope_low", "slope_high", "kind", "tokens", "low", "high")
    return {
        f"{one.layer}.{one.head}": {
            "certified": {name: getattr(one, name) for name in certified} | {"bounds": dict(one.bounds)},
            "measured": None
            if (found := seen.get((one.layer, one.head))) is None
            else {name: getattr(found, name) for name in observed},
        }
        for one in certificate.heads
    }


def _certified_together(heads: Sequence[HeadCertificate]) -> dict[str, Any]:
    first = min(heads, key=lambda one: one.log10_tokens)
    return {
        "smallest": min(one.spread for one in heads),
        "median": statistics.median(one.spread for one in heads),
        "tokens": first.tokens,
        "log10_tokens": first.log10_tokens,
        "informative": sum(one.informative for one in heads),
        "heads": len(heads),
    }


def _measured_together(heads: Sequence[MeasuredHead]) -> dict[str, Any]:
    kinds, tokens = Counter(one.kind for one in heads), [one.tokens for one in heads if one.tokens is not None]
    return {
        "spread": statistics.median(one.spread for one in heads),
        "widest": max(one.widest for one in heads),
        "tokens": statistics.median(tokens) if tokens else None,
        **{kind: kinds[kind] for kind in KINDS},
    }


def _certified_verdict(certificate: Certificate) -> str:
    known, total, mass = len(certificate.informative), len(certificate.heads), f"{100 * certificate.mass:g}%"
    first = min(certificate.heads, key=lambda one: one.log10_tokens)
    name = f"layer {first.layer}, head {first.head}"
    if known:
        return (
            f"Certified for every input: {known} of {total} heads cannot keep {mass} of their weight on one token "
            f"beyond a known number of tokens, the first of them ({name}) beyond {first.tokens:,}; for the other "
            f"{total - known} the certificate is vacuous."
        )
    power = math.floor(10.0 * first.log10_tokens) / 10.0
    return (
        f"Certified for every input: nothing that anyone could meet, for all {total} certificates are vacuous. The "
        f"tightest ({name}) allows {mass} of the weight on one token up to about 10^{power:.1f} tokens, "
        f"and no row will see more than {first.reach:,}."
    )


def _measured_verdict(measured: MeasuredHorizons) -> str:
    kinds, total = Counter(one.kind for one in measured.heads), len(measured.heads)
    mass = f"{100 * measured.mass:g}%"
    tokens = [one.tokens for one in measured.heads if one.tokens is not None]
    by = f" (half of these by {whole(statistics.median(tokens)):,} tokens)" if tokens else ""
    return (
        f"Measured on {measured.prompts} prompts of {measured.shortest:,} to {measured.longest:,} tokens: of {total} "
        f"heads {kinds['before']} hold {mass} of their weight on one token at no length, {kinds['at']} fall under "
        f"it{by}, and {kinds['beyond']} are not seen to fall."
    )
