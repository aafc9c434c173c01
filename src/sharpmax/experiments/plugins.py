"""A user's own Python files, which are sent as text to where tasks run and imported there once."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from sharpmax.errors import FileFormatError, SharpmaxError, reject


@dataclass(frozen=True)
class Plugin:
    """A file: its path, for messages, and its text."""

    path: str
    text: str

    @property
    def module(self) -> str:
        """The name under which it is imported everywhere.

        >>> Plugin("/home/me/mine.py", "").module
        'sharpmax_plugin_mine'
        """
        return f"sharpmax_plugin_{Path(self.path).stem}"


class _Text(importlib.abc.ExecutionLoader):
    """Import a plugin from its text."""

    def __init__(self, plugin: Plugin) -> None:
        self.plugin = plugin

    def get_filename(self, fullname: str) -> str:
        return self.plugin.path

    def get_source(self, fullname: str) -> str:
        return self.plugin.text

    def is_package(self, fullname: str) -> bool:
        return False


def read(paths: Sequence[Path]) -> list[Plugin]:
    """The files as they are now."""
    found: dict[str, Plugin] = {}
    for path in map(Path, paths):
        try:
            plugin = Plugin(str(path.resolve()), path.read_text(encoding="utf-8-sig"))
        except OSError as problem:
            reject("--with", f"{str(path)!r} ({problem.strerror})", "the path of a Python file that you may read")
        except UnicodeDecodeError:
            raise FileFormatError(f"--with: {str(path)!r} is not text in UTF-8; give a Python file") from None
        if found.setdefault(plugin.module, plugin) != plugin:
            reject("--with", f"two files called {path.stem!r}", "files of different names", "rename one of them")
    return list(found.values())


def load(plugin: Plugin) -> ModuleType:
    """Import a plugin, unless this process has done so before."""
    before = sys.modules.get(plugin.module)
    if before is not None and getattr(getattr(before, "__loader__", None), "plugin", None) == plugin:
        return before
    loader = _Text(plugin)
    spec = ModuleSpec(plugin.module, loader, origin=plugin.path)
    spec.has_location = True
    module = importlib.util.module_from_spec(spec)
    sys.modules[plugin.module] = module
    try:
        loader.exec_module(module)
    except BaseException as problem:
        del sys.modules[plugin.module]
        if isinstance(problem, SharpmaxError) or not isinstance(problem, (Exception, SystemExit)):
            raise
        lines = [one.lineno for one in traceback.extract_tb(problem.__traceback__) if one.filename == plugin.path]
        where = f", line {lines[-1]}" if lines else ""
        what = " ".join(str(problem).split())
        raise FileFormatError(
            f"--with: {plugin.path!r} cannot be run ({type(problem).__name__}{where}: {what})"
        ) from None
    return module
