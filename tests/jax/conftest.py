"""Quick compilation for the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

try:
    import jax
except ModuleNotFoundError:  # an extra: a machine without it leaves this folder out
    collect_ignore_glob = ["test_*.py"]
else:
    # Nearly all of the time goes into compiling, and most of that into one part of the compiler that can be left out.
    # An unknown flag would end the process, so it is set for the versions that are known to have it, before any use.
    if (0, 10) <= jax.__version_info__ < (0, 11):
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_use_fusion_emitters=false"


@pytest.fixture(autouse=True)
def quick_compilation() -> Iterator[None]:
    """Skip the compiler's optimisations."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def few_newton_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The solver's 24 steps are written out for the compiler; the rows of these tests are there after six."""
    monkeypatch.setattr("sharpmax.policies.entropy_target._STEPS", 6)
