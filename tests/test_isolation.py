"""What a test defines is gone after it: tests pass in any order, in any process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sharpmax.experiments import engine as plugins
from sharpmax.normalisers.base import Normaliser, normalisers
from sharpmax.policies.base import policy_from_dict
from sharpmax.policies.basic import Constant

NORMALISER = """
from sharpmax.normalisers import Normaliser

class Same(Normaliser):
    name = "the-same-in-two-tests"
    disperses = "yes"

    def normalise(self, logits, visible):
        return visible / visible.sum(-1, keepdim=True)
"""


@pytest.mark.parametrize("home", ["one", "two"])
def test_a_name_is_free_again(home: str, tmp_path: Path) -> None:
    assert "the-same-in-two-tests" not in normalisers()
    assert not [name for name in sys.modules if name.startswith("sharpmax_plugin_of_test_")]
    file = tmp_path / f"of_test_{home}.py"
    file.write_text(NORMALISER, encoding="utf-8")
    plugins.load_plugin(plugins.read_plugins([file])[0])
    assert issubclass(normalisers()["the-same-in-two-tests"], Normaliser)


@pytest.mark.parametrize("name", ["Half", "Third"])
def test_a_policy_is_its_own_again(name: str) -> None:
    assert type(policy_from_dict(Constant(2.0).to_dict())) is Constant
    type(name, (Constant,), {"kind": "constant"})
    assert type(policy_from_dict(Constant(2.0).to_dict())).__name__ == name
