"""Stacked models: single heads against the paper's formula, encoders against the same model run in simpler ways."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sharpmax.models import stacked
from sharpmax.models.stacked import ACTIVATIONS, Encoders, Normalisers, SingleHeads, summarise_rows
from sharpmax.models.weights import Trained, shipped_path
from sharpmax.normalisers.base import Normaliser, normaliser, visible_softmax
from sharpmax.tasks.sized import CLASSES, Batch, Sets, draw, seeded, sized_task
from tests.models.plain_head import PlainHead
from tests.numerics import worst
from tests.small_normalisers import shipped

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


def scored(heads: SingleHeads, sets: Sets, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Scores of the model under test, and the gradient of every parameter."""
    heads = heads.to(dtype)
    scores = heads(sets.items.to(dtype), sets.query.to(dtype), sets.visible)
    names, parameters = zip(*heads.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss_of(scores, sets), parameters)
    return scores.detach(), dict(zip(names, gradients, strict=True))


def plain(heads: SingleHeads, sets: Sets, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """The same by the plain form."""
    tensors = {name: p.detach().to(dtype).requires_grad_() for name, p in heads.named_parameters()}
    items, query = sets.items.to(dtype), sets.query.to(dtype)
    each = [PlainHead(tensors, i, dtype).scores(items[i], query[i], sets.visible[i]) for i in range(len(query))]
    scores = torch.stack(each)
    gradients = torch.autograd.grad(loss_of(scores, sets), list(tensors.values()))
    return scores.detach(), dict(zip(tensors, gradients, strict=True))


@pytest.mark.parametrize("kind", HEADS)
def test_equals_the_plain_form_to_rounding(kind: str) -> None:
    heads = HEADS[kind]().double()
    sets = sets_for(heads, 16)
    (got, gradients), (want, true_gradients) = scored(heads, sets, torch.float64), plain(heads, sets, torch.float64)
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
    got, gradients = scored(heads, sets, torch.float32)
    assert worst(got, want) <= 2 * worst(rough, want)
    for name, gradient in gradients.items():
        assert worst(gradient, true_gradients[name]) <= 3 * worst(rough_gradients[name], true_gradients[name]), name


def test_rows_in_groups_equal_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = untrained().double()
    sets = sets_for(heads, 64)  # 1,024 items, 64 queries: the items are grouped even as the module has it
    monkeypatch.setattr(stacked, "_GROUP", 10**9)
    want, true_gradients = scored(heads, sets, torch.float64)
    monkeypatch.setattr(stacked, "_GROUP", 8)
    got, gradients = scored(heads, sets, torch.float64)
    assert worst(got, want) < 1e-12
    for name, gradient in gradients.items():
        assert worst(gradient, true_gradients[name]) < 1e-11, name


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


PAIR = (3, 0)
KINDS = list(shipped())


def examples(task: str = "max", *, count: int = 6, sizes: int | tuple[int, int] = (5, 16)) -> Batch:
    return sized_task(task).draw((len(PAIR), count), sizes, seeded(CPU, 7))


def encoders(kind: str = "softmax", task: str = "max", seeds: tuple[int, ...] = PAIR, **options: object) -> Encoders:
    settings = {"width": 16, "heads": 2, "depth": 2, **options}
    return Encoders(seeds, kind, {}, sized_task(task), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_seed_in_a_stack_is_that_seed_alone_and_reads_as_it_answers(kind: str, causal: bool) -> None:
    batch = examples()
    stack, alone = encoders(kind, causal=causal).double(), encoders(kind, seeds=(0,), causal=causal).double()
    for (name, many), (_, one) in zip(stack.state_dict().items(), alone.state_dict().items(), strict=True):
        assert torch.equal(many[1:2], one), name
    inputs = batch.inputs.double()
    got = stack.answer(inputs, batch.visible, 1)
    assert worst(got[1:2], alone.answer(inputs[1:2], batch.visible[1:2], 1)) < 1e-10
    reading = stack.read(inputs, batch.visible, 1)
    assert worst(reading.scores, got) < 1e-10
    assert reading.entropy.shape == (2, 6, 2, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_single_heads_read_as_they_answer(kind: str) -> None:
    batch, heads = examples(), SingleHeads.initial(PAIR, kind, {}, width=16)
    assert worst(heads.read(batch.inputs, batch.visible).scores, heads.answer(batch.inputs, batch.visible)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
def test_reading_in_parts_is_reading_at_once(kind: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, model = examples("sort"), encoders(kind, "sort", causal=causal)
    whole = model.read(batch.inputs, batch.visible, 8)
    monkeypatch.setitem(stacked._MAX_WEIGHTS, "cpu", 1)
    with torch.no_grad():
        parts = model.read(batch.inputs, batch.visible, 8)
    assert worst(parts.scores, whole.scores) < 1e-5
    assert worst(parts.argmax_scores, whole.argmax_scores) < 1e-5
    assert worst(parts.entropy, whole.entropy) < 1e-4
    assert torch.equal(parts.first, whole.first)


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
    soft, hard = SingleHeads.initial(PAIR, "softmax", {}, width=16), SingleHeads.initial(PAIR, "hard", {}, width=16)
    reading, other = (heads.read(batch.inputs, batch.visible) for heads in (soft, hard))
    assert worst(reading.argmax_scores, other.scores) < 1e-5
    assert worst(reading.scores, other.scores) > 1e-3
    one_layer = [encoders(kind, depth=1).read(batch.inputs, batch.visible, 1) for kind in ("softmax", "hard")]
    assert worst(one_layer[0].argmax_scores, one_layer[1].scores) < 1e-5


def test_summaries_describe_shares_of_the_weight() -> None:
    weights = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.2, 0.0], [0.0, 0.0, 0.0]])[None, None, None]
    entropy, top, first = (seen.flatten().tolist() for seen in summarise_rows(weights))
    assert entropy == pytest.approx([1.0397, 0.6931, 0.0], abs=1e-4)
    assert top == pytest.approx([0.5, 0.5, 0.0])
    assert first[0] == 0


@pytest.mark.parametrize(("name", "edge"), [("step", 0.0), ("hard-threshold", 0.5)])
def test_discontinuous_activations_jump_and_still_have_a_gradient(name: str, edge: float) -> None:
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
    q, k, visible = torch.randn(2, 5, 1, 8), torch.randn(2, 5, 7, 8), torch.rand(2, 5, 1, 7) < 0.8
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
