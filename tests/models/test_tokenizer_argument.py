"""Functions of a model and its tokenizer say what is wrong with either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import sharpmax as sm
from sharpmax.errors import ArgumentTypeError
from tests.integrations.families import FAMILIES


@pytest.mark.parametrize("function", [sm.probe, sm.calibrate], ids=["probe", "calibrate"])
@pytest.mark.parametrize("given", [torch.arange(8)[None], [1, 2, 3], "smollm2", None], ids=str)
def test_what_is_no_tokenizer_is_refused(function: Callable[..., Any], given: Any) -> None:
    kind = "None" if given is None else f"a {type(given).__name__}"
    with pytest.raises(ArgumentTypeError, match=f"tokenizer: got {kind}; allowed: the model's tokenizer"):
        function(FAMILIES["llama"].build(), given)


@pytest.mark.parametrize("function", [sm.probe, sm.calibrate], ids=["probe", "calibrate"])
def test_what_is_no_model_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(ArgumentTypeError, match="model: got str; allowed: a transformers PreTrainedModel"):
        function("smollm2", None)
