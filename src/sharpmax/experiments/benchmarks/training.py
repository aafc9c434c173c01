"""Cost per training step of the observer, of QK-clip and of policies, on a decoder of SmolLM2's shape."""

from __future__ import annotations

import functools
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from sharpmax.calibration.learnable import LearnablePolicy
from sharpmax.experiments.benchmarks.measuring import Note, in_rounds, median_ratio, silent, targets
from sharpmax.integrations.trainer import AttentionObserver, EntropyBand, QKClip
from sharpmax.integrations.transformers.application import applied
from sharpmax.lazy import require
from sharpmax.models.language import any_length
from sharpmax.policies.registry import load_policy

LENGTH, ROUNDS, EVERY = 2048, 8, 20
_ROWS = {"cuda": 16}  # sequences of a step; elsewhere 2
_SHAPE = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
_LIMITS = {"observer_percent": 2.0, "clip_percent": 1.0, "policy_ratio": 1 / 0.85}
_WORK = {
    "matrix products": r"gemm|cutlass|nvjet|cublas|xmma",
    "attention": r"flash|fmha|attention|sdpa",
    "row statistics and β": r"_stats|_parts|_sharpen|_beta|_backward_kernel|row_",
    "optimizer": r"adam|multi_tensor",
}


class _Steps:
    """Training steps of one model on the same tokens."""

    def __init__(self, length: int, device: torch.device, seed: int, layers: int) -> None:
        transformers = require("transformers", "hf", "bench --training")
        torch.manual_seed(seed)
        shape = _SHAPE | {"num_hidden_layers": layers, "max_position_embeddings": max(length, 2048)}
        self.model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).to(device).train()
        self.tokens = torch.randint(1000, (_ROWS.get(device.type, 2), length), device=device)
        self.device = device

    def one(self, optimizer: torch.optim.Optimizer, band: EntropyBand | None = None) -> None:
        """Forward, backward and AdamW, in bfloat16 on a GPU."""
        on_gpu = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=on_gpu), any_length(self.device):
            hidden = self.model.model(self.tokens, use_cache=False).last_hidden_state
        # Logits of a few rows: those of all tokens would measure the vocabulary.
        loss: Tensor = self.model.lm_head(hidden[:, ::16].to(self.model.dtype)).float().logsumexp(-1).mean()
        torch.autograd.backward([loss if band is None else loss + band.loss()])
        optimizer.step()
        optimizer.zero_grad()

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=self.device.type == "cuda")

    def timed(self, step: Callable[[], object]) -> float:
        """Milliseconds."""
        self._wait()
        began = time.perf_counter()
        step()
        self._wait()
        return 1e3 * (time.perf_counter() - began)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def _case(steps: _Steps, name: str) -> Iterator[Callable[[], None]]:
    """A training step under the name of what is added to it."""
    model = steps.model
    with ExitStack() as block:
        if name in ("paper", "constant:1.5"):
            block.enter_context(applied(model, load_policy(name)))
        elif name.startswith("learned "):
            block.callback(LearnablePolicy(model, name.removeprefix("learned ")).remove)
        band = block.enter_context(EntropyBand(model.model)) if name == "entropy band" else None
        optimizer = steps.optimizer()
        if name != "observed":
            yield lambda: steps.one(optimizer, band)
            return
        observer = AttentionObserver(model.model, every=1)

        def observed() -> None:
            with observer.step():
                steps.one(optimizer)

        yield observed


CASES = ("baseline", "observed", "constant:1.5", "paper", "learned ssmax", "learned entropy", "entropy band")


def training_tables(
    *, length: int, repeat: int, device: torch.device, seed: int = 0, layers: int = 30, note: Note = silent
) -> dict[str, Any]:
    """Milliseconds of a step by case, and what the observer and QK-clip add to a step at every 20th."""
    steps = _Steps(length, device, seed, layers)

    def measured(name: str) -> Callable[[], float]:
        def once() -> float:
            with _case(steps, name) as step:
                steps.timed(step)  # the first one makes the state of the optimizer
                return steps.timed(step)

        return once

    times = in_rounds({name: measured(name) for name in CASES}, repeat + 1, note)
    times = {name: found[1:] for name, found in times.items()}  # the first round compiles kernels
    base = times["baseline"]
    entries: dict[str, dict[str, Any]] = {
        name: {"median_ms": statistics.median(found), "ratio": median_ratio(found, base)}
        for name, found in times.items()
    }
    for name in CASES[2:]:
        entry = entries[name]
        entry["targets"] = targets({"ratio": _LIMITS["policy_ratio"]}, entry, device.type == "cuda")
    clip = _clip_ms(steps)
    cost = {
        "every": EVERY,
        "observer_percent": 100.0 * (entries["observed"]["ratio"] - 1.0) / EVERY,
        "clip_ms": clip,
        "clip_percent": 100.0 * clip / (EVERY * entries["baseline"]["median_ms"]),
    }
    limits = {name: _LIMITS[name] for name in ("observer_percent", "clip_percent")}
    cost["targets"] = targets(limits, cost, device.type == "cuda")
    tokens = steps.tokens.numel()
    setting = {
        "model": "SmolLM2's shape",
        "layers": layers,
        "length": length,
        "rows": len(steps.tokens),
        "rounds": repeat,
    }
    found = {
        "setting": setting | {"device": device.type, "tokens": tokens},
        "training_bench": entries,
        "training_cost": cost,
    }
    if device.type == "cuda":
        found["profile"] = {name: _profile(steps, name) for name in ("baseline", "paper")}
    return found


def _clip_ms(steps: _Steps) -> float:
    """QK-clip with every head above τ, the most it can cost."""
    observer = AttentionObserver(steps.model, every=1)
    with observer.step():
        steps.model(steps.tokens[:1, :64])
    clip = QKClip(steps.model, tau=1e-9)
    return min(steps.timed(functools.partial(clip, observer.history[0])) for _ in range(3))


def _profile(steps: _Steps, name: str) -> dict[str, float]:
    """Milliseconds of the device in one step by kind of work, and those that the host takes to launch it."""
    with _case(steps, name) as step:
        step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            step()
            torch.cuda.synchronize()
        found = dict.fromkeys([*_WORK, "other"], 0.0)
        for event in seen.key_averages():
            kind = next((kind for kind, names in _WORK.items() if re.search(names, event.key, re.IGNORECASE)), "other")
            found[kind] += event.self_device_time_total / 1e3
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        return found | {"host": 1e3 * (time.perf_counter() - began)}
