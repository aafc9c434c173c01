"""What `import sharpmax.jax` brings along, and what it says when JAX is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import sharpmax


def run(program: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(sharpmax.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": source, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )


def test_torch_is_neither_imported_nor_needed():
    done = run(
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import numpy as np, sharpmax.jax as sj\n"
        "x = np.ones((1, 4, 8), np.float32)\n"
        "assert float(sj.softmax(x, policy='paper').sum()) == 4.0\n"
        "assert float(sj.entropy(x).min()) > 2.0\n"
        "out, stats = sj.attention(x, x, x, return_stats=True, policy='paper')\n"
        "assert float(abs(out - 1).max()) < 1e-6 and int(stats.count[0, 0]) == 4\n"
    )
    assert done.returncode == 0, done.stderr


def test_missing_jax_names_the_extra():
    done = run(
        "import sys\n"
        "sys.modules['jax'] = None\n"
        "from sharpmax.errors import MissingExtraError\n"
        "try:\n"
        "    import sharpmax.jax\n"
        "except MissingExtraError as missing:\n"
        "    print(missing)\n"
    )
    assert done.returncode == 0, done.stderr
    assert "pip install 'jax>=0.6'" in done.stdout
