"""The engines under test, and what they are asked: each run is a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from sharpmax.tasks import get_task
from sharpmax.tasks.prompt import Prompt

CONSTANTS = "smollm2"
"""The packaged policy of one constant per head for SmolLM2."""

ROWS = "smollm2-rows"
"""The packaged policy for SmolLM2 that reads the row, learned for every head."""

PROMPTS, NAMES = 24, 40
GAIN = 5
"""How many more of the prompts the policy must win at least. Measured: 4 → 20 with `smollm2`."""

_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def lookups() -> list[Prompt]:
    """Ask for the number of one name in a list."""
    return get_task("kv").prompts(NAMES, PROMPTS, seed=0)


def text_of(tokenizer: Any, prompt: Prompt) -> str:
    """What the model reads: the chat up to the opening of the reply."""
    chat = [{"role": "user", "content": prompt.user}]
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)) + prompt.opening


def tokens_of(tokenizer: Any, prompt: Prompt) -> list[int]:
    """The same as tokens."""
    ids: list[int] = tokenizer(text_of(tokenizer, prompt), add_special_tokens=False).input_ids
    return ids


def side_by_side(run: Callable[..., Any], *given: Any) -> list[Any]:
    """Run once for each, two at a time: a process of one thread never waits for another on a busy machine."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, given))


def correct(answers: Sequence[str]) -> int:
    """How many answers begin with the number that was asked for."""
    return sum(answer.startswith(one.answer) for answer, one in zip(answers, lookups(), strict=True))


@torch.inference_mode()
def reference(model: Any, prompts: Sequence[Sequence[int]], tokens: int = 4) -> list[list[list[int]]]:
    """The likeliest tokens after each prompt by transformers, also past the end of the text; in the form of vLLM's."""
    answers = []
    for prompt in prompts:
        read, cache, answer = torch.tensor([list(prompt)]), None, []
        for _ in range(tokens):
            out = model(input_ids=read, past_key_values=cache, use_cache=True, logits_to_keep=1)
            read, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
            answer.append(int(read))
        answers.append([answer])
    return answers


def greedy(prompts: Sequence[Sequence[int]], tokens: int = 4, **sampling: Any) -> dict[str, Any]:
    """A call of vLLM: the likeliest tokens, also past the end of the text."""
    return {
        "prompts": [list(one) for one in prompts],
        "sampling": {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, **sampling},
    }


def run_vllm(
    model: Path, calls: Sequence[dict[str, Any]], policy: str | Path | None = None, **options: Any
) -> list[list[list[list[int]]]]:
    """For every call, for every prompt, the tokens of each completion; `policy` goes to the plugin."""
    found: list[list[list[list[int]]]] = ask_vllm(
        {"model": str(model), "options": chosen(options), "calls": calls}, policy
    )
    return found


def chosen(options: dict[str, Any]) -> dict[str, Any]:
    """Options of an engine: float32 and short inputs unless others are given."""
    return {"dtype": "float32", "max_model_len": 1024, **options}


def environment(policy: str | Path | None) -> dict[str, str]:
    """The environment of a process with vLLM."""
    found = {**os.environ, **_ENVIRONMENT}
    found.pop("SHARPMAX_POLICY", None)
    return found if policy is None else {**found, "SHARPMAX_POLICY": str(policy)}


def ask_vllm(job: dict[str, Any], policy: str | Path | None) -> Any:
    """Give a job to a new process (see `vllm_process`) and return its answer."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answer.json"
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("vllm_process.py"))],
            input=json.dumps({**job, "out": str(out)}), env=environment(policy), capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert out.is_file(), done.stderr[-4000:]
        return json.loads(out.read_text(encoding="utf-8"))
