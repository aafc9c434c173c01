"""A whole calibration: correct, repeatable, resumable; the model is unchanged afterwards."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import sharpmax as sm
from sharpmax.calibration import calibrate as calibration
from sharpmax.calibration.budget import HELD_OUT_FACTOR, Change, TrainingSetup, percent, select_best
from sharpmax.calibration.calibrate import CalibrationResult, Progress
from sharpmax.calibration.learnable import KINDS, policy_from
from sharpmax.calibration.trainer import DivergedError
from sharpmax.errors import FileFormatError
from sharpmax.experiments.tables import calibrated_tables
from sharpmax.integrations import transformers as hf
from sharpmax.models.scoring import Reply, encode, judge
from sharpmax.models.weights import load_tensors
from sharpmax.policies.basic import Constant
from sharpmax.policies.log_linear import LogLinear
from tests.calibration.small import TEXT, calibrated, same, snapshot, training_setup
from tests.experiments.evaluate import tiny

SEVERAL = ("frequency", "constant", "rows", "frequency+output")


@pytest.fixture(scope="module")
def result() -> CalibrationResult:
    """One calibration of several kinds, shared by the tests that only read it."""
    return calibrated(tiny.model(), kinds=SEVERAL)


def stop_at(what: str, step: int) -> Progress:
    """Interrupts a calibration at one of its steps."""

    def progress(now: str, done: int, total: int, remark: str) -> None:
        if (now, done) == (what, step):
            raise KeyboardInterrupt

    return progress


def test_changes_and_losses_are_those_of_the_saved_policies(result: CalibrationResult, tmp_path: Path) -> None:
    model = tiny.model()
    files = result.save(tmp_path)
    assert [file.name for file in files] == ["policy.json", *(f"policy-{kind}.json" for kind in SEVERAL)]
    assert sm.load_policy(tmp_path / "policy.json") == result.policy
    setup = training_setup(model)
    prompts = setup.prompts.validation()
    assert len(prompts) == result.prompts == 8
    for kind, one in result.candidates.items():
        policy: Any = sm.load_policy(tmp_path / f"policy-{kind}.json")
        assert policy == one.policy
        changes = setup.changes(policy)
        assert {name: change.kl for name, change in changes.items()} == pytest.approx(
            {name: change.kl for name, change in one.changes.items()}, abs=1e-6
        )
        with hf.applied(model, policy):
            judged = judge(model, prompts)
        assert setup.used(one.changes) <= 1.0
        assert one.nll == pytest.approx(sum(answer.nll for answer in judged) / len(judged))
        assert one.accuracy == sum(answer.right for answer in judged) / len(judged)
        assert one.modified_heads == sum(not head.is_identity for layer in policy.policies for head in layer) == 4
        assert [point["step"] for point in result.curves[kind]] == [1, 2, 3, 4]
    assert result.before["nll"] == pytest.approx(sum(answer.nll for answer in judge(model, prompts)) / len(prompts))


def test_the_lowest_loss_is_chosen_and_shown(result: CalibrationResult, capsys: pytest.CaptureFixture[str]) -> None:
    losses = {kind: one.nll for kind, one in result.candidates.items()}
    assert len(set(losses.values())) == len(SEVERAL)
    assert result.chosen.kind == min(losses, key=losses.__getitem__)
    result.show()
    shown = capsys.readouterr().out
    assert shown == f"{result!r}\n"
    lines = shown.splitlines()
    assert lines[0].startswith("baseline: accuracy ")
    assert [line.partition(":")[0] for line in lines[1:]] == list(SEVERAL)
    assert [line.endswith("(chosen)") for line in lines[1:]] == [kind == result.chosen.kind for kind in SEVERAL]
    assert len(repr(result.chosen)) < 80


def test_a_frame_has_a_row_for_the_baseline_and_each_candidate(result: CalibrationResult) -> None:
    pytest.importorskip("pandas", reason="needs the extra frame")
    frame = result.to_frame()
    assert list(frame["kind"]) == ["baseline", *SEVERAL]
    assert list(frame["nll"])[1:] == [one.nll for one in result.candidates.values()]
    assert list(frame["kind"][frame["chosen"] == True]) == [result.chosen.kind]  # noqa: E712 (a column)


def test_candidates_fold(result: CalibrationResult) -> None:
    foldable = [result.candidates[kind] for kind in ("frequency", "constant")]
    assert result.foldable is min(foldable, key=lambda one: one.nll)
    model, ids = tiny.model(), torch.arange(60)[None]
    for one in foldable:
        with hf.applied(model, one.policy):
            want = model(input_ids=ids).logits
        torch.testing.assert_close(hf.fold(model, one.policy)(input_ids=ids).logits, want, rtol=0, atol=5e-5)
    unfoldable = {kind: one for kind, one in result.candidates.items() if one not in foldable}
    assert dataclasses.replace(result, candidates=unfoldable).foldable is None


def test_a_seed_fixes_everything(result: CalibrationResult) -> None:
    torch.manual_seed(1)  # other random numbers of torch do not matter
    again = calibrated(tiny.model())
    assert again.policy == result.candidates["constant"].policy
    assert again.curves["constant"] == result.curves["constant"]
    assert calibrated(tiny.model(), seed=1).policy != again.policy


def test_the_model_is_unchanged(result: CalibrationResult) -> None:
    """Weights, gradients, what is trainable, dropout, and a policy that was applied, which is ignored."""
    model = tiny.model().train().requires_grad_(True)
    model.lm_head.weight.requires_grad_(False)
    model.model.norm.eval()
    model.model.norm.weight.grad = torch.ones_like(model.model.norm.weight)
    hf.apply(model, Constant(2.0))
    before = snapshot(model)
    policy = calibrated(model).policy
    assert same(before, snapshot(model))
    assert hf.policy_of(model) == Constant(2.0)
    assert policy == result.candidates["constant"].policy


@pytest.mark.parametrize("at", [("finding sizes", 0), ("training constant", 3), ("measuring constant", 0)])
def test_the_model_is_unchanged_after_an_interruption(at: tuple[str, int]) -> None:
    model = hf.apply(tiny.model().train().requires_grad_(True), Constant(2.0))
    before = snapshot(model)
    with pytest.raises(KeyboardInterrupt):
        calibrated(model, progress=stop_at(*at))
    assert same(before, snapshot(model))


@pytest.mark.parametrize(
    ("number", "error", "says"),
    [
        (1.0, AssertionError, "a weight of the model was changed"),
        (math.nan, DivergedError, r"is not a number at step 3; try a smaller rate than 0\.1, or float32$"),
    ],
)
def test_writing_to_a_weight_is_noticed(number: float, error: type[Exception], says: str, tmp_path: Path) -> None:
    model = tiny.model()

    def write(what: str, done: int, total: int, remark: str) -> None:
        if done == 2:
            model.model.layers[1].mlp.down_proj.weight.mul_(number)

    with pytest.raises(error, match=says):
        calibrated(model, progress=write, folder=tmp_path)
    assert snapshot(model)["installed"] is None
    assert (list(tmp_path.iterdir()) == []) == math.isnan(number)


def test_a_resumed_calibration_ends_as_if_never_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_SAVE_EVERY", -1.0)
    options: dict[str, Any] = {"kinds": ("constant", "rows")}
    whole = calibrated(tiny.model(), folder=tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        calibrated(tiny.model(), folder=tmp_path / "parts", progress=stop_at("training rows", 3), **options)
    with pytest.raises(FileFormatError, match=r"made with other settings.*; delete it, or start"):
        calibrated(tiny.model(), folder=tmp_path / "parts", resume=True, **options, texts={"words": TEXT[::-1]})
    steps: list[Any] = []
    options["progress"] = lambda what, done, total, remark: steps.append((what, done))
    parts = calibrated(tiny.model(), folder=tmp_path / "parts", resume=True, **options)
    for kind in ("constant", "rows"):
        # Coefficients, moments, prices and curve, to the last bit.
        names = [tmp_path / run / f"state-{kind}.safetensors" for run in ("parts", "whole")]
        (found, about), (wanted, wanted_about) = (load_tensors(name, "calibration") for name in names)
        assert about == wanted_about
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert (parts.candidates, parts.curves) == (whole.candidates, whole.curves)
    # The step before the interrupted one was the last to be saved; nothing is done twice.
    assert [one for one in steps if one[0].startswith("training")] == [("training rows", 3), ("training rows", 4)]


def test_states_that_cannot_be_resumed(tmp_path: Path, result: CalibrationResult) -> None:
    (tmp_path / "state-constant.safetensors").write_bytes(b"\x00" * 99)
    with pytest.raises(FileFormatError, match="is damaged or not a safetensors file"):
        calibrated(tiny.model(), folder=tmp_path, resume=True)
    # Without `resume` a state is not read.
    assert calibrated(tiny.model(), folder=tmp_path).policy == result.candidates["constant"].policy


LIMIT = 0.002


@pytest.fixture(scope="module")
def setup() -> TrainingSetup:
    return training_setup(tiny.model(), LIMIT, lengths=(40,))


def coefficients(kind: str, scale: float) -> torch.Tensor:
    shape = (tiny.LAYERS, tiny.HEADS, len(KINDS[kind]))
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(0))


def divergence(model: Any, policy: Any, replies: tuple[Reply, ...]) -> tuple[float, float]:
    """KL and rise of the loss by hand, one text at a time, in float64."""
    kl = rise = count = 0.0
    for reply in replies:
        ids = torch.tensor([reply.ids])
        before = model(input_ids=ids).logits[0, reply.start - 1 : -1].double().log_softmax(-1)
        with hf.applied(model, policy):
            after = model(input_ids=ids).logits[0, reply.start - 1 : -1].double().log_softmax(-1)
        answer = ids[0, reply.start :, None]
        kl += float((before.exp() * (before - after)).sum())
        rise += float((before.gather(1, answer) - after.gather(1, answer)).sum())
        count += len(answer)
    return kl / count, rise / count


def test_divergence_is_the_mean_over_tokens_of_each_domain(setup: TrainingSetup) -> None:
    policy = policy_from("constant", coefficients("constant", 0.5))
    changes = setup.changes(policy)
    assert list(changes) == ["sampled/24", "docs/40", "code/40", "words/40", "chat"]
    for domain in setup.domains:
        kl, rise = divergence(setup.model, policy, domain.validation)
        assert changes[domain.name].kl == pytest.approx(kl, rel=1e-3, abs=1e-7)
        assert changes[domain.name].rise == pytest.approx(rise, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("kind", ["constant", "rows"])
def test_a_policy_beyond_the_budget_is_weakened_no_more_than_needed(
    kind: str, setup: TrainingSetup, tmp_path: Path
) -> None:
    wanted = coefficients(kind, 0.3)
    assert setup.used(setup.changes(policy_from(kind, wanted))) > 1.0
    found = select_best(setup, kind, wanted, setup.prompts.validation())
    assert found is not None
    assert 0 < found.strength < 1
    assert found.policy == policy_from(kind, wanted, found.strength)
    # Read back from its file it is what was measured.
    saved: Any = sm.load_policy(found.policy.save(tmp_path / "policy.json"))
    assert setup.changes(saved) == found.changes
    assert 0.8 < setup.used(found.changes) <= 1.0
    assert hf.policy_of(setup.model) is None


def test_a_policy_is_strengthened_only_if_the_loss_falls(setup: TrainingSetup) -> None:
    wide = dataclasses.replace(setup, budget=1.0)
    prompts = [encode(tiny.tokenizer(), prompt) for prompt in tiny.LETTERS.prompts(8, 12, 7)]
    found = [select_best(wide, "constant", coefficients("constant", scale), prompts) for scale in (0.2, -0.2)]
    assert {None if one is None else one.strength for one in found} == {1.0, 1.4}


@pytest.mark.parametrize("name", ["sampled/24", "code/40", "chat"])
def test_every_domain_counts_and_the_one_held_out_may_diverge_more(name: str, setup: TrainingSetup) -> None:
    """Up to the limit, not beyond it, and not with a number that is none."""
    limit = LIMIT * (HELD_OUT_FACTOR if name.startswith("code") else 1)
    for kl, within in ((limit, True), (math.nextafter(limit, 1), False), (math.nan, False)):
        changes = {domain.name: Change(0.0, -3.0) for domain in setup.domains} | {name: Change(kl, 0.0)}
        assert (setup.used(changes) <= 1.0) == within


def test_tables_hold_the_candidates(result: CalibrationResult) -> None:
    tables = json.loads(json.dumps(calibrated_tables(result, "tiny"), allow_nan=False))
    assert list(tables["candidates"]) == list(SEVERAL)
    for kind, one in result.candidates.items():
        shown, cell = tables["candidates"][kind], tables["validation"][kind]["8"]
        assert shown["rise"] == pytest.approx({name: percent(change.rise) for name, change in one.changes.items()})
        assert (shown["nll"], shown["strength"], shown["modified"]) == (one.nll, one.strength, one.modified_heads)
        assert cell["mean"] == pytest.approx(100 * one.accuracy) == pytest.approx(shown["validation"])
    assert result.foldable is not None
    assert (tables["chosen"], tables["best_foldable"]) == (result.chosen.kind, result.foldable.kind)


@pytest.mark.parametrize("kind", ["constant", "rows"])
def test_heads_are_compared_at_the_reference_row(kind: str, result: CalibrationResult) -> None:
    """β by hand of a row with n = 1,024, H/ln n = 0.5 and a top weight of 0.25."""
    alone = dataclasses.replace(result, candidates={kind: result.candidates[kind]})
    heads = calibrated_tables(alone, "tiny")["heads"]
    longer = math.log(1024 / 32)
    features = (1.0, longer, 0.5, 0.25, 0.25, 0.0625, math.log(2.0), 0.5 * longer, 0.25 * longer)
    modified = 0
    for layer, row in enumerate(alone.policy.policies):
        for head, one in enumerate(row):
            if isinstance(one, LogLinear):
                total = sum(getattr(one, n) * f for n, f in zip(LogLinear.COEFFICIENTS, features, strict=True))
                want = min(max(math.exp(total), 0.2), 12.0)
            else:
                assert isinstance(one, Constant)
                want = one.value
            assert heads["betas"][layer][head] == pytest.approx(want, rel=1e-5)
            modified += not one.is_identity
    assert modified == 4
