"""Learning: what is kept from falling, pruned, priced, refused, and taken up again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from sharpmax.calibration import trainer as module
from sharpmax.calibration.data import KINDS
from sharpmax.calibration.trainer import Course, Descent, DivergedError, Live
from sharpmax.errors import FileFormatError
from sharpmax.models.weights import load_tensors, save_tensors
from tests.calibration.small import course, same, shifted, snapshot
from tests.experiments.evaluate import tiny

ABOUT = {"kind": "rows", "seed": 0, "profile": {"sizes": [4, 8], "rate": 0.1}}


@pytest.fixture(scope="module")
def lessons() -> Course:
    return course(tiny.model())


def made(kind: str = "rows", steps: int = 6, rate: float = 0.1, keep: float = 1.0) -> Descent:
    return Descent(Live(kind, tiny.LAYERS, tiny.HEADS, torch.device("cpu")), steps, rate, keep)


def nothing(now: Descent) -> None:
    """No one is told."""


def stop_after(step: int) -> Callable[[Descent], None]:
    def after(now: Descent) -> None:
        if now.step == step:
            raise KeyboardInterrupt

    return after


def state_of(one: Descent) -> list[Any]:
    optimizer = one._optimizer.state[one.live.coefficients]
    tensors = (one.live.coefficients, one.live.touched, optimizer["exp_avg"], optimizer["exp_avg_sq"])
    return [*(t.tolist() for t in tensors), float(optimizer["step"]), one.prices, one.rises, one.curve, one.step]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_taken_and_weights_left_alone(kind: str, lessons: Course) -> None:
    before, told = snapshot(lessons.model), []
    one = made(kind)
    one.run(lessons, lambda now: told.append((now.step, dict(now.curve[-1]))))
    assert [step for step, _ in told] == [1, 2, 3, 4, 5, 6]
    assert set(told[-1][1]) == {"step", "nll", "40", "64", "chat"}
    assert all(math.isfinite(value) for _, point in told for value in point.values())
    assert (one.live.coefficients[..., 0] != 0).all()
    assert same(before, snapshot(lessons.model))


def test_learning_lowers_the_loss_it_learns_from(lessons: Course) -> None:
    """The same lesson again and again, no price for anything else: its loss falls."""
    again = dataclasses.replace(lessons.lessons)
    object.__setattr__(again, "at", lambda step: lessons.lessons.at(0))
    one = made("rows", steps=25)
    one.prices.update(dict.fromkeys(lessons.base, 0.0))
    free = dataclasses.replace(lessons, lessons=again, base=shifted(lessons.base, lessons.practice, 50.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_LEAST_PRICE", 0.0)
        one.run(free, nothing)
    assert one.curve[-1]["nll"] < one.curve[0]["nll"] - 0.1


@pytest.mark.parametrize("kind", ["length", "entropy", "rows"])
def test_the_slope_in_length_never_falls_below_0(kind: str, lessons: Course) -> None:
    one = made(kind, steps=8, rate=0.3)
    place = KINDS[kind].index("length")
    seen = []
    one.run(lessons, lambda now: seen.append(now.live.coefficients.detach().clone()))
    slopes = torch.stack(seen)[..., place]
    assert (slopes >= 0).all()
    # Held back, not unlearned: some want to fall and some rise.
    assert (slopes[-1] == 0).any()
    assert (slopes[-1] > 0).any()
    assert (torch.stack(seen)[..., 0] < 0).any()


class TestPruning:
    @pytest.mark.parametrize("steps", [1, 2, 4, 5])
    @pytest.mark.parametrize(("keep", "heads"), [(0.25, 2), (0.5, 4), (0.01, 1), (1.0, 8)])
    def test_keeps_the_share_asked_for(self, steps: int, keep: float, heads: int, lessons: Course) -> None:
        one = made("length", steps=steps, keep=keep)
        one.run(lessons, nothing)
        assert int(one.live.touched.sum()) == heads
        assert int((one.live.values() != 0).any(-1).sum()) == heads

    @pytest.mark.parametrize(("keep", "heads"), [(1.0, 4), (0.25, 2)])
    def test_keeps_to_the_share_of_layers(self, keep: float, heads: int, lessons: Course) -> None:
        one = made("rows", steps=5, keep=keep)
        one.keep_layers = 0.5
        one.run(lessons, nothing)
        assert sorted(one.live.touched.sum(-1).tolist()) == [0, heads]

    def test_a_head_let_go_stays_so(self, lessons: Course) -> None:
        one = made("rows", steps=10, keep=0.25)
        gone = []

        def after(now: Descent) -> None:
            assert (now.live.coefficients[~now.live.touched] == 0).all()
            gone.append(~now.live.touched)

        one.run(lessons, after)
        counts = [int(step.sum()) for step in gone]
        assert counts == [0] * 4 + [3] * 2 + [6] * 4
        for earlier, later in pairwise(gone):
            assert (later | ~earlier).all()

    def test_the_heads_that_the_loss_would_miss_stay(self, lessons: Course) -> None:
        """A head that nothing depends on (its output is projected to 0) is among the first to go."""
        model = tiny.model()
        size = model.config.head_dim
        with torch.no_grad():
            model.model.layers[1].self_attn.o_proj.weight[:, size : 3 * size] = 0.0
        one = made("constant", steps=6, keep=0.75)
        one.run(course(model), nothing)
        assert one.live.touched.tolist() == [[True] * 4, [True, False, False, True]]


class TestPrices:
    def after(self, lessons: Course, nats: float, first: float | None = None) -> Descent:
        """A few steps against losses shifted by so much: the rise is about that much less."""
        one = made("constant", steps=4)
        if first is not None:
            one.prices.update(dict.fromkeys(lessons.base, first))
        one.run(dataclasses.replace(lessons, base=shifted(lessons.base, lessons.practice, nats)), nothing)
        return one

    def test_rise_where_the_leash_is_broken(self, lessons: Course) -> None:
        one = self.after(lessons, -5.0)
        # Chat is met at every step, each of the two lengths at every other.
        twice, always = 10 * math.exp(0.08), 10 * math.exp(0.16)
        assert one.prices == pytest.approx({"40": twice, "64": twice, "chat": always})
        assert all(rise > 1 for rise in one.rises.values())

    def test_fall_where_it_is_not(self, lessons: Course) -> None:
        twice, always = 10 * math.exp(-0.08), 10 * math.exp(-0.16)
        assert self.after(lessons, 5.0).prices == pytest.approx({"40": twice, "64": twice, "chat": always})

    def test_stay_within_bounds(self, lessons: Course) -> None:
        assert set(self.after(lessons, -5.0, first=299.0).prices.values()) == {300.0}
        assert set(self.after(lessons, 5.0, first=1.01).prices.values()) == {1.0}

    def test_a_price_holds_back(self, lessons: Course) -> None:
        """What is learned under the highest price costs less everyday loss than what is learned for nothing."""
        ends = {}
        for price in (0.0, 300.0):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "_LEAST_PRICE", price)
                patch.setattr(module, "_MOST_PRICE", price)
                one = made("rows", steps=14)
                one.prices.update(dict.fromkeys(lessons.base, price))
                one.run(lessons, nothing)
            ends[price] = sum(one.rises.values())
        assert ends[300.0] < ends[0.0]


def test_a_loss_that_is_not_a_number_ends_in_one_line() -> None:
    model = tiny.model()
    lessons, one, before = course(model), made("rows"), []

    def poison(now: Descent) -> None:
        if now.step == 2:
            before.append(now.live.coefficients.detach().clone())
            model.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan

    with pytest.raises(DivergedError) as caught:
        one.run(lessons, poison)
    message = "calibration: the loss of kind 'rows' is not a number at step 3; try a smaller --rate than 0.1"
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    # The step that went wrong was not taken.
    assert one.step == 2
    assert len(one.curve) == 2
    assert torch.equal(one.live.coefficients, before[0])
    assert snapshot(model)["installed"] is None
    assert model.config._attn_implementation == "sdpa"


class TestResume:
    @pytest.mark.parametrize("kind", ["constant", "rows"])
    @pytest.mark.parametrize("at", [1, 4])
    def test_goes_on_bit_for_bit(self, kind: str, at: int, lessons: Course, tmp_path: Path) -> None:
        whole = made(kind, keep=0.5)
        whole.run(lessons, nothing)
        first = made(kind, keep=0.5)
        with pytest.raises(KeyboardInterrupt):
            first.run(lessons, stop_after(at))
        first.save(tmp_path / "state", ABOUT)
        second = made(kind, keep=0.5)
        assert second.resume(tmp_path / "state", ABOUT)
        assert state_of(second) == state_of(first)
        taken: list[int] = []
        second.run(lessons, lambda now: taken.append(now.step))
        assert taken == list(range(at + 1, 7))
        assert state_of(second) == state_of(whole)

    def test_nothing_to_go_on_from(self, tmp_path: Path) -> None:
        assert not made().resume(tmp_path / "state", ABOUT)

    @pytest.fixture
    def state(self, lessons: Course, tmp_path: Path) -> Path:
        one = made(steps=1)
        one.run(lessons, nothing)
        one.save(tmp_path / "state", ABOUT)
        return tmp_path / "state"

    @pytest.mark.parametrize("change", [{"seed": 1}, {"kind": "length"}, {"profile": {"sizes": [4]}}, {"new": 1}])
    def test_other_settings_are_refused(self, change: dict[str, Any], state: Path) -> None:
        before = state.read_bytes()
        with pytest.raises(FileFormatError, match=r"made with other settings.*; delete it, or leave") as caught:
            made().resume(state, ABOUT | change)
        assert "\n" not in str(caught.value)
        assert state.read_bytes() == before

    @pytest.mark.parametrize("damage", ["empty", "cut", "text", "other", "no state", "no tensor", "bad state", "shape"])
    def test_a_damaged_file_is_one_line(self, damage: str, state: Path) -> None:
        whole = state.read_bytes()
        tensors, about = load_tensors(state, "calibration")
        if damage == "empty":
            state.write_bytes(b"")
        elif damage == "cut":
            state.write_bytes(whole[:-20])
        elif damage == "text":
            state.write_text("{}")
        elif damage == "other":
            save_tensors(state, "single-head", tensors, about)
        elif damage == "no state":
            save_tensors(state, "calibration", tensors, ABOUT)
        elif damage == "no tensor":
            save_tensors(state, "calibration", {"coefficients": tensors["coefficients"]}, about)
        elif damage == "bad state":
            save_tensors(state, "calibration", tensors, about | {"state": {"step": "x"}})
        else:
            save_tensors(state, "calibration", tensors | {"coefficients": torch.ones(7, 7, 7)}, about)
        with pytest.raises(FileFormatError) as caught:
            made().resume(state, ABOUT)
        assert str(state) in str(caught.value)
        assert "\n" not in str(caught.value)
