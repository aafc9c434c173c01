"""What `import sharpmax.jax` brings along, and what it says when JAX is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import sharpmax

WITHOUT_TORCH = """
import sys
sys.modules['torch'] = None
import numpy as np, sharpmax.jax as sj
x = np.ones((1, 4, 8), np.float32)
assert float(sj.softmax(x, policy='paper').sum()) == 4.0
assert float(sj.entropy(x).min()) > 2.0
out, stats = sj.attention(x, x, x, return_stats=True, policy='paper')
assert float(abs(out - 1).max()) < 1e-6 and int(stats.count[0, 0]) == 4
"""
WITHOUT_JAX = """
import sys
sys.modules['jax'] = None
from sharpmax.errors import MissingExtraError
try:
    import sharpmax.jax
except MissingExtraError as missing:
    print(missing)
"""


@pytest.mark.parametrize(("program", "printed"), [(WITHOUT_TORCH, ""), (WITHOUT_JAX, "pip install 'jax>=0.6'")])
def test_import(program, printed):
    environment = {"PYTHONPATH": str(Path(sharpmax.__file__).parents[1]), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout
