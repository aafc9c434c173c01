"""The demonstration's numbers against theory and against the definition."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from sharpmax import theory
from sharpmax.errors import ArgumentError
from sharpmax.experiments.demo import MARGIN, RANGE, SIZES, dispersion_tables, what_to_see
from sharpmax.policies import PAPER, base

SMALL = (16, 128, 2048)
ARMS = ["softmax", "paper", "log-length", "entropy-target"]


@pytest.fixture(scope="module")
def tables() -> dict[str, Any]:
    return dispersion_tables(seed=11, sizes=SMALL, draws=8)


def test_sizes_are_those_of_the_paper() -> None:
    assert SIZES[0] == 16
    assert SIZES[-1] == 16_384
    assert len(SIZES) == 11


def test_shape_of_the_tables(tables: dict[str, Any]) -> None:
    for name in ("weight", "entropy"):
        assert list(tables[name]) == ARMS
        for arm in ARMS:
            assert list(tables[name][arm]) == [str(n) for n in SMALL]
            assert all(set(cell) == {"mean", "sem", "n"} and cell["n"] == 8 for cell in tables[name][arm].values())


def test_every_arm_against_the_definition(tables: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(11)
    others = RANGE * torch.rand(8, max(SMALL) - 1, generator=generator, dtype=torch.float64).numpy()
    for n in SMALL:
        logits = np.concatenate((np.full((8, 1), RANGE + MARGIN), others[:, : n - 1]), axis=1)
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        entropy = -(p * np.log(p)).sum(1)
        betas = {
            "softmax": np.ones(8),
            "paper": np.asarray(PAPER.value_at(entropy)),
            "log-length": np.full(8, math.log(n) / math.log(16)),
        }
        for arm, beta in betas.items():
            q = np.exp(beta[:, None] * logits)
            q /= q.sum(1, keepdims=True)
            assert tables["weight"][arm][str(n)]["mean"] == pytest.approx(100 * q[:, 0].mean(), rel=1e-9)
            assert tables["entropy"][arm][str(n)]["mean"] == pytest.approx(-(q * np.log(q)).sum(1).mean(), rel=1e-6)
    target = tables["entropy"]["softmax"]["16"]["mean"]
    for n in SMALL[1:]:
        assert tables["entropy"]["entropy-target"][str(n)]["mean"] == pytest.approx(target, abs=1e-4)


def test_plain_softmax_stays_within_the_bounds_and_disperses(tables: dict[str, Any]) -> None:
    for n in map(str, SMALL):
        assert tables["weight"]["softmax"][n]["mean"] < tables["theory"]["largest_weight"][n]
        assert tables["entropy"]["softmax"][n]["mean"] > tables["theory"]["least_entropy"][n]
    assert tables["weight"]["softmax"]["2048"]["mean"] < 2.0
    assert tables["theory"]["horizon"] == theory.horizon(RANGE + MARGIN)


def test_the_polynomial_does_nothing_beyond_its_range(tables: dict[str, Any]) -> None:
    assert tables["rows_outside_paper_range"] == {"16": 0.0, "128": 0.0, "2048": 100.0}
    assert tables["theory"]["paper_acts_below"] == pytest.approx(5.944, abs=1e-3)
    assert tables["weight"]["paper"]["128"]["mean"] > 2 * tables["weight"]["softmax"]["128"]["mean"]
    assert tables["weight"]["paper"]["2048"]["mean"] == pytest.approx(tables["weight"]["softmax"]["2048"]["mean"])
    sentence = what_to_see(tables)
    assert "from 2,048 items on does nothing" in sentence
    assert sentence.count(". ") == 0


def test_the_demo_neither_warns_nor_uses_up_the_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_warned", set())
    dispersion_tables(seed=0, sizes=(16, 2048), draws=2)  # a warning would be an error here
    assert base._warned == set()


def test_seeds(tables: dict[str, Any]) -> None:
    assert dispersion_tables(seed=11, sizes=SMALL, draws=8) == tables
    assert dispersion_tables(seed=12, sizes=SMALL, draws=8)["weight"] != tables["weight"]
    with pytest.raises(ArgumentError, match="seed"):
        dispersion_tables(seed=-1)


def test_the_sentence_without_rows_beyond_the_range() -> None:
    assert "does nothing" not in what_to_see(dispersion_tables(seed=0, sizes=(16, 64), draws=2))
