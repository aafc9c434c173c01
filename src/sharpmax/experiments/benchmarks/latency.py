"""Latency: host time per call (`host_tables`), `generate` (`generate_tables`), a training step (`training_tables`).

Every round runs each case once, and ratios are taken in a round. Host time is the time until a call returns. Device
time is taken with CUDA events, behind a wait during which the host queues the call.
"""

from __future__ import annotations

import importlib
import itertools
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sharpmax as sm
from sharpmax.calibration.learnable import LearnablePolicy
from sharpmax.errors import ArgumentError, reject
from sharpmax.experiments.benchmarks.measuring import (
    Note,
    distance,
    in_rounds,
    median_ratio,
    milliseconds,
    random_tokens,
    silent,
    spent,
    summary,
    synchronise,
    targets,
)
from sharpmax.integrations.trainer import AttentionObserver, EntropyBand, QKClip
from sharpmax.lazy import require
from sharpmax.models.language import DTYPES, any_length, load_language_model
from sharpmax.policies.basic import Constant
from sharpmax.policies.per_head import PerHead
from sharpmax.provenance import check_amounts, check_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RANDOM = "random"
"""In place of a model: random weights in the shape of SmolLM2-135M, which are as fast as trained ones."""

_SHAPE: dict[str, Any] = {
    "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 1 << 16,
    "tie_word_embeddings": True, "eos_token_id": None,
}  # fmt: skip

ROUNDS, GENERATE_ROUNDS, TRAINING_ROUNDS = 5, 3, 8
POLICIES = ("paper", "smollm2", "smollm2-rows", "constant:1.5")
_BASELINE = "baseline"
_WARM_UP_CALLS, _CALLS = 20, 100
_QUEUED = 150_000_000  # cycles, about 80 ms, to queue a forward pass

_ERROR = {torch.bfloat16: 0.03, torch.float32: 1e-4}
_HOST_TARGETS = {
    name: {"median_us": most} for name, most in (("constant", 50), ("paper", 90), ("row-stats", 60), ("decode", 60))
}
_TYPICAL = (8, 16, 1024, 64)
_TYPICAL_TARGETS = {"paper": {"ratio": 2.2}}


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def host_tables(device: torch.device, repeat: int = ROUNDS, seed: int = 0, note: Note = silent) -> dict[str, Any]:
    """The tables `bench` and `setting`: host microseconds per call, and device time of a typical shape."""
    check_amounts(_TYPICAL[2], repeat)
    check_seed(seed)
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    shape = _TYPICAL if on_gpu else (1, 4, 256, 64)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # rows of random logits are outside the polynomial's range
        errors = _errors(dtype, device, seed)
        small = _calls((1, 8, 128, 64) if on_gpu else (1, 2, 8, 16), dtype, device, seed)
        host = in_rounds({name: partial(_host_us, call, device) for name, call in small.items()}, repeat, note)
        large = _calls(shape, dtype, device, seed)
        del large["decode"]
        runs = {name: partial(spent, call, device) for name, call in large.items()}
        in_rounds(runs, 3)
        rounds = in_rounds(runs, repeat, note)
    bench = {f"host/{name}": summary(us, "us", None, _HOST_TARGETS.get(name, {}), on_gpu) for name, us in host.items()}
    for name, error in errors.items():
        bench[f"host/{name}"] |= {"error": error, "agrees": error <= _ERROR[dtype]}
    device_ms = {name: [one.device_ms for one in each] for name, each in rounds.items()}
    for name, ms in device_ms.items():
        bench[f"everyday/{name}"] = summary(ms, "ms", device_ms["pytorch"], _TYPICAL_TARGETS.get(name, {}), on_gpu)
    setting = {"device": _name_of(device), "dtype": str(dtype).removeprefix("torch.")}
    return {"bench": bench, "setting": setting | {"everyday": list(shape), "rounds": repeat}}


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
    """The largest errors against float64 in the third call of a layout, which reuses cached launches."""
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
    """Microseconds until a call returns, with inputs so small that a GPU does not fall behind."""
    for _ in range(_WARM_UP_CALLS):
        call()
    synchronise(device)
    start = time.perf_counter()
    for _ in range(_CALLS):
        call()
    taken = time.perf_counter() - start
    synchronise(device)
    return 1e6 * taken / _CALLS


