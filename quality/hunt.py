"""The hunt for mutants: each is put into a fork of a process that has everything loaded, and meets the tests there.

A fork costs milliseconds, where a new process would load torch for seconds. Mutants inside functions go into a process
that has collected the tests already, by exchanging the code of those functions; mutants of what runs at import go into
one that has not imported the package yet.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import math
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NoReturn

import pytest

from quality.covering import Items, Tests, cover, known
from quality.log import ROOT, Log
from quality.mutants import ROOMS, SOURCE, Mutant
from quality.session import OPTIONS, Failures, Quick, failure

__all__ = ["TESTS", "hunt"]

TESTS = [
    *(f"{place}/{room}" for room in ROOMS for place in ("tests", "src/sharpmax")),
    *("tests/ops/test_sharp.py", "tests/ops/test_dense.py"),
    *("tests/test_numerics_table.py", "tests/test_pitfalls.py", "tests/test_errors.py"),
]
"""Where the tests are looked for that a mutant meets; of these, those that run the line it changes."""

_ALONG = ("numpy", "torch", "torch.utils._pytree", "triton", "hypothesis.extra.numpy", "mpmath", "scipy.optimize")
Functions = dict[tuple[str, str, int], list[FunctionType]]

_SAID = ROOT / "build" / "quality" / "said.txt"
_MEMORY = 8 << 30


def hunt(mutants: Sequence[Mutant], log: Log, covering: Path, minutes: float = math.inf) -> None:
    """Find out what becomes of every mutant that the log does not know, and write it there.

    `covering` is the file that keeps which test runs which line, and how long it takes. After some `minutes` the rest
    is left for another time.
    """
    end = time.monotonic() + 60.0 * minutes
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.chdir(ROOT)
    for name in _ALONG:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    _SAID.parent.mkdir(parents=True, exist_ok=True)
    _SAID.write_text("", encoding="utf-8")
    left = log.left(mutants)
    if not left or minutes <= 0:
        return
    _in_fork(lambda: _warm([one for one in left if one.inside], log, covering, end), None)
    log = Log(log.path, log.patience)
    tests = Tests(json.loads(covering.read_text(encoding="utf-8")), log.patience)
    for mutant in log.left(left):
        if time.monotonic() > end:
            break
        _meet(mutant, log, tests, functools.partial(_cold, mutant, tests))


def _meet(mutant: Mutant, log: Log, tests: Tests, run: Callable[[], str | None]) -> None:
    """Let a mutant meet its tests in a fork: `run` returns the name of the test that failed."""
    names = tests.of(mutant)
    if not names:
        log.add(mutant, "uncovered", None, 0.0)
        return
    start = time.monotonic()
    outcome, by = _in_fork(run, 20.0 + 5.0 * sum(tests.seconds[name] for name in names))
    if by:
        tests.kills[mutant.file, by] += 1
    log.add(mutant, outcome, by, time.monotonic() - start)


def _in_fork(run: Callable[[], str | None], seconds: float | None) -> tuple[str, str | None]:
    """Run something in a fork: `killed` with what it returns, `survived` if that is None, `timeout` if it is late."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _be_the_fork(run, write)
    os.close(write)
    ready, _, _ = select.select([read], [], [], seconds)
    told = os.read(read, 1 << 16) if ready else b""
    os.close(read)
    if not told:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not told:  # late, or gone without a word: out of memory, or a crash in native code
        late = not ready or os.WTERMSIG(status) == signal.SIGALRM
        return ("timeout", None) if late else ("killed", "a crash")
    word, _, rest = told.decode().partition(" ")
    if word == "broken":
        raise RuntimeError(rest)
    return word, rest or None


def _be_the_fork(run: Callable[[], str | None], write: int) -> NoReturn:
    try:
        # What tests and pytest itself say goes where it can be looked up.
        aside = os.open(_SAID, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(aside, 1)
        os.dup2(aside, 2)
        os.setpgid(0, 0)
        by = run()
        told = "survived" if by is None else f"killed {by}"
    except BaseException as problem:
        import traceback

        told = f"broken {problem!r}\n{traceback.format_exc()}"[:60000]
    os.write(write, told.encode())
    os.close(write)
    os._exit(0)


def _limited() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))


