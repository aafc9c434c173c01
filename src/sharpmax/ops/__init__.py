"""Attention with a policy: β per row, β·q, then PyTorch's own attention."""
