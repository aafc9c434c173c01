"""SmolLM2 with a policy in its files: its gain and numbers in llama.cpp and vLLM, neither of which knows sharpmax."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoModelForCausalLM

import sharpmax as sm
from sharpmax.models import language
from sharpmax.policies import LogScale
from tests.engines import engines

RULE = LogScale(0.5, 64.0, steps=True, shift=1.0)
"""A rule that engines read, strong at the lengths of the prompts."""

_LLAMA_CPP = """
import json, sys
import xllamacpp
from xllamacpp import CommonParams, Server
path, prompts, out = json.load(sys.stdin)
options = CommonParams()
options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds to float16
options.model.path, options.n_ctx, options.n_parallel = path, 1024, 1
options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
server = Server(options)
asked = {"max_tokens": 4, "temperature": 0, "logprobs": 5}
made = [server.handle_completions({"prompt": one, **asked}) for one in prompts]
json.dump([one["choices"][0] for one in made], open(out, "w"))
"""


def llama_cpp(model: Path, prompts: list[Any], out: Path) -> list[dict[str, Any]]:
    """What llama.cpp answers: four tokens, the likeliest, each with the five likeliest."""
    job = json.dumps([str(model), prompts, str(out)])
    subprocess.run([sys.executable, "-c", _LLAMA_CPP], input=job, text=True, check=True, capture_output=True)
    answers: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
    return answers


def in_float32(source: Path, out: Path) -> Path:
    """The GGUF file with the weights that transformers reads from it: quantised ones meet rounded activations."""
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(out, "llama")
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.")):
            writer.add_key_value(name, field.contents(), *field.types[:2])
    for one in reader.tensors:
        writer.add_tensor(one.name, gguf.quants.dequantize(one.data, one.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def test_llama_cpp_gains_from_a_folded_file(tokenizer: Any, tmp_path: Path) -> None:
    source = language.smollm2_file()[0]
    folded = sm.fold(source, engines.CONSTANTS, out=tmp_path / "sharper.gguf").path
    prompts = [engines.text_of(tokenizer, one) for one in engines.lookups()]

    def score(path: Path) -> int:
        answers = llama_cpp(path, prompts, tmp_path / f"{path.stem}.json")
        return engines.correct([one["text"] for one in answers])

    before, after = engines.side_by_side(score, source, folded)
    assert after - before >= engines.GAIN, (before, after)


def test_llama_cpp_computes_a_rule_of_the_length(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """The likeliest tokens and their probabilities are those of transformers with the policy applied."""
    plain = in_float32(language.smollm2_file()[0], tmp_path / "plain.gguf")
    ruled = sm.fold(plain, RULE, out=tmp_path / "ruled.gguf").path
    prompts = [engines.tokens_of(tokenizer, one) for one in engines.lookups()[:6]]
    found = engines.side_by_side(lambda path: llama_cpp(path, prompts, tmp_path / f"{path.stem}.json"), plain, ruled)
    for policy, answers in zip((None, RULE), found, strict=True):
        with torch.inference_mode(), sm.applied(model, policy):
            for prompt, answer in zip(prompts, answers, strict=True):
                tokens = answer["logprobs"]["content"]
                read = torch.tensor([[*prompt, *(one["id"] for one in tokens)]])
                logs = model(read).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                assert logs.argmax(-1).tolist() == [one["id"] for one in tokens]
                for row, one in zip(logs, tokens, strict=True):
                    for top in one["top_logprobs"]:
                        assert abs(float(row[top["id"]]) - top["logprob"]) < 2e-3
    ids = [[[token["id"] for token in one["logprobs"]["content"]] for one in answers] for answers in found]
    assert ids[0] != ids[1]


def test_vllm_computes_a_rule_of_the_length(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """The tokens are those of transformers with the policy applied, and of transformers from the same files."""
    ruled = sm.fold("smollm2", RULE, out=tmp_path / "ruled").path
    prompts = [engines.tokens_of(tokenizer, one) for one in engines.lookups()]
    with sm.applied(model, RULE):
        wanted = engines.reference(model, prompts)
    assert engines.reference(model, prompts) != wanted
    assert engines.run_vllm(ruled, [engines.greedy(prompts)])[0] == wanted
    loaded = AutoModelForCausalLM.from_pretrained(ruled, dtype="float32").eval()
    assert engines.reference(loaded, prompts) == wanted


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
