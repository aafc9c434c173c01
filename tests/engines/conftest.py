"""Real engines need the environment that `make test-engines` creates; in others nothing is collected here."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from sharpmax.models.language import smollm2_folder

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """SmolLM2 as a Hugging Face checkpoint in float32."""
    return smollm2_folder()


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> Any:
    """SmolLM2 in transformers, the reference."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32").eval()
