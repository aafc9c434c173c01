"""Every mistake of a caller is answered with the argument, the value, what is allowed and, if any, a way out."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import sharpmax as sm
from sharpmax import errors
from sharpmax.errors import (
    ArgumentError,
    ArgumentTypeError,
    FileFormatError,
    MissingExtraError,
    SharpmaxError,
    UnsupportedError,
    reject,
    reject_type,
)
from sharpmax.lazy import require
from sharpmax.normalisers import base as normalisers
from sharpmax.normalisers.base import attend, normaliser
from sharpmax.policies import base as policies
from sharpmax.policies.base import policy_from_dict
from tests.test_golden import check


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


NAN, INF = float("nan"), float("inf")
Q, K, LOGITS = t(2, 4, 3, 8), t(2, 4, 5, 8), t(2, 5)
TOKEN, CACHE = t(1, 4, 1, 16), t(1, 2, 70, 16)

ROWS = """
[1.0], K
Q, None
t(8), K
t(), K
Q, t(8)
Q, t(4, 5, 8)
Q.int(), K.int()
Q, K.long()
Q.to(torch.complex64), K.to(torch.complex64)
Q.half(), K
Q, t(2, 4, 5, 7)
t(2, 4, 3, 0), t(2, 4, 5, 0)
Q, t(2, 2, 5, 8)
Q, t(2, 3, 5, 8), enable_gqa=True
Q, t(2, 0, 5, 8), enable_gqa=True
Q, t(3, 4, 5, 8)
Q[:1], K
Q, K, attn_mask=[True]
Q, K, attn_mask=t(3, 5, dtype=torch.int64)
Q, K, attn_mask=t(3, 4).bool()
Q, K, attn_mask=t(7, 2, 4, 3, 5)
Q, K, attn_mask=t(3, 5).bool(), is_causal=True
Q, K, impl="fast"
Q, K, scale=NAN
Q, K, scale=INF
Q, K, scale="1"
Q, K, scale=True
"""
"""Arguments that `row_stats` and `attention` share."""

DENSE = """
[1.0, 2.0]
LOGITS.int()
LOGITS.bool()
LOGITS.to(torch.complex64)
t()
LOGITS, dim=2
LOGITS, dim=-3
LOGITS, dim=None
LOGITS, dim=1.0
LOGITS, mask=[True] * 5
LOGITS, mask=t(2, 5)
LOGITS, mask=t(4).bool()
LOGITS, mask=t(3, 2, 5).bool()
"""
"""Arguments that `softmax` and `entropy` share."""

OTHERS = """
row_stats(Q, K, fields=["entropy", "median"])
attention(Q, K, None)
attention(Q, K, K.half())
attention(Q, K, t(2, 4, 6, 8))
attention(Q, K, t(2, 2, 5, 8), enable_gqa=True)
attention(Q, K, t(1, 4, 5, 8))
attention(Q, K, t(4, 5, 8))
attention(Q, K, K, dropout_p=1.5)
attention(Q, K, K, dropout_p=-0.1)
attention(Q, K, K, dropout_p=NAN)
attention(Q, K, K, policy="papr")
attention(Q, K, K, policy=2.0)
attention(Q, K, K, policy=PerHead.of(Constant, value=[[2.0, 3.0]]))
softmax(LOGITS, policy="papr")
softmax(LOGITS, policy=3)
load_policy("papr")
load_policy(3)
Constant(-1.0)
Constant(NAN)
Constant(INF)
Constant(10**40 * 10**360)
Constant("2")
Constant(True)
Constant(None)
Polynomial((), (0, 1))
Polynomial("12", (0, 1))
Polynomial((1.0, NAN), (0, 1))
Polynomial((1.0, "x"), (0, 1))
Polynomial((1.0,), (2, 1))
Polynomial((1.0,), (1, 1))
Polynomial((1.0,), (1, 2, 3))
Polynomial((1.0,), None)
Polynomial((1.0,), (NAN, 1))
Polynomial((1.0,), (0, 1), -0.5)
Polynomial((1.0,), (0, 1), 0.5, "wrap")
LogLength(1)
LogLength(NAN)
LogLength("16")
LogLength(16, -1)
LogLength(16, fitted_on=(16, 2))
EntropyTarget(-0.1)
EntropyTarget("1")
EntropyTarget(1, floor=0)
EntropyTarget(1, floor=2, ceiling=2)
EntropyTarget(1, ceiling=INF)
Curve((1.0,), (1.0,))
Curve(1.0, (1.0, 2.0))
Curve((1.0, 2.0), (1.0, 2.0, 3.0))
Curve((2.0, 1.0), (1.0, 2.0))
Curve((1.0, 1.0), (1.0, 2.0))
Curve((1.0, 3.0, 2.0), (1.0, 2.0, 3.0))
Curve((-1.0, 1.0), (1.0, 2.0))
Curve((1.0, NAN), (1.0, 2.0))
Curve((1.0, "2"), (1.0, 2.0))
Curve((1.0, 2.0), (-1.0, 2.0))
Curve((1.0, 2.0, 3.0), (1.0, 2.0, 1.5))
PerHead(())
PerHead(((),))
PerHead((Constant(),))
PerHead(((Constant(), 2.0),))
PerHead(((PerHead(((Constant(),),)),),))
PerHead(((Constant(),), (Constant(), Constant())))
PerHead.of(EntropyTarget)
PerHead.of(EntropyTarget, target=[0.5, 1.0])
PerHead.of(EntropyTarget, target=0.5)
PerHead.of(EntropyTarget, target=[[0.5]], floor=[[1.0, 1.0]])
PerHead.of(EntropyTarget, target=[[0.5], [0.5, 0.6]])
LogLinear(level=NAN)
LogLinear(top_length=INF)
LogLinear(reference=0.5)
LogLinear(floor=0.0)
LogLinear(floor=2.0, ceiling=2.0)
Polynomial.fit([1.0, 2.0], [1.0, 2.0, 3.0])
Polynomial.fit([1.0, 2.0], [1.0, 2.0])
Polynomial.fit([1.0, 2.0] * 5, [1.0, 2.0] * 5)
Polynomial.fit(range(9), [NAN] * 9)
Curve.fit([1.0], [1.0])
Curve.fit([1.0, 2.0], [1.0])
Curve.fit([1.0, NAN], [1.0, 2.0])
Curve.fit([1.0, 1.0], [1.0, 2.0])
Curve.fit([1.0, 2.0], [1.0, 2.0], 1)
policy_from_dict([])
policy_from_dict({})
policy_from_dict({"schema": 1})
policy_from_dict({"kind": "constant"})
policy_from_dict({"schema": 2, "kind": "from the future"})
policy_from_dict({"schema": "1", "kind": "constant"})
policy_from_dict({"schema": 1, "kind": "nope"})
policy_from_dict({"schema": 1, "kind": ["constant"]})
policy_from_dict({"schema": 1, "kind": "constant", "valeu": 2})
policy_from_dict({"schema": 1, "kind": "log-length", "floor": 2})
policy_from_dict({"schema": 1, "kind": "constant", "value": "2"})
policy_from_dict({"schema": 1, "kind": "constant", "value": NAN})
policy_from_dict({"schema": 1, "kind": "constant", "value": {"schema": 1, "kind": "constant"}})
policy_from_dict({"schema": 1, "kind": "per-head", "policies": [[{"schema": 1, "kind": "nope"}]]})
policy_from_dict({"schema": 1, "kind": "per-head", "policies": [[{"schema": 9, "kind": "constant"}]]})
policy_from_dict({"schema": 1, "kind": "per-head", "policies": [[1]]})
policy_from_dict({"schema": 1, "kind": "curve", "knots": [2, 1], "values": [1, 2]})
decode(t(4, 1, 16), CACHE, CACHE)
decode(TOKEN, t(2, 2, 70, 16), CACHE)
decode(TOKEN, t(1, 3, 70, 16), t(1, 3, 70, 16))
decode(TOKEN, CACHE, t(1, 2, 69, 16))
decode(TOKEN, CACHE, CACHE.double())
decode(TOKEN, CACHE, CACHE, lengths=[70])
decode(TOKEN, CACHE, CACHE, lengths=torch.ones(2).int())
decode(TOKEN, CACHE, CACHE, lengths=torch.ones(1))
decode(TOKEN, CACHE, CACHE, block_table=torch.ones(1, 3).int())
decode(TOKEN, CACHE, CACHE, attn_mask=torch.ones(3, 70).bool())
decode(TOKEN, CACHE, CACHE, attn_mask=torch.ones(70).double())
decode(TOKEN, CACHE, CACHE, scale="1")
decode(TOKEN, CACHE, CACHE, policy=[Constant()])
decode(TOKEN, CACHE, CACHE, policy=2.0)
decode(TOKEN, CACHE, CACHE, policy=PerHead.of(Constant, value=[[1.0] * 4] * 2))
decode(TOKEN, CACHE, CACHE, impl="streaming")
row_stats(Q, Q, window=0, is_causal=True)
row_stats(Q, Q, window=2.5, is_causal=True)
row_stats(Q, Q, window=3)
row_stats(Q, Q, cu_seqlens=[0, 3])
row_stats(Q, Q, cu_seqlens=torch.tensor([0.0, 3.0]))
row_stats(Q, Q, cu_seqlens=torch.tensor([0, 9]))
row_stats(Q, Q, cu_seqlens=torch.tensor([-1, 2]))
row_stats(Q, Q, cu_seqlens=torch.tensor([0, 3, 1]))
row_stats(Q, Q, cu_seqlens=torch.tensor(3))
row_stats(Q, Q, cu_seqlens=torch.tensor([0]))
row_stats(Q, Q, cu_seqlens=torch.tensor([0, 3], device="meta"))
row_stats(Q, Q, cu_seqlens=torch.tensor([0, 3]), cu_seqlens_k=torch.tensor([0, 2, 3]))
row_stats(Q, Q, cu_seqlens=torch.tensor([0, 3]), cu_seqlens_k=[0, 3])
row_stats(Q, Q, cu_seqlens=torch.tensor([0, 3]), cu_seqlens_k=torch.tensor([0, 9]))
row_stats(Q, Q, cu_seqlens_k=torch.tensor([0, 3]))
row_stats(Q, "keys")
row_stats(Q, Q.to("meta"))
row_stats(Q, Q, attn_mask=torch.ones(3, 3, dtype=torch.bool, device="meta"))
normaliser("softmux")
normaliser("softmax", k=3)
normaliser("top-k", window=3)
normaliser("top-k", k=0)
normaliser("top-k", k=2.0)
normaliser("local", window=-1)
normaliser("local", window=True)
normaliser("ssmax", s=NAN)
normaliser("sigmoid", bias="low")
normaliser("adaptive", policy="sharp")
normaliser("softmax")([1.0], t(3, 4))
normaliser("softmax")(t(2, 4, dtype=torch.int64), t(3, 4))
normaliser("softmax")(t(2, 4), t(4))
normaliser("softmax")(t(2, 4), t(3, 4).half())
normaliser("softmax")(t(2, 4), t(3, 5))
normaliser("softmax")(t(2, 0), t(3, 0))
normaliser("softmax")(t(2, 2, 4), t(3, 3, 4))
normaliser("softmax")(t(2, 4), t(3, 4).to("meta"))
normaliser("softmax")(t(2, 4), t(3, 4), mask=[[True]])
normaliser("softmax")(t(2, 4), t(3, 4), mask=t(2, 3, dtype=torch.int64))
normaliser("softmax")(t(2, 4), t(3, 4), mask=t(3, 2).bool())
normaliser("softmax")(t(2, 4), t(3, 4), mask=t(1, 2, 3).bool())
normaliser("softmax")(t(2, 4), t(3, 4), mask=t(2, 3).bool().to("meta"))
normaliser("softmax")(t(2, 4), t(3, 4), scale="big")
normaliser("softmax")(t(2, 4), t(3, 4), scale=INF)
attend(t(2, 2, 4), t(3, 4), [1.0], "softmax")
attend(t(2, 2, 4), t(3, 4), t(3, 2).double(), "softmax")
attend(t(2, 2, 4), t(3, 4), t(2, 2), "softmax")
attend(t(2, 2, 4), t(3, 4), t(3, 3, 2), "softmax")
attend(t(2, 2, 4), t(3, 4), t(3, 2).to("meta"), "softmax")
attend(t(2, 2, 4), t(3, 4), t(3, 2), dict)
theory.horizon(-1.0)
theory.horizon([1.0, 2.0], [0.1, 0.2, 0.3])
theory.horizon(1.0, NAN)
theory.required_spread(0.5)
theory.required_spread(torch.ones(2), [0.5] * 3)
theory.entropy_ceiling(NAN)
theory.entropy_ceiling(10**40 * 10**360)
theory.entropy_floor(1.0, [2.0, 2.5])
theory.weight_bounds([1.0, 2.0], [1, 2, 3])
theory.weight_bounds(-INF, 4)
theory.weight_bounds(1.0, 0.0)
theory.top_weight_limit(1.0, 1.0 + 1e-5)
theory.top_weight_limit_from_sample(torch.zeros(3, 5), [1.0] * 4)
theory.top_weight_limit_from_sample("no")
theory.top_weight_limit_from_sample([1.0], "no")
theory.top_weight_limit_from_sample([1.0], 1.0, top="no")
theory.spread_from_weights(torch.eye(2), torch.ones(3, 2, 2), [1.0] * 4, 1.0)
"""


JAX_ATTENTION = """
[1.0], K, V
Q, torch.zeros(2, 2, 6, 8), V
Q, K, None
jnp.zeros(8), K, V
Q, K, jnp.zeros(8)
jnp.zeros((2, 4, 5, 8), int), K, V
Q, jnp.zeros((2, 2, 6, 8), jnp.bfloat16), V
Q, K, jnp.zeros((2, 2, 6, 3), bool)
Q, jnp.zeros((2, 2, 6, 7)), V
jnp.zeros((2, 4, 5, 0)), jnp.zeros((2, 2, 6, 0)), V
Q, jnp.zeros((2, 6, 8)), V
Q, K, jnp.zeros((2, 2, 7, 3))
Q, K, V, enable_gqa=False
Q, jnp.zeros((2, 3, 6, 8)), jnp.zeros((2, 3, 6, 3))
Q, jnp.zeros((3, 2, 6, 8)), jnp.zeros((3, 2, 6, 3))
jnp.zeros((1, 4, 5, 8)), K, V
Q, K, V, attn_mask=[True]
Q, K, V, attn_mask=jnp.ones((5, 6), int)
Q, K, V, attn_mask=jnp.ones((6, 5), bool)
Q, K, V, attn_mask=jnp.ones((2, 2, 1, 6), bool)
Q, K, V, attn_mask=jnp.ones((1, 2, 4, 5, 6), bool)
Q, K, V, attn_mask=jnp.ones((5, 6), bool), is_causal=True
Q, K, V, scale="large"
Q, K, V, scale=NAN
Q, K, V, block=0
Q, K, V, block=2.0
Q, K, V, policy="nothing-like-it"
Q, K, V, policy=sj.PerHead.of(sj.Constant, value=[[1.0, 2.0]])
"""

JAX_DENSE = """
[1.0, 2.0]
torch.zeros(2)
jnp.arange(3)
jnp.array(1.0)
jnp.zeros(3), axis=1
jnp.zeros(3), axis=0.0
jnp.zeros(3), mask=jnp.ones(3)
jnp.zeros(3), mask=[True]
jnp.zeros(3), mask=jnp.ones(2, bool)
jnp.zeros(3), mask=jnp.ones((2, 3), bool)
"""


def lines(text: str) -> list[str]:
    return text.strip().splitlines()


MISTAKES = [
    *(f"{name}({given})" for given in lines(ROWS) for name in ("row_stats", "self_attention")),
    *(f"{name}({given})" for given in lines(DENSE) for name in ("softmax", "entropy")),
    *lines(OTHERS),
]
_FORM = re.compile(r"[\w, ]+: got .+; allowed: .+")


def self_attention(q: Any, k: Any, **options: Any) -> Any:
    return sm.attention(q, k, k, **options)


def answers_to(mistakes: list[str], names: dict[str, Any]) -> str:
    """Each mistake with the error that it raises."""
    answers = []
    for mistake in mistakes:
        with pytest.raises((ArgumentError, ArgumentTypeError, FileFormatError)) as caught:
            eval(mistake, names)
        kind: type[Exception] = type(caught.value)
        message = str(caught.value)
        assert _FORM.fullmatch(message) or kind is FileFormatError, message
        assert issubclass(kind, TypeError if kind is ArgumentTypeError else ValueError)
        short = message if len(message) < 400 else f"{message[:60]}…{message[-60:]}"
        answers.append(f"{mistake}\n    {kind.__name__}: {short}\n")
    return "".join(answers)


def test_mistakes_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every error and its message, as recorded in tests/golden/errors.txt."""
    for module in (normalisers, policies):  # other tests define kinds of their own
        kinds = {name: kind for name, kind in module._kinds.items() if kind.__module__.startswith("sharpmax.")}
        monkeypatch.setattr(module, "_kinds", kinds)
    public = {name: getattr(module, name) for module in (sm, sm.policies) for name in module.__all__}
    own = {"normaliser": normaliser, "attend": attend, "policy_from_dict": policy_from_dict}
    check("errors", answers_to(MISTAKES, {**globals(), **public, **own}))


