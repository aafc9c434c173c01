"""Training and evaluation of the paper's heads on a GPU."""

from __future__ import annotations

import torch

from sharpmax.experiments.reproduce import measure
from sharpmax.experiments.stacked_training import RECIPES, Training
from sharpmax.models.weights import Trained, shipped_path
from sharpmax.tasks.sized import draw, seeded
from tests.numerics import NEEDS_GPU

pytestmark = NEEDS_GPU


def _trained(stops: tuple[int, ...], steps: int = 400) -> dict[str, torch.Tensor]:
    device = torch.device("cuda")
    training = Training(RECIPES["paper"], (0, 1, 2), steps, device)
    while training.step < steps:
        if training.step in stops:
            state, step = training.state(), training.step
            training = Training(RECIPES["paper"], (0, 1, 2), steps, device)
            training.restore(state, step)
        training.next_block()
    return training.state()


def test_resumed_training_is_bit_identical() -> None:
    once, in_parts = _trained(()), _trained((100, 300))
    assert all(torch.equal(once[name], in_parts[name]) for name in once)


def test_a_captured_step_equals_an_ordinary_one() -> None:
    captured = Training(RECIPES["sharp"], (0, 1), 100, torch.device("cuda"))
    plain = Training(RECIPES["sharp"], (0, 1), 100, torch.device("cuda"))
    plain._advance = plain._one_step
    losses = [training.next_block() for training in (captured, plain)]
    assert torch.equal(*losses)
    assert all(torch.equal(a, b) for a, b in zip(captured.state().values(), plain.state().values(), strict=True))


def test_heads_answer_alike_on_gpu_and_cpu() -> None:
    trained = Trained.load(shipped_path("paper"))
    sets = draw((64,), 1024, seeded(torch.device("cpu"), 0))
    scores = []
    for device in ("cpu", "cuda"):
        heads = trained.heads().to(device)
        inputs = (x.to(device).expand(len(trained.seeds), *x.shape) for x in (sets.items, sets.query, sets.visible))
        with torch.inference_mode():
            scores.append(heads(*inputs).cpu())
    # Two items whose logits nearly tie may swap by rounding, so a few answers may differ.
    assert (scores[0].argmax(-1) == scores[1].argmax(-1)).float().mean() > 0.995


def test_evaluation_on_a_gpu_has_the_accuracy_of_the_cpu() -> None:
    trained = Trained.load(shipped_path("paper")).first(4)
    accuracy = []
    for device in ("cpu", "cuda"):
        heads = [trained.heads([position]).to(device) for position in range(4)]
        measured = measure(heads, [{"softmax": None}] * 4, [256], 512, (0, 0))[256]
        accuracy.append(measured.correct["softmax"].mean())
    # Each device draws sets of its own: 2,048 answers of about 83% right differ by 1.2 points in one of three runs.
    assert abs(accuracy[0] - accuracy[1]) < 0.05
