"""Sharp attention, the dense softmax family, and the alternatives to softmax."""

from typing import TYPE_CHECKING

from sharpmax.lazy import lazy_exports

if TYPE_CHECKING:
    from sharpmax.attention import normalisers as normalisers
    from sharpmax.attention.decode import decode as decode
    from sharpmax.attention.dense import entropy as entropy
    from sharpmax.attention.dense import softmax as softmax
    from sharpmax.attention.sharp import attention as attention

__all__ = ["attention", "decode", "entropy", "normalisers", "softmax"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "attention": "sharpmax.attention.sharp",
        "decode": "sharpmax.attention.decode:decode",
        "entropy": "sharpmax.attention.dense",
        "normalisers": "sharpmax.attention.normalisers",
        "softmax": "sharpmax.attention.dense",
    },
)
