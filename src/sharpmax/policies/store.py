"""Policies by name or from a file."""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from sharpmax.errors import FileFormatError, reject, reject_type
from sharpmax.files import read_json
from sharpmax.policies.base import Policy, policy_from_dict
from sharpmax.policies.constant import Constant
from sharpmax.policies.polynomial import PAPER

__all__ = ["NAMED", "load_policy", "resolve_policy"]


def load_policy(path_or_name: str | Path) -> Policy:
    """A policy by its name, or read from the JSON file that `policy.save` wrote.

    >>> load_policy("paper").describe()
    'β = max(1, -0.037·H^4 +0.481·H^3 -2.3·H^2 +4.917·H -1.791) for H > 0.5, extrapolate outside'
    """
    if not isinstance(path_or_name, (str, Path)):
        reject_type("path_or_name", type(path_or_name).__name__, f"a path or one of {sorted(NAMED)}")
    if isinstance(path_or_name, str) and path_or_name in NAMED:
        return NAMED[path_or_name]()
    path = Path(path_or_name)
    if not path.is_file():
        reject("policy", repr(str(path_or_name)), f"one of {sorted(NAMED)} or the path of a policy file")
    return _read(path)


@functools.cache
def _packaged(name: str) -> Policy:
    """A policy that comes with the package: what `sharpmax calibrate` learned for a model."""
    return _read(Path(str(importlib.resources.files("sharpmax.policies") / "data" / f"{name}.json")))


def _read(path: Path) -> Policy:
    body = read_json(path, "policy")
    try:
        return policy_from_dict(body)
    except FileFormatError as problem:
        raise FileFormatError(f"{problem} (in {str(path)!r})") from None


def resolve_policy(policy: Policy | str | None) -> Policy:
    """What the argument `policy=` of a public function means."""
    if policy is None:
        return NAMED["none"]()
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        return load_policy(policy)
    reject_type("policy", type(policy).__name__, f"a Policy, None, one of {sorted(NAMED)} or a path")


NAMED: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "none": Constant,
        "paper": lambda: PAPER,
        "smollm2": lambda: _packaged("smollm2"),
        "smollm2-constant": lambda: _packaged("smollm2-constant"),
    }
)
"""Policies that can be asked for by name."""
