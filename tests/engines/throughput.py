"""Throughput of vLLM with the plugin relative to vLLM without it.

`.venv-engines/bin/python -m tests.engines.throughput [FILE.json]`, after `make test-engines`.

One engine per policy is started, then they work in turns. What counts is the CPU time of the engine's process, which
runs in one thread: other work on the machine has little effect on it. Prints the median over the rounds of each ratio
to the engine without a policy.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from sharpmax.files import write_text
from tests.engines import engines, vllm_process

POLICIES = (None, engines.CONSTANTS, "log-length:64", "paper", engines.ROWS)
ROUNDS, PROMPTS, LENGTH, TOKENS = 7, 4, 256, 64


def work(model: str) -> None:
    """Run a round for every line on standard input and print its CPU seconds: to read the prompts, and all of it."""
    engine = vllm_process.start(model, engines.chosen({"enable_prefix_caching": False, "max_num_batched_tokens": 4096}))
    prompts = [[(7 * one + place) % 40_000 + 100 for place in range(LENGTH)] for one in range(PROMPTS)]
    for _ in sys.stdin:
        seconds = []
        for tokens in (1, TOKENS):
            start = time.process_time()
            vllm_process.generate(engine, engines.greedy(prompts, tokens))
            seconds.append(time.process_time() - start)
        print("seconds", *seconds, flush=True)


def main(out: str | None) -> None:
    """Measure all policies and print, or write, the medians."""
    from sharpmax.models.smollm2 import smollm2_folder

    line = [sys.executable, "-m", "tests.engines.throughput", "--work", str(smollm2_folder())]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    processes = [subprocess.Popen(line, env=engines.environment(one), text=True, **pipes) for one in POLICIES]
    seconds: list[list[tuple[float, float]]] = [[] for _ in POLICIES]
    for _ in range(ROUNDS + 1):
        for process, found in zip(processes, seconds, strict=True):
            print("go", file=process.stdin, flush=True)
            words = next(line for line in cast("Iterator[str]", process.stdout) if line.startswith("seconds ")).split()
            found.append((float(words[1]), float(words[2]) - float(words[1])))
    for process in processes:
        process.communicate()
    results = {}
    for policy, found in zip(POLICIES, seconds, strict=True):
        pairs = list(zip(seconds[0][1:], found[1:], strict=True))  # the first round warms up
        read, write = (statistics.median(plain[part] / own[part] for plain, own in pairs) for part in (0, 1))
        results[policy or "none"] = {"prefill": round(read, 3), "decode": round(write, 3)}
        print(f"{policy or 'none':18} prefill {read:.3f}× decode {write:.3f}×")
    about = {"prompts": PROMPTS, "prompt_tokens": LENGTH, "new_tokens": TOKENS, "rounds": ROUNDS, "model": "smollm2"}
    if out is not None:
        write_text(Path(out), json.dumps({"kind": "vllm-throughput", **about, "relative": results}, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2])
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else None)
