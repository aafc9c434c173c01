"""A whole calibration: honest about what it chose, repeatable, resumable, and without a trace in the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sharpmax as sm
from sharpmax.calibration import calibrate as calibration
from sharpmax.calibration.budget import Leash
from sharpmax.calibration.calibrate import CalibrationResult, LeashError
from sharpmax.calibration.data import KINDS, Lessons, everyday
from sharpmax.calibration.trainer import DivergedError
from sharpmax.errors import ArgumentError, FileFormatError
from sharpmax.integrations import transformers as hf
from sharpmax.models.scoring import judge
from sharpmax.models.weights import load_tensors
from sharpmax.policies.constant import Constant
from tests.calibration.small import TEXT, calibrated, profile, same, snapshot
from tests.experiments.evaluate import tiny

ALL = tuple(KINDS)


@pytest.fixture(scope="module")
def found() -> CalibrationResult:
    """One calibration of every kind, shared by the tests that only look at it."""
    return calibrated(tiny.model(), kinds=ALL)


class Stop:
    """Interrupts a calibration at one of its steps; remembers those it saw."""

    def __init__(self, what: str = "", step: int = -1) -> None:
        self.at, self.seen = (what, step), list[tuple[str, int]]()

    def __call__(self, what: str, done: int, total: int, remark: str) -> None:
        self.seen.append((what, done))
        if (what, done) == self.at:
            raise KeyboardInterrupt


class TestOutcome:
    def test_the_leash_and_the_losses_are_those_of_the_saved_files(
        self, found: CalibrationResult, tmp_path: Path
    ) -> None:
        """Everything measured again, with text and prompts put together here."""
        model, words = tiny.model(), tiny.tokenizer()
        files = found.save(tmp_path)
        assert [file.name for file in files] == ["policy.json", *(f"policy-{kind}.json" for kind in ALL)]
        held = everyday(model, words, profile(), "validation", TEXT[len(TEXT) // 2 :])
        leash = Leash.of(model, held, 0.05)
        exam = Lessons(words, tiny.LETTERS, profile(), 0, TEXT).exam()
        for kind, one in found.candidates.items():
            policy = sm.load_policy(tmp_path / f"policy-{kind}.json")
            assert policy == one.policy
            with hf.applied(model, policy):
                assert leash.rises(model) == one.rises
                judged = judge(model, exam)
            assert leash.holds(one.rises)
            assert one.nll == sum(answer.nll for answer in judged) / len(judged)
            assert one.right == sum(answer.right for answer in judged) / len(judged)
        judged = judge(model, exam)
        assert found.before["nll"] == sum(answer.nll for answer in judged) / len(judged)

    def test_the_lowest_loss_on_unseen_prompts_is_chosen(self, found: CalibrationResult, tmp_path: Path) -> None:
        losses = {kind: one.nll for kind, one in found.candidates.items()}
        assert len(set(losses.values())) == len(ALL)
        assert found.chosen.kind == min(losses, key=losses.__getitem__)
        assert found.policy == found.chosen.policy
        found.save(tmp_path)
        assert sm.load_policy(tmp_path / "policy.json") == found.policy

    def test_the_foldable_one_is_the_constant_one_and_folds(self, found: CalibrationResult) -> None:
        assert found.foldable is found.candidates["constant"]
        assert [one.kind for one in found.candidates.values() if one.foldable] == ["constant"]
        model = tiny.model()
        ids = torch.arange(60)[None]
        with hf.applied(model, found.foldable.policy):
            want = model(input_ids=ids).logits
        torch.testing.assert_close(hf.fold(model, found.foldable.policy)(input_ids=ids).logits, want, rtol=0, atol=1e-5)

    def test_without_constants_nothing_is_foldable(self) -> None:
        assert calibrated(tiny.model(), kinds=("length",), steps=1).foldable is None

    def test_show_has_a_line_for_each(self, found: CalibrationResult) -> None:
        lines = str(found).splitlines()
        assert lines[0].startswith("as it comes: ")
        assert [line.partition(":")[0] for line in lines[1:]] == list(ALL)
        assert [line.endswith("(chosen)") for line in lines[1:]] == [kind == found.chosen.kind for kind in ALL]

    def test_heads_touched_are_no_more_than_asked_for(self) -> None:
        one = calibrated(tiny.model(), keep=0.25).chosen
        assert one.touched == sum(head != Constant(1.0) for layer in one.policy.policies for head in layer) == 2

    def test_curves_have_a_point_per_step(self, found: CalibrationResult) -> None:
        for kind in ALL:
            assert [point["step"] for point in found.curves[kind]] == [1, 2, 3, 4, 5, 6]


class TestRepeatable:
    def test_the_same_seed_gives_the_same_policy(self, found: CalibrationResult) -> None:
        again = calibrated(tiny.model(), kinds=ALL)
        assert {kind: one.policy for kind, one in again.candidates.items()} == {
            kind: one.policy for kind, one in found.candidates.items()
        }
        assert again.curves == found.curves

    def test_another_seed_gives_another(self, found: CalibrationResult) -> None:
        other = calibrated(tiny.model(), seed=1)
        assert other.policy != found.candidates["constant"].policy

    def test_what_torch_draws_elsewhere_does_not_matter(self) -> None:
        policies = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            policies.append(calibrated(tiny.model()).policy)
        assert policies[0] == policies[1]

    def test_prompts_after_text_are_learned_from_too(self) -> None:
        plain = calibrated(tiny.model()).policy
        assert calibrated(tiny.model(), filled=2, fillers=(50, 90)).policy != plain


class TestModel:
    def test_is_as_before_in_every_respect(self) -> None:
        """Weights, gradients, what learns, dropout, a policy that was applied."""
        model = tiny.model().train().requires_grad_(True)
        model.lm_head.weight.requires_grad_(False)
        model.model.norm.eval()
        model.model.norm.weight.grad = torch.ones_like(model.model.norm.weight)
        hf.apply(model, Constant(2.0))
        before = snapshot(model)
        policy = calibrated(model).policy
        assert same(before, snapshot(model))
        assert hf.policy_of(model) == Constant(2.0)
        # None of it took part.
        assert policy == calibrated(tiny.model()).policy

    @pytest.mark.parametrize("at", [("reading everyday text", 0), ("learning constant", 3), ("measuring constant", 0)])
    def test_is_as_before_after_an_interruption(self, at: tuple[str, int]) -> None:
        model = hf.apply(tiny.model().train().requires_grad_(True), Constant(2.0))
        before = snapshot(model)
        with pytest.raises(KeyboardInterrupt):
            calibrated(model, progress=Stop(*at))
        assert same(before, snapshot(model))

    def test_a_weight_that_is_written_to_is_noticed(self) -> None:
        model = tiny.model()

        def meddle(what: str, done: int, total: int, remark: str) -> None:
            if done == 2:
                model.model.layers[0].mlp.up_proj.weight.mul_(1.0)

        with pytest.raises(AssertionError, match="a weight of the model was changed"):
            calibrated(model, progress=meddle)

    def test_a_loss_that_is_not_a_number(self, tmp_path: Path) -> None:
        model = tiny.model()

        def poison(what: str, done: int, total: int, remark: str) -> None:
            if done == 2:
                model.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan

        with pytest.raises(DivergedError, match=r"is not a number at step 3; try a smaller --rate than 0\.1") as caught:
            calibrated(model, progress=poison, folder=tmp_path)
        assert "\n" not in str(caught.value)
        assert snapshot(model)["installed"] is None
        assert list(tmp_path.iterdir()) == []


class TestRefusals:
    def test_a_leash_that_cannot_be_met(self, tmp_path: Path) -> None:
        model = tiny.model()
        before = snapshot(model)
        with pytest.raises(
            LeashError, match="leash: got 1e-07%, which no policy of kind constant, rows keeps"
        ) as caught:
            calibrated(model, kinds=("constant", "rows"), leash=1e-9)
        assert "\n" not in str(caught.value)
        assert same(before, snapshot(model))

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"leash": 0.0}, "leash: got 0.0"),
            ({"leash": -0.01}, "leash: got -0.01"),
            (
                {"leash": 1},
                "leash: got 1; allowed: a rise of perplexity above 0 and up to 0.5",
            ),
            ({"leash": 0.7}, "leash: got 0.7; allowed: "),
            ({"leash": float("nan")}, "leash: got nan"),
            ({"keep": 0.0}, "keep: got 0.0"),
            ({"keep": 1.5}, "keep: got 1.5"),
            ({"keep_layers": 0.0}, "keep_layers: got 0.0"),
            ({"rate": 0.0}, "rate: got 0.0"),
            ({"task": "nonsense"}, "task: got 'nonsense'"),
            ({"sizes": (4, 5000)}, "size: got 5000; allowed: 1 … 512 for the task 'letters'"),
            ({"text": "too short"}, "text: got 4 tokens; allowed: at least one window of 40 tokens"),
            ({"text": ""}, "text: got 0 tokens"),
        ],
    )
    def test_bad_arguments(self, options: dict[str, Any], says: str) -> None:
        model = tiny.model()
        before = snapshot(model)
        with pytest.raises(ArgumentError) as caught:
            calibrated(model, **options)
        assert str(caught.value).startswith(says)
        assert same(before, snapshot(model))


class TestResume:
    @pytest.fixture(autouse=True)
    def save_every_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(calibration, "_SAVE_EVERY", -1.0)

    @pytest.mark.parametrize("at", [("learning constant", 4), ("learning rows", 3)])
    def test_ends_as_if_never_interrupted(self, at: tuple[str, int], tmp_path: Path) -> None:
        options: dict[str, Any] = {"kinds": ("constant", "rows"), "keep": 0.5}
        whole = calibrated(tiny.model(), folder=tmp_path / "whole", **options)
        with pytest.raises(KeyboardInterrupt):
            calibrated(tiny.model(), folder=tmp_path / "parts", progress=Stop(*at), **options)
        rest = Stop()
        parts = calibrated(tiny.model(), folder=tmp_path / "parts", resume=True, progress=rest, **options)
        for kind in ("constant", "rows"):
            # Coefficients, moments, prices and curve, to the last bit.
            name = f"state-{kind}.safetensors"
            (tensors, about), (want, about_whole) = (
                load_tensors(tmp_path / run / name, "calibration") for run in ("parts", "whole")
            )
            assert about == about_whole
            assert {key: tensor.tolist() for key, tensor in tensors.items()} == {
                key: tensor.tolist() for key, tensor in want.items()
            }
            assert parts.candidates[kind] == whole.candidates[kind]
        assert parts.curves == whole.curves
        # The step before the one that was interrupted was the last to be saved; nothing is done twice.
        kind, step = at
        assert [done for what, done in rest.seen if what == kind] == list(range(step, 7))
        if kind == "learning rows":
            assert "learning constant" not in [what for what, _ in rest.seen]

    @pytest.mark.parametrize(
        "change",
        [
            {"seed": 1},
            {"rate": 0.2},
            {"keep": 0.5},
            {"leash": 0.2},
            {"steps": 7},
            {"sizes": (4,)},
            {"text": TEXT[::-1]},
        ],
        ids=str,
    )
    def test_other_settings_are_refused(self, change: dict[str, Any], tmp_path: Path) -> None:
        with pytest.raises(KeyboardInterrupt):
            calibrated(tiny.model(), folder=tmp_path, progress=Stop("learning constant", 2))
        state = (tmp_path / "state-constant.safetensors").read_bytes()
        with pytest.raises(FileFormatError, match="made with other settings") as caught:
            calibrated(tiny.model(), folder=tmp_path, resume=True, **change)
        assert "\n" not in str(caught.value)
        assert (tmp_path / "state-constant.safetensors").read_bytes() == state

    def test_a_damaged_state_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "state-constant.safetensors").write_bytes(b"\x00" * 99)
        with pytest.raises(FileFormatError, match="is damaged or not a safetensors file") as caught:
            calibrated(tiny.model(), folder=tmp_path, resume=True)
        assert "\n" not in str(caught.value)

    def test_nothing_to_resume_is_refused(self, tmp_path: Path) -> None:
        for folder in (None, tmp_path / "new", tmp_path):
            with pytest.raises(ArgumentError, match=r"^resume: got .*; allowed: the folder of an interrupted calib"):
                calibrated(tiny.model(), folder=folder, resume=True)
        assert list(tmp_path.iterdir()) == []

    def test_without_resume_a_state_is_not_read(self, tmp_path: Path) -> None:
        (tmp_path / "state-constant.safetensors").write_bytes(b"\x00" * 99)
        assert calibrated(tiny.model(), folder=tmp_path).policy == calibrated(tiny.model()).policy