def model_for(name: str, device: torch.device, dtype: str, seed: int = 0) -> PreTrainedModel:
    """The model to generate with: loaded by name, or with random weights (`random`)."""
    if name != RANDOM:
        return load_language_model(name, device=device.type, dtype=dtype).model
    model: PreTrainedModel = _random_model(device, seed).to(DTYPES[dtype]).eval()
    return model


def _random_model(device: torch.device, seed: int, **shape: int) -> Any:
    transformers = require("transformers", "hf", "bench --generate and --training")
    torch.manual_seed(seed)
    with torch.device(device):  # ten times as fast on a GPU as on a CPU
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**_SHAPE, **shape}))


def generate_tables(
    model: PreTrainedModel,
    name: str,
    *,
    policies: Sequence[str] = POLICIES,
    contexts: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
    tokens: int | None = None,
    compiled: bool = False,
    repeat: int = GENERATE_ROUNDS,
    seed: int = 0,
    note: Note = silent,
) -> dict[str, Any]:
    """The tables `bench` and `setting`: prefill and time per token of `generate`, for the baseline and each policy.

    Policies that do not fit the model are left out. `compiled` adds cases with a static cache, whose decoding step
    transformers compiles on a GPU. A case that fails has a `problem` instead of times.
    """
    on_gpu = model.device.type == "cuda"
    contexts, batches = contexts or ((2048, 8192) if on_gpu else (512,)), batches or ((1, 16) if on_gpu else (1,))
    new_tokens = tokens or (16 if on_gpu else 8)
    check_amounts(min(contexts), repeat)
    check_seed(seed)
    if new_tokens < 2:
        reject("tokens", new_tokens, "2 or more new tokens")
    variants = [_BASELINE, *(policy for policy in policies if _fits(model, policy))]
    cells = [("eager", batch, context) for batch in batches for context in contexts]
    cells += [("static", batch, contexts[0]) for batch in batches] if compiled else []
    bench: dict[str, Any] = {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for mode, batch, context in cells:
            ids = random_tokens(model, batch * context, seed).view(batch, context)
            place = f"{mode}, batch {batch}, {context:,} tokens"
            note(place)
            found = _times(model, ids, variants, mode, new_tokens, repeat, note)
            bench |= {f"{place}: {variant}": _entry(found, variant, mode, on_gpu) for variant in variants}
    setting = {
        "model": name, "device": _name_of(model.device), "dtype": str(model.dtype).removeprefix("torch."),
        "new_tokens": new_tokens, "threads": torch.get_num_threads(), "rounds": repeat,
    }  # fmt: skip
    return {"bench": bench, "setting": setting}


def _fits(model: PreTrainedModel, policy: str) -> bool:
    """Whether a policy can be applied to the model. An unknown name is an error."""
    sm.load_policy(policy)
    try:
        with _applied(model, policy):
            return True
    except ArgumentError:
        return False


def _applied(model: PreTrainedModel, variant: str) -> Any:
    return nullcontext() if variant == _BASELINE else sm.applied(model, variant)


_Times = dict[str, list[dict[str, float]] | str]
"""The times of each variant by round, or the reason why there are none."""


def _times(
    model: PreTrainedModel, ids: Tensor, variants: Sequence[str], mode: str, tokens: int, repeat: int, note: Note
) -> _Times:
    """Time every variant in every round, after one warm-up round (two where a pass is compiled)."""
    static = mode == "static"
    rounds = range(-2 if static else -1, repeat)
    # Each variant is compiled again, so with a static cache they run one after the other.
    turns = [(v, r) for v in variants for r in rounds] if static else [(v, r) for r in rounds for v in variants]
    found: _Times = {variant: [] for variant in variants}
    for variant, number in turns:
        times = found[variant]
        if isinstance(times, str):
            continue
        note(f"{variant}, round {number + 1} of {repeat}")
        if static and number == rounds[0]:
            torch.compiler.reset()
            _graph_breaks().clear()
            vars(model).pop("_compiled_call", None)
        try:
            with _applied(model, variant):
                took = _generated(model, ids, tokens, static) | ({} if static else _forward(model, ids))
        except Exception as error:  # other cases can still be measured
            found[variant] = f"{type(error).__name__}: {error}".splitlines()[0]
            if ids.is_cuda:
                torch.cuda.empty_cache()
            continue
        if number >= 0:
            times.append(took)
    return found


def _generated(model: PreTrainedModel, ids: Tensor, tokens: int, static: bool) -> dict[str, float]:
    """Milliseconds to the first token and between tokens; with a static cache also the graph breaks so far."""
    times: list[float] = []

    class Clock:
        """A streamer, which gets the prompt and then every token."""

        def put(self, tokens: Tensor) -> None:
            times.append(time.perf_counter())

        def end(self) -> None:
            pass

    generate: Any = model.generate
    generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
        pad_token_id=0, streamer=Clock(), **({"cache_implementation": "static"} if static else {}),
    )  # fmt: skip
    steps = [1e3 * (after - before) for before, after in itertools.pairwise(times)]
    found = {"prefill_ms": steps[0], "token_ms": statistics.median(steps[1:])}
    return found | ({"graph_breaks": sum(_graph_breaks().values())} if static else {})


