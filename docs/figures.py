"""Draw the figures of README and docs: `python docs/figures.py` writes docs/images/*.svg."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sharpmax as sm
from sharpmax.report import charts
from sharpmax.results import load

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
LAYER = 10
FORMATS = ("csv", "log", "mapping", "letters", "markup", "directory")


def retrieval() -> Any:
    """Accuracy with and without the packaged policy, one panel per test format."""
    tables = load(ROOT / "results" / "evaluate-smollm2" / "results.json").tables
    styles = {"baseline": charts.Style(charts.BLACK), "sharpened": charts.Style(charts.VERMILLION, "square")}
    panels = []
    for name in FORMATS:
        accuracy = tables[f"accuracy/formats/{name}"]
        rows = [
            {"variant": words, "x": int(size), "y": cell["mean"], "low": cell["low"], "high": cell["high"]}
            for words, variant in (("baseline", "baseline"), ("sharpened", "smollm2"))
            for size, cell in accuracy[variant].items()
        ]
        x = charts.size_axis([16, 32, 64, 128], "items")
        y = charts.percent_axis("accuracy (%)")
        panels.append(charts.lines_panel(name, rows, x, y, styles, height=130))
    return charts.figure(*panels, columns=3, names=list(styles))


def dispersion() -> Any:
    """The largest weight that a softmax row can have, and the smallest entropy, by spread and number of items."""
    sizes = [2**power for power in range(2, 17, 2)]
    styles = charts.styles_of([f"spread {spread}" for spread in (4, 6, 8)])
    weights, entropies = [], []
    for name in styles:
        spread = float(name.split()[1])
        for n in sizes:
            top = 100 * float(sm.theory.weight_bounds(spread, n)[1])
            weights.append({"variant": name, "x": n, "y": top})
            entropies.append({"variant": name, "x": n, "y": float(sm.theory.entropy_floor(spread, n))})
    x = charts.size_axis(sizes, "items n")
    return charts.figure(
        charts.lines_panel("Largest possible weight", weights, x, charts.percent_axis("weight (%)"), styles),
        charts.lines_panel("Smallest possible entropy", entropies, x, charts.axis("y", "entropy (nats)"), styles),
        names=list(styles),
    )


def frequencies() -> Any:
    """β of every rotary frequency of the heads of one layer."""
    heads = sm.load_policy("smollm2").to_dict()["policies"][LAYER]
    rows = [
        {"x": frequency, "y": head, "value": beta - 1.0}
        for head, policy in enumerate(heads)
        for frequency, beta in enumerate(policy["values"])
    ]
    tips = charts.tooltip(y="head", x="frequency", value="β − 1|+.2f")
    panel = charts.heat_panel(
        "", rows, "rotary frequency (0 turns fastest)", "head", "β − 1: red sharpens, blue flattens",
        domain=[-0.5, 0.5], tips=tips, diverging=True, height=220,
    )  # fmt: skip
    return charts.figure(panel, columns=1)


def folding() -> Any:
    """A file, the numbers, the file with the numbers in its query weights, and the engines that load it."""
    alt = charts.altair()
    boxes = [
        (0, 2, "checkpoint or GGUF"), (0, 3, "policy (numbers β)"), (1, 2.5, "sharpmax fold"),
        (2, 2.5, "same file, β in Wq"), (3, 4, "transformers"), (3, 3, "vLLM"), (3, 2, "llama.cpp"), (3, 1, "Ollama"),
    ]  # fmt: skip
    hub, end = (1, 2.5), (2, 2.5)
    links = [((0, 2), hub), ((0, 3), hub), (hub, end), *((end, (3, place)) for place in (1, 2, 3, 4))]
    across, up = alt.Scale(domain=[-0.45, 3.45], nice=False), alt.Scale(domain=[0.6, 4.4], nice=False)
    scale = {"x": alt.X("x:Q", axis=None, scale=across), "y": alt.Y("y:Q", axis=None, scale=up)}
    lines = charts.data([
        {"x": x, "y": y, "x2": x2, "y2": y2} for (x, y), (x2, y2) in links
    ])  # fmt: skip
    cells = charts.data([
        {"x": x, "y": y, "left": x - 0.42, "right": x + 0.42, "low": y - 0.33, "high": y + 0.33, "text": text}
        for x, y, text in boxes
    ])  # fmt: skip
    arrows = alt.Chart(lines).mark_rule(color=charts.PALE, strokeWidth=2).encode(**scale, x2="x2:Q", y2="y2:Q")
    rects = alt.Chart(cells).mark_rect(fill=charts.PANEL, stroke=charts.LINK, cornerRadius=5).encode(
        x=alt.X("left:Q", axis=None, scale=across), x2="right:Q", y=alt.Y("low:Q", axis=None, scale=up), y2="high:Q"
    )  # fmt: skip
    words = alt.Chart(cells).mark_text(color=charts.INK, fontSize=12).encode(**scale, text="text:N")
    return charts.figure(charts.panel("", arrows, rects, words, height=220), columns=1, around=10)


FIGURES = {
    "retrieval": (retrieval, "Lookup in lists of n items, SmolLM2-135M", "Formats never trained on. 95% intervals."),
    "dispersion": (dispersion, "Bounded logits must lose focus", "Spread: largest minus smallest logit, in nats."),
    "frequencies": (frequencies, f"What was learned for layer {LAYER} of SmolLM2", ""),
    "folding": (folding, "Folding: the numbers go into the file", ""),
}


def draw(name: str) -> str:
    """One figure as the text of an SVG file."""
    make, title, caption = FIGURES[name]
    return charts.svg_of(charts.titled(make(), title, caption))


if __name__ == "__main__":
    for name in FIGURES:
        (IMAGES / f"{name}.svg").write_text(draw(name), encoding="utf-8")
        print(f"wrote docs/images/{name}.svg")
