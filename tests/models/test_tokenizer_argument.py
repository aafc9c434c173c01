"""Functions of a model and its tokenizer say what is wrong with either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import sharpmax as sm
from sharpmax.errors import ArgumentTypeError
from sharpmax.models.scoring import encode, judge
from tests.experiments.evaluate import tiny
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


@pytest.mark.parametrize("given", [3, ["kv"], None], ids=str)
def test_what_is_no_task_is_refused(given: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="task: got"):
        sm.calibrate(FAMILIES["llama"].build(), tiny.tokenizer(), task=given)
    if given == 3:
        with pytest.raises(ArgumentTypeError, match="tasks: got int; allowed: a list of tasks"):
            sm.probe(FAMILIES["llama"].build(), tiny.tokenizer(), tasks=given)


def test_scoring_names_what_is_wrong() -> None:
    prompt = sm.tasks.get_task("kv").prompts(4, 1, seed=0)[0]
    with pytest.raises(ArgumentTypeError, match="tokenizer: got a str; allowed: the model's tokenizer"):
        encode("smollm2", prompt)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="prompt: got str; allowed: a Prompt; make some"):
        encode(tiny.tokenizer(), "what?")  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="model: got str"):
        judge("smollm2", [encode(tiny.tokenizer(), prompt)])  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="replies: got a str"):
        judge(tiny.model(), ["an answer"])  # type: ignore[list-item]
