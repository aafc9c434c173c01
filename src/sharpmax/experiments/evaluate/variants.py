"""The arms of an evaluation: a model as it comes, and the same model under each policy."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from sharpmax.errors import OutOfRangeWarning
from sharpmax.policies.base import Policy
from sharpmax.policies.per_head import PerHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASE = "as it comes"
"""The name of the arm without a policy, which every evaluation has."""


@contextlib.contextmanager
def under(
    model: PreTrainedModel, policy: Policy | None, remark: Callable[[str], None] = lambda text: None
) -> Iterator[None]:
    """The model under a policy, or as it comes for None; `remark` is told of rows outside a policy's fitted range."""
    from sharpmax.integrations.transformers.application import applied

    arm: AbstractContextManager[Any] = contextlib.nullcontext() if policy is None else applied(model, policy)
    with warnings.catch_warnings(record=True) as said, arm:
        warnings.simplefilter("always", OutOfRangeWarning)
        yield
    for warning in said:
        if issubclass(warning.category, OutOfRangeWarning):
            remark(str(warning.message))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def shape_of(model: PreTrainedModel) -> tuple[int, int]:
    """Layers, and heads per layer."""
    config = model.config.get_text_config()
    return int(config.num_hidden_layers), int(config.num_attention_heads)


def touched(policy: Policy | None, layers: int, heads: int) -> int:
    """How many heads a policy does not leave alone.

    >>> from sharpmax.policies import Constant
    >>> touched(Constant(1.5), 30, 9), touched(PerHead.of(Constant, value=[[1.0, 2.0]]), 1, 2), touched(None, 30, 9)
    (270, 1, 0)
    """
    if policy is None or policy.is_identity:
        return 0
    if isinstance(policy, PerHead):
        return policy.touched
    return layers * heads
