"""Every variant of the evaluation against a dense computation in float64 over all items."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import sharpmax as sm
from sharpmax.experiments import reproduce as evaluation
from sharpmax.experiments.reproduce import HARD, Read, measure, read
from sharpmax.models.stacked import WIDTH, SingleHeads
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import LogLength
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.polynomial import PAPER, Polynomial
from sharpmax.tasks.sized import Sets, draw, seeded
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
    """Logits and answers of one head over all pages."""
    pages = list(read(head, size, SAMPLES, (*STREAM, position)))
    return torch.cat([seen.logits for seen in pages]), torch.cat([seen.answer for seen in pages])


def sets_of(size: int | tuple[int, int], position: int) -> Sets:
    """The sets that a head sees, drawn again; they fit one page."""
    most = size if isinstance(size, int) else size[1]
    return draw((SAMPLES,), size, seeded(CPU, *STREAM, position, most))


@pytest.mark.parametrize("recipe", ["paper", "sharp"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.filterwarnings("ignore::sharpmax.errors.OutOfRangeWarning")
def test_every_variant_equals_the_dense_computation(recipe: str, size: int | tuple[int, int]) -> None:
    heads = heads_of(recipe)
    found = measure(heads, [VARIANTS, VARIANTS], [size], SAMPLES, STREAM)[size]
    for position, head in enumerate(heads):
        read_logits, answer = everything_read(head, size, position)
        sets = sets_of(size, position)
        plain = PlainHead(head.state_dict(), 0, torch.float64)
        h = plain.features(sets.items.double())
        want = plain.logits(h, sets.query.double())
        assert torch.equal(read_logits == -torch.inf, ~sets.visible)
        assert float((read_logits.double() - want)[sets.visible].abs().max()) < 5e-6 * float(want.abs().max())
        assert torch.equal(answer, sets.answer)
        # Compare from the float32 logits: those of the sharp recipe reach 2,700, where float32 has three decimals.
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


def agrees(correct: np.ndarray, scores: Tensor, sets: Sets) -> None:
    """Right and wrong as the scores say, except where the first two classes tie to rounding."""
    assert correct.dtype == np.bool_
    first, second = scores.topk(2).values.unbind(-1)
    clear = (first - second > 1e-2).numpy()
    assert clear.mean() > 0.75
    assert (correct == (scores.argmax(-1) == sets.answer).numpy())[clear].all()


@pytest.mark.parametrize("down", [-40.001, -100.0])
def test_skipped_items_still_count(down: float) -> None:
    """Two items are near the top, the rest far below. Log-length counts all of them: with two, β would be 1."""
    logits = torch.full((3, 2**14), down)
    logits[:, 5], logits[:, 9] = 0.0, -1.0
    variants: dict[str, Policy | None] = {"softmax": None, "log-length": LogLength(reference=16)}
    head = SingleHeads.initial((0,)).requires_grad_(False)
    nothing = torch.zeros(3, dtype=torch.long)
    with torch.inference_mode():
        seen = Read(head, torch.randn(*logits.shape, WIDTH), logits, logits, nothing, nothing)
        found = evaluation.measure_page(seen, variants)
    for name, policy in variants.items():
        dense = sm.softmax(logits.double(), policy=policy)
        assert found["top_weight", name].tolist() == pytest.approx(dense.amax(-1).tolist(), abs=1e-6)
        assert found["entropy", name].tolist() == pytest.approx(
            (-torch.special.xlogy(dense, dense).sum(-1)).tolist(), abs=1e-6
        )


def test_results_do_not_depend_on_threads_or_other_heads() -> None:
    """Heads and sizes are read in parallel, one per thread; each head sees its own sets."""
    heads = heads_of("paper")
    torch.set_num_threads(2)
    try:
        at_once = measure(heads, [VARIANTS, VARIANTS], [16, 256], 8, STREAM)
    finally:
        torch.set_num_threads(1)
    assert list(at_once) == [16, 256]
    for size, found in at_once.items():
        alone = measure(heads[:1], [VARIANTS], [size], 8, STREAM)[size]
        for one, other in ((found.correct, alone.correct), (found.entropy, alone.entropy)):
            assert all(np.array_equal(one[name][0], values[0]) for name, values in other.items())
        assert np.array_equal(found.confidence[0], alone.confidence[0])
    twins = measure([heads[0], heads[0]], [{"softmax": None}] * 2, [64], SAMPLES, STREAM)[64].confidence
    assert not np.isin(twins[0], twins[1]).any()
