"""The memory of a method does not depend on what ran before it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

IN_A_ROW = """
import json, sys, torch
from dataclasses import asdict
from sharpmax.experiments import stacked_training
from sharpmax.experiments.compare.methods import SHIPPED_METHODS, ModelSpec
from sharpmax.experiments.compare.run import train
torch.set_num_threads(1)
stacked_training.BLOCK = 4
def memory(name):
    common = {"model": asdict(ModelSpec()), "task": "max", "seeds": [0, 1], "device": "cpu"}
    return train(**common, method=asdict(SHIPPED_METHODS[name]), steps=4, batch=64).record["memory"]
print(json.dumps([memory(name) for name in sys.argv[1:]]))
"""


def test_first_or_last() -> None:
    """In a process of its own, where libraries have not been used yet."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_ROW, "softmax", "adaptive", "softmax", "adaptive"],
        capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=600,
    )  # fmt: skip
    first, second, third, fourth = json.loads(done.stdout)
    assert (first, second) == (third, fourth)
    assert first > 5e6
