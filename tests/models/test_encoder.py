"""Stacked encoders and single heads with any normaliser, against the same model run in simpler ways."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sharpmax.models import encoder as module
from sharpmax.models.encoder import Encoders
from sharpmax.models.single_head import ACTIVATIONS, Normalisers, SetHeads, summarise_rows
from sharpmax.normalisers.base import Normaliser, normaliser, visible_softmax
from sharpmax.tasks.max_retrieval import seeded, sized_task
from sharpmax.tasks.sized import Batch
from tests.numerics import worst
from tests.small_normalisers import shipped

CPU = torch.device("cpu")
SEEDS = (3, 0)
KINDS = list(shipped())


def examples(task: str = "max", *, count: int = 6, sizes: int | tuple[int, int] = (5, 16)) -> Batch:
    return sized_task(task).draw((len(SEEDS), count), sizes, seeded(CPU, 7))


def encoders(kind: str = "softmax", task: str = "max", seeds: tuple[int, ...] = SEEDS, **options: object) -> Encoders:
    settings = {"width": 16, "heads": 2, "depth": 2, **options}
    return Encoders(seeds, kind, {}, sized_task(task), **settings)  # type: ignore[arg-type]


def lane(batch: Batch, at: int) -> tuple[Tensor, Tensor, int]:
    return batch.inputs[at : at + 1], batch.visible[at : at + 1], batch.answer.shape[-1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_seed_in_a_stack_is_that_seed_alone(kind: str, causal: bool) -> None:
    batch = examples()
    stack, alone = encoders(kind, causal=causal).double(), encoders(kind, seeds=(0,), causal=causal).double()
    for (name, many), (_, one) in zip(stack.state_dict().items(), alone.state_dict().items(), strict=True):
        assert torch.equal(many[1:2], one), name
    batch = Batch(batch.inputs.double(), *(getattr(batch, name) for name in ("visible", "answer", "source", "close")))
    got = stack.answer(batch.inputs, batch.visible, 1)
    assert worst(got[1:2], alone.answer(*lane(batch, 1))) < 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_reading_answers_as_training_does(kind: str) -> None:
    batch = examples()
    heads = SetHeads(SEEDS, kind, {}, width=16)
    assert worst(heads.read(batch.inputs, batch.visible).scores, heads.answer(batch.inputs, batch.visible)) < 1e-5
    for causal in (False, True):
        model = encoders(kind, causal=causal)
        reading = model.read(batch.inputs, batch.visible, 1)
        assert worst(reading.scores, model.answer(batch.inputs, batch.visible, 1)) < 1e-5
        assert len(reading.layers) == 2
        assert reading.layers[0].entropy.shape == (2, 6, 2, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
def test_reading_in_parts_is_reading_at_once(kind: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, model = examples("sort"), encoders(kind, "sort", causal=causal)
    whole = model.read(batch.inputs, batch.visible, 8)
    monkeypatch.setitem(module._LOGITS, "cpu", 1)
    parts = model.read(batch.inputs, batch.visible, 8)
    assert worst(parts.scores, whole.scores) < 1e-5
    assert worst(parts.argmax_scores, whole.argmax_scores) < 1e-5
    for a, b in zip(parts.layers, whole.layers, strict=True):
        assert worst(a.entropy, b.entropy) < 1e-4
        assert torch.equal(a.first, b.first)


@pytest.mark.parametrize("task", ["max", "copy", "recall"])
def test_a_causal_encoder_never_sees_the_future(task: str) -> None:
    batch, model = examples(task, sizes=8), encoders(task=task, causal=True)
    length = batch.visible.shape[-1]
    before = model.answer(batch.inputs, batch.visible, length)
    for place in (1, length // 2, length - 1):
        inputs = batch.inputs.clone()
        inputs[:, :, place:] = (inputs[:, :, place:] + 1) % 7
        after = model.answer(inputs, batch.visible, length)
        assert torch.equal(after[:, :, :place], before[:, :, :place])
        assert not torch.equal(after[:, :, place:], before[:, :, place:])
    blind = encoders(task="max")
    sets = examples(sizes=8)
    changed = sets.inputs.clone()
    changed[:, :, 7] += 1.0
    assert not torch.equal(
        blind.answer(changed, sets.visible, 9)[:, :, 0], blind.answer(sets.inputs, sets.visible, 9)[:, :, 0]
    )


def test_the_order_of_a_set_does_not_matter_to_a_global_encoder() -> None:
    batch, model = examples(sizes=9), encoders().double()
    order = torch.cat((torch.randperm(9, generator=torch.Generator().manual_seed(0)), torch.tensor([9])))
    inputs = batch.inputs.double()
    assert worst(model.answer(inputs[:, :, order], batch.visible, 1), model.answer(inputs, batch.visible, 1)) < 1e-12


@pytest.mark.parametrize("task", ["max", "copy"])
def test_positions_that_are_not_visible_change_nothing(task: str) -> None:
    batch, model = examples(task), encoders(task=task, causal=True)
    hidden = ~batch.visible if batch.inputs.ndim == 3 else ~batch.visible[..., None]
    inputs = torch.where(hidden, 3, batch.inputs) if task == "copy" else batch.inputs.masked_fill(hidden, 9.0)
    assert not torch.equal(inputs, batch.inputs)
    asked = batch.answer >= 0
    got, want = (model.answer(x, batch.visible, batch.answer.shape[-1]) for x in (inputs, batch.inputs))
    assert torch.equal(got[asked], want[asked])


def test_order_reaches_three_places_back_where_it_matters() -> None:
    """One causal layer tells x₁x₂ from x₂x₁ only by the convolution."""
    model = encoders(task="copy", depth=1, causal=True)
    tokens = torch.tensor([5, 9, 2, 7]).expand(2, 1, 4)
    visible = torch.ones(2, 1, 4, dtype=torch.bool)
    turned = tokens[..., [1, 0, 2, 3]]
    assert worst(model.answer(tokens, visible, 1), model.answer(turned, visible, 1)) > 1e-3
    for task in ("max", "sort"):
        assert encoders(task=task).neighbours is None


def test_argmax_scores_take_the_key_with_the_most_weight() -> None:
    batch = examples()
    soft, hard = SetHeads(SEEDS, "softmax", {}, width=16), SetHeads(SEEDS, "hard", {}, width=16)
    reading, other = (heads.read(batch.inputs, batch.visible) for heads in (soft, hard))
    assert worst(reading.argmax_scores, other.scores) < 1e-5
    assert worst(reading.scores, other.scores) > 1e-3
    one_layer = [encoders(kind, depth=1).read(batch.inputs, batch.visible, 1) for kind in ("softmax", "hard")]
    assert worst(one_layer[0].argmax_scores, one_layer[1].scores) < 1e-5


def test_summaries_describe_shares_of_the_weight() -> None:
    weights = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.2, 0.0], [0.0, 0.0, 0.0]])[None, None, None]
    seen = summarise_rows(weights)
    assert seen.entropy.flatten().tolist() == pytest.approx([1.0397, 0.6931, 0.0], abs=1e-4)
    assert seen.top.flatten().tolist() == pytest.approx([0.5, 0.5, 0.0])
    assert seen.first.flatten().tolist()[0] == 0


@pytest.mark.parametrize("name", ["step", "hard-threshold"])
def test_discontinuous_activations_jump_and_still_have_a_gradient(name: str) -> None:
    edge = {"step": 0.0, "hard-threshold": 0.5}[name]
    x = torch.tensor([edge, edge + 1e-4, -2.0, 2.0], requires_grad=True)
    y = ACTIVATIONS[name](x)
    assert float((y[1] - y[0]).detach()) >= 0.5
    assert y[2] == 0.0
    y.sum().backward()
    assert x.grad is not None
    assert (x.grad != 0).all()


class Gated(Normaliser):
    name = "gated for a test"
    disperses = "yes: it is softmax at a fixed temperature of each head of its own"

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Parameter(torch.rand(()) + 0.5)

    def normalise(self, logits: Tensor, visible: Tensor) -> Tensor:
        return visible_softmax(self.gate * logits, visible)


@pytest.mark.parametrize("kind", ["ssmax", "gated for a test"])
def test_learned_parameters_belong_to_the_seed(kind: str) -> None:
    many = Normalisers((4, 9), kind, {})
    (name,) = many.learned.keys()
    with torch.no_grad():
        many.learned[name][1] += 0.25
    q, k = torch.randn(2, 5, 1, 8), torch.randn(2, 5, 7, 8)
    visible = torch.rand(2, 5, 1, 7) < 0.8
    got = many(q, k, mask=visible, scale=1.0)
    for at, seed in enumerate((4, 9)):
        torch.manual_seed(seed)
        one = normaliser(kind)
        with torch.no_grad():
            next(one.parameters()).add_(0.25 * at)
        assert worst(got[at], one(q[at], k[at], mask=visible[at], scale=1.0)) < 1e-6
    got.square().sum().backward()
    gradient = many.learned[name].grad
    assert gradient is not None
    assert gradient.shape == (2,)
    assert (gradient != 0).all()
    if kind != "ssmax":
        assert many.learned[name][0] != many.learned[name][1] - 0.25, "both began at the same random number"
