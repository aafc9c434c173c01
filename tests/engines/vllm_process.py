"""Generate with vLLM in a process of its own: a job as JSON on standard input, tokens as JSON in the file it names.

The job: `model`; `options` of `LLM`; `calls`, each with `prompts` (lists of tokens) and `sampling`; `out`. The answer:
for every call, for every prompt, the tokens of each of its `n` completions.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> None:
    """Start one engine and make the calls one after another."""
    from vllm import LLM, SamplingParams

    engine = LLM(job["model"], enforce_eager=True, disable_log_stats=True, **job["options"])
    answers = []
    for call in job["calls"]:
        prompts: list[Any] = [{"prompt_token_ids": ids} for ids in call["prompts"]]
        made = engine.generate(prompts, SamplingParams(**call["sampling"]), use_tqdm=False)
        answers.append([[list(one.token_ids) for one in request.outputs] for request in made])
    Path(job["out"]).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(json.load(sys.stdin))
