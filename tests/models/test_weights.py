"""Files of trained heads: what goes in comes out, what else there is is refused in one line, and what is shipped."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from sharpmax.errors import ArgumentError, FileFormatError
from sharpmax.models import weights as tensor_files
from sharpmax.models.single_head import SingleHeads
from sharpmax.models.weights import Trained, load_tensors, save_tensors, shipped_path

KIND = "single-heads"
PROVENANCE = {"commit": "abc", "date": "2025-01-01T00:00:00+00:00", "command": "sharpmax reproduce – β", "seconds": 0.1}
ABOUT = {"recipe": "paper", "steps": 3, "seeds": [4, 2], "trained": PROVENANCE}


@pytest.fixture
def trained() -> Trained:
    return Trained("paper", 3, (4, 2), SingleHeads.initial((4, 2)).state_dict(), PROVENANCE)


def same(a: Trained, b: Trained) -> bool:
    """Bit for bit, NaN and the sign of zero included."""
    if (a.recipe, a.steps, a.seeds, a.provenance) != (b.recipe, b.steps, b.seeds, b.provenance):
        return False
    return a.tensors.keys() == b.tensors.keys() and all(
        torch.equal(t.contiguous().view(torch.int32), b.tensors[name].contiguous().view(torch.int32))
        for name, t in a.tensors.items()
    )


class TestRoundTrip:
    def test_bit_for_bit(self, trained: Trained, tmp_path: Path) -> None:
        weights = trained.tensors["k.weight"]
        weights[0, 0, :4] = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
        path = trained.save(str(tmp_path / "new" / "w.safetensors"))
        assert path == tmp_path / "new" / "w.safetensors"
        assert same(Trained.load(path), trained)
        assert same(Trained.load(str(path)), trained)
        assert [file.name for file in path.parent.iterdir()] == ["w.safetensors"]

    def test_the_file_says_what_it_is(self, trained: Trained, tmp_path: Path) -> None:
        path = trained.save(tmp_path / "w.safetensors")
        with safetensors.safe_open(path, framework="pt") as file:
            header = file.metadata()
        assert header["sharpmax"] == KIND
        assert header["schema"] == str(tensor_files.SCHEMA)
        assert json.loads(header["about"]) == ABOUT

    def test_saving_again_replaces(self, trained: Trained, tmp_path: Path) -> None:
        path = trained.save(tmp_path / "w.safetensors")
        alone = trained.first(1)
        alone.save(path)
        assert same(Trained.load(path), alone)

    def test_heads_hold_the_weights_and_ask_for_no_gradient(self, trained: Trained) -> None:
        for which, order in ((None, [0, 1]), ([1], [1]), ([1, 0], [1, 0])):
            heads = trained.heads(which)
            for name, parameter in heads.named_parameters():
                assert torch.equal(parameter, trained.tensors[name][order])
                assert not parameter.requires_grad


class TestFirst:
    def test_cuts_seeds_and_weights_alike(self, trained: Trained) -> None:
        alone = trained.first(1)
        assert alone.seeds == (4,)
        assert all(torch.equal(t, trained.tensors[name][:1]) for name, t in alone.tensors.items())
        assert (alone.recipe, alone.steps, alone.provenance) == (trained.recipe, trained.steps, trained.provenance)
        assert same(trained.first(2), trained)

    @pytest.mark.parametrize("count", [-1, 0, 3])
    def test_refuses_seeds_that_are_not_there(self, trained: Trained, count: int) -> None:
        with pytest.raises(ArgumentError, match=rf"seeds: got {count}; allowed: 1 … 2"):
            trained.first(count)


def truncated(trained: Trained, path: Path) -> None:
    path.write_bytes(trained.save(path).read_bytes()[:-100])


def header_cut(trained: Trained, path: Path) -> None:
    path.write_bytes(trained.save(path).read_bytes()[:50])


def random_bytes(trained: Trained, path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(5000))


def empty(trained: Trained, path: Path) -> None:
    path.write_bytes(b"")


def missing(trained: Trained, path: Path) -> None:
    pass


def folder(trained: Trained, path: Path) -> None:
    path.mkdir()


def foreign(trained: Trained, path: Path) -> None:
    safetensors.torch.save_file(dict(trained.tensors), path, metadata={"format": "pt"})


def without_header(trained: Trained, path: Path) -> None:
    safetensors.torch.save_file(dict(trained.tensors), path)


def training_state(trained: Trained, path: Path) -> None:
    save_tensors(path, "training", trained.tensors, ABOUT)


def written(
    trained: Trained,
    path: Path,
    header: Mapping[str, str] | None = None,
    about: Any = ABOUT,
    changed: Mapping[str, Tensor | None] | None = None,
) -> None:
    """A file that `save` would not write; tensors changed to None are left out."""
    tensors = {name: t for name, t in {**trained.tensors, **(changed or {})}.items() if t is not None}
    given = {"sharpmax": KIND, "schema": "1", "about": json.dumps(about), **(header or {})}
    safetensors.torch.save_file(tensors, path, metadata=given)


def about_without(name: str) -> dict[str, Any]:
    return {key: value for key, value in ABOUT.items() if key != name}


BROKEN: dict[str, tuple[Callable[[Trained, Path], None], str]] = {
    "truncated": (truncated, "damaged"),
    "header cut": (header_cut, "damaged"),
    "random bytes": (random_bytes, "damaged"),
    "empty": (empty, "damaged"),
    "missing": (missing, "no file"),
    "folder": (folder, "no file"),
    "foreign": (foreign, "holds nothing of sharpmax"),
    "without header": (without_header, "holds nothing of sharpmax"),
    "training state": (training_state, "holds 'training'"),
    "newer schema": (lambda t, p: written(t, p, {"schema": "2"}), "newer sharpmax"),
    "about is no JSON": (lambda t, p: written(t, p, {"about": "{"}), "damaged"),
    "about is a list": (lambda t, p: written(t, p, about=[1]), "not an object"),
    "fewer seeds than weights": (lambda t, p: written(t, p, about=ABOUT | {"seeds": [0]}), "does not fit"),
    "no recipe": (lambda t, p: written(t, p, about=about_without("recipe")), "does not fit"),
    "no provenance": (lambda t, p: written(t, p, about=about_without("trained")), "does not fit"),
    "seeds are a number": (lambda t, p: written(t, p, about=ABOUT | {"seeds": 2}), "does not fit"),
    "more seeds than weights": (lambda t, p: written(t, p, about=ABOUT | {"seeds": [4, 2, 1]}), "does not fit"),
    "missing tensor": (lambda t, p: written(t, p, changed={"k.weight": None}), "does not fit"),
    "other tensor": (lambda t, p: written(t, p, changed={"extra": torch.zeros(2)}), "does not fit"),
    "no tensors": (lambda t, p: written(t, p, changed=dict.fromkeys(t.tensors)), "does not fit"),
    "wrong shape": (lambda t, p: written(t, p, changed={"k.weight": torch.zeros(2, 128, 64)}), "does not fit"),
    "no axes": (lambda t, p: written(t, p, changed={"k.weight": torch.tensor(0.0)}), "does not fit"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_is_no_file_of_weights_is_refused_in_one_line(how: str, trained: Trained, tmp_path: Path) -> None:
    make, says = BROKEN[how]
    path = tmp_path / "w.safetensors"
    make(trained, path)
    with pytest.raises(FileFormatError) as caught:
        Trained.load(path)
    message = str(caught.value)
    assert repr(str(path)) in message
    assert says in message
    assert "\n" not in message
    assert caught.value.__cause__ is None


def test_a_reader_of_another_kind_refuses_weights(trained: Trained, tmp_path: Path) -> None:
    path = trained.save(tmp_path / "w.safetensors")
    with pytest.raises(FileFormatError, match="holds 'single-heads'; allowed: a file of kind 'training'"):
        load_tensors(path, "training")


def test_what_json_cannot_hold_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        save_tensors(tmp_path / "w.safetensors", KIND, {}, {"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("recipe", ["paper", "sharp"])
class TestShipped:
    def test_are_ten_seeds_at_full_length(self, recipe: str) -> None:
        shipped = Trained.load(shipped_path(recipe))
        assert shipped.recipe == recipe
        assert shipped.steps == 100_000
        assert shipped.seeds == tuple(range(10))
        for name, tensor in shipped.tensors.items():
            assert tensor.isfinite().all(), name
            # Seeds that were trained apart share no weights.
            assert len(torch.unique(tensor.flatten(1), dim=0)) == 10, name

    def test_say_where_they_come_from(self, recipe: str) -> None:
        provenance = Trained.load(shipped_path(recipe)).provenance
        assert provenance["commit"]
        assert {"sharpmax", "python", "torch", "numpy"} <= provenance["versions"].keys()
        assert {"cpu", "gpu", "system"} <= provenance["hardware"].keys()
        assert datetime.fromisoformat(provenance["date"]).tzinfo is not None
        assert provenance["command"]
        assert provenance["seconds"] > 0

    def test_are_small(self, recipe: str) -> None:
        assert shipped_path(recipe).stat().st_size < 5_000_000
