"""Time and memory of folding files of 500 MB: `python tests/integrations/fold_cost.py`.

A GGUF file (Q8_0) and a checkpoint (bfloat16) of the same Llama are made up, then each is folded in a process of its
own. Memory is the largest resident size of that process.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

LAYERS, WIDTH, HEADS, INNER = 24, 1024, 16, 4096


FOLD = """
import sys
from pathlib import Path
from sharpmax.cli import main
code = main(["fold", sys.argv[1], "--policy", "constant:1.5", "--out", sys.argv[2]])
print([line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")][0].split()[1])
sys.exit(code)
"""


def main() -> None:
    """Make the files, fold them and print what it took."""
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        for source, out in ((_gguf(folder / "model.gguf"), "out.gguf"), (_checkpoint(folder / "model"), "out")):
            size = sum(file.stat().st_size for file in ([source] if source.is_file() else source.iterdir()))
            line = [sys.executable, "-c", FOLD, str(source), str(folder / out)]
            start = time.perf_counter()
            done = subprocess.run(line, check=True, capture_output=True, text=True)
            seconds, memory = time.perf_counter() - start, int(done.stdout.split()[-1]) / 1024
            print(f"{source.name}: {size / 1e6:.0f} MB folded in {seconds:.1f} s, at most {memory:.0f} MB of memory")


def _gguf(path: Path) -> Path:
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(1024)
    writer.add_embedding_length(WIDTH)
    writer.add_head_count(HEADS)
    kind = gguf.GGMLQuantizationType.Q8_0
    for layer in range(LAYERS):
        for name, rows in (("attn_q", WIDTH), ("attn_k", WIDTH), ("attn_v", WIDTH), ("ffn_up", 4 * INNER)):
            data = gguf.quants.quantize(
                np.random.default_rng(layer).normal(size=(rows, WIDTH)).astype(np.float32), kind
            )
            writer.add_tensor(f"blk.{layer}.{name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _checkpoint(folder: Path) -> Path:
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000, hidden_size=WIDTH, intermediate_size=INNER // 2, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: one.shape for name, one in LlamaForCausalLM(config).state_dict().items()}
    save_file(
        {name: torch.ones(one, dtype=torch.bfloat16) for name, one in shapes.items()}, folder / "model.safetensors"
    )
    return folder


if __name__ == "__main__":
    main()
