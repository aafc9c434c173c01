"""vLLM in a process of its own: a job as JSON on standard input, its answer as JSON in the file the job names (`out`).

A job has either `model`, `options` of `LLM` and `calls`, each with `prompts` (lists of tokens) and `sampling`: the
answer has, for every call and prompt, the tokens of each of its `n` completions. Or it has `tries`, each with a
`policy`, `model` and `options`: the answer has the error that each of these engines ends in.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> None:
    """Do the job."""
    answer = [_error(**one) for one in job["tries"]] if "tries" in job else _tokens(job)
    Path(job["out"]).write_text(json.dumps(answer), encoding="utf-8")


def start(model: str, options: dict[str, Any]) -> Any:
    """An engine."""
    from vllm import LLM

    return LLM(model, enforce_eager=True, disable_log_stats=True, **options)


def generate(engine: Any, call: dict[str, Any]) -> list[list[list[int]]]:
    """The tokens of each completion of each prompt."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": ids} for ids in call["prompts"]]
    made = engine.generate(prompts, SamplingParams(**call["sampling"]), use_tqdm=False)
    return [[list(one.token_ids) for one in request.outputs] for request in made]


def _tokens(job: dict[str, Any]) -> list[Any]:
    engine = start(job["model"], job["options"])
    return [generate(engine, call) for call in job["calls"]]


def _error(policy: str, model: str, options: dict[str, Any]) -> str:
    from vllm.distributed import cleanup_dist_env_and_memory

    os.environ["SHARPMAX_POLICY"] = policy
    try:
        start(model, options)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    finally:
        cleanup_dist_env_and_memory()
    return ""


if __name__ == "__main__":
    main(json.load(sys.stdin))
