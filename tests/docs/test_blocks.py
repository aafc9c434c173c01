"""Every code block of the documentation runs as written, and every command it speaks of exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.blocks import INDENTED, INLINE, ROOT, blocks, check_command, check_mentioned, commands, run
from tests.smollm2 import load_once

PAGES = sorted((ROOT / "docs").rglob("*.md"))
WITH_CODE = [page for page in PAGES if blocks(page)]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT / "docs").as_posix()


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    load_once(monkeypatch)
    run(blocks(page))


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_commands_in_the_text_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for line in INDENTED.findall(text):
        for words in commands(line):
            check_command(words)
    for mentioned in INLINE.findall(text):
        check_mentioned(mentioned.split())


def test_most_blocks_are_run() -> None:
    found = [block for page in PAGES for block in blocks(page)]
    assert {block.language for block in found} == {"python", "sh"}
    assert len(found) > 40
    assert sum(block.reason is None for block in found) > len(found) / 2
