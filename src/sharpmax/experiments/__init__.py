"""Experiments: one module per result, and the form in which results are saved."""
