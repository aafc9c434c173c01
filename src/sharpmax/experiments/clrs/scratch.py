"""Small decoders that start from random weights, with a tokenizer made for the texts of CLRS."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sharpmax.errors import reject
from sharpmax.lazy import require
from sharpmax.models.language import LanguageModel

if TYPE_CHECKING:
    from sharpmax.tasks.clrs_text.generation import Example

PREFIX = "scratch:"
_SHAPES = {"1m": (128, 4, 4), "10m": (384, 6, 6), "30m": (512, 9, 8)}  # width, layers, heads
_WITHOUT_POSITIONS = "-nope"
_CONTEXT = 4096
# A word, the beginning of a number between 0 and 1 with what stands before it in a list, or a single character.
_TOKEN = r"[A-Za-z_]+|[ \[]?0\.|[\s\S]"
_END, _UNKNOWN = "<end>", "<unknown>"


def is_scratch(word: str) -> bool:
    """Whether a model is named that does not exist yet."""
    return word.startswith(PREFIX)


def scratch_model(word: str, examples: Sequence[Example], seed: int) -> LanguageModel:
    """A decoder like Llama's with random weights: `scratch:10m` with rotary positions, `scratch:10m-nope` without.

    Its tokens are the words in the examples, `0.` and single characters.
    """
    size = word.removeprefix(PREFIX)
    rotary = not size.endswith(_WITHOUT_POSITIONS)
    if size.removesuffix(_WITHOUT_POSITIONS) not in _SHAPES:
        allowed = ", ".join(f"{PREFIX}{name}" for name in _SHAPES)
        reject("model", repr(word), f"{allowed}, each also with {_WITHOUT_POSITIONS} (no positions)")
    width, layers, heads = _SHAPES[size.removesuffix(_WITHOUT_POSITIONS)]
    transformers = require("transformers", "hf", "sharpmax clrs train")
    tokenizer = _tokenizer(transformers, examples)
    config = transformers.SmolLM3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64, hidden_size=width, intermediate_size=8 * width // 3 // 64 * 64,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        max_position_embeddings=_CONTEXT, no_rope_layers=[int(rotary)] * layers, use_cache=True,
        pad_token_id=None, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.SmolLM3ForCausalLM(config)
    return LanguageModel(word, model.eval(), tokenizer)


def _tokenizer(transformers: Any, examples: Sequence[Example]) -> Any:
    tokenizers = require("tokenizers", "hf", "sharpmax clrs train")
    known: set[str] = set("0123456789")
    for one in examples:
        known.update(re.findall(_TOKEN, one.question), re.findall(_TOKEN, one.answer))
    vocabulary = {token: number for number, token in enumerate([_END, _UNKNOWN, *sorted(known)])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(_TOKEN), "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=_END, unk_token=_UNKNOWN)
