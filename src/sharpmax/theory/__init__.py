"""What bounded logits allow: how sharp a softmax over n items can be, and what limits its spread.

A *spread* is δ = β·(largest − smallest logit), in nats, everywhere in this package.
"""

from sharpmax.theory.bounds import (
    entropy_ceiling,
    entropy_floor,
    horizon,
    loose_weight_bounds,
    required_spread,
    spread_from_product,
    spread_from_weights,
    top_weight_limit,
    top_weight_limit_from_sample,
    weight_bounds,
)

__all__ = [
    "entropy_ceiling", "entropy_floor", "horizon", "loose_weight_bounds", "required_spread", "spread_from_product",
    "spread_from_weights", "top_weight_limit", "top_weight_limit_from_sample", "weight_bounds",
]  # fmt: skip
