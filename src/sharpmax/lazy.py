"""Lazy imports: public names of packages, and optional dependencies.

`import sharpmax` takes milliseconds, and `import sharpmax.jax` never loads torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from sharpmax.errors import MissingExtraError


def lazy_exports(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package; `homes` maps each public name to its module.

    A name whose home has the same name is that module (`"policies": "sharpmax.policies"`).
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(homes[name])
        value = module if homes[name] == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)  # later accesses find it there
        return value

    return load, lambda: sorted(homes)


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional dependency, or raise a MissingExtraError that names its extra and `purpose`."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name != module.partition(".")[0]:
            raise  # the package is installed, but something that it imports is not
        raise MissingExtraError(missing.name, extra, purpose) from None
