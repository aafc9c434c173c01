"""Training: the step it takes, the data it sees, and that it can be taken up again as if it had never stopped."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sharpmax.errors import ArgumentError
from sharpmax.experiments.reproduce.training import Training
from sharpmax.experiments.stacked_training import RECIPES, STEPS, Recipe, recipe_named
from sharpmax.models.single_head import SingleHeads
from sharpmax.tasks.max_retrieval import draw, seeded
from tests.models.plain_head import PlainHead
from tests.numerics import worst

CPU = torch.device("cpu")


def finish(training: Training) -> dict[str, Tensor]:
    while training.step < training.steps:
        training.next_block()
    return training.state()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def test_resumed_from_any_block_is_bit_identical(small_recipe: Recipe, short_blocks: int) -> None:
    seeds, steps = (3, 0), 10
    whole = Training(small_recipe, seeds, steps, CPU)
    saved = [(whole.step, whole.state())]
    while whole.step < steps:
        whole.next_block()
        saved.append((whole.step, whole.state()))
    # The last block is cut where the training ends.
    assert [step for step, _ in saved] == [0, 4, 8, 10]
    assert not same(saved[-2][1], saved[-1][1])
    for step, state in saved:
        again = Training(small_recipe, seeds, steps, CPU)
        again.restore(state, step)
        assert same(finish(again), saved[-1][1]), step


class TestSeeds:
    def test_begins_at_the_initial_weights_with_a_clean_optimiser(self, small_recipe: Recipe) -> None:
        training = Training(small_recipe, (3, 0), 8, CPU)
        initial = SingleHeads.initial((3, 0)).state_dict()
        state = training.state()
        assert training.step == 0
        assert all(torch.equal(state.pop(f"heads.{name}"), tensor) for name, tensor in initial.items())
        assert {name.partition(".")[0] for name in state} == {"step", "exp_avg", "exp_avg_sq"}
        assert not any(tensor.any() for tensor in state.values())

    def test_one_alone_follows_itself_in_a_stack(self, small_recipe: Recipe, short_blocks: int) -> None:
        # Without the warm-up of 1,000 steps, in which nothing would move.
        recipe = replace(small_recipe, warmup=0)
        stack, alone = Training(recipe, (5, 3, 8), 8, CPU), Training(recipe, (3,), 8, CPU)
        while alone.step < 8:
            assert worst(stack.next_block()[1:2], alone.next_block()) < 1e-5
        initial = SingleHeads.initial((3,)).state_dict()
        for name, tensor in alone.heads().items():
            moved = worst(tensor, initial[name])
            assert moved > 1e-3, name
            # Adam divides by the gradient's own size, so the rounding of a tiny gradient moves a weight visibly.
            error = (stack.heads()[name][1:2] - tensor).abs()
            assert float(error.mean()) < 1e-3 * moved, name


def first_batches(recipe: Recipe, seed: int, block: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """What a seed sees in its first block, drawn here once more: items, query, visible, answer by step."""
    sets = draw((block, recipe.batch), recipe.sizes, seeded(CPU, seed, 0))
    return list(zip(sets.items, sets.query, sets.visible, sets.answer, strict=True))


class TestStep:
    @pytest.mark.parametrize("l2", [0.0, 0.1])
    def test_is_adams_on_the_plain_form_with_half_the_squared_weights(self, l2: float, short_blocks: int) -> None:
        recipe = replace(RECIPES["paper"], l2=l2, batch=8)
        training = Training(recipe, (3,), 3, CPU)
        training.next_block()
        tensors = {name: t.clone().requires_grad_() for name, t in SingleHeads.initial((3,)).state_dict().items()}
        adam = torch.optim.Adam(tensors.values(), lr=1e-3)
        for items, query, visible, answer in first_batches(recipe, 3, short_blocks)[:3]:
            scores = PlainHead(tensors, 0, torch.float32).scores(items, query, visible)
            penalty = 0.5 * l2 * sum((tensor**2).sum() for tensor in tensors.values())
            adam.zero_grad()
            (F.cross_entropy(scores, answer) + penalty).backward()
            adam.step()
        state = training.state()
        for name, tensor in tensors.items():
            for kind in ("exp_avg", "exp_avg_sq"):
                want = adam.state[tensor][kind]
                assert worst(state[f"{kind}.{name}"], want) <= 1e-4 * float(want.abs().max()), (kind, name)
            # Where a gradient is no more than rounding, Adam makes a full step of either sign of it.
            clear = adam.state[tensor]["exp_avg_sq"].sqrt() > 1e-6
            assert clear.float().mean() > 0.5, name
            assert worst(state[f"heads.{name}"][clear], tensor[clear]) < 1e-5, name
            assert int(state[f"step.{name}"]) == 3

    def test_the_loss_is_the_mean_over_the_steps_of_the_block(self, short_blocks: int) -> None:
        # At a rate of 0 the heads stay what they were, so every loss of the block is theirs.
        recipe = replace(RECIPES["paper"], batch=8, learning_rate=0.0)
        head = PlainHead(SingleHeads.initial((3,)).state_dict(), 0, torch.float64)
        losses = [
            float(F.cross_entropy(head.scores(items.double(), query.double(), visible), answer))
            for items, query, visible, answer in first_batches(recipe, 3, short_blocks)
        ]
        assert len(set(losses)) == short_blocks
        for steps in (1, 3, short_blocks):  # blocks cut short are divided by what they did
            got = Training(recipe, (3,), steps, CPU).next_block()
            assert got.tolist() == pytest.approx([sum(losses[:steps]) / steps], rel=1e-5)


def test_recipes() -> None:
    paper, sharp = RECIPES["paper"], RECIPES["sharp"]
    assert (paper.learning_rate, paper.l2, paper.batch, paper.sizes) == (1e-3, 1e-3, 128, (5, 16))
    assert {paper.rate(step, STEPS) for step in (0, 1, 50_000, STEPS - 1)} == {1e-3}
    assert (sharp.l2, sharp.sizes) == (0.0, (5, 16))
    assert sharp.rate(0, STEPS) == pytest.approx(3e-3 / 1001)
    assert sharp.rate(499, STEPS) == pytest.approx(3e-3 * 500 / 1001, rel=1e-4)
    assert sharp.rate(STEPS // 2, STEPS) == pytest.approx(1.5e-3)
    assert 0.0 < sharp.rate(STEPS - 1, STEPS) < 1e-9 * STEPS / 1000
    assert recipe_named("sharp") is sharp
    with pytest.raises(ArgumentError, match="recipe: got 'blunt'; allowed: 'paper' or 'sharp'"):
        recipe_named("blunt")
