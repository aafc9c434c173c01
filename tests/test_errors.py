"""Every mistake of a caller is answered with the argument, the value, what is allowed and, if any, a way out."""

from __future__ import annotations

import pickle
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
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
    NotMeasuredError,
    SharpmaxError,
    UnsupportedError,
)
from sharpmax.experiments.benchmarks.gpu import gpu_entries
from sharpmax.experiments.benchmarks.monitor import monitor_tables
from sharpmax.experiments.compare.methods import Method, ModelSpec, recipe_for
from sharpmax.lazy import require
from sharpmax.normalisers import base as normalisers
from sharpmax.normalisers.base import attend, normaliser
from sharpmax.policies import base as policies
from sharpmax.policies.base import policy_from_dict
from sharpmax.probing.capture import Capture
from sharpmax.probing.horizons import beta_ceiling
from sharpmax.provenance import check_seed
from sharpmax.tasks.clrs_text import examples, make_dataset
from sharpmax.tasks.clrs_text.datasets import load_dataset
from sharpmax.tasks.sized import sized_task
from tests.experiments.evaluate import tiny
from tests.integrations.test_torch_modules import ViT
from tests.probing.test_modules import Causal
from tests.test_golden import GOLDEN, check


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


NAN, INF = float("nan"), float("inf")
Q, K, LOGITS = t(2, 4, 3, 8), t(2, 4, 5, 8), t(2, 5)
TOKEN, CACHE = t(1, 4, 1, 16), t(1, 2, 70, 16)
_FORM = re.compile(r"[\w, ]+: got .+; allowed: .+")
_BUILTIN: dict[type[Exception], type[Exception]] = {
    ArgumentError: ValueError, ArgumentTypeError: TypeError, FileFormatError: ValueError,
    MissingExtraError: ImportError, NotMeasuredError: AttributeError, UnsupportedError: NotImplementedError,
}  # fmt: skip


def train_method(**own: Any) -> Any:
    method = Method("odd", "softmax", **own)
    method.check(sized_task("max"))
    return recipe_for(ModelSpec(), method, sized_task("max"), 5000, 64)


def self_attention(q: Any, k: Any, **options: Any) -> Any:
    return sm.attention(q, k, k, **options)


def check_answers(file: str, names: dict[str, Any], least: int = 41) -> None:
    """Make each mistake of a golden file, whose next line has the error; a new case is a line without one."""
    answers = []
    lines = (GOLDEN / f"{file}.txt").read_text(encoding="utf-8").splitlines()
    for mistake in [line for line in lines if not line.startswith(" ")]:
        with pytest.raises(SharpmaxError) as caught:
            eval(mistake, names)
        kind: type[Exception] = type(caught.value)
        message = str(caught.value)
        assert _FORM.fullmatch(message) or kind not in (ArgumentError, ArgumentTypeError), message
        assert "\n" not in message
        assert issubclass(kind, _BUILTIN[kind])
        short = message if len(message) < 400 else f"{message[:60]}…{message[-60:]}"
        answers.append(f"{mistake}\n    {kind.__name__}: {short}\n")
    assert len(answers) >= least
    check(file, "".join(answers))


def written(name: str, content: bytes) -> str:
    """The name of a file in the current folder with this content."""
    Path(name).write_bytes(content)
    return name


def test_mistakes_are_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for module in (normalisers, policies):  # other tests define kinds of their own
        kinds = {name: kind for name, kind in module._kinds.items() if kind.__module__.startswith("sharpmax.")}
        monkeypatch.setattr(module, "_kinds", kinds)
    public = {name: getattr(module, name) for module in (sm, sm.policies) for name in module.__all__}
    own: dict[str, Any] = {"normaliser": normaliser, "attend": attend, "policy_from_dict": policy_from_dict}
    own |= {"examples": examples, "make_dataset": make_dataset, "load_dataset": load_dataset}
    own |= {"tiny": tiny, "ViT": ViT, "Causal": Causal, "Capture": Capture, "beta_ceiling": beta_ceiling}
    own |= {"check_seed": check_seed, "gpu_entries": gpu_entries}
    language: Any = SimpleNamespace(model=None)
    own["monitor_tables"] = partial(monitor_tables, language)
    check_answers("errors", {**globals(), **public, **own})
    files = ["a.jsonl", "broken.json", "own.py", "policy.json", "sharpmax_policy.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == files  # nothing but what was `written`


def test_mistakes_in_jax_are_explained() -> None:
    jnp: Any = pytest.importorskip("jax.numpy")
    import sharpmax.jax as sj

    def attention(*arguments: Any, **options: Any) -> Any:
        return sj.attention(*arguments, **{"enable_gqa": True, **options})

    q, k, v = jnp.zeros((2, 4, 5, 8)), jnp.zeros((2, 2, 6, 8)), jnp.zeros((2, 2, 6, 3))
    names = {"jnp": jnp, "torch": torch, "sj": sj, "attention": attention, "NAN": NAN, "Q": q, "K": k, "V": v}
    check_answers("errors-jax", names)


def test_an_error_survives_the_way_from_another_process() -> None:
    missing = MissingExtraError("no_such_package", "fit", "Comparing variants")
    again = pickle.loads(pickle.dumps(missing))
    assert (type(again), str(again)) == (MissingExtraError, str(missing))


def test_a_package_that_is_broken_inside_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_inside.py").write_text("import no_such_package_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_package_at_all") as caught:
        require("broken_inside", "fit", "Comparing variants")
    assert not isinstance(caught.value, SharpmaxError)
