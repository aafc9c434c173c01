"""What matters in `sharp`: each variant removes or replaces one ingredient.

sharpmax compare softmax sharp --with docs/ablation.py --seeds 5
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sharpmax.experiments.compare.methods import SHIPPED_METHODS, Method

SHARP = SHIPPED_METHODS["sharp"]


def _with(name: str, summary: str, **changed: Any) -> Method:
    return replace(SHARP, name=f"sharp-{name}", summary=summary, **changed)


METHODS = [
    # Training examples: are near-ties needed, how near, and do they have to lie where those of large sets do?
    _with("usual-sets", "without near-ties in training", data={}),
    _with("zoom-2", "ranges down to 1e-2", data={"zoom": 1e-2}),
    _with("zoom-3", "ranges down to 1e-3", data={"zoom": 1e-3}),
    _with("zoom-5", "ranges down to 1e-5", data={"zoom": 1e-5}),
    _with("anywhere", "near-ties anywhere, not only below the top", data={**SHARP.data, "anywhere": True}),
    _with("only-16", "only sets of 16 items", recipe={**SHARP.recipe, "sizes": (16, 16)}),
    # Normaliser.
    _with("soft-at-test", "the training normaliser at test time", at_test=None),
    _with("softmax", "plain softmax in training", normaliser="softmax"),
    _with("hard", "straight-through in training too", normaliser="hard"),
    # Optimiser.
    _with("no-decay", "a constant learning rate", recipe={**SHARP.recipe, "decay": False}),
    _with("l2", "the paper's L2 penalty", recipe={**SHARP.recipe, "l2": 1e-3}),
]
