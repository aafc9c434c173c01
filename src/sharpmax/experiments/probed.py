"""A probe of a model as it comes or under a policy, as the tables of results.json."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from sharpmax.hf import applied
from sharpmax.models.language import LanguageModel
from sharpmax.policies import Policy
from sharpmax.probe.survey.probing import probe
from sharpmax.probe.survey.result import ProbeResult
from sharpmax.provenance import shown

__all__ = ["probe_under", "probed_tables"]


def probe_under(language: LanguageModel, policy: Policy | None, **options: Any) -> ProbeResult:
    """Probe a model while a policy is applied (None: as it comes); `options` are those of `sharpmax.probe`."""
    with nullcontext() if policy is None else applied(language.model, policy):
        return probe(language.model, language.tokenizer, name=shown(language.name), **options)


def probed_tables(found: ProbeResult, policy: str | None) -> dict[str, Any]:
    """Everything a reader of the probe may ask for, with the policy under the name it was asked for by."""
    tables = found.tables()
    return {**tables, "setting": {**tables["setting"], "policy": policy}}
