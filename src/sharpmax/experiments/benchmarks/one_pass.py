"""A process of its own in which a language model reads one input, plainly or while rows are captured.

Run as `python -m sharpmax.experiments.benchmarks.one_pass MODEL LENGTH ROWS SEED`. ROWS is what `capture` takes, or
`plain`.
Prints one JSON object: seconds by the clock and of the processor, the most memory of the process in MiB (null where the
system does not tell), a digest of the output, and how far captured entropies of a short input are from float64.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sharpmax.experiments.evaluate.cost import peak_mib, start_peak
from sharpmax.integrations.transformers.interface import observed
from sharpmax.models.language import load_language_model
from sharpmax.probing.capture import capture
from sharpmax.stats.dispatch import measure

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sharpmax.stats.call import AttentionCall

PLAIN = "plain"

_SHORT = 256


def one_pass(model: PreTrainedModel, length: int, rows: str, seed: int) -> dict[str, Any]:
    """Read `length` random tokens, and a short input before them: threads and libraries come to life with that."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.get_text_config().vocab_size, (1, length), generator=generator)
    error = None if rows == PLAIN else entropy_error(model, ids[:, :_SHORT], rows)
    _read(model, ids[:, :_SHORT], rows)
    known = start_peak(model.device)
    began, worked = time.perf_counter(), time.process_time()
    out = _read(model, ids, rows)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - worked
    digest = hashlib.sha256(out.float().numpy().tobytes()).hexdigest()[:16]
    peak = peak_mib(model.device) if known else None
    return {
        "seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mib": peak, "output": digest, "entropy_error": error,
    }  # fmt: skip


def entropy_error(model: PreTrainedModel, ids: Tensor, rows: str) -> float:
    """The largest distance of a captured entropy, in nats, from that of the dense logits in float64."""
    expected: list[Tensor] = []

    def by_definition(seen: AttentionCall) -> None:
        expected.append(measure(seen, "reference", frozenset({"entropy"})).entropy)

    with observed(model, by_definition), capture(model, rows) as found:
        _read(model, ids, PLAIN)
    pairs = zip(found.calls, expected, strict=True)
    errors = [(call.statistics["entropy"].double() - every[..., call.places]).abs().max() for call, every in pairs]
    return float(torch.stack(errors).max())


def _read(model: PreTrainedModel, ids: Tensor, rows: str) -> Tensor:
    """The last token's logits; nothing is kept that reading does not need, so that what is added shows."""
    with torch.no_grad(), nullcontext() if rows == PLAIN else capture(model, rows):
        out: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
    return out


def main() -> None:
    """Measure and print."""
    name, length, rows, seed = sys.argv[1:5]
    print(json.dumps(one_pass(load_language_model(name).model, int(length), rows, int(seed))))


if __name__ == "__main__":
    main()
