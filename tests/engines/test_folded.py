"""SmolLM2 with a policy folded into its files: the gain in llama.cpp and in vLLM, neither of which knows sharpmax."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import sharpmax as sm
from sharpmax.models import language
from tests.engines import engines

_LLAMA_CPP = """
import json, sys
from xllamacpp import CommonParams, Server
path, prompts, out = json.load(sys.stdin)
options = CommonParams()
options.model.path, options.n_ctx, options.n_parallel = path, 1024, 1
options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
server = Server(options)
made = [server.handle_completions({"prompt": one, "max_tokens": 4, "temperature": 0}) for one in prompts]
json.dump([one["choices"][0]["text"] for one in made], open(out, "w"))
"""


def llama_cpp(model: Path, prompts: list[str], out: Path) -> list[str]:
    """What llama.cpp answers: four tokens, the likeliest."""
    job = json.dumps([str(model), prompts, str(out)])
    subprocess.run([sys.executable, "-c", _LLAMA_CPP], input=job, text=True, check=True, capture_output=True)
    answers: list[str] = json.loads(out.read_text(encoding="utf-8"))
    return answers


def test_llama_cpp_gains_from_a_folded_file(tokenizer: Any, tmp_path: Path) -> None:
    source = language.smollm2_file()[0]
    folded = sm.fold(source, engines.CONSTANTS, out=tmp_path / "sharper.gguf").path
    prompts = [engines.text_of(tokenizer, one) for one in engines.lookups()]

    def score(path: Path) -> int:
        return engines.correct(llama_cpp(path, prompts, tmp_path / f"{path.stem}.json"))

    before, after = engines.side_by_side(score, source, folded)
    assert after - before >= engines.GAIN, (before, after)


def test_vllm_gains_from_a_folded_checkpoint(checkpoint: Path, model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """The tokens are those of transformers, with the policy folded and without."""
    twin = sm.fold(model, engines.CONSTANTS)
    twin.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    prompts = [engines.tokens_of(tokenizer, one) for one in engines.lookups()]
    calls = [engines.greedy(prompts)]
    found = engines.side_by_side(lambda path: engines.run_vllm(path, calls)[0], checkpoint, tmp_path)
    assert found == [engines.reference(model, prompts), engines.reference(twin, prompts)]
    before, after = (engines.correct(tokenizer.batch_decode([tokens for (tokens,) in answers])) for answers in found)
    assert after - before >= engines.GAIN, (before, after)
