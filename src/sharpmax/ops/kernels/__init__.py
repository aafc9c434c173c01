"""Triton kernels of sharp attention beyond the statistics, and the operators around them."""
