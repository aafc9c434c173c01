"""Every mistake of a caller is answered with the argument, the value, what is allowed and, if any, a way out."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import sharpmax as sm
from sharpmax.errors import (
    ArgumentError,
    ArgumentTypeError,
    FileFormatError,
    MissingExtraError,
    SharpmaxError,
    UnsupportedError,
)
from sharpmax.lazy import require
from sharpmax.normalisers import base as normalisers
from sharpmax.normalisers.base import attend, normaliser
from sharpmax.policies import base as policies
from sharpmax.policies.base import policy_from_dict
from sharpmax.tasks.clrs_text import examples, make_dataset
from tests.test_golden import GOLDEN, check


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


NAN, INF = float("nan"), float("inf")
Q, K, LOGITS = t(2, 4, 3, 8), t(2, 4, 5, 8), t(2, 5)
TOKEN, CACHE = t(1, 4, 1, 16), t(1, 2, 70, 16)
_FORM = re.compile(r"[\w, ]+: got .+; allowed: .+")


def self_attention(q: Any, k: Any, **options: Any) -> Any:
    return sm.attention(q, k, k, **options)


def check_answers(file: str, names: dict[str, Any], least: int = 41) -> None:
    """Make each mistake of a golden file, whose next line has the error; a new case is a line without one."""
    answers = []
    lines = (GOLDEN / f"{file}.txt").read_text(encoding="utf-8").splitlines()
    for mistake in [line for line in lines if not line.startswith(" ")]:
        with pytest.raises((ArgumentError, ArgumentTypeError, FileFormatError, UnsupportedError)) as caught:
            eval(mistake, names)
        kind: type[Exception] = type(caught.value)
        message = str(caught.value)
        assert _FORM.fullmatch(message) or kind in (FileFormatError, UnsupportedError), message
        assert "\n" not in message
        builtins: dict[type[Exception], type[Exception]]
        builtins = {ArgumentTypeError: TypeError, UnsupportedError: NotImplementedError}
        assert issubclass(kind, builtins.get(kind, ValueError))
        short = message if len(message) < 400 else f"{message[:60]}…{message[-60:]}"
        answers.append(f"{mistake}\n    {kind.__name__}: {short}\n")
    assert len(answers) >= least
    check(file, "".join(answers))


def test_mistakes_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (normalisers, policies):  # other tests define kinds of their own
        kinds = {name: kind for name, kind in module._kinds.items() if kind.__module__.startswith("sharpmax.")}
        monkeypatch.setattr(module, "_kinds", kinds)
    public = {name: getattr(module, name) for module in (sm, sm.policies) for name in module.__all__}
    own = {"normaliser": normaliser, "attend": attend, "policy_from_dict": policy_from_dict}
    own |= {"examples": examples, "make_dataset": make_dataset}
    check_answers("errors", {**globals(), **public, **own})


def test_mistakes_in_jax_are_explained() -> None:
    jnp: Any = pytest.importorskip("jax.numpy")
    import sharpmax.jax as sj

    def attention(*arguments: Any, **options: Any) -> Any:
        return sj.attention(*arguments, **{"enable_gqa": True, **options})

    q, k, v = jnp.zeros((2, 4, 5, 8)), jnp.zeros((2, 2, 6, 8)), jnp.zeros((2, 2, 6, 3))
    names = {"jnp": jnp, "torch": torch, "sj": sj, "attention": attention, "NAN": NAN, "Q": q, "K": k, "V": v}
    check_answers("errors-jax", names)


def test_an_implementation_that_cannot_is_not_replaced() -> None:
    says = "impl: 'sdpa' cannot do this: the mean of an added float mask never leaves the kernel; use impl='streaming'"
    with pytest.raises(UnsupportedError, match=f"^{says}$"):
        sm.row_stats(Q, K, impl="sdpa", attn_mask=t(3, 5))


def test_a_missing_extra_says_how_to_install_it():
    with pytest.raises(MissingExtraError) as caught:
        require("no_such_package.part", "fit", "Comparing variants")
    assert str(caught.value) == (
        "Comparing variants needs the package 'no_such_package', which is not installed; "
        "install it with: pip install 'scipy>=1.15'"
    )
    again = pickle.loads(pickle.dumps(caught.value))  # as it comes from another process
    assert (type(again), str(again)) == (MissingExtraError, str(caught.value))


def test_a_package_that_is_broken_inside_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_inside.py").write_text("import no_such_package_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_package_at_all") as caught:
        require("broken_inside", "fit", "Comparing variants")
    assert not isinstance(caught.value, SharpmaxError)
