"""Every variant of the evaluation against a dense computation in float64 that leaves no item out."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

import sharpmax as sm
from sharpmax.errors import OutOfRangeWarning
from sharpmax.experiments.reproduce import evaluation
from sharpmax.experiments.reproduce.evaluation import HARD, Measured, Read, measure, measure_all, read, side_by_side
from sharpmax.models.single_head import WIDTH, SingleHeads
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import LogLength
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.polynomial import PAPER, Polynomial
from sharpmax.tasks.max_retrieval import Sets, draw, seeded
from tests.experiments.reproduce.trained_heads import heads_of
from tests.models.plain_head import PlainHead

CPU = torch.device("cpu")
STREAM = (5, 2)
SAMPLES = 16
VARIANTS: dict[str, Policy | None] = {
    "softmax": None,
    "paper": PAPER,
    "refit": Polynomial((0.3, 0.8), fitted_on=(0.1, 6.0)),
    "log-length": LogLength(reference=16),
    "entropy-target": EntropyTarget(0.3),
}
SIZES: list[int | tuple[int, int]] = [1, 1024, (5, 16)]


def everything_read(head: SingleHeads, size: int | tuple[int, int], position: int) -> tuple[Tensor, Tensor]:
    """Logits and answers of the head at a position over all pages."""
    pages = list(read(head, size, SAMPLES, (*STREAM, position)))
    return torch.cat([seen.logits for seen in pages]), torch.cat([seen.answer for seen in pages])


def sets_of(size: int | tuple[int, int], position: int) -> Sets:
    """The sets that a head sees, drawn here once more; they fit one page."""
    most = size if isinstance(size, int) else size[1]
    return draw((SAMPLES,), size, seeded(CPU, *STREAM, position, most))


@pytest.mark.parametrize("recipe", ["paper", "sharp"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.filterwarnings("ignore::sharpmax.errors.OutOfRangeWarning")
def test_every_variant_is_that_of_the_dense_computation(recipe: str, size: int | tuple[int, int]) -> None:
    heads = heads_of(recipe)
    found = measure(heads, [VARIANTS, VARIANTS], size, SAMPLES, STREAM)
    for position, head in enumerate(heads):
        read_logits, answer = everything_read(head, size, position)
        sets = sets_of(size, position)
        plain = PlainHead(head.state_dict(), 0, torch.float64)
        h = plain.features(sets.items.double())
        want = plain.logits(h, sets.query.double())
        assert torch.equal(read_logits == -torch.inf, ~sets.visible)
        assert float((read_logits.double() - want)[sets.visible].abs().max()) < 5e-6 * float(want.abs().max())
        assert torch.equal(answer, sets.answer)
        # From the logits that were read: those of the sharp recipe reach 2,700, where float32 has three decimals.
        logits = read_logits.double()
        for name, policy in VARIANTS.items():
            p = sm.softmax(logits, policy=policy)
            entropy = -torch.special.xlogy(p, p).sum(-1)
            assert found.entropy[name][position] == pytest.approx(entropy.numpy(), abs=3e-6), name
            assert found.top_weight[name][position] == pytest.approx(p.amax(-1).numpy(), abs=3e-6), name
            agrees(found.correct[name][position], plain.classify(p, h), sets)
        one_hot = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
        agrees(found.correct[HARD][position], plain.classify(one_hot, h), sets)
        confidence = plain.classify(logits.softmax(-1), h).softmax(-1).amax(-1)
        assert found.confidence[position] == pytest.approx(confidence.numpy(), abs=1e-3)
        spread = logits.amax(-1) - logits.masked_fill(~sets.visible, torch.inf).amin(-1)
        assert found.spread[position] == pytest.approx(spread.numpy(), rel=1e-6)


def agrees(correct: np.ndarray, scores: Tensor, sets: Sets) -> None:
    """Right and wrong as the scores say, except where the first two classes tie to rounding."""
    assert correct.dtype == np.bool_
    first, second = scores.topk(2).values.unbind(-1)
    clear = (first - second > 1e-2).numpy()
    assert clear.mean() > 0.75
    assert (correct == (scores.argmax(-1) == sets.answer).numpy())[clear].all()


def made_up(logits: Tensor, answer: Tensor) -> Read:
    """Sets whose logits are given; features and head are of no interest."""
    head = SingleHeads.initial((0,)).requires_grad_(False)
    nothing = torch.zeros(len(logits), dtype=torch.long)
    return Read(head, torch.randn(*logits.shape, WIDTH), logits, logits, nothing, answer)


class TestItemsOutOfReach:
    """Items too far down to weigh anything are left out of the work, never of the result."""

    def page(self, variants: Mapping[str, Policy | None], logits: Tensor) -> dict[str, Tensor]:
        with torch.inference_mode():
            return evaluation.measure_page(made_up(logits, torch.zeros(len(logits), dtype=torch.long)), variants)

    def test_log_length_sees_the_true_number(self) -> None:
        n = 256
        # Two items at the top and the rest 100 nats down: the two left over would give β = 1.
        logits = torch.full((3, n), -100.0)
        logits[:, 5], logits[:, 9] = 0.0, -1.0
        found = self.page({"softmax": None, "log-length": LogLength(reference=16)}, logits)
        beta = np.log(n) / np.log(16)
        top = 1 / (1 + np.exp(-beta))
        assert found["top log-length"].tolist() == pytest.approx([top] * 3, abs=1e-6)
        assert found["top softmax"].tolist() == pytest.approx([1 / (1 + np.exp(-1.0))] * 3, abs=1e-6)

    def test_what_is_left_out_weighs_less_than_rounding(self) -> None:
        # The worst there is: everything just out of reach.
        logits = torch.full((1, 2**14), -40.001)
        logits[0, 3] = 0.0
        found = self.page({"softmax": None}, logits)
        dense = logits.double().softmax(-1)
        assert float(found["top softmax"]) == pytest.approx(float(dense.amax()), abs=1e-7)
        assert float(found["entropy softmax"]) == pytest.approx(float(sm.entropy(logits.double())), abs=1e-6)


def equal(a: Measured, b: Measured, names: tuple[str, ...]) -> bool:
    tables = [(a.correct, b.correct), (a.entropy, b.entropy), (a.top_weight, b.top_weight)]
    named = all(np.array_equal(x[name], y[name]) for x, y in tables for name in names if name in x)
    # Pooling more variants at once may round their sums differently.
    return named and np.allclose(a.confidence, b.confidence, atol=1e-5) and np.array_equal(a.spread, b.spread)


class TestSharing:
    def test_each_head_has_policies_of_its_own(self, heads: list[SingleHeads]) -> None:
        targets = [0.2, 0.6]
        variants: list[dict[str, Policy | None]] = [{"softmax": None, "own": EntropyTarget(t)} for t in targets]
        found = measure(heads, variants, 1024, SAMPLES, STREAM)
        assert (found.entropy["softmax"] > 1.0).all()
        for position, target in enumerate(targets):
            assert found.entropy["own"][position] == pytest.approx(target, abs=1e-4)

    def test_heads_see_different_sets_and_only_their_own(self, heads: list[SingleHeads]) -> None:
        variants: list[dict[str, Policy | None]] = [{"softmax": None}] * 2
        twins = measure([heads[0], heads[0]], variants, 64, SAMPLES, STREAM).spread
        assert not np.isin(twins[0], twins[1]).any()
        # Whoever stands beside it, the first head reads the same.
        assert np.array_equal(measure(heads, variants, 64, SAMPLES, STREAM).spread[0], twins[0])
        assert np.array_equal(measure(heads[:1], variants, 64, SAMPLES, STREAM).spread[0], twins[0])

    def test_leaving_the_fitted_range_is_not_warned_of(self, heads: list[SingleHeads]) -> None:
        narrow: dict[str, Policy | None] = {"softmax": None, "refit": Polynomial((2.0,), fitted_on=(0.5, 0.6))}
        with warnings.catch_warnings():
            warnings.simplefilter("error", OutOfRangeWarning)
            measure(heads[:1], [narrow], 1024, 8, STREAM)


class TestThreads:
    """Heads and sizes are read side by side, one on each of torch's threads."""

    @pytest.fixture(autouse=True)
    def two_threads(self) -> Iterator[None]:
        torch.set_num_threads(2)
        yield
        torch.set_num_threads(1)

    def test_change_no_bit_of_the_results(self, heads: list[SingleHeads]) -> None:
        at_once = measure_all(heads, [VARIANTS, VARIANTS], [16, 256], 8, STREAM)
        assert list(at_once) == [16, 256]
        torch.set_num_threads(1)
        for size, found in at_once.items():
            alone = measure(heads, [VARIANTS, VARIANTS], size, 8, STREAM)
            assert equal(found, alone, (*VARIANTS, HARD))
            assert np.array_equal(found.confidence, alone.confidence)

    def test_a_failure_is_raised_and_leaves_the_threads_as_they_were(self) -> None:
        def fail(place: int) -> None:
            raise ZeroDivisionError(place)

        with pytest.raises(ZeroDivisionError, match="0"):
            side_by_side(fail, range(2), CPU)
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("size", "samples"), [(1000, 70), (40_000, 2), ((5, 16), 3000)])
def test_pages_hold_so_many_items_and_no_more(
    size: int | tuple[int, int], samples: int, monkeypatch: pytest.MonkeyPatch, heads: list[SingleHeads]
) -> None:
    most = size if isinstance(size, int) else size[1]
    # What is read of an item is of no interest here, only how much is held at once.
    monkeypatch.setattr(evaluation, "_features", lambda head, items: torch.zeros(*items.shape[:2], WIDTH))
    progress: list[int] = []
    shapes = [tuple(seen.logits.shape) for seen in read(heads[0], size, samples, STREAM, progress.append)]
    assert sum(rows for rows, _ in shapes) == samples
    assert all(width == most for _, width in shapes)
    assert max(rows * width for rows, width in shapes) <= max(2**15, most)
    # As full as they may be, but for the last.
    assert len({rows for rows, _ in shapes[:-1]}) <= 1
    assert sum(progress) == samples * most


@pytest.mark.parametrize("rows", [1, 4097])
def test_features_in_blocks_are_the_features(rows: int, heads: list[SingleHeads]) -> None:
    items = draw((1,), rows, seeded(CPU, 0)).items
    with torch.inference_mode():
        got, want = evaluation._features(heads[0], items), heads[0].features(items[None])[0]
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)


def test_less_memory_changes_the_parts_and_not_what_is_read(
    monkeypatch: pytest.MonkeyPatch, heads: list[SingleHeads]
) -> None:
    whole = measure(heads, [VARIANTS, VARIANTS], 64, 12, STREAM)
    monkeypatch.setitem(evaluation._AT_ONCE, "cpu", 5 * 64)
    assert [len(seen.answer) for seen in read(heads[0], 64, 12, STREAM)] == [5, 5, 2]
    parts = measure(heads, [VARIANTS, VARIANTS], 64, 12, STREAM)
    for name in VARIANTS:
        assert np.array_equal(parts.correct[name], whole.correct[name])
        assert np.allclose(parts.entropy[name], whole.entropy[name], atol=1e-5)
