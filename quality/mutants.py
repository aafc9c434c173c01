"""Small mistakes put into the package's source, one at a time: what a test suite has to notice."""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

__all__ = ["NOT_MUTATED", "ROOMS", "SOURCE", "Mutant", "files", "mutants_of"]

Change = Callable[[], Callable[[], None]]
"""Does something to a tree and returns how to undo it."""

SOURCE = Path(__file__).parents[1] / "src" / "sharpmax"
ROOMS = ("theory", "policies", "rows")
"""The rooms that are mutated: the mathematics."""

NOT_MUTATED = {
    "rows/impl/triton_kernel.py": "device code: compiled for a GPU, where `make test-gpu` compares it with the oracle",
    "rows/impl/triton_backward_kernel.py": "device code: as triton_kernel.py",
    "rows/impl/triton.py": "launches device code: one test in Triton's interpreter outlasts all others of a file",
    "rows/impl/triton_backward.py": "launches device code: as triton.py",
}
"""Files that are left alone, and why."""

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_PAIRS = [("min", "max"), ("minimum", "maximum"), ("at_least", "at_most"), ("amin", "amax"), ("any", "all")]
_PAIRS += [("clamp_min", "clamp_max"), ("floor", "ceil"), ("zeros_like", "ones_like")]
_OPPOSITES = dict(_PAIRS) | {b: a for a, b in _PAIRS}
_COMPLAINTS = {"reject", "reject_type", "warn"}
"""Calls whose words are for people: that they are made is tested, how they read is not mutated."""
_CHECKS = {"check", "check_at_least", "check_number", "check_range", "read", "require"}
"""Calls that complain by themselves: their texts are left alone, and nothing else of them."""


@dataclass(frozen=True)
class Mutant:
    """One mistake and where it is made.

    `key` names it by file, function and text, so that it keeps its name when lines above it move.
    """

    file: str
    lines: range
    """Of the statement it lies in; of a compound one, the head alone."""
    key: str
    inside: bool
    """Whether it lies in the body of a function, and not in what runs at import."""
    number: int
    """Which of its file's mutants it is."""

    def code(self) -> CodeType:
        """The whole module with the mistake in it."""
        path = SOURCE / self.file
        tree = ast.parse(path.read_text(encoding="utf-8"))
        *_, change = next(itertools.islice(_places(tree), self.number, None))
        change()
        return compile(ast.fix_missing_locations(tree), str(path), "exec")


def files(*rooms: str) -> list[str]:
    """The files of these rooms that are mutated, relative to the package."""
    found = sorted(path.relative_to(SOURCE).as_posix() for room in rooms for path in (SOURCE / room).rglob("*.py"))
    return [file for file in found if file not in NOT_MUTATED]


def mutants_of(file: str, text: str | None = None) -> list[Mutant]:
    """Every mutant of one file.

    >>> [one.key.split(": ", 1)[1] for one in mutants_of("x.py", "def f(a, b):\\n    return a < b")]
    ['return a < b -> return None', 'a < b -> a <= b', 'a < b -> a >= b']
    """
    text = (SOURCE / file).read_text(encoding="utf-8") if text is None else text
    tree = ast.parse(text)
    found: list[Mutant] = []
    seen: Counter[str] = Counter()
    for number, (node, lines, function, inside, change) in enumerate(_places(tree)):
        before = _words(node)
        undo = change()
        key = f"{file}::{function}: {before} -> {_words(node)}"
        undo()
        seen[key] += 1
        again = f" ({seen[key]})" if seen[key] > 1 else ""
        found.append(Mutant(file, lines, key + again, inside, number))
    return found


def _places(tree: ast.Module) -> Iterator[tuple[Any, range, str, bool, Change]]:
    return ((*place, change) for place in _walk(tree) for change in list(_changes(place[0])))


def _words(node: ast.AST) -> str:
    words = " ".join(ast.unparse(node).split())
    return words if len(words) <= 120 else words[:100] + " … " + words[-19:]


def _walk(tree: ast.Module) -> Iterator[tuple[Any, range, str, bool]]:
    """Every node that may be changed, its statement's lines, its function, and whether it is in that one's body."""

    def visit(node: ast.AST, lines: range, scope: str, inside: bool) -> Iterator[tuple[Any, range, str, bool]]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            here = f"{scope}.{node.name}" if scope else node.name
            if isinstance(node, ast.FunctionDef):
                for default in [*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)]:
                    yield from visit(default, _lines(node), here, inside)
            for child in node.body:
                yield from visit(child, lines, here, inside or isinstance(node, ast.FunctionDef))
            return
        if _is_for_people(node):
            return
        if isinstance(node, ast.stmt):
            lines = _lines(node)
        if hasattr(node, "lineno"):
            yield node, lines, scope or "module", inside
        silent = isinstance(node, ast.Call) and _called(node) in _CHECKS
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST) and not (silent and _is_text(child)):
                        yield from visit(child, lines, scope, inside)

    for statement in tree.body:
        yield from visit(statement, range(0), "", False)


def _lines(node: ast.stmt) -> range:
    body = getattr(node, "body", None)
    last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
    return range(node.lineno, max(node.lineno, last) + 1)


def _is_for_people(node: ast.AST) -> bool:
    """Texts, imports, exports and annotations: nothing that computes."""
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.JoinedStr, ast.Raise)):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.Call) and _called(node) in _COMPLAINTS:
        return True
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
        return True
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _changes(node: Any) -> Iterator[Change]:
    """What can be done to a node."""

    def setting(owner: Any, name: str, new: Any) -> Change:
        def change() -> Callable[[], None]:
            old = getattr(owner, name)
            setattr(owner, name, new)
            return lambda: setattr(owner, name, old)

        return change

    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            for other in _COMPARISONS[type(op)]:
                yield setting(node, "ops", [*node.ops[:i], other(), *node.ops[i + 1 :]])
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in _ARITHMETIC:
        yield setting(node, "op", _ARITHMETIC[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield setting(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.Call):
        name = "attr" if isinstance(node.func, ast.Attribute) else "id"
        if (opposite := _OPPOSITES.get(getattr(node.func, name, ""))) is not None:
            yield setting(node.func, name, opposite)
    elif isinstance(node, ast.Return) and node.value is not None and not _is_false(node.value):
        yield setting(node, "value", ast.copy_location(ast.Constant(None), node.value))
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)) and not isinstance(node.test, (ast.Compare, ast.BoolOp)):
        yield setting(node, "test", ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test))
    elif isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
        yield _replacing(node, ast.UnaryOp(ast.UAdd(), node.operand)) if isinstance(node.op, ast.USub) else _bare(node)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield setting(node, "value", ast.copy_location(ast.Constant(None), node.value))
    elif isinstance(node, ast.Constant):
        yield from (setting(node, "value", new) for new in _other_constants(node.value))


def _replacing(node: ast.UnaryOp, new: ast.UnaryOp) -> Change:
    def change() -> Callable[[], None]:
        old, node.op = node.op, new.op
        return lambda: setattr(node, "op", old)

    return change


def _bare(node: ast.UnaryOp) -> Change:
    """`not x` and `~x` become x: written as a second `not` or `~` around it."""

    def change() -> Callable[[], None]:
        old = node.operand
        node.operand = ast.copy_location(ast.UnaryOp(type(node.op)(), old), old)
        return lambda: setattr(node, "operand", old)

    return change


def _other_constants(value: object) -> list[object]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value + 1]
    if isinstance(value, str) and value:
        return [value + "~"]
    return []


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func).split(".")[-1]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in (None, False)
