"""The page to explore dispersion by hand: sliders, and what theory and policies make of them."""

from sharpmax.report.explore.page import FILE_NAME, write

__all__ = ["FILE_NAME", "write"]
