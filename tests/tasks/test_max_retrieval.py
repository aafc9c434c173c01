"""Max retrieval: what is drawn, what the right answer is, and that the same numbers give the same sets for good."""

from __future__ import annotations

import itertools

import pytest
import torch

from sharpmax.tasks.max_retrieval import CLASSES, VERSION, Sets, draw, seeded

CPU = torch.device("cpu")


def test_sizes_are_uniform_between_both_ends() -> None:
    sets = draw((24_000,), (5, 16), seeded(CPU, 0))
    counts = torch.bincount(sets.visible.sum(-1), minlength=17)
    assert counts[:5].tolist() == [0] * 5
    assert len(counts) == 17
    assert float((counts[5:] - 2000).abs().max()) < 5 * 2000**0.5
    # Live items come first, so that a set is its first items.
    assert torch.equal(sets.visible, sets.visible.sort(-1, descending=True).values)


def test_the_answer_is_the_class_of_the_largest_live_priority() -> None:
    sets = draw((40, 5), (1, 7), seeded(CPU, 3))
    for i, j in itertools.product(range(40), range(5)):
        rows = zip(sets.priority[i, j].tolist(), sets.label[i, j].tolist(), sets.visible[i, j].tolist(), strict=True)
        candidates = [(priority, at, label) for at, (priority, label, visible) in enumerate(rows) if visible]
        _, at, label = max(candidates)
        assert int(sets.best[i, j]) == at
        assert int(sets.answer[i, j]) == label


def test_an_item_that_is_not_live_is_never_the_answer() -> None:
    sets = Sets(
        priority=torch.tensor([[0.0, 0.9, 0.5], [0.2, 0.1, 0.9]]),
        label=torch.tensor([[4, 5, 6], [7, 8, 9]]),
        query=torch.zeros(2),
        # A visible priority of exactly 0 still wins over items that are not there.
        visible=torch.tensor([[True, False, False], [True, True, False]]),
    )
    assert sets.best.tolist() == [0, 0]
    assert sets.answer.tolist() == [4, 7]


def test_an_item_is_its_priority_and_its_class_one_hot() -> None:
    sets = draw((4,), (2, 6), seeded(CPU, 1))
    priority, one_hot = sets.items[..., 0], sets.items[..., 1:]
    assert torch.equal(priority, sets.priority)
    assert torch.equal(one_hot, torch.nn.functional.one_hot(sets.label, CLASSES).float())
    assert sets.items.dtype == sets.priority.dtype


def test_version_1_draws_these_very_sets() -> None:
    """Weights and results are bound to these streams: if this changes, VERSION has to."""
    assert VERSION == 1
    assert seeded(CPU, 1, 2).initial_seed() == 3429124248386577504
    sets = draw((2,), (3, 6), seeded(CPU, 1, 2))
    assert sets.priority[0].tolist() == pytest.approx([0.4425, 0.5670, 0.1268, 0.7298, 0.5362, 0.5562], abs=5e-5)
    assert sets.priority[1].tolist() == pytest.approx([0.1127, 0.8772, 0.2752, 0.7775, 0.9038, 0.7980], abs=5e-5)
    assert sets.label.tolist() == [[5, 2, 4, 7, 4, 1], [6, 9, 1, 6, 5, 5]]
    assert sets.query.tolist() == pytest.approx([0.4458, 0.5473], abs=5e-5)
    assert sets.visible.sum(-1).tolist() == [6, 4]
    assert sets.answer.tolist() == [7, 9]
