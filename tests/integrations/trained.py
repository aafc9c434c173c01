"""A small model and its batches; run as a script with a folder and a rank, one of two processes that train it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from sharpmax.integrations.trainer import AttentionObserver

VOCABULARY, LAYERS, HEADS = 31, 2, 4


def llama() -> Any:
    """A new model, the same at every call; its attention is close to uniform."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def batch(seed: int = 0, rows: int = 3, length: int = 12) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def main(folder: str, rank: int) -> None:
    # A store in a file: one that a process serves would go with the first process that ends.
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", world_size=2, rank=rank)
    model = nn.parallel.DistributedDataParallel(llama())
    observer = AttentionObserver(model, every=1)
    with observer.step():
        tokens = batch(rank)
        model(tokens, labels=tokens).loss.backward()
    Path(f"{folder}/{rank}.json").write_text(json.dumps(observer.state_dict()), encoding="utf-8")
    torch.distributed.barrier()
    # The destructor of a gloo group waits, holding the GIL, for a thread that may itself be waiting for the GIL.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
