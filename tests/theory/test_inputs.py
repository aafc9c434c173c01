"""What every function of the package takes and gives: numbers, arrays and tensors in, clear errors otherwise."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sharpmax.theory as theory
from sharpmax.errors import ArgumentError, ArgumentTypeError

ELEMENTWISE: dict[str, tuple[Callable[..., Any], list[float], list[float]]] = {
    "low": (lambda a, b: theory.weight_bounds(a, b)[0], [0.0, 1.0, 50.0], [1, 4, 1000]),
    "high": (lambda a, b: theory.weight_bounds(a, b)[1], [0.0, 1.0, 50.0], [1, 4, 1000]),
    "loose low": (lambda a, b: theory.loose_weight_bounds(a, b)[0], [0.0, 1.0, 50.0], [1, 4, 1000]),
    "loose high": (lambda a, b: theory.loose_weight_bounds(a, b)[1], [0.0, 1.0, 50.0], [1, 4, 1000]),
    "horizon": (theory.horizon, [0.0, 1.0, 50.0], [0.1, 0.5, 0.9]),
    "required spread": (theory.required_spread, [1, 4, 1000], [0.1, 0.5, 0.9]),
    "entropy floor": (theory.entropy_floor, [0.0, 1.0, 50.0], [1, 4, 1000]),
    "limit": (theory.top_weight_limit, [1.0, 2.0, 3.0], [0.5, 2.0, -4.0]),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_numbers_arrays_and_tensors_agree(name):
    function, first, second = ELEMENTWISE[name]
    one_by_one = [function(a, b) for a, b in zip(first, second, strict=True)]
    assert all(type(value) is float for value in one_by_one)
    array = function(np.array(first), np.array(second))
    assert array.dtype == np.float64
    np.testing.assert_allclose(array, one_by_one, rtol=1e-15)
    for tensor in (
        function(torch.tensor(first), torch.tensor(second, dtype=torch.float64)),
        function(torch.tensor(first), np.array(second)),
        function(np.array(first), torch.tensor(second, dtype=torch.float64)),
    ):
        assert tensor.dtype == torch.float64
        np.testing.assert_allclose(tensor.numpy(), one_by_one, rtol=1e-13)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_arguments_broadcast(name):
    function, first, second = ELEMENTWISE[name]
    first = [max(first)] * 2  # the limit needs its first argument not to be under its second
    table = function(np.array(first)[:, None], np.array(second))
    assert table.shape == (2, 3)
    np.testing.assert_allclose(table[1], [function(first[1], b) for b in second], rtol=1e-15)
    tensors = function(torch.tensor(first)[:, None], torch.tensor(second, dtype=torch.float64))
    np.testing.assert_allclose(tensors.numpy(), table, rtol=1e-13)


def test_matrices_and_samples_as_tensors():
    rng = np.random.default_rng(0)
    Q, K, logits = rng.normal(size=(2, 3, 5)), rng.normal(size=(2, 3, 4)), rng.normal(size=(6, 9))
    for bound in (theory.spread_from_weights, theory.spread_from_product):
        found = bound(torch.tensor(Q), torch.tensor(K), 1.5, [1.0, 2.0], scale=0.5)
        assert isinstance(found, torch.Tensor)
        np.testing.assert_allclose(found.numpy(), bound(Q, K, 1.5, [1.0, 2.0], scale=0.5), rtol=1e-13)
    found = theory.top_weight_limit_from_sample(torch.tensor(logits), 2.0, top=4.0)
    expected = theory.top_weight_limit_from_sample(logits, 2.0, top=4.0)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-13)


def test_gradients_flow_through_tensors():
    n, mass = torch.tensor([4.0, 9.0, 30.0]).double(), torch.tensor(0.7).double()
    spread = torch.tensor([0.5, 2.0, 7.0], dtype=torch.float64, requires_grad=True)
    for function in (
        lambda d: theory.weight_bounds(d, n),
        lambda d: theory.loose_weight_bounds(d, n),
        lambda d: theory.horizon(d, mass),
        lambda d: theory.entropy_floor(d, n),
    ):
        assert torch.autograd.gradcheck(function, (spread,))
    weights = [torch.randn(3, 4, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in (0, 1)]
    for bound in (theory.spread_from_weights, theory.spread_from_product):
        inputs = tuple(w.clone().requires_grad_() for w in weights)
        assert torch.autograd.gradcheck(lambda Q, K, bound=bound: bound(Q, K, 1.0, 2.0), inputs)


def test_gradients_are_finite_at_the_edges():
    spread = torch.tensor([0.0, 0.0, 5.0, 1e4], dtype=torch.float64, requires_grad=True)
    n = torch.tensor([1.0, 7.0, 1.0, 1e300], dtype=torch.float64, requires_grad=True)
    total = theory.entropy_floor(spread, n) + sum(theory.weight_bounds(spread, n)) + theory.required_spread(n)
    total.sum().backward()
    assert spread.grad is not None
    assert n.grad is not None
    assert spread.grad.isfinite().all()
    assert n.grad.isfinite().all()


def test_other_kinds_of_number():
    assert theory.entropy_ceiling(Fraction(2, 2)) == 0.0
    assert theory.entropy_ceiling(10**300) == pytest.approx(300 * math.log(10), rel=1e-15)
    assert theory.horizon(np.float32(0.0)) == 2.0
    np.testing.assert_allclose(theory.entropy_ceiling([[1, 2], [3, 4]]), np.log([[1, 2], [3, 4]]), rtol=1e-15)
    np.testing.assert_allclose(theory.entropy_ceiling(torch.tensor([1, 2])).numpy(), np.log([1, 2]), rtol=1e-15)
    assert theory.entropy_ceiling(np.ones(0)).shape == (0,)


OF_SPREAD_AND_N = [theory.weight_bounds, theory.loose_weight_bounds, theory.entropy_floor]


@pytest.mark.parametrize("as_given", [float, np.array, lambda x: np.array([1.0, x]), torch.tensor])
@pytest.mark.parametrize("function", OF_SPREAD_AND_N)
def test_a_bad_spread_or_size_is_named_and_quoted(function, as_given):
    for bad in (-0.5, math.nan, math.inf, -math.inf):
        with pytest.raises(ArgumentError, match=f"^spread: got {bad}; allowed: .*masked"):
            function(as_given(bad), 4)
        with pytest.raises(ArgumentError, match=f"^n: got {bad}; allowed: finite numbers of at least 1"):
            function(1.0, as_given(bad))
    with pytest.raises(ArgumentError, match=r"^n: got 0.0"):
        function(1.0, as_given(0.0))


@pytest.mark.parametrize("bad", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_a_bad_mass_is_named_and_quoted(bad):
    with pytest.raises(ArgumentError, match=f"^mass: got {bad}; allowed: numbers strictly between 0 and 1"):
        theory.horizon(1.0, bad)
    with pytest.raises(ArgumentError, match=f"^mass: got {bad}"):
        theory.required_spread(8, torch.tensor([0.5, bad]).double())


@pytest.mark.parametrize(
    "bad", ["3", None, 1j, True, [1.0, [2.0]], [None], [10**300, True], torch.tensor(True), torch.tensor(1j)]
)
def test_what_is_not_a_number_is_a_type_error(bad):
    with pytest.raises(ArgumentTypeError, match=r"^n: got .*real number"):
        theory.entropy_ceiling(bad)


def test_it_runs_where_torch_is_not_installed():
    # The subpackage is loaded without the package's own __init__, which may need torch.
    package = Path(theory.__file__).parents[1]
    script = (
        "import sys, types\n"
        "sys.modules['torch'] = None\n"
        "package = types.ModuleType('sharpmax')\n"
        f"package.__path__ = [{str(package)!r}]\n"
        "sys.modules['sharpmax'] = package\n"
        "from sharpmax.theory import entropy_floor, horizon, spread_from_product, weight_bounds\n"
        "assert horizon(0.0) == 2.0\n"
        "assert weight_bounds([0.0], 2)[1].tolist() == [0.5]\n"
        "assert entropy_floor(1.0, 1) == 0.0\n"
        "assert abs(spread_from_product([[1.0]], [[2.0]], 1.0, 1.0) - 4.0) < 1e-12\n"
        "print('done')\n"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert finished.stdout == "done\n", finished.stderr


def test_numpy_error_settings_of_the_caller_do_not_matter():
    with np.errstate(all="raise"):
        assert theory.horizon(1e4) == math.inf
        assert theory.weight_bounds(1e4, 3) == (0.0, 1.0)
        assert theory.entropy_floor(1e4, 10) == 0.0
        assert theory.loose_weight_bounds(1e4, 3) == (0.0, math.inf)
        assert theory.required_spread(1) == 0.0
