"""Throughput of vLLM with the plugin relative to vLLM without a policy.

`.venv-engines/bin/python -m tests.engines.throughput [POLICY ...]`, after `make test-engines`.

One engine per policy; in every round it works without the policy and with it, in turns. What counts is the CPU time of
its process, which runs in one thread: other work on the machine has little effect on it.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import time

from sharpmax.integrations.vllm import SharpAttention
from sharpmax.models.language import smollm2_folder
from tests.engines import engines, vllm_process

POLICIES = (engines.CONSTANTS, "log-length:64", "paper", engines.ROWS)
ROUNDS, PROMPTS, LENGTH, TOKENS = 9, 4, 256, 64


def work(policy: str) -> None:
    """Print the medians, over the rounds, of the time without the policy divided by the time with it."""
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": 4096}
    engine = vllm_process.start(str(smollm2_folder()), engines.chosen(options))
    layers = [one for one in gc.get_objects() if isinstance(one, SharpAttention)]
    rules = [one.sharpener.rules for one in layers]
    prompts = [[(7 * one + place) % 40_000 + 100 for place in range(LENGTH)] for one in range(PROMPTS)]
    seconds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for turn in range(2 * ROUNDS + 2):
        sharp = bool(turn % 2)
        for one, own in zip(layers, rules, strict=True):
            one.sharpener.rules = own if sharp else ()
        times = [time.process_time()]
        for tokens in (1, TOKENS):
            vllm_process.generate(engine, engines.greedy(prompts, tokens))
            times.append(time.process_time())
        read = times[1] - times[0]
        seconds[sharp].append((read, times[2] - times[1] - read))
    pairs = list(zip(seconds[False], seconds[True], strict=True))[1:]  # the first round warms up
    prefill, decode = (statistics.median(plain[part] / own[part] for plain, own in pairs) for part in (0, 1))
    print(f"{policy:18} prefill {prefill:.3f}× decode {decode:.3f}×", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2])
    for name in () if "--work" in sys.argv else sys.argv[1:] or POLICIES:
        line = [sys.executable, "-m", "tests.engines.throughput", "--work", name]
        subprocess.run(line, env=engines.environment(name), check=True, stderr=subprocess.DEVNULL)
