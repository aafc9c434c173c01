"""A tiny language model (bytes as tokens, random weights, answers of "a" or "b"), and a task for the harness."""

from __future__ import annotations

import inspect
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from sharpmax.models.language import LanguageModel
from sharpmax.tasks.prompt import Prompt, Task

pytest.importorskip("transformers", reason="needs the extra hf")

LAYERS, HEADS, ROOM = 2, 4, 1024


def make(size: int, rng: random.Random) -> Prompt:
    letters = "".join(rng.choice("ab ") for _ in range(4 * size))
    return Prompt(f"{letters}?", "So:", rng.choice("ab"))


LETTERS = Task("letters", version=1, summary="a letter after n words", sizes=(4, 8), most=512, make=make)
"""A coin toss: the tiny model is right about half of the time, and a policy changes for which prompts."""

LETTERS_FILE = f"""
import random
from sharpmax.tasks.prompt import Prompt, Task

{inspect.getsource(make)}
TASK = Task("letters", version=1, summary="a letter after n words", sizes=(4, 8), most=512, make=make)
"""


def tokenizer() -> Any:
    """Every byte is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate([*alphabet, "</s>"])}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", pad_token="</s>")


def model() -> Any:
    """A model whose answer is always one of two letters; the same in every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    words = tokenizer()
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=ROOM, eos_token_id=words.eos_token_id,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(3)
    made = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim >= 2:
                weight.normal_(0.0, 0.35)
        a, b = (words.convert_tokens_to_ids(letter) for letter in "ab")
        head = made.lm_head.weight
        head.mul_(0.02)
        head[a].normal_(0.0, 0.5)
        head[b] = -head[a]
    return made.eval().requires_grad_(False)


@cache
def language() -> LanguageModel:
    """The model with its tokenizer."""
    return LanguageModel("tiny", model(), tokenizer())


def save(folder: Path) -> Path:
    """Save the model to a folder."""
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def coins() -> list[dict[str, Any]]:
    """The questions of a task for the harness."""
    rng = random.Random(6)
    return [{"question": "".join(rng.choices("ab ?", k=20)) + "So:", "label": rng.randrange(2)} for _ in range(40)]


def write_coins(folder: Path) -> Path:
    """Write the questions, and the task file that reads them; return the folder of the task file."""
    data = folder / "coins.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in coins()))
    (folder / "tasks").mkdir()
    task = Path(__file__).with_name("coins.yaml").read_text().replace("DATA", str(data))
    (folder / "tasks" / "coins.yaml").write_text(task)
    return folder / "tasks"
