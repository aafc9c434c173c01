"""Every kernel compiles for Hopper, as its own launch code asks for it; no GPU is needed to see that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_every_kernel_compiles() -> None:
    script = Path(__file__).with_name("hopper.py")
    source = Path(__file__).parents[1] / "src"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join([str(source), *sys.path])}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    compiled = {name for name, *_ in lines}
    assert {"quick_parts", "careful_parts", "into_queries", "into_keys", "scale_rows", "scale_rows_backward"} < compiled
    assert "scale_features" in compiled
    assert {"sharpen_rows", "decode_logits", "decode_values", "decode_whole", "decode_sum", "decode_rows"} < compiled
    # Tensor cores at full speed, and no more shared memory than a Hopper GPU gives a block of threads.
    assert all(unit == "wgmma" for name, unit, *_ in lines if name in ("quick_parts", "into_queries", "decode_logits"))
    assert all(int(size) <= 227 * 1024 for *_, size in lines)
