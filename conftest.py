"""What tests and the examples of docstrings share: one start for each, Triton's interpreter, repeatable properties."""

from __future__ import annotations

import os

# Read by Triton when it is imported. On a machine with a GPU, TRITON_INTERPRET=0 runs the compiled kernels instead.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Read by each process when it loads torch, also by those that tests start. Threads spin while they wait for each other:
# two of them beside other work are many times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import functools
import gc
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sharpmax.normalisers import base as normalisers
from sharpmax.ops import sharpen
from sharpmax.policies import base as policies

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:  # a GPU machine that brings torch, Triton and pytest alone still runs `make test-gpu`
    settings = None  # type: ignore[assignment, misc]

# Tests are small and run side by side: threads inside each of them would only wait for one another.
torch.set_num_threads(1)

# Other work on the machine must not fail a test, so there are no deadlines; and a red run must be red again.
if settings is not None:
    settings.register_profile(
        "sharpmax", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("sharpmax")


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end: no collection of garbage has to look at them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """Every test starts from the same random state and with no warning given yet."""
    torch.manual_seed(0)
    policies.WARNED.clear()
    # Stand-ins for other devices make tensors of their own kind, which are good in their test alone.
    sharpen._sharpeners.clear()
    sharpen._two_keys.clear()


@pytest.fixture(autouse=True)
def _own_registries() -> Iterator[None]:
    """Take out the normalisers, policies and plugins that a test has brought in.

    Otherwise a second test that uses the same name fails or not by the order in which tests run, which differs with
    the load when workers steal tests from each other.
    """
    registries: tuple[dict[str, Any], ...] = (normalisers._kinds, policies._kinds)
    before = [dict(registry) for registry in registries]
    modules = set(sys.modules)
    yield
    for registry, kinds in zip(registries, before, strict=True):
        late = {name: kind for name, kind in registry.items() if name not in kinds and _of_the_package(kind)}
        registry.clear()
        registry.update(kinds | late)
    for name in set(sys.modules) - modules:
        if name.startswith("sharpmax_plugin_"):
            del sys.modules[name]


def _of_the_package(kind: type) -> bool:
    """Whether a module of sharpmax defines it. A docstring's example has the name of that module, but is not in it."""
    module = sys.modules.get(kind.__module__)
    return kind.__module__.startswith("sharpmax.") and getattr(module, kind.__name__, None) is kind


def _patch_language_once() -> None:
    """Half the time of an interpreted kernel goes into patching Triton's language again for every inner function.

    A launch patches it and takes the patches back. Inside of a launch there is nothing left to patch.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    if not hasattr(interpreter, "_LangPatchScope"):  # another version of Triton, which patches in another way
        return
    patch = interpreter._patch_lang
    language: Any = importlib.import_module("triton.language")

    @functools.cache
    def modules(function: Any) -> list[Any]:
        return [value for value in function.__globals__.values() if value is language or value is language.core]

    def patch_once(function: Any) -> Any:
        patched = all(module.static_print is print for module in modules(function))
        return interpreter._LangPatchScope() if patched else patch(function)

    interpreter._patch_lang = patch_once


if os.environ["TRITON_INTERPRET"] == "1" and importlib.util.find_spec("triton"):
    _patch_language_once()

if "mutmut" in sys.modules and not hasattr(pytest.Item, "_nodeid"):
    # mutmut 3.8 reads the id of a test under the name it had before pytest 9.1.
    pytest.Item._nodeid = property(lambda self: self.nodeid)  # type: ignore[attr-defined]
