"""The vLLM plugin: greedy tokens are those of transformers with the same policy applied, in float32."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sharpmax as sm
from sharpmax.errors import UnsupportedError
from sharpmax.integrations import vllm as plugin
from sharpmax.ops.sharpen import Sharpener, rules_of
from sharpmax.policies import Constant, LogLength, PerHead
from sharpmax.tasks import get_task
from tests.engines import engines

POLICIES = (engines.CONSTANTS, "log-length:64", "paper", engines.ROWS)
SIZES, TOKENS = (2, 8, 20, 40), 6
# Prompts of 50 … 380 tokens are read in parts, 96 tokens of all sequences at a time.
CHUNKS = {"max_num_batched_tokens": 96, "max_num_seqs": 4}


def prompts_of(tokenizer: Any) -> list[list[int]]:
    """Prompts of mixed lengths, more of them than the engine runs at once."""
    made = [prompt for size in SIZES for prompt in get_task("kv").prompts(size, 2, seed=1)]
    return [engines.tokens_of(tokenizer, one) for one in made]


@pytest.fixture(scope="module")
def found(checkpoint: Path, tokenizer: Any) -> dict[str, Any]:
    """What the engine gives with each policy: all prompts, the same again from its cache, and two completions each."""
    prompts = prompts_of(tokenizer)
    twice = engines.greedy(prompts[-2:], TOKENS, temperature=1.0, top_k=1, n=2)
    calls = [engines.greedy(prompts, TOKENS), engines.greedy(prompts, TOKENS), twice]
    made = engines.side_by_side(lambda policy: engines.run_vllm(checkpoint, calls, policy, **CHUNKS), *POLICIES)
    return dict(zip(POLICIES, made, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_those_of_transformers(policy: str, found: dict[str, Any], model: Any, tokenizer: Any) -> None:
    with sm.applied(model, policy):
        wanted = engines.reference(model, prompts_of(tokenizer), TOKENS)
    first, again, twice = found[policy]
    assert first == wanted
    assert again == wanted
    assert twice == [one * 2 for one in wanted[-2:]]


def test_policies_change_what_is_generated(found: dict[str, Any]) -> None:
    assert len({str(answers) for answers in found.values()}) > 1


def config_of(kind: str, **options: Any) -> Any:
    """The configuration of a tiny model."""
    import transformers

    small: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
    }  # fmt: skip
    if kind == "DeepseekV2":
        small |= {"q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
                  "v_head_dim": 32, "first_k_dense_replace": 2, "n_routed_experts": 2}  # fmt: skip
    return getattr(transformers, f"{kind}Config")(architectures=[f"{kind}ForCausalLM"], **{**small, **options})


TINY = {"skip_tokenizer_init": True, "max_model_len": 256}


def test_windows_kinds_per_head_and_tensor_parallel_ranks(tmp_path: Path) -> None:
    """Constants, length rules and rules that read the row side by side in a layer, its heads on two ranks."""
    from transformers import MistralForCausalLM

    model = MistralForCausalLM(config_of("Mistral", sliding_window=24)).eval()
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(tmp_path)
    paper, long = sm.load_policy("paper"), LogLength(4.0)
    policy = PerHead(((paper, Constant(3.0), Constant(1.0), long), (long, paper, Constant(2.0), paper)))
    policy.save(tmp_path / "policy.json")
    prompts = [torch.randint(0, 512, (length,)).tolist() for length in (5, 17, 40, 100)]
    call = engines.greedy(prompts, 12, detokenize=False)

    def run(ranks: int) -> Any:
        path = tmp_path / "policy.json"
        return engines.run_vllm(
            tmp_path, [call], path, max_num_batched_tokens=64, tensor_parallel_size=ranks, **TINY
        )[0]  # fmt: skip

    with sm.applied(model, policy):
        wanted = engines.reference(model, prompts, 12)
    assert wanted != engines.reference(model, prompts, 12)
    assert engines.side_by_side(run, 1, 2) == [wanted, wanted]


DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("nonsense", "Mistral", {}, r"SHARPMAX_POLICY: policy: got 'nonsense'; allowed: one of"),
    ("auto", "Mistral", {}, r"SHARPMAX_POLICY: policy: got 'auto' for .*2 layers × 4 heads\), which has no packaged"),
    (engines.CONSTANTS, "Mistral", {}, r"30 layers × 9 heads; allowed: 2 × 4, the attention layers × heads of"),
    ("paper", "Gemma2", {}, r"logits that model\.layers\.0.* caps \(softcap\); fold"),
    (
        "paper",
        "DeepseekV2",
        {},
        r"vLLM's backend \w*_MLA \(multi-head latent attention, --attention-backend\); allowed: C",
    ),
    ("paper", "Mistral", {"kv_cache_dtype": "fp8"}, r"fp8 queries or keys \(--kv-cache-dtype fp8\); fold"),
    ("paper", "Mistral", {"speculative_config": DRAFTS}, r"speculative decoding \(--speculative-config\)"),
]


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The error of each engine: the first in a process of its own, the others in one, which loads vLLM once."""
    tries = []
    for number, (policy, kind, options, _) in enumerate(REFUSED):
        folder = tmp_path_factory.mktemp(f"model{number}")
        config_of(kind).save_pretrained(folder)
        more = engines.chosen({"load_format": "dummy", **TINY, **options})
        tries.append({"policy": policy, "model": str(folder), "options": more})
    first, others = engines.side_by_side(lambda some: engines.ask_vllm({"tries": some}, None), tries[:1], tries[1:])
    return [*first, *others]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda number: str(REFUSED[number][:3]))
