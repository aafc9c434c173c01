"""The page of supported models says what the models say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.families import transformers

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference" / "supported-models.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| ")][1:]


def test_the_header_counts_the_rows() -> None:
    found = re.search(r"^\*(\d+) of (\d+) model types of transformers (\S+) take a policy\.\*$", PAGE, re.MULTILINE)
    assert found is not None
    counts = [int(row[3]) for row in ROWS]
    assert counts == [len(row[4].split(", ")) for row in ROWS]
    assert int(found[2]) == sum(counts)
    assert int(found[1]) == sum(count for row, count in zip(ROWS, counts, strict=True) if row[0] == "yes")
    names = [name for row in ROWS for name in row[4].split(", ")]
    assert len(names) == len(set(names))


@pytest.fixture(scope="module")
def scan() -> dict[str, Any]:
    if f"transformers {transformers.__version__} " not in PAGE:
        pytest.skip("the page was made with another release of transformers")
    return runpy.run_path(str(DOCS / "supported_models.py"))


@pytest.mark.parametrize(
    ("kind", "apply", "fold"),
    [
        ("llama", "yes", "yes"), ("gpt_oss", "yes", "yes"), ("bert", "yes", "yes"), ("t5", "yes", "no"),
        ("gemma2", "yes", "no"), ("ministral3", "yes", "no"), ("bloom", "no", "no"), ("mamba", "no", "no"),
    ],
)  # fmt: skip
def test_rows_are_true(scan: dict[str, Any], kind: str, apply: str, fold: str) -> None:
    verdict = scan["verdict"](kind, dict(scan["model_types"]())[kind])
    row = next(row for row in ROWS if kind in row[4].split(", "))
    assert (row[0], row[1], row[2].replace("—", "")) == verdict
    assert verdict[:2] == (apply, fold)
