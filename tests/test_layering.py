"""The packages of the package import only from the packages above them, and nothing heavy before it is needed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "sharpmax"

# From the ground up; each may import those before it. Modules of the same level do not import each other.
LEVELS = [
    "errors", "files lazy arrays", "provenance", "results", "stats", "policies", "ops", "normalisers", "theory",
    "jax", "tasks", "models", "integrations", "calibration", "probing", "monitoring", "experiments", "report", "cli",
]  # fmt: skip
LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages.split()}
# `report` draws from saved results alone, so it may not reach the code that made them; policies are values that JAX
# users load too, so the torch side of `stats` must stay out.
FORBIDDEN = {("report", "experiments"), ("policies", "stats")}


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> list[str]:
    """What of the package a module imports, wherever in the file; imports for the type checker alone do not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            skipped |= {inner for statement in node.body for inner in ast.walk(statement)}
    names: list[str] = []
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in names if name.startswith("sharpmax.")]


def imports(path: Path) -> set[str]:
    """The packages a module imports."""
    return {name.split(".")[1] for name in imported(path)}


MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE or p.name != "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_packages_import_only_from_above(path: Path) -> None:
    package = package_of(path)
    assert package in LEVEL, f"{package} has no place in the order of packages"
    for other in imports(path) - {package}:
        if other in LEVEL:
            assert LEVEL[other] < LEVEL[package], f"{path.name} in {package} imports {other}, which lies below it"
            assert (package, other) not in FORBIDDEN, f"{package} must not import {other}"


def test_no_package_has_more_than_fifteen_modules() -> None:
    for folder in {path.parent for path in MODULES}:
        modules = [path for path in folder.glob("*.py") if not path.name.startswith("__")]
        assert len(modules) <= 15, f"{folder.name} has {len(modules)} modules"


def test_every_module_can_be_imported_under_another_name() -> None:
    """After every public name was used: a function with the name of its package would hide the package."""
    names = sorted(".".join(("sharpmax", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in MODULES)
    modules = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    lines = "\n".join(f"import {name} as module; assert module.__name__ == {name!r}" for name in modules)
    script = f"import sharpmax as sm\n[getattr(sm, name) for name in sm.__all__]\n{lines}"
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)


HEAVY = {"transformers", "jax", "triton", "altair", "ray", "scipy", "entmax", "typer", "rich"}


def modules_after(*lines: str) -> list[set[str]]:
    """The top-level modules that a fresh interpreter holds after each of these lines."""
    script = "import sys\n" + "".join(f"{line}\nprint(*sys.modules)\n" for line in lines)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return [{name.partition(".")[0] for name in line.split()} for line in done.stdout.splitlines()]


def test_nothing_heavy_is_imported_before_it_is_used() -> None:
    used = "import sharpmax.normalisers; from sharpmax import attention, softmax, row_stats, policies, theory"
    alone, core, models = modules_after("import sharpmax", used, "from sharpmax import apply, fold")
    (tasks,) = modules_after("import sharpmax.tasks as t; t.TASKS, t.plain_text, t.chat_questions")
    assert not alone & {"torch", *HEAVY}
    assert not core & HEAVY
    assert "transformers" not in models
    assert not tasks & {"torch", "transformers", "numpy"}


def test_jax_users_do_not_load_torch() -> None:
    (after,) = modules_after("import sharpmax.jax as smj; smj.softmax, smj.attention, smj.PAPER")
    assert "jax" in after
    assert "torch" not in after


WITH_JAX = """
import numpy as np, sharpmax.jax as sj
x = np.ones((1, 4, 8), np.float32)
assert float(sj.softmax(x, policy='paper').sum()) == 4.0
assert float(sj.entropy(x).min()) > 2.0
out, stats = sj.attention(x, x, x, return_stats=True, policy='paper')
assert float(abs(out - 1).max()) < 1e-6 and int(stats.count[0, 0]) == 4
"""
THEORY = """
from sharpmax.theory import entropy_floor, spread_from_product, weight_bounds
print(weight_bounds([0.0], 2)[1].tolist(), entropy_floor(1.0, 1), spread_from_product([[1.0]], [[2.0]], 1.0, 1.0))
"""
WITHOUT_JAX = """
from sharpmax.errors import MissingExtraError
try:
    import sharpmax.jax
except MissingExtraError as missing:
    print(missing)
"""


@pytest.mark.parametrize(
    ("missing", "program", "printed"),
    [("torch", WITH_JAX, ""), ("torch", THEORY, "[0.5] 0.0 4.0\n"), ("jax", WITHOUT_JAX, "pip install 'jax>=0.6'")],
    ids=["jax without torch", "theory without torch", "without jax"],
)
def test_without_a_package_that_is_not_needed_or_is(missing: str, program: str, printed: str) -> None:
    script = f"import sys; sys.modules[{missing!r}] = None\n{program}"
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout


def test_lazy_names_are_the_public_contract() -> None:
    import sharpmax as sm

    assert set(sm.__all__) == set(sm._homes)
    assert all(getattr(sm, name) is not None for name in sm.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = sm.nothing
