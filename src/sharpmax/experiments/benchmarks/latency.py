"""What a user waits for: host time per call (`host_tables`), and transformers' `generate` (`generate_tables`).

Within a round everything runs once and ratios are taken within a round. Host time is the time until a call returns; a
GPU's own time is taken with CUDA events, behind a wait during which the host queues the call.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sharpmax as sm
from sharpmax.errors import ArgumentError, reject
from sharpmax.experiments.benchmarks.gpu import spent
from sharpmax.experiments.benchmarks.measuring import (
    Note,
    distance,
    in_rounds,
    median_ratio,
    random_tokens,
    silent,
    targets,
)
from sharpmax.lazy import require
from sharpmax.models.language import DTYPES, load_language_model
from sharpmax.policies.basic import Constant
from sharpmax.policies.per_head import PerHead
from sharpmax.provenance import check_amounts, check_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RANDOM = "random"
"""In place of a model: random weights in the shape of SmolLM2-135M, which take as long as trained ones."""

ROUNDS = 5
CONTEXTS, BATCHES, TOKENS = (2048, 8192), (1, 16), 32
SMALL_CONTEXTS, SMALL_BATCHES, SMALL_TOKENS = (512,), (1,), 8
POLICIES = ("constant:1.5", "smollm2-constant", "smollm2", "paper")
_BASELINE = "baseline"
_WARM_UP_CALLS, _CALLS = 20, 100
_STEPS = 8

_ERROR = {torch.bfloat16: 0.03, torch.float32: 1e-4}
_HOST_TARGETS = {"constant": 50.0, "paper": 90.0, "row-stats": 60.0, "decode": 60.0}
_EVERYDAY = (8, 16, 1024, 64)
_EVERYDAY_TARGETS = {"paper": {"ratio": 2.2}}


def host_tables(device: torch.device, repeat: int = ROUNDS, seed: int = 0, note: Note = silent) -> dict[str, Any]:
    """The tables `bench` and `setting`: microseconds of the host per call, and device time of an everyday shape."""
    check_amounts(_EVERYDAY[2], repeat)
    check_seed(seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # rows of random logits lie beyond the polynomial's range
        errors = _errors(dtype, device, seed)
        small = _calls((1, 8, 128, 64) if device.type == "cuda" else (1, 2, 8, 16), dtype, device, seed)
        found = in_rounds({name: partial(_host_us, call, device) for name, call in small.items()}, repeat, note)
        bench: dict[str, Any] = {}
        for name, times in found.items():
            entry = {"median_us": statistics.median(times), "min_us": min(times), "rounds": repeat}
            limits = {"median_us": _HOST_TARGETS[name]} if name in _HOST_TARGETS else {}
            bench[f"host/{name}"] = entry | {"targets": targets(limits, entry, device.type == "cuda")}
        shape = _EVERYDAY if device.type == "cuda" else (1, 4, 256, 64)
        large = {name: call for name, call in _calls(shape, dtype, device, seed).items() if name != "decode"}
        in_rounds({name: partial(spent, call, device) for name, call in large.items()}, 3)
        rounds = in_rounds({name: partial(spent, call, device) for name, call in large.items()}, repeat, note)
    own = [one.device_ms for one in rounds["pytorch"]]
    for name, each in rounds.items():
        ms = [one.device_ms for one in each]
        entry = {
            "median_ms": statistics.median(ms),
            "min_ms": min(ms),
            "ratio": median_ratio(ms, own),
            "rounds": repeat,
        }
        limits = _EVERYDAY_TARGETS.get(name, {})
        bench[f"everyday/{name}"] = entry | {"targets": targets(limits, entry, device.type == "cuda")}
    for name, error in errors.items():
        bench[f"host/{name}"] |= {"error": error, "agrees": error <= _ERROR[dtype]}
    setting = {
        "device": _name_of(device),
        "dtype": str(dtype).removeprefix("torch."),
        "everyday": list(shape),
        "rounds": repeat,
    }
    return {"bench": bench, "setting": setting}


def _calls(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Callable[[], Any]]:
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v = torch.randn(3, *shape, generator=generator, device=device, dtype=dtype).unbind()
    heads = PerHead((tuple(Constant(1.0 + 0.1 * head) for head in range(shape[1])),))
    row = q[:, :, :1].contiguous()
    return {
        "pytorch": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "constant": lambda: sm.attention(q, k, v, is_causal=True, policy="constant:1.5"),
        "per-head constants": lambda: sm.attention(q, k, v, is_causal=True, policy=heads),
        "paper": lambda: sm.attention(q, k, v, is_causal=True, policy="paper"),
        "row-stats": lambda: sm.row_stats(q, k, is_causal=True, fields=("entropy",)),
        "decode": lambda: sm.decode(row, k, v, policy="paper"),
    }


def _errors(dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, float]:
    """The largest errors of the third call of a layout, whose launches are known by then, against float64."""
    found: dict[str, float] = {}
    for again in range(3):
        generator = torch.Generator(device).manual_seed(seed + again)
        q, k, v = torch.randn(3, 2, 4, 96, 64, generator=generator, device=device, dtype=dtype).unbind()
        row, (wide_q, wide_k, wide_v) = q[:, :, :1].contiguous(), (x.double() for x in (q, k, v))
        truth = sm.attention(wide_q, wide_k, wide_v, is_causal=True, policy="paper", impl="reference")
        entropy = sm.row_stats(q, k, is_causal=True, impl="reference").entropy
        token = sm.decode(row.double(), wide_k, wide_v, policy="paper", impl="torch")
        found = {
            "paper": distance(sm.attention(q, k, v, is_causal=True, policy="paper"), truth),
            "row-stats": distance(sm.row_stats(q, k, is_causal=True, fields=("entropy",)).entropy, entropy),
            "decode": distance(sm.decode(row, k, v, policy="paper"), token),
        }
    return found


def _host_us(call: Callable[[], Any], device: torch.device) -> float:
    """Microseconds until a call returns, on inputs so small that a GPU keeps up with it."""
    for _ in range(_WARM_UP_CALLS):
        call()
    _wait(device)
    start = time.perf_counter()
    for _ in range(_CALLS):
        call()
    taken = time.perf_counter() - start
    _wait(device)
    return 1e6 * taken / _CALLS


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def model_for(name: str, device: torch.device, dtype: str, seed: int = 0) -> PreTrainedModel:
    """The model to generate with: loaded by its name, or of random weights (`random`)."""
    if name != RANDOM:
        return load_language_model(name, device=device.type, dtype=dtype).model
    transformers = require("transformers", "hf", "bench --generate")
    config = transformers.LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=1 << 16, tie_word_embeddings=True, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    model: PreTrainedModel = transformers.LlamaForCausalLM(config).to(DTYPES[dtype]).to(device).eval()
    return model


class _Clock:
    """Takes the place of a streamer: `generate` hands it the prompt, then every token once it is there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def generate_tables(
    model: PreTrainedModel,
    name: str,
    *,
    policies: Sequence[str] = POLICIES,
    contexts: Sequence[int] = CONTEXTS,
    batches: Sequence[int] = BATCHES,
    tokens: int = TOKENS,
    compiled: bool = True,
    repeat: int = ROUNDS,
    seed: int = 0,
    note: Note = silent,
) -> dict[str, Any]:
    """The tables `bench` and `setting`: prefill and time per token of `generate`, for the baseline and each policy.

    Policies of another shape than the model's are left out. With `compiled`, also with a static cache, whose forward
    pass transformers compiles on a GPU: there the variants run one after the other, as each is compiled anew.
    """
    check_amounts(min(contexts), repeat)
    check_seed(seed)
    if tokens < 2:
        reject("tokens", tokens, "2 or more new tokens")
    device = model.device
    variants = [_BASELINE, *(policy for policy in policies if _fits(model, policy))]
    bench: dict[str, Any] = {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for mode in ("eager", "static") if compiled else ("eager",):
            for batch in batches:
                for context in contexts if mode == "eager" else contexts[:1]:
                    ids = random_tokens(model, batch * context, seed).view(batch, context)
                    run = _in_turn if mode == "eager" else _one_by_one
                    found = run(model, ids, variants, tokens, repeat, note)
                    place = f"{mode}, batch {batch}, {context:,} tokens"
                    bench |= {f"{place}: {one}": entry for one, entry in _entries(found, mode, device).items()}
    setting = {
        "model": name,
        "device": _name_of(device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "new_tokens": tokens,
        "threads": torch.get_num_threads(),
        "rounds": repeat,
    }
    return {"bench": bench, "setting": setting}


def _fits(model: PreTrainedModel, policy: str) -> bool:
    """Whether a policy can be applied to the model; an unknown name is an error."""
    sm.load_policy(policy)
    try:
        with _applied(model, policy):
            return True
    except ArgumentError:
        return False


def _applied(model: PreTrainedModel, variant: str) -> Any:
    return nullcontext() if variant == _BASELINE else sm.applied(model, variant)


_Times = dict[str, list[dict[str, float]]]


def _in_turn(
    model: PreTrainedModel, ids: Tensor, variants: Sequence[str], tokens: int, repeat: int, note: Note
) -> _Times:
    def measured(variant: str) -> dict[str, float]:
        with _applied(model, variant):
            return _generated(model, ids, tokens, {}) | _forward(model, ids)

    runs = {variant: partial(measured, variant) for variant in variants}
    in_rounds(runs, 1, note)
    return in_rounds(runs, repeat, note)


def _one_by_one(
    model: PreTrainedModel, ids: Tensor, variants: Sequence[str], tokens: int, repeat: int, note: Note
) -> _Times:
    found: _Times = {}
    for variant in variants:
        note(f"static cache: compiling {variant}")
        torch.compiler.reset()
        vars(model).pop("_compiled_call", None)
        with _applied(model, variant):
            for _ in range(2):
                _generated(model, ids, tokens, {"cache_implementation": "static"})
            found[variant] = [_generated(model, ids, tokens, {"cache_implementation": "static"}) for _ in range(repeat)]
    return found


def _generated(model: PreTrainedModel, ids: Tensor, tokens: int, options: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds until the first token and between tokens."""
    clock = _Clock()
    generate: Any = model.generate
    generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
        pad_token_id=0, streamer=clock, **options,
    )  # fmt: skip
    steps = [1e3 * (after - before) for before, after in zip(clock.times, clock.times[1:], strict=False)]
    return {"prefill_ms": steps[0], "token_ms": statistics.median(steps[1:])}


def _forward(model: PreTrainedModel, ids: Tensor) -> dict[str, float]:
    """Forward pass of one new token on a GPU: until the call returns, and until the device is done."""
    if model.device.type != "cuda":
        return {}
    cache = require("transformers", "hf", "bench --generate").DynamicCache(config=model.config)
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    took: list[tuple[float, float]] = []
    for _ in range(_STEPS):
        _wait(model.device)
        start = time.perf_counter()
        model(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True, logits_to_keep=1)
        returned = time.perf_counter()
        _wait(model.device)
        took.append((1e3 * (returned - start), 1e3 * (time.perf_counter() - start)))
    host, done = (statistics.median(times) for times in zip(*took, strict=True))
    return {"forward_host_ms": host, "forward_ms": done}


def _entries(found: _Times, mode: str, device: torch.device) -> dict[str, dict[str, Any]]:
    entries = {}
    for variant, rounds in found.items():
        quantities = rounds[0]
        entry: dict[str, Any] = {one: statistics.median(each[one] for each in rounds) for one in quantities}
        for one in quantities:
            ratio = median_ratio([each[one] for each in rounds], [each[one] for each in found[_BASELINE]])
            entry[one.removesuffix("_ms") + "_ratio"] = ratio
        limits = {} if variant == _BASELINE else _limits(variant, mode, device)
        entries[variant] = entry | {"rounds": len(rounds), "targets": targets(limits, entry)}
    return entries


def _limits(variant: str, mode: str, device: torch.device) -> dict[str, float]:
    """The largest ratios that are aimed at."""
    if device.type != "cuda":
        return {"token_ratio": 1.1, "prefill_ratio": 1.35}
    if mode == "static":
        return {"token_ratio": 1.1}
    policy = sm.load_policy(variant)
    constant = (
        not any(one.needs for row in policy.policies for one in row)
        if isinstance(policy, PerHead)
        else not policy.needs
    )
    return {"token_ratio": 1.03 if constant else 1.15, "prefill_ratio": 1.03 if constant else 1.25}