def _graph_breaks() -> dict[str, int]:
    """Graph breaks of the compiler, by reason."""
    breaks: dict[str, int] = importlib.import_module("torch._dynamo.utils").counters["graph_break"]
    return breaks


def _forward(model: PreTrainedModel, ids: Tensor) -> dict[str, float]:
    """Host and device time of forward passes over the prompt and one new token, on a GPU."""
    if model.device.type != "cuda":
        return {}
    caches = [require("transformers", "hf", "bench --generate").DynamicCache(config=model.config) for _ in range(2)]
    found = {}
    for name, given in (("prefill", ids), ("token", ids[:, -1:])):
        options = {"input_ids": given, "use_cache": True, "logits_to_keep": 1}
        runs = [partial(model, past_key_values=cache, **options) for cache in caches]
        synchronise(model.device)
        start = time.perf_counter()
        runs[0]()
        found[f"{name}_host_ms"] = 1e3 * (time.perf_counter() - start)
        found[f"{name}_device_ms"] = spent(runs[1], model.device, _QUEUED).device_ms
    return found


def _entry(found: _Times, variant: str, mode: str, on_gpu: bool) -> dict[str, Any]:
    times, base = found[variant], found[_BASELINE]
    if isinstance(times, str):
        return {"problem": times, "targets": {}}
    entry: dict[str, Any] = {one: statistics.median(each[one] for each in times) for one in times[0]}
    if not isinstance(base, str):
        for one in [name for name in times[0] if name.endswith("_ms")]:
            ratio = median_ratio([each[one] for each in times], [each[one] for each in base])
            entry[one.removesuffix("_ms") + "_ratio"] = ratio
    limits = {} if variant == _BASELINE else _limits(variant, mode, on_gpu)
    return entry | {"rounds": len(times), "targets": targets(limits, entry)}


def _limits(variant: str, mode: str, on_gpu: bool) -> dict[str, float]:
    """Targets of the ratios."""
    if not on_gpu:
        return {"token_ratio": 1.1, "prefill_ratio": 1.35}
    if mode == "static":
        return {"token_ratio": 1.1}
    policy = sm.load_policy(variant)
    every = [one for row in policy.policies for one in row] if isinstance(policy, PerHead) else [policy]
    measures = any(one.needs for one in every)
    return {"token_ratio": 1.15, "prefill_ratio": 1.25} if measures else {"token_ratio": 1.03, "prefill_ratio": 1.03}


TRAINING_LENGTH, EVERY = 2048, 20
TRAINING_CASES = ("baseline", "observed", "constant:1.5", "paper", "learned ssmax", "learned entropy", "entropy band")
_COST_LIMITS = {"observer_percent": 2.0, "clip_percent": 1.0}
_WORK = {
    "row statistics and β": r"quick_parts|careful_parts|into_queries|into_keys|scale_rows|sharpen_rows|scale_features",
    "attention": r"flash|fmha|attention|sdpa",
    "matrix products": r"gemm|cutlass|nvjet|cublas|xmma",
    "optimizer": r"adam|multi_tensor",
}


