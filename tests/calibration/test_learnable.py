"""`learnable`: numbers that train with the weights, are saved with them, and become a policy."""

from __future__ import annotations

import pytest
import torch

import sharpmax as sm
from sharpmax.policies import Constant, LogLinear, PerFrequency
from sharpmax.policies.basic import LogScale
from tests.integrations.trained import batch, llama

TOKENS = batch(rows=4, length=24)


@pytest.mark.parametrize(
    ("kind", "made"),
    [("frequency", PerFrequency), ("constant", Constant), ("rows", LogLinear), ("ssmax", LogScale)],
)
def test_numbers_train_with_the_weights_and_become_the_policy(kind: str, made: type) -> None:
    model = llama().train()
    plain = model(TOKENS).logits
    learned = sm.learnable(model, kind)
    if kind == "ssmax":
        wanted = model(TOKENS).logits
        with sm.applied(llama().train(), "ssmax:0.43") as other:
            torch.testing.assert_close(other(TOKENS).logits, wanted)
    else:
        torch.testing.assert_close(model(TOKENS).logits, plain)
    start = learned.parameter.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(learned.parameter, start)
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    before = model(TOKENS).logits
    policy = learned.finish()
    assert all(isinstance(one, made) for layer in policy.policies for one in layer)
    torch.testing.assert_close(model(TOKENS).logits, before, rtol=1e-3, atol=1e-4)
    assert "sharpmax_policy" not in dict(model.named_parameters())
    again = llama().train()
    sm.learnable(again, kind)
    again.load_state_dict(state)
    torch.testing.assert_close(again(TOKENS).logits, before)
    if kind == "constant":
        torch.testing.assert_close(sm.fold(model.eval(), policy)(TOKENS).logits, before, rtol=1e-3, atol=1e-4)