def test_mistakes_in_jax_are_explained() -> None:
    jnp: Any = pytest.importorskip("jax.numpy")
    import sharpmax.jax as sj

    def attention(*arguments: Any, **options: Any) -> Any:
        return sj.attention(*arguments, **{"enable_gqa": True, **options})

    q, k, v = jnp.zeros((2, 4, 5, 8)), jnp.zeros((2, 2, 6, 8)), jnp.zeros((2, 2, 6, 3))
    names = {"jnp": jnp, "torch": torch, "sj": sj, "attention": attention, "NAN": NAN, "Q": q, "K": k, "V": v}
    mistakes = [f"attention({given})" for given in lines(JAX_ATTENTION)]
    mistakes += [f"sj.{name}({given})" for given in lines(JAX_DENSE) for name in ("entropy", "softmax")]
    mistakes += ['sj.softmax(jnp.zeros(3), policy="nothing-like-it")', "sj.softmax(jnp.zeros(3), policy=3)"]
    check("errors-jax", answers_to(mistakes, names))


def test_the_same_arguments_are_accepted_when_they_are_right():
    """So that no case above fails for another reason than its own."""
    assert sm.row_stats(Q, K, scale=1, impl="streaming", fields=["entropy"]).count.shape == (2, 4, 3)
    assert sm.attention(Q, K, t(2, 4, 5, 6), attn_mask=t(3, 5).bool(), dropout_p=0.0).shape == (2, 4, 3, 6)
    assert sm.attention(Q, t(2, 2, 5, 8), t(2, 2, 5, 6), enable_gqa=True, is_causal=True).shape == (2, 4, 3, 6)
    heads = sm.policies.PerHead.of(sm.policies.Constant, value=[[2.0] * 4])
    assert sm.attention(Q, K, K, policy=heads).shape == (2, 4, 3, 8)
    assert sm.softmax(LOGITS, dim=-2, mask=t(2, 1).bool()).shape == (2, 5)


def test_an_implementation_that_cannot_is_not_replaced() -> None:
    reason = "the mean of an added float mask never leaves the kernel"
    with pytest.raises(
        UnsupportedError, match=f"^impl: 'sdpa' cannot do this: {reason}; use impl='streaming'$"
    ) as caught:
        sm.row_stats(Q, K, impl="sdpa", attn_mask=t(3, 5))
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