def test_what_cannot_be_right_ends_at_start_in_one_line(number: int, errors: list[str]) -> None:
    assert "SHARPMAX_POLICY" in errors[number]
    assert "\n" not in errors[number]
    assert re.search(REFUSED[number][3], errors[number]), errors[number]


class Kernel:
    """A stand-in for an attention kernel: it returns its query."""

    def forward(self, layer: Any, query: Tensor, *given: Any, **options: Any) -> Tensor:
        return query


@pytest.mark.filterwarnings("ignore")  # of what vLLM imports
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", ["FLASH_ATTN", "TRITON_ATTN"])
def test_length_rules_read_the_metadata_of_cuda_backends(name: str, window: int | None) -> None:
    """Their kernels need a GPU; the query they get is β·q of every token."""
    implementation = getattr(plugin, name).get_impl_cls()
    given = list(inspect.signature(implementation.__mro__[2].forward).parameters)
    assert given[:7] == ["self", "layer", "query", "key", "value", "kv_cache", "attn_metadata"]
    module = importlib.import_module(implementation.__mro__[2].__module__)
    (metadata,) = [
        one
        for key, one in vars(module).items()
        if key.endswith("AttentionMetadata") and one.__module__ == module.__name__
    ]
    assert {"query_start_loc", "seq_lens"} <= {field.name for field in fields(metadata)}
    step = object.__new__(metadata)
    step.query_start_loc, step.seq_lens = torch.tensor([0, 2, 3, 6]), torch.tensor([7, 3, 9])
    layer: Any = object.__new__(plugin._implementation(Kernel))
    layer.sharpener = layer._shared = Sharpener(rules_of((LogLength(4.0),), None), 2)
    layer._needs, layer._measures, layer._window, layer._constants = frozenset({"count"}), False, window, {}
    query = torch.randn(6, 2, 8)
    found = layer.forward(None, query, None, None, None, step)
    counts = [min(n, window or n) for n in (6, 7, 3, 7, 8, 9)]
    beta = torch.tensor([max(1.0, math.log(n) / math.log(4.0)) for n in counts])
    torch.testing.assert_close(found, query * beta[:, None, None])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["FLEX_ATTENTION", "TRITON_MLA"])
def test_a_backend_that_no_policy_runs_in_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"^SHARPMAX_POLICY: .* backend {name} \(.*; allowed: CPU_ATTN, FLASH"):
        getattr(plugin, name).get_impl_cls()
