"""The site builds without a warning, needs nothing from elsewhere, and can be read on a desk and on a phone."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import filelock
import pytest

from tests.blocks import ROOT
from tests.report.browser import DESK, PHONE, fits, visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytest.importorskip("mkdocs", reason="needs the extra docs")

FETCHED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\s(?:src|href)=\"?(https?:|//)[^>]*>")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built once for all xdist workers."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder = shared / "site"
    with filelock.FileLock(shared / "site.lock"):
        if not (folder / "built").exists():
            words = ["-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
            environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
            built = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
            assert built.returncode == 0, built.stdout + built.stderr
            (folder / "built").touch()
    return folder


def test_pages_are_light_and_fetch_nothing_from_elsewhere(site: Path) -> None:
    pages = [page for page in site.rglob("*.html") if "data" not in page.parts]
    assert len(pages) > 30
    for page in pages:
        assert not FETCHED.search(page.read_text(encoding="utf-8")), page
    results = [page.stat().st_size for page in (site / "data" / "results").glob("*/report.html")]
    assert len(results) >= 6
    assert max(results) < 700_000
    assert sum(file.stat().st_size for file in site.rglob("*") if file.is_file()) < 15_000_000


def test_results_and_reference_are_there(site: Path) -> None:
    reproduce = (site / "results" / "reproduce.html").read_text(encoding="utf-8")
    assert "../data/results/reproduce/accuracy.svg" in reproduce
    for file in re.findall(r"(?:src|href)=\"\.\./(data/[^\"#]+)", reproduce):
        assert (site / file).is_file(), file
    reference = (site / "reference" / "attention.html").read_text(encoding="utf-8")
    assert "&gt;&gt;&gt; " in reference
    assert "<blockquote>" not in reference


@pytest.mark.parametrize("name", ["explore", "results/reproduce", "reference/cli"])
def test_pages_fit_and_ask_nobody(site: Path, browser: Browser, name: str) -> None:
    size = DESK if name == "explore" else PHONE
    with visit(browser, (site / f"{name}.html").as_uri(), viewport=size) as found:
        assert fits(found)
        assert found.problems == []
        assert all(url.startswith(("file:", "data:", "about:")) for url in found.requests)
        broken = "() => [...document.images].filter((one) => one.complete && !one.naturalWidth).map((one) => one.src)"
        assert found.page.evaluate(broken) == []


WORDS = {
    "vLLM": "Run it in your engine", "GGUF": "Calibrate my model", "sm.fold": "Language models",
    "log-length": "Glossary", "resume": "Run on a Ray cluster",
}  # fmt: skip
"""Words a reader searches for, with a page that must be found."""


def test_words_are_indexed_without_punctuation(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    text = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", entry["text"])) for entry in index["docs"])
    tokens = set(re.split(index["config"]["separator"], text.lower()))
    assert {"vllm", "gguf", "entropy", "llama.cpp", "bfloat16"} <= tokens
    punctuation = re.compile(r"^[(\[\"'`“‘][a-z]|[a-z][)\],;:.!?\"”’]$")
    assert [token for token in tokens if punctuation.search(token)] == []


@pytest.mark.parametrize("page", ["index", "how-to/probe"])
def test_words_are_found_by_the_search_from_every_folder(site: Path, browser: Browser, page: str) -> None:
    with visit(browser, (site / f"{page}.html").as_uri(), viewport=DESK) as found:
        for word, result in WORDS.items():
            # The search listens to keys, and calls a word that ends in a hyphen invalid.
            found.page.locator("input.md-search__input").fill(word[:-1])
            found.page.locator("input.md-search__input").press_sequentially(word[-1])
            found.page.wait_for_selector(f".md-search-result__item h1:has-text('{result}')")
        assert found.problems == []
