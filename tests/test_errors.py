"""Every mistake of a caller is answered with the argument, the value, what is allowed and, if any, a way out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import sharpmax as sm
from sharpmax import errors
from sharpmax.errors import (
    ArgumentError,
    ArgumentTypeError,
    MissingExtraError,
    SharpmaxError,
    UnsupportedError,
    reject,
    reject_type,
)
from sharpmax.lazy import require
from sharpmax.policies.basic import Constant, Curve, LogLength
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import Polynomial

NAN, INF = math.nan, math.inf
POLICY_NAMES = (
    "one of ['none', 'paper', 'smollm2', 'smollm2-constant'], log-length:64, constant:1.5 or the path of a policy file "
    "or its folder"
)
VALUE, TYPE = (ArgumentError, ValueError), (ArgumentTypeError, TypeError)

_FORM = re.compile(r"(?P<argument>\w+): got (?P<given>.+?); allowed: (?P<allowed>.+?)(; (?P<todo>.+))?", re.DOTALL)


class Case(NamedTuple):
    """One mistake and its answer; of the value, of what is allowed and of the way out a beginning will do."""

    name: str
    call: Callable[[], Any]
    kind: tuple[type[Exception], type[Exception]]
    says: str


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


Q, K, LOGITS = t(2, 4, 3, 8), t(2, 4, 5, 8), t(2, 5)


def untyped(value: Any) -> Any:
    """What a type checker would not let through, and a caller without one may well pass."""
    return value


def measured(name: str, q: Any, k: Any, kind: Any, says: str, **options: Any) -> list[Case]:
    """The same mistake in `row_stats` and in `attention`, which share their arguments."""
    return [
        Case(f"row_stats: {name}", lambda: sm.row_stats(q, k, **options), kind, says),
        Case(f"attention: {name}", lambda: sm.attention(q, k, k, **options), kind, says),
    ]


def dense(name: str, logits: Any, kind: Any, says: str, **options: Any) -> list[Case]:
    """The same mistake in `softmax` and in `entropy`."""
    return [
        Case(f"softmax: {name}", lambda: sm.softmax(logits, **options), kind, says),
        Case(f"entropy: {name}", lambda: sm.entropy(logits, **options), kind, says),
    ]


ROWS = [
    *measured("q is a list", [1.0], K, TYPE, "q: got list; allowed: a torch.Tensor"),
    *measured("k is None", Q, None, TYPE, "k: got NoneType; allowed: a torch.Tensor"),
    *measured("q of rank 1", t(8), K, VALUE, "q: got shape (8,); allowed: two or more dimensions, [..., L, D]"),
    *measured("q of rank 0", t(), K, VALUE, "q: got shape (); allowed: two or more dimensions"),
    *measured("k of rank 1", Q, t(8), VALUE, "k: got shape (8,); allowed: two or more dimensions"),
    *measured(
        "ranks differ", Q, t(4, 5, 8), VALUE, "k: got shape (4, 5, 8); allowed: 4 dimensions, as q has (2, 4, 3, 8)"
    ),
    *measured("integers", Q.int(), K.int(), TYPE, "q: got dtype torch.int32; allowed: a floating dtype; q.float()"),
    *measured("integer keys", Q, K.long(), TYPE, "k: got dtype torch.int64; allowed: a floating dtype; k.float()"),
    *measured(
        "complex",
        Q.to(torch.complex64),
        K.to(torch.complex64),
        TYPE,
        "q: got dtype torch.complex64; allowed: a floating dtype; q.float()",
    ),
    *measured("mixed dtypes", Q.half(), K, TYPE, "k: got dtype torch.float32; allowed: the dtype of q, torch.float16"),
    *measured("head sizes differ", Q, t(2, 4, 5, 7), VALUE, "k: got head size 7; allowed: the head size of q, 8"),
    *measured(
        "empty head size", t(2, 4, 3, 0), t(2, 4, 5, 0), VALUE, "q: got head size 0; allowed: a head size of 1 or more"
    ),
    *measured(
        "heads differ", Q, t(2, 2, 5, 8), VALUE, "k: got 2 heads for 4 query heads; allowed: 4 heads; enable_gqa=True"
    ),
    *measured(
        "heads do not divide",
        Q,
        t(2, 3, 5, 8),
        VALUE,
        "k: got 3 heads for 4 query heads; allowed: a number of heads that divides the query's",
        enable_gqa=True,
    ),
    *measured(
        "no key heads", Q, t(2, 0, 5, 8), VALUE, "k: got 0 heads for 4 query heads; allowed: a number", enable_gqa=True
    ),
    *measured(
        "batches differ",
        Q,
        t(3, 4, 5, 8),
        VALUE,
        "k: got batch (3,); allowed: a batch that broadcasts with the query's (2,)",
    ),
    *measured("batch of keys is larger", Q[:1], K, VALUE, "q: got batch (1,); allowed: the batch of k, (2,)"),
    *measured("mask is a list", Q, K, TYPE, "attn_mask: got list; allowed: a torch.Tensor or None", attn_mask=[True]),
    *measured(
        "integer mask",
        Q,
        K,
        TYPE,
        "attn_mask: got dtype torch.int64; allowed: bool (True = visible) or a floating dtype",
        attn_mask=t(3, 5, dtype=torch.int64),
    ),
    *measured(
        "mask does not broadcast",
        Q,
        K,
        VALUE,
        "attn_mask: got shape (3, 4); allowed: a shape that broadcasts to (2, 4, 3, 5), [..., H, Lq, Lk]",
        attn_mask=t(3, 4).bool(),
    ),
    *measured(
        "mask is larger than the logits",
        Q,
        K,
        VALUE,
        "attn_mask: got shape (7, 2, 4, 3, 5); allowed: a shape that broadcasts to (2, 4, 3, 5)",
        attn_mask=t(7, 2, 4, 3, 5),
    ),
    *measured(
        "mask and is_causal",
        Q,
        K,
        VALUE,
        "attn_mask: got a mask together with is_causal=True; allowed: one of the two; put the causal limit",
        attn_mask=t(3, 5).bool(),
        is_causal=True,
    ),
    *measured(
        "unknown impl",
        Q,
        K,
        VALUE,
        "impl: got 'fast'; allowed: one of ['auto', 'reference', 'streaming', 'sdpa', 'triton']",
        impl="fast",
    ),
    *measured("scale is NaN", Q, K, VALUE, "scale: got nan; allowed: a finite number or None", scale=NAN),
    *measured("scale is infinite", Q, K, VALUE, "scale: got inf; allowed: a finite number or None", scale=INF),
    *measured("scale is text", Q, K, TYPE, "scale: got str; allowed: a number or None", scale="1"),
    *measured("scale is a truth value", Q, K, TYPE, "scale: got bool; allowed: a number or None", scale=True),
    Case(
        "row_stats: unknown field",
        lambda: sm.row_stats(Q, K, fields=["entropy", "median"]),
        VALUE,
        "fields: got ['median']; allowed: some of ['count', 'entropy', 'lse', 'max', 'mean', 'var']",
    ),
]

ATTENTION = [
    Case("v is None", lambda: sm.attention(Q, K, untyped(None)), TYPE, "v: got NoneType; allowed: a torch.Tensor"),
    Case(
        "dtype of v",
        lambda: sm.attention(Q, K, K.half()),
        TYPE,
        "v: got dtype torch.float16; allowed: the dtype of q, torch.float32",
    ),
    Case(
        "length of v",
        lambda: sm.attention(Q, K, t(2, 4, 6, 8)),
        VALUE,
        "v: got shape (2, 4, 6, 8); allowed: the shape of k (2, 4, 5, 8)",
    ),
    Case(
        "heads of v",
        lambda: sm.attention(Q, K, t(2, 2, 5, 8), enable_gqa=True),
        VALUE,
        "v: got shape (2, 2, 5, 8); allowed: the shape of k",
    ),
    Case(
        "batch of v",
        lambda: sm.attention(Q, K, t(1, 4, 5, 8)),
        VALUE,
        "v: got shape (1, 4, 5, 8); allowed: the shape of k",
    ),
    Case("rank of v", lambda: sm.attention(Q, K, t(4, 5, 8)), VALUE, "v: got shape (4, 5, 8); allowed: the shape of k"),
    Case(
        "dropout above 1",
        lambda: sm.attention(Q, K, K, dropout_p=1.5),
        VALUE,
        "dropout_p: got 1.5; allowed: a probability, 0 … 1",
    ),
    Case(
        "dropout below 0",
        lambda: sm.attention(Q, K, K, dropout_p=-0.1),
        VALUE,
        "dropout_p: got -0.1; allowed: a probability, 0 … 1",
    ),
    Case(
        "dropout is NaN",
        lambda: sm.attention(Q, K, K, dropout_p=NAN),
        VALUE,
        "dropout_p: got nan; allowed: a probability, 0 … 1",
    ),
    Case(
        "unknown policy",
        lambda: sm.attention(Q, K, K, policy="papr"),
        VALUE,
        f"policy: got 'papr'; allowed: {POLICY_NAMES}",
    ),
    Case(
        "policy of another type",
        lambda: sm.attention(Q, K, K, policy=untyped(2.0)),
        TYPE,
        "policy: got float; allowed: a Policy, None, one of",
    ),
    Case(
        "heads of the policy",
        lambda: sm.attention(Q, K, K, policy=PerHead.of(Constant, value=[[2.0, 3.0]])),
        VALUE,
        "policy: got 2 heads for rows of shape (2, 4, 3); allowed: rows [..., H, Lq] with as many heads",
    ),
]

DENSE = [
    *dense("a list", [1.0, 2.0], TYPE, "logits: got list; allowed: a torch tensor or a JAX array"),
    *dense("integers", LOGITS.int(), TYPE, "logits: got dtype torch.int32; allowed: a floating dtype"),
    *dense("booleans", LOGITS.bool(), TYPE, "logits: got dtype torch.bool; allowed: a floating dtype"),
    *dense("complex", LOGITS.to(torch.complex64), TYPE, "logits: got dtype torch.complex64; allowed: a floating dtype"),
    *dense("rank 0", t(), VALUE, "logits: got shape (); allowed: one or more dimensions"),
    *dense("dim too large", LOGITS, VALUE, "dim: got 2; allowed: -2 … 1 for logits of shape (2, 5)", dim=2),
    *dense("dim too small", LOGITS, VALUE, "dim: got -3; allowed: -2 … 1 for logits of shape (2, 5)", dim=-3),
    *dense("dim is None", LOGITS, TYPE, "dim: got NoneType; allowed: an integer", dim=None),
    *dense("dim is a float", LOGITS, TYPE, "dim: got float; allowed: an integer", dim=1.0),
    *dense("mask is a list", LOGITS, TYPE, "mask: got list; allowed: a boolean array, True where", mask=[True] * 5),
    *dense(
        "float mask", LOGITS, TYPE, "mask: got dtype torch.float32; allowed: a boolean array, True where", mask=t(2, 5)
    ),
    *dense(
        "mask of another shape",
        LOGITS,
        VALUE,
        "mask: got shape (4,); allowed: a shape that broadcasts to (2, 5)",
        mask=t(4).bool(),
    ),
    *dense(
        "larger mask",
        LOGITS,
        VALUE,
        "mask: got shape (3, 2, 5); allowed: a shape that broadcasts to (2, 5)",
        mask=t(3, 2, 5).bool(),
    ),
    Case(
        "unknown policy",
        lambda: sm.softmax(LOGITS, policy="papr"),
        VALUE,
        f"policy: got 'papr'; allowed: {POLICY_NAMES}",
    ),
    Case(
        "policy of another type",
        lambda: sm.softmax(LOGITS, policy=untyped(3)),
        TYPE,
        "policy: got int; allowed: a Policy, None, one of",
    ),
    Case(
        "load_policy: unknown",
        lambda: sm.load_policy("papr"),
        VALUE,
        f"policy: got 'papr'; allowed: {POLICY_NAMES}",
    ),
    Case(
        "load_policy: a number",
        lambda: sm.load_policy(untyped(3)),
        TYPE,
        f"path_or_name: got int; allowed: {POLICY_NAMES}",
    ),
]

POLICIES = [
    Case(
        "Constant: negative", lambda: Constant(-1.0), VALUE, "value: got -1.0; allowed: a finite number of at least 0"
    ),
    Case("Constant: NaN", lambda: Constant(NAN), VALUE, "value: got nan; allowed: a finite number of at least 0"),
    Case("Constant: infinite", lambda: Constant(INF), VALUE, "value: got inf; allowed: a finite number of at least 0"),
    Case(
        "Constant: beyond floats",
        lambda: Constant(10**400),
        VALUE,
        "value: got 1000; allowed: a finite number of at least 0",
    ),
    Case(
        "Constant: text",
        lambda: Constant(untyped("2")),
        TYPE,
        "value: got str '2'; allowed: a finite number of at least 0",
    ),
    Case(
        "Constant: truth value",
        lambda: Constant(True),
        TYPE,
        "value: got bool True; allowed: a finite number of at least 0",
    ),
    Case("Constant: None", lambda: Constant(untyped(None)), TYPE, "value: got NoneType None; allowed: a finite number"),
    Case(
        "Polynomial: empty",
        lambda: Polynomial((), (0, 1)),
        VALUE,
        "coefficients: got (); allowed: a tuple of one or more numbers, highest power first",
    ),
    Case(
        "Polynomial: text",
        lambda: Polynomial(untyped("12"), (0, 1)),
        VALUE,
        "coefficients: got '12'; allowed: a tuple of one or more numbers",
    ),
    Case(
        "Polynomial: NaN inside",
        lambda: Polynomial((1.0, NAN), (0, 1)),
        VALUE,
        "coefficients: got nan; allowed: a finite number",
    ),
    Case(
        "Polynomial: text inside",
        lambda: Polynomial(untyped((1.0, "x")), (0, 1)),
        TYPE,
        "coefficients: got str 'x'; allowed: a finite number",
    ),
    Case(
        "Polynomial: range upside down",
        lambda: Polynomial((1.0,), (2, 1)),
        VALUE,
        "fitted_on: got (2, 1); allowed: a pair (low, high) with low < high",
    ),
    Case(
        "Polynomial: empty range",
        lambda: Polynomial((1.0,), (1, 1)),
        VALUE,
        "fitted_on: got (1, 1); allowed: a pair (low, high) with low < high",
    ),
    Case(
        "Polynomial: three ends",
        lambda: Polynomial((1.0,), untyped((1, 2, 3))),
        VALUE,
        "fitted_on: got (1, 2, 3); allowed: a pair (low, high) with low < high",
    ),
    Case(
        "Polynomial: no range",
        lambda: Polynomial((1.0,), untyped(None)),
        VALUE,
        "fitted_on: got None; allowed: a pair (low, high) with low < high",
    ),
    Case(
        "Polynomial: NaN range",
        lambda: Polynomial((1.0,), (NAN, 1)),
        VALUE,
        "fitted_on: got nan; allowed: a finite number",
    ),
    Case(
        "Polynomial: threshold",
        lambda: Polynomial((1.0,), (0, 1), -0.5),
        VALUE,
        "threshold: got -0.5; allowed: a finite number of at least 0",
    ),
    Case(
        "Polynomial: outside",
        lambda: Polynomial((1.0,), (0, 1), 0.5, untyped("wrap")),
        VALUE,
        "outside_is: got 'wrap'; allowed: 'clamp' or 'extrapolate'",
    ),
    Case("LogLength: reference 1", lambda: LogLength(1), VALUE, "reference: got 1; allowed: a finite number above 1"),
    Case(
        "LogLength: reference NaN",
        lambda: LogLength(NAN),
        VALUE,
        "reference: got nan; allowed: a finite number above 1",
    ),
    Case(
        "LogLength: text",
        lambda: LogLength(untyped("16")),
        TYPE,
        "reference: got str '16'; allowed: a finite number above 1",
    ),
    Case("LogLength: floor", lambda: LogLength(16, -1), VALUE, "floor: got -1; allowed: a finite number of at least 0"),
    Case(
        "LogLength: range",
        lambda: LogLength(16, fitted_on=(16, 2)),
        VALUE,
        "fitted_on: got (16, 2); allowed: a pair (low, high) with low < high",
    ),
    Case(
        "EntropyTarget: negative",
        lambda: EntropyTarget(-0.1),
        VALUE,
        "target: got -0.1; allowed: a finite number of at least 0",
    ),
    Case(
        "EntropyTarget: text",
        lambda: EntropyTarget(untyped("1")),
        TYPE,
        "target: got str '1'; allowed: a finite number of at least 0",
    ),
    Case(
        "EntropyTarget: floor 0",
        lambda: EntropyTarget(1, floor=0),
        VALUE,
        "floor: got 0; allowed: a finite number above 0",
    ),
    Case(
        "EntropyTarget: ceiling",
        lambda: EntropyTarget(1, floor=2, ceiling=2),
        VALUE,
        "ceiling: got 2; allowed: a finite number above 2",
    ),
    Case(
        "EntropyTarget: infinite",
        lambda: EntropyTarget(1, ceiling=INF),
        VALUE,
        "ceiling: got inf; allowed: a finite number above 1",
    ),
    Case(
        "Curve: one knot",
        lambda: Curve((1.0,), (1.0,)),
        VALUE,
        "knots: got (1.0,); allowed: a tuple of two or more numbers",
    ),
    Case(
        "Curve: not a tuple",
        lambda: Curve(untyped(1.0), (1.0, 2.0)),
        VALUE,
        "knots: got 1.0; allowed: a tuple of two or more numbers",
    ),
    Case(
        "Curve: lengths differ",
        lambda: Curve((1.0, 2.0), (1.0, 2.0, 3.0)),
        VALUE,
        "values: got 3 numbers for 2 knots; allowed: one value per knot",
    ),
    Case(
        "Curve: knots fall",
        lambda: Curve((2.0, 1.0), (1.0, 2.0)),
        VALUE,
        "knots: got (2.0, 1.0); allowed: strictly rising entropies",
    ),
    Case(
        "Curve: knots repeat",
        lambda: Curve((1.0, 1.0), (1.0, 2.0)),
        VALUE,
        "knots: got (1.0, 1.0); allowed: strictly rising entropies",
    ),
    Case(
        "Curve: negative knot",
        lambda: Curve((-1.0, 1.0), (1.0, 2.0)),
        VALUE,
        "knots: got -1.0; allowed: a finite number of at least 0",
    ),
    Case(
        "Curve: NaN knot",
        lambda: Curve((1.0, NAN), (1.0, 2.0)),
        VALUE,
        "knots: got nan; allowed: a finite number of at least 0",
    ),
    Case(
        "Curve: text knot",
        lambda: Curve(untyped((1.0, "2")), (1.0, 2.0)),
        TYPE,
        "knots: got str '2'; allowed: a finite number",
    ),
    Case(
        "Curve: negative value",
        lambda: Curve((1.0, 2.0), (-1.0, 2.0)),
        VALUE,
        "values: got -1.0; allowed: a finite number of at least 0",
    ),
    Case(
        "Curve: up and down",
        lambda: Curve((1.0, 2.0, 3.0), (1.0, 2.0, 1.5)),
        VALUE,
        "values: got (1.0, 2.0, 1.5); allowed: values that only rise or only fall; fit with Curve.fit",
    ),
    Case(
        "PerHead: empty",
        lambda: PerHead(()),
        VALUE,
        "policies: got (); allowed: a tuple of layers, each a tuple of one policy per head",
    ),
    Case(
        "PerHead: empty layer",
        lambda: PerHead(((),)),
        VALUE,
        "policies: got (); allowed: a tuple of layers, each a tuple of one policy per head",
    ),
    Case(
        "PerHead: one row only",
        lambda: PerHead(untyped((Constant(),))),
        VALUE,
        "policies: got Constant(value=1.0); allowed: a tuple of layers, each a tuple of one policy per head",
    ),
    Case(
        "PerHead: a number",
        lambda: PerHead(((Constant(), untyped(2.0)),)),
        TYPE,
        "policies: got float; allowed: any policy but PerHead itself",
    ),
    Case(
        "PerHead: nested",
        lambda: PerHead(((PerHead(((Constant(),),)),),)),
        TYPE,
        "policies: got PerHead; allowed: any policy but PerHead itself",
    ),
    Case(
        "PerHead: ragged",
        lambda: PerHead(((Constant(),), (Constant(), Constant()))),
        VALUE,
        "policies: got layers of [1, 2] heads; allowed: the same number of heads in every layer",
    ),
]


@pytest.mark.parametrize("case", [*ROWS, *ATTENTION, *DENSE, *POLICIES], ids=lambda case: case.name)
def test_a_mistake_is_explained(case):
    with pytest.raises(SharpmaxError) as caught:
        case.call()
    assert type(caught.value) is case.kind[0]
    assert isinstance(caught.value, case.kind[1])
    got, want = _FORM.fullmatch(str(caught.value)), _FORM.fullmatch(case.says)
    assert got, str(caught.value)
    assert want
    assert got["argument"] == want["argument"]
    assert got["given"].startswith(want["given"])
    assert got["allowed"].startswith(want["allowed"])
    assert (got["todo"] is None) == (want["todo"] is None)
    assert want["todo"] is None or want["todo"] in got["todo"]


def test_the_same_arguments_are_accepted_when_they_are_right():
    """So that no case above fails for another reason than its own."""
    assert sm.row_stats(Q, K, scale=1, impl="streaming", fields=["entropy"]).count.shape == (2, 4, 3)
    assert sm.attention(Q, K, t(2, 4, 5, 6), attn_mask=t(3, 5).bool(), dropout_p=0.0).shape == (2, 4, 3, 6)
    assert sm.attention(Q, t(2, 2, 5, 8), t(2, 2, 5, 6), enable_gqa=True, is_causal=True).shape == (2, 4, 3, 6)
    assert sm.attention(Q, K, K, policy=PerHead.of(Constant, value=[[2.0] * 4])).shape == (2, 4, 3, 8)
    assert sm.softmax(LOGITS, dim=-2, mask=t(2, 1).bool()).shape == (2, 5)


@pytest.mark.parametrize(
    ("impl", "options", "reason"),
    [
        ("sdpa", {"attn_mask": t(3, 5)}, "the mean of an added float mask never leaves the kernel"),
    ],
)
def test_an_implementation_that_cannot_is_not_replaced(impl, options, reason):
    with pytest.raises(UnsupportedError) as caught:
        sm.row_stats(Q, K, impl=impl, **options)
    assert str(caught.value) == f"impl: {impl!r} cannot do this: {reason}; use impl='streaming'"
    assert isinstance(caught.value, NotImplementedError)
    assert isinstance(caught.value, SharpmaxError)


class TestKinds:
    def test_every_error_is_ours_and_something_python_knows(self):
        kinds = [getattr(errors, name) for name in errors.__all__]
        for kind in kinds:
            if not isinstance(kind, type) or kind is SharpmaxError:
                continue
            if issubclass(kind, Warning):
                assert issubclass(kind, UserWarning)
                continue
            assert issubclass(kind, SharpmaxError)
            known = (ValueError, TypeError, NotImplementedError, AttributeError, ImportError)
            assert issubclass(kind, known)

    def test_messages(self):
        with pytest.raises(ArgumentError) as value:
            reject("size", 3, "1 or 2", "pass size=2")
        assert str(value.value) == "size: got 3; allowed: 1 or 2; pass size=2"
        with pytest.raises(ArgumentTypeError) as kind:
            reject_type("size", "str", "an integer")
        assert str(kind.value) == "size: got str; allowed: an integer"

    def test_a_missing_extra_says_how_to_install_it(self):
        with pytest.raises(MissingExtraError) as caught:
            require("no_such_package.part", "fit", "Curve.fit")
        assert str(caught.value) == (
            "Curve.fit needs the package 'no_such_package', which is not installed; "
            "install it with: pip install 'scipy>=1.15'"
        )
        assert isinstance(caught.value, ImportError)
        assert isinstance(caught.value, SharpmaxError)

    def test_a_package_that_is_broken_inside_is_not_called_missing(self, tmp_path, monkeypatch):
        (tmp_path / "broken_inside.py").write_text("import no_such_package_at_all\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(ModuleNotFoundError) as caught:
            require("broken_inside", "fit", "Curve.fit")
        assert not isinstance(caught.value, SharpmaxError)
        assert caught.value.name == "no_such_package_at_all"

    @pytest.mark.parametrize("name", ["atention", "Softmax", "_nothing"])
    def test_an_unknown_name_of_the_package(self, name):
        with pytest.raises(AttributeError, match=f"module 'sharpmax' has no attribute '{name}'"):
            getattr(sm, name)
