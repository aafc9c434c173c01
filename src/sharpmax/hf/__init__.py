"""Policies in Hugging Face transformers models: apply, restore, save beside the weights, fold into them."""

from typing import TYPE_CHECKING

from sharpmax.lazy import lazy_exports

if TYPE_CHECKING:
    from sharpmax.hf.application import applied as applied
    from sharpmax.hf.application import apply as apply
    from sharpmax.hf.application import policy_of as policy_of
    from sharpmax.hf.application import restore as restore
    from sharpmax.hf.folding import fold as fold
    from sharpmax.hf.folding import nearest_constant as nearest_constant

__all__ = ["applied", "apply", "fold", "nearest_constant", "policy_of", "restore"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "applied": "sharpmax.hf.application",
        "apply": "sharpmax.hf.application",
        "fold": "sharpmax.hf.folding",
        "nearest_constant": "sharpmax.hf.folding",
        "policy_of": "sharpmax.hf.application",
        "restore": "sharpmax.hf.application",
    },
)
