"""Fitting policies: the temperature that would have been best for an input, and laws through many of them."""
