"""Policies in Hugging Face transformers models: apply, restore, save beside the weights, fold into them."""

from typing import TYPE_CHECKING

from sharpmax.lazy import lazy_exports

if TYPE_CHECKING:
    from sharpmax.integrations.constants import nearest_constant as nearest_constant
    from sharpmax.integrations.transformers.application import applied as applied
    from sharpmax.integrations.transformers.application import apply as apply
    from sharpmax.integrations.transformers.application import policy_of as policy_of
    from sharpmax.integrations.transformers.application import restore as restore
    from sharpmax.integrations.transformers.folding import fold as fold

__all__ = ["applied", "apply", "fold", "nearest_constant", "policy_of", "restore"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "applied": "sharpmax.integrations.transformers.application",
        "apply": "sharpmax.integrations.transformers.application",
        "fold": "sharpmax.integrations.transformers.folding",
        "nearest_constant": "sharpmax.integrations.constants",
        "policy_of": "sharpmax.integrations.transformers.application",
        "restore": "sharpmax.integrations.transformers.application",
    },
)