def _warm(mutants: Sequence[Mutant], log: Log, covering: Path, end: float) -> None:
    """Collect the tests once, find out which lines each of them runs, then fork for every mutant."""

    class Loop:
        @pytest.hookimpl(tryfirst=True)
        def pytest_runtestloop(self, session: pytest.Session) -> bool:
            items = {item.nodeid: item for item in session.items}
            if set(items) != set(known(items, covering)["seconds"]):
                _, problem = _in_fork(lambda: cover(items, covering), None)
                if problem is not None:
                    raise RuntimeError(f"a test fails without any mutant: {problem}")
            tests = Tests(json.loads(covering.read_text(encoding="utf-8")), log.patience)
            _warm_up()
            functions = _functions()
            gc.freeze()
            for mutant in mutants:
                if time.monotonic() > end:
                    break
                if exchanges := _exchanges(mutant, functions):
                    _meet(mutant, log, tests, functools.partial(_patched, mutant, exchanges, items, tests))
            return True

    code = pytest.main([*OPTIONS, *TESTS], plugins=[Quick(), Loop()])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"the tests cannot be collected: pytest ends with {code!r}")


def _warm_up() -> None:
    """Do once what every fork would do again: late imports, and tables that libraries make on first use.

    Nothing is differentiated here: a fork of a process that has done so cannot.
    """
    import torch
    from hypothesis import given
    from hypothesis import strategies as st

    import sharpmax as sm

    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        if parts[1] in (*ROOMS, "attention") and "kernel" not in parts[-1] and parts[-1] != "__init__":
            importlib.import_module(".".join(parts))
    given(st.lists(st.floats()) | st.text())(lambda x: None)()
    with torch.no_grad():
        q = torch.randn(1, 2, 3, 4)
        for impl in ("streaming", "stock", "reference"):
            sm.row_stats(q, q, impl=impl)
        for policy in (None, "paper", sm.policies.EntropyTarget(0.5)):
            sm.softmax(q, policy=policy)
            sm.attention(q, q, q, policy=policy)


def _functions() -> Functions:
    """Every function there is of the package, by file, name and first line."""
    found: Functions = {}
    inside = str(SOURCE)
    for one in gc.get_objects():
        if type(one) is FunctionType and one.__code__.co_filename.startswith(inside):
            found.setdefault(_name(one.__code__), []).append(one)
    return found


def _name(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_name, code.co_firstlineno


def _codes(code: CodeType) -> Iterator[CodeType]:
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield one
            yield from _codes(one)


def _exchanges(mutant: Mutant, functions: Functions) -> list[tuple[FunctionType, CodeType]]:
    """Which functions get which code to become the mutant; none if that cannot be done to a function that exists."""
    found = [
        (function, code)
        for code in _codes(mutant.code())
        for function in functions.get(_name(code), ())
        if function.__code__ != code
    ]
    same = all(function.__code__.co_freevars == code.co_freevars for function, code in found)
    return found if same else []


def _patched(
    mutant: Mutant, exchanges: Sequence[tuple[FunctionType, CodeType]], items: Items, tests: Tests
) -> str | None:
    """Exchange the code of the functions that the mutant changes, then run its tests: the first that fails."""
    for function, code in exchanges:
        function.__code__ = code
    _limited()
    names = tests.of(mutant)
    for name, following in zip(names, [*names[1:], None], strict=True):
        signal.setitimer(signal.ITIMER_REAL, 10.0 + 10.0 * tests.seconds[name])
        if failure(items[name], items[following] if following else None) is not None:
            return name
    return None


def _cold(mutant: Mutant, tests: Tests) -> str | None:
    """Import the package with the mutant in it and run its tests: the first that fails."""
    code, path, plain = mutant.code(), str(SOURCE / mutant.file), SourceFileLoader.get_code
    _limited()

    def get_code(self: Any, fullname: str) -> CodeType | None:
        return code if self.path == path else plain(self, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]

    failures = Failures()
    ended = pytest.main(["-x", *OPTIONS, *tests.of(mutant)], plugins=[Quick(), failures])
    if failures.first is not None:
        return failures.first[0]
    return None if ended == pytest.ExitCode.OK else f"pytest ends with {ended!r}"
