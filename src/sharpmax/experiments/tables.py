"""The tables of `calibrate` and `horizon`."""

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
from sharpmax.policies.basic import OutputScale, PerFrequency
from sharpmax.probing.horizons import KINDS, REACH, Certificate, HeadCertificate, MeasuredHead, MeasuredHorizons
from sharpmax.results import json_values
from sharpmax.stats.statistics import RowStats
from sharpmax.theory.bounds import whole


def calibrated_tables(found: CalibrationResult, model: str) -> dict[str, Any]:
    """The tables of a calibration."""
    profile, chosen, foldable = found.setting["profile"], found.chosen, found.foldable
    size = str(max(profile["sizes"]))

    def cell(share: float) -> dict[str, dict[str, Any]]:
        right = round(share * found.prompts)
        return {size: asdict(accuracy([1] * right + [0] * (found.prompts - right)))}

    return {
        "setting": {
            **found.setting,
            "model": model,
            **{name: profile[name] for name in ("sizes", "kinds", "steps")},
            "modified": chosen.modified_heads,
        },
        "candidates": {
            kind: {
                "kind": kind,
                "strength": one.strength,
                "modified": one.modified_heads,
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
        "heads": {"betas": [[_beta(one) for one in layer] for layer in chosen.policy.policies]},
        "validation": {
            "baseline": cell(found.before["right"]),
            **{kind: cell(one.accuracy) for kind, one in found.candidates.items()},
        },
    }


def _beta(policy: Policy) -> float:
    """β of a typical row, to compare heads: 1,024 keys, H/ln n = 0.5, a top weight of 0.25."""
    if isinstance(policy, OutputScale):
        return _beta(policy.policy)
    if isinstance(policy, PerFrequency):
        return math.exp(sum(math.log(max(value, 1e-3)) for value in policy.values) / len(policy.values))
    n, entropy, top = 1024, 0.5 * math.log(1024), 0.25
    lse = -math.log(top)
    # With a largest logit of 0 the top weight is e^−lse.
    row = RowStats(*(torch.tensor([value]) for value in (n, 0.0, lse, lse - entropy, 1.0)))
    return float(policy.beta(row))


RULE = (
    f"a certificate is informative if its horizon is at most {REACH} times the model's context, or the sliding window, "
    "where a row sees no more; else it is vacuous"
)


def horizon_tables(
    certificate: Certificate, measured: MeasuredHorizons | None, setting: Mapping[str, Any]
) -> dict[str, Any]:
    """The tables of horizons. `setting` holds the model and options."""
    by_head = {} if measured is None else {(one.layer, one.head): asdict(one) for one in measured.heads}
    prompts = ("task", "sizes", "prompts", "shortest", "longest")
    layers = range(1 + certificate.heads[-1].layer)
    together = {number: [one for one in certificate.heads if one.layer == number] for number in layers}
    tables = {
        "setting": {
            **setting,
            "family": certificate.family,
            "layers": len(layers),
            "heads": max(map(len, together.values())),
            "mass": certificate.mass,
            "context": certificate.context,
            "reach": max(one.reach for one in certificate.heads),
            "rule": RULE,
            "prompts": None if measured is None else {name: getattr(measured, name) for name in prompts},
        },
        "verdict": [_certified_verdict(certificate), *([] if measured is None else [_measured_verdict(measured)])],
        "certified": _certified_together(certificate.heads),
        "measured": None if measured is None else _measured_together(measured.heads),
        "layers": {
            str(number): {
                "certified": _certified_together(heads),
                "measured": measured and _measured_together([one for one in measured.heads if one.layer == number]),
            }
            for number, heads in together.items()
        },
        "heads": {
            f"{one.layer}.{one.head}": {
                "certified": asdict(one) | {"tokens": one.tokens, "informative": one.informative},
                "measured": by_head.get((one.layer, one.head)),
            }
            for one in certificate.heads
        },
    }
    return json_values(tables)


def check_consistent(certificate: Certificate, measured: MeasuredHorizons, dtype: torch.dtype) -> None:
    """Raise if measured logits spread further than certified, so the model does more than its weights say."""
    rounding = 8.0 * torch.finfo(dtype).eps
    for certain, found in zip(certificate.heads, measured.heads, strict=True):
        if found.widest > certain.spread * (1.0 + rounding):
            raise UnsupportedError(
                f"model: in layer {certain.layer}, head {certain.head} a spread of {found.widest:.4g} was measured and "
                f"{certain.spread:.4g} certified; this {certificate.family} computes more than its weights say"
            )


def _certified_together(heads: Sequence[HeadCertificate]) -> dict[str, Any]:
    return {
        "median": statistics.median(one.spread for one in heads),
        "tokens": min(heads, key=lambda one: one.log10_tokens).tokens,
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
    known = sum(one.informative for one in certificate.heads)
    total, mass = len(certificate.heads), f"{100 * certificate.mass:g}%"
    first = min(certificate.heads, key=lambda one: one.log10_tokens)
    horizon = f"{first.tokens:,}" if known else f"10^{math.floor(10.0 * first.log10_tokens) / 10.0:.1f}"
    return (
        f"Certified for every input: {known} of {total} certificates are informative. The tightest (layer "
        f"{first.layer}, head {first.head}) allows {mass} of the weight on one token up to {horizon} tokens; no row "
        f"sees more than {first.reach:,}."
    )


def _measured_verdict(measured: MeasuredHorizons) -> str:
    found = _measured_together(measured.heads)
    by = "" if found["tokens"] is None else f" (half of these by {whole(found['tokens']):,} tokens)"
    return (
        f"Measured on {measured.prompts} prompts of {measured.shortest:,} to {measured.longest:,} tokens: of "
        f"{len(measured.heads)} heads {found['before']} hold {100 * measured.mass:g}% of their weight on one token at "
        f"no length, {found['at']} fall under it{by}, and {found['beyond']} do not fall within the prompts read."
    )
