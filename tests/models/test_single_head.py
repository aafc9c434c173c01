"""The stacked heads against the paper's formula written out for one seed at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sharpmax.models import single_head as layers
from sharpmax.models.single_head import SingleHeads
from sharpmax.models.weights import Trained, shipped_path
from sharpmax.tasks.max_retrieval import CLASSES, Sets, draw, seeded
from tests.models.plain_head import PlainHead
from tests.numerics import worst

CPU = torch.device("cpu")
SEEDS = (3, 0, 8)


def untrained(seeds: tuple[int, ...] = SEEDS) -> SingleHeads:
    """Initial heads with biases that are not 0, so that a bias left out would show."""
    heads = SingleHeads.initial(seeds)
    for name, parameter in heads.named_parameters():
        if name.endswith("bias"):
            with torch.no_grad():
                parameter.normal_(std=0.3)
    return heads


def trained(recipe: str) -> SingleHeads:
    return Trained.load(shipped_path(recipe)).heads(SEEDS).requires_grad_()


HEADS = {"untrained": untrained, "paper": lambda: trained("paper"), "sharp": lambda: trained("sharp")}


def sets_for(heads: SingleHeads, *shape: int, sizes: int | tuple[int, int] = (5, 16)) -> Sets:
    return draw((len(heads.q.weight), *shape), sizes, seeded(CPU, 1))


def loss_of(scores: Tensor, sets: Sets) -> Tensor:
    return F.cross_entropy(scores.flatten(0, -2), sets.answer.flatten(), reduction="sum")


def stacked(heads: SingleHeads, sets: Sets, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Scores of the model under test, and the gradient of every parameter."""
    heads = heads.to(dtype)
    scores = heads(sets.items.to(dtype), sets.query.to(dtype), sets.visible)
    names, parameters = zip(*heads.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss_of(scores, sets), parameters)
    return scores.detach(), dict(zip(names, gradients, strict=True))


def plain(heads: SingleHeads, sets: Sets, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """The same by the plain form."""
    tensors = {name: p.detach().to(dtype).requires_grad_() for name, p in heads.named_parameters()}
    each = [
        PlainHead(tensors, lane, dtype).scores(
            sets.items[lane].to(dtype), sets.query[lane].to(dtype), sets.visible[lane]
        )
        for lane in range(len(sets.query))
    ]
    scores = torch.stack(each)
    gradients = torch.autograd.grad(loss_of(scores, sets), list(tensors.values()))
    return scores.detach(), dict(zip(tensors, gradients, strict=True))


@pytest.mark.parametrize("kind", HEADS)
def test_equals_the_plain_form_to_rounding(kind: str) -> None:
    heads = HEADS[kind]().double()
    sets = sets_for(heads, 16)
    (got, gradients), (want, true_gradients) = stacked(heads, sets, torch.float64), plain(heads, sets, torch.float64)
    assert got.shape == (len(SEEDS), 16, CLASSES)
    assert worst(got, want) <= 1e-12 * float(want.abs().max())
    assert gradients.keys() == true_gradients.keys()
    for name, gradient in gradients.items():
        size = float(true_gradients[name].abs().max())
        assert size > 0, name
        assert worst(gradient, true_gradients[name]) <= 1e-11 * size, name


def test_gradients_keep_the_contract_of_accuracy_in_float32() -> None:
    heads = untrained()
    sets = sets_for(heads, 256)
    want, true_gradients = plain(heads, sets, torch.float64)
    rough, rough_gradients = plain(heads, sets, torch.float32)
    got, gradients = stacked(heads, sets, torch.float32)
    assert worst(got, want) <= 2 * worst(rough, want)
    for name, gradient in gradients.items():
        assert worst(gradient, true_gradients[name]) <= 3 * worst(rough_gradients[name], true_gradients[name]), name


def test_rows_in_groups_equal_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = untrained().double()
    sets = sets_for(heads, 64)  # 1,024 items, 64 queries: the items are grouped even as the module has it
    monkeypatch.setattr(layers, "_GROUP", 10**9)
    want, true_gradients = stacked(heads, sets, torch.float64)
    monkeypatch.setattr(layers, "_GROUP", 8)
    got, gradients = stacked(heads, sets, torch.float64)
    assert worst(got, want) < 1e-12
    for name, gradient in gradients.items():
        assert worst(gradient, true_gradients[name]) < 1e-11, name


def test_a_seed_does_not_depend_on_its_neighbours() -> None:
    together, alone = SingleHeads.initial(SEEDS), SingleHeads.initial((0,))
    for (name, stack), single in zip(together.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(stack[1:2], single), name
    sets = sets_for(together, 8)
    own = Sets(sets.priority[1:2], sets.label[1:2], sets.query[1:2], sets.visible[1:2])
    got = together.double()(sets.items.double(), sets.query.double(), sets.visible)
    assert worst(got[1:2], alone.double()(own.items.double(), own.query.double(), own.visible)) < 1e-13


def test_initial_weights_are_lecuns() -> None:
    heads = SingleHeads.initial((0, 1))
    for name, parameter in heads.state_dict().items():
        if name.endswith("bias"):
            assert not parameter.any(), name
        else:
            size_in = parameter.shape[1]
            # Five standard errors of a standard deviation over this many draws.
            slack = 5 * (2 * parameter[0].numel()) ** -0.5
            assert float(parameter[0].std()) * size_in**0.5 == pytest.approx(1.0, abs=slack), name
            assert not torch.equal(parameter[0], parameter[1]), name


def test_items_that_are_not_visible_change_nothing() -> None:
    heads = untrained()
    sets = sets_for(heads, 32)
    other = replace(
        sets,
        priority=torch.where(sets.visible, sets.priority, 1e4),
        label=torch.where(sets.visible, sets.label, (sets.label + 3) % CLASSES),
    )
    assert not torch.equal(other.items, sets.items)
    assert torch.equal(heads(other.items, other.query, other.visible), heads(sets.items, sets.query, sets.visible))
