"""Row statistics of attention logits: one value type, one function, several implementations."""

from typing import TYPE_CHECKING

from sharpmax.lazy import lazy_exports

if TYPE_CHECKING:
    from sharpmax.stats.dispatch import row_stats as row_stats
    from sharpmax.stats.statistics import RowStats as RowStats

__all__ = ["RowStats", "row_stats"]

__getattr__, __dir__ = lazy_exports(
    __name__, {"RowStats": "sharpmax.stats.statistics", "row_stats": "sharpmax.stats.dispatch"}
)
