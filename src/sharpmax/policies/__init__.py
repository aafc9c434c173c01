"""Policies: rules from the statistics of a row to its inverse temperature β."""

from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant, Curve, LogLength, LogScale, OutputScale, PerFrequency
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import PAPER, Polynomial
from sharpmax.policies.registry import from_config, load_policy, resolve_policy, yarn

__all__ = [
    "PAPER", "Constant", "Curve", "EntropyTarget", "LogLength", "LogLinear", "LogScale", "OutputScale", "PerFrequency",
    "PerHead", "Policy", "Polynomial", "from_config", "load_policy", "resolve_policy", "yarn",
]  # fmt: skip
