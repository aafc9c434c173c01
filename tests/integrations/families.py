"""Tiny random models of every family that is proven: two layers, four heads, hidden size 32, vocabulary 97."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from sharpmax.policies import Constant, LogLength, PerHead, Polynomial

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

LENGTH = 12


@dataclass(frozen=True)
class Family:
    name: str
    model: str
    config: str
    options: dict[str, Any]
    kind: str = "causal"  # causal | encoder | image | seq2seq | speech

    @property
    def attentions(self) -> tuple[str, ...]:
        """The implementations that transformers allows; softcapped logits are eager's alone."""
        return ("eager",) if "attn_logit_softcapping" in self.options else ("sdpa", "eager")

    def build(self, attention: str | None = None, **changes: Any) -> Any:
        """A model in evaluation mode, the same at every call."""
        if attention is None and len(self.attentions) == 1:  # older releases choose another one by themselves
            attention = self.attentions[0]
        options = {"attn_implementation": attention} if attention else {}
        config = getattr(transformers, self.config)(**copy.deepcopy({**self.options, **changes}), **options)
        torch.manual_seed(1)
        model = getattr(transformers, self.model)(config)
        # Random weights as they come attend almost uniformly; then nothing about β would show.
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim >= 2:
                    weight.normal_(0.0, 0.25)
                else:
                    weight.add_(torch.randn_like(weight), alpha=0.1)
        return model.eval()

    def inputs(self, model: Any, batch: int = 2, length: int = LENGTH) -> dict[str, Tensor]:
        torch.manual_seed(2)
        ids = torch.randint(3, 97, (batch, length))
        dtype = model.dtype
        if self.kind == "image":
            return {"pixel_values": torch.randn(batch, 3, 8, 8, dtype=dtype)}
        if self.kind == "speech":
            features = torch.randn(batch, 8, 20, dtype=dtype)
            return {"input_features": features, "decoder_input_ids": ids}
        if self.kind == "seq2seq":
            return {"input_ids": ids, "decoder_input_ids": ids.flip(1)[:, : max(1, length - 2)]}
        return {"input_ids": ids}

    def logits(self, model: Any, **inputs: Any) -> Tensor:
        out = model(**(inputs or self.inputs(model)))
        found: Tensor = out.logits if "logits" in out else out.last_hidden_state
        return found


_SMALL = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64,
}  # fmt: skip
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = {**_SMALL, **_IDS, "num_key_value_heads": 2}
_GEMMA = {**_LLAMA, "head_dim": 8}
_LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}

_GPT2 = {**_IDS, "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_T5 = {
    "vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "pad_token_id": 0,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "decoder_start_token_id": 0,
    "eos_token_id": 2,
}  # fmt: skip
_VIT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 8,
    "patch_size": 2,
}  # fmt: skip
_MODERNBERT = {
    **_SMALL, **_IDS, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 6, "global_attn_every_n_layers": 2,
}  # fmt: skip
_WHISPER = {
    **_IDS, "vocab_size": 97, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8,
    "max_source_positions": 10, "max_target_positions": 64, "decoder_start_token_id": 1,
}  # fmt: skip

_ALL = (
    Family("llama", "LlamaForCausalLM", "LlamaConfig", _LLAMA),
    Family("gemma", "GemmaForCausalLM", "GemmaConfig", _GEMMA),
    Family("gemma2", "Gemma2ForCausalLM", "Gemma2Config", {**_GEMMA, **_LAYERS, "attn_logit_softcapping": 5.0}),
    Family("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", {**_GEMMA, **_LAYERS}),
    Family("qwen2", "Qwen2ForCausalLM", "Qwen2Config", _LLAMA),
    Family("qwen3", "Qwen3ForCausalLM", "Qwen3Config", {**_LLAMA, "head_dim": 8}),
    Family("mistral", "MistralForCausalLM", "MistralConfig", {**_LLAMA, "sliding_window": 5}),
    Family("phi", "PhiForCausalLM", "PhiConfig", {**_LLAMA, "partial_rotary_factor": 0.5}),
    Family("gpt2", "GPT2LMHeadModel", "GPT2Config", _GPT2),
    Family("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", {**_SMALL, **_IDS}),
    Family("opt", "OPTForCausalLM", "OPTConfig", {**_SMALL, **_IDS, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    Family("t5", "T5ForConditionalGeneration", "T5Config", _T5, "seq2seq"),
    Family("bert", "BertForMaskedLM", "BertConfig", {**_SMALL, "pad_token_id": 0}, "encoder"),
    Family("roberta", "RobertaForMaskedLM", "RobertaConfig", {**_SMALL, "pad_token_id": 0}, "encoder"),
    Family("modernbert", "ModernBertForMaskedLM", "ModernBertConfig", _MODERNBERT, "encoder"),
    Family("vit", "ViTModel", "ViTConfig", _VIT, "image"),
    Family("whisper", "WhisperForConditionalGeneration", "WhisperConfig", _WHISPER, "speech"),
)
FAMILIES = {family.name: family for family in _ALL}
LLAMA = FAMILIES["llama"]
PHI3 = Family("phi3", "Phi3ForCausalLM", "Phi3Config", _LLAMA)
OLMO2 = Family("olmo2", "Olmo2ForCausalLM", "Olmo2Config", _LLAMA)

_BART = {key: value for key, value in _WHISPER.items() if key not in ("num_mel_bins", "max_source_positions")}
BIDIRECTIONAL = (
    FAMILIES["bert"],
    Family("bart", "BartForConditionalGeneration", "BartConfig", {**_BART, "max_position_embeddings": 64}, "seq2seq"),
    FAMILIES["whisper"],
)
"""Models with attention that is not causal: of encoders, and of decoders to an encoder's output."""

MIXTURE = PerHead(
    (
        (Constant(1.0), LogLength(3.0), LogLength(2.0), Constant(2.0)),
        (Polynomial((0.5, 1.0), (0.0, 9.0)), Constant(1.0), Constant(1.0), Polynomial((0.2, 1.5), (0.0, 9.0))),
    )
)
"""A policy of several kinds for two layers of four heads."""
