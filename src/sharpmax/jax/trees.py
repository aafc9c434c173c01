"""`RowStats` as a JAX pytree, so that it can leave `jit`, `vmap` and `grad`."""

from __future__ import annotations

import jax

from sharpmax.rows.stats import RowStats

__all__: list[str] = []

jax.tree_util.register_pytree_node(RowStats, RowStats.flatten, RowStats.unflatten)
