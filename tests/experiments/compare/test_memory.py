"""What a method's memory is does not depend on what ran before it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

IN_A_ROW = """
import json, sys, torch
from sharpmax.experiments.compare.run import train
from sharpmax.experiments.compare.methods import LEAGUE
from sharpmax.experiments.compare.methods import ModelSpec
torch.set_num_threads(1)
def memory(name):
    common = {"model": ModelSpec().plain(), "task": "max", "seeds": [0, 1], "device": "cpu"}
    return train(**common, method=LEAGUE[name].plain(), steps=100, batch=64).record["memory"]
print(json.dumps([memory(name) for name in sys.argv[1:]]))
"""


@pytest.mark.parametrize("name", ["softmax", "adaptive"])
def test_first_or_last(name: str) -> None:
    """In a process of its own, where libraries have not been used yet."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_ROW, name, "softmax", "adaptive", name], capture_output=True, text=True, check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=600,
    )  # fmt: skip
    first, *_, last = json.loads(done.stdout)
    assert first > 10e6
    assert last == first
