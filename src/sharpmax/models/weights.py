"""Trained single heads: their files, and the ones that come with the package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sharpmax.errors import reject
from sharpmax.models.single_head import SingleHeads
from sharpmax.models.tensor_files import load_tensors, must_fit, save_tensors

__all__ = ["Trained", "shipped_path"]

_KIND = "single-heads"
_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Trained:
    """Weights of single heads, the seeds they were trained from, and where they come from."""

    recipe: str
    steps: int
    seeds: tuple[int, ...]
    tensors: Mapping[str, Tensor]
    """Stacked over seeds, by the names of `SingleHeads`."""

    provenance: Mapping[str, Any]

    def save(self, path: str | Path) -> Path:
        """Write everything to one safetensors file."""
        about = {"recipe": self.recipe, "steps": self.steps, "seeds": list(self.seeds), "trained": self.provenance}
        return save_tensors(path, _KIND, self.tensors, about)

    @classmethod
    def load(cls, path: str | Path) -> Trained:
        """Read the file that `save` wrote."""
        tensors, about = load_tensors(path, _KIND)
        with must_fit(path, "the single head", "train again or give another file"):
            trained = cls(about["recipe"], about["steps"], tuple(about["seeds"]), tensors, about["trained"])
            if any(len(tensor) != len(trained.seeds) for tensor in tensors.values()):
                raise ValueError(f"not every tensor holds {len(trained.seeds)} seeds")
            trained.heads()
        return trained

    def first(self, count: int) -> Trained:
        """The first `count` seeds alone."""
        if not 1 <= count <= len(self.seeds):
            reject("seeds", count, f"1 … {len(self.seeds)}, the number of seeds in these weights")
        cut = {name: tensor[:count] for name, tensor in self.tensors.items()}
        return Trained(self.recipe, self.steps, self.seeds[:count], cut, self.provenance)

    def heads(self, which: Sequence[int] | None = None) -> SingleHeads:
        """The model with the weights of all seeds, or of those at the positions `which`."""
        chosen = list(range(len(self.seeds)) if which is None else which)
        model = SingleHeads(len(chosen))
        model.load_state_dict({name: tensor[chosen] for name, tensor in self.tensors.items()})
        return model.requires_grad_(False)


def shipped_path(recipe: str) -> Path:
    """Where the package keeps the weights trained at full length by a recipe."""
    return _DATA / f"max-retrieval-{recipe}.safetensors"