@contextmanager
def _step(model: Any, tokens: Tensor, name: str) -> Iterator[Callable[[], None]]:
    """A step with forward, backward and AdamW, in bfloat16 on a GPU, and what the named case adds to it."""
    device = tokens.device
    on_gpu = device.type == "cuda"
    with ExitStack() as block:
        if name in ("paper", "constant:1.5"):
            block.enter_context(sm.applied(model, name))
        elif name.startswith("learned "):
            block.callback(LearnablePolicy(model, name.removeprefix("learned ")).remove)
        band = block.enter_context(EntropyBand(model.model)) if name == "entropy band" else None
        observer = AttentionObserver(model.model, every=1) if name == "observed" else None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=on_gpu)

        def step() -> None:
            with nullcontext() if observer is None else observer.step():
                with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu), any_length(device):
                    hidden = model.model(tokens, use_cache=False).last_hidden_state
                # Logits of a few rows, or the vocabulary would dominate.
                loss: Tensor = model.lm_head(hidden[:, ::16].to(model.dtype)).float().logsumexp(-1).mean()
                torch.autograd.backward([loss if band is None else loss + band.loss()])
                optimizer.step()
                optimizer.zero_grad()

        yield step


def training_tables(
    *, length: int, repeat: int, device: torch.device, seed: int = 0, layers: int = 30, note: Note = silent
) -> dict[str, Any]:
    """Milliseconds of a step by case, the cost of observer and QK-clip every 20 steps, and a profile on a GPU."""
    model = _random_model(device, seed, num_hidden_layers=layers).train()
    tokens = torch.randint(1000, (16 if device.type == "cuda" else 2, length), device=device)

    def measured(name: str) -> float:
        with _step(model, tokens, name) as step:
            step()  # creates the optimizer's state
            return milliseconds(step, device)

    rounds = in_rounds({name: partial(measured, name) for name in TRAINING_CASES}, repeat + 1, note)
    times = {name: found[1:] for name, found in rounds.items()}  # without the first round, which compiles kernels
    entries = {}
    for name, found in times.items():
        limits = {"ratio": 1 / 0.85} if name not in ("baseline", "observed") else {}
        entries[name] = summary(found, "ms", times["baseline"], limits, device.type == "cuda")
    observer = AttentionObserver(model, every=1)
    with observer.step():
        model(tokens[:1, :64])
    clip = QKClip(model, tau=1e-9)  # every head is above τ, the most expensive case
    clip_ms = min(milliseconds(partial(clip, observer.history[0]), device) for _ in range(3))
    cost = {
        "every": EVERY,
        "observer_percent": 100.0 * (entries["observed"]["ratio"] - 1.0) / EVERY,
        "clip_ms": clip_ms,
        "clip_percent": 100.0 * clip_ms / (EVERY * entries["baseline"]["median_ms"]),
    }
    setting = {
        "model": "SmolLM2's shape", "layers": layers, "length": length, "rows": len(tokens), "rounds": repeat,
        "device": device.type, "tokens": tokens.numel(),
    }  # fmt: skip
    limited = cost | {"targets": targets(_COST_LIMITS, cost, device.type == "cuda")}
    tables = {"setting": setting, "training_bench": entries, "training_cost": limited}
    if device.type == "cuda":
        tables["profile"] = {name: _profile(model, tokens, name) for name in ("baseline", "paper")}
    return tables


def _profile(model: Any, tokens: Tensor, name: str) -> dict[str, float]:
    """Device milliseconds of a step by kind of work, and host milliseconds to launch it."""
    with _step(model, tokens, name) as step:
        step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        found = dict.fromkeys([*_WORK, "other"], 0.0)
        for event in profile.key_averages():
            kind = next((kind for kind, names in _WORK.items() if re.search(names, event.key, re.IGNORECASE)), "other")
            found[kind] += event.self_device_time_total / 1e3
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        return found | {"host": 1e3 * (time.perf_counter() - start)}
