"""Policies: rules from the statistics of a row to its inverse temperature β."""

from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant, Curve, LogLength
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_frequency import PerFrequency
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import PAPER, Polynomial
from sharpmax.policies.registry import load_policy, resolve_policy
from sharpmax.policies.shipped import LogScale, from_config, yarn

__all__ = [
    "PAPER", "Constant", "Curve", "EntropyTarget", "LogLength", "LogLinear", "LogScale", "PerFrequency", "PerHead",
    "Policy", "Polynomial", "from_config", "load_policy", "resolve_policy", "yarn",
]  # fmt: skip
