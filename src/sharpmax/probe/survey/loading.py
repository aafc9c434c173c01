"""Models to probe: a causal language model, or an encoder that reads text."""

from __future__ import annotations

from pathlib import Path

from sharpmax.errors import ArgumentError
from sharpmax.lazy import require
from sharpmax.models.language import ALIASES, DTYPES, LanguageModel, load_language_model, quiet

__all__ = ["load_model"]


def load_model(name: str, *, device: str = "cpu", dtype: str = "float32") -> LanguageModel:
    """Load a model with its tokenizer as `load_language_model` does, or an encoder such as BERT."""
    try:
        return load_language_model(name, device=device, dtype=dtype)
    except ArgumentError:
        encoder = None if name in ALIASES else _encoder(name, device, dtype)
        if encoder is None:
            raise
        return encoder


def _encoder(name: str, device: str, dtype: str) -> LanguageModel | None:
    transformers = require("transformers", "hf", "a model to probe")
    place = Path(name).expanduser()
    options = {"local_files_only": place.exists()}
    with quiet():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(place), **options)
            model = transformers.AutoModel.from_pretrained(
                str(place), dtype=DTYPES[dtype], use_safetensors=True, **options
            )
            return LanguageModel(name, model.to(device).eval().requires_grad_(False), tokenizer)
        except Exception:  # why it is no causal language model is then what has to be said
            return None
