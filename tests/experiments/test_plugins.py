"""Files of the user's own."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

from sharpmax.errors import ArgumentError, FileFormatError
from sharpmax.experiments import engine as plugins
from sharpmax.normalisers import normalisers


def loaded(path: Path) -> Any:
    return plugins.load_plugin(plugins.read_plugins([path])[0])


def test_a_file_is_imported_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "one-off.py"
    file.write_text("class A:\n    x = 'ä'\n", encoding="utf-8")
    first = loaded(file)
    assert loaded(file) is first
    assert sys.modules["sharpmax_plugin_one-off"] is first
    assert inspect.getsource(first.A) == "class A:\n    x = 'ä'\n"
    file.write_text("y = 2\n", encoding="utf-8")
    assert loaded(file).y == 2


NORMALISER = """
from sharpmax.normalisers import Normaliser, visible_softmax

class Squared(Normaliser):
    name = "squared-for-a-test"
    disperses = "as a test likes"

    def normalise(self, logits, visible):
        return visible_softmax(logits.square(), visible)
"""


@pytest.mark.parametrize("again", [False, True])  # what a test registers is gone after it
def test_a_normaliser_registers_wherever_its_text_goes(tmp_path: Path, again: bool) -> None:
    assert "squared-for-a-test" not in normalisers()
    file = tmp_path / f"squared_{again}.py"
    file.write_text(NORMALISER, encoding="utf-8")
    plugin = plugins.read_plugins([file])[0]
    file.unlink()
    module: Any = plugins.load_plugin(plugin)
    assert normalisers()["squared-for-a-test"] is module.Squared
    # A file that was changed since replaces what it defined before, instead of finding the name taken.
    changed: Any = plugins.load_plugin(plugins.Plugin(plugin.path, plugin.text + "\n"))
    assert normalisers()["squared-for-a-test"] is changed.Squared is not module.Squared


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\nx = (", r"SyntaxError"),
        ("x = 1\nraise ValueError('no\\nluck')", r"ValueError, line 2: no luck"),
        ("import nowhere_at_all", r"ModuleNotFoundError, line 1"),
        ("raise SystemExit(3)", r"SystemExit, line 1: 3"),
    ],
)
def test_a_file_that_cannot_be_run(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "bad.py"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(FileFormatError, match=rf"^--with: '.*bad.py' cannot be run \({says}.*\)$"):
        loaded(file)
    assert "sharpmax_plugin_bad" not in sys.modules


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"--with: got '.*none.py'"):
        plugins.read_plugins([tmp_path / "none.py"])
    (tmp_path / "x.py").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileFormatError, match="not text"):
        plugins.read_plugins([tmp_path / "x.py"])
    (tmp_path / "a").mkdir()
    for folder, text in (("a", "1"), (".", "2")):
        (tmp_path / folder / "y.py").write_text(text, encoding="utf-8")
    with pytest.raises(ArgumentError, match="two files called 'y'"):
        plugins.read_plugins([tmp_path / "y.py", tmp_path / "a" / "y.py"])
    assert len(plugins.read_plugins([tmp_path / "y.py", tmp_path / "y.py"])) == 1
