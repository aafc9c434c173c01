"""Draw the figures of README and docs: `python docs/figures.py` writes docs/images/*.svg."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import sharpmax as sm
from sharpmax.report import charts
from sharpmax.results import load
from sitekit.drawn import PHONE, fitted

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
LAYER = 10
FORMATS = ("csv", "log", "mapping", "letters", "markup", "directory")


def retrieval(width: int) -> Any:
    """Accuracy with and without the packaged policy, one panel per test format."""
    tables = load(ROOT / "results" / "evaluate-smollm2" / "results.json").tables
    styles = {"baseline": charts.Style(charts.BLACK), "with policy": charts.Style(charts.VERMILLION, "square")}
    panels = []
    for name in FORMATS:
        accuracy = tables[f"accuracy/formats/{name}"]
        rows = [
            {"variant": words, "x": int(size), "y": cell["mean"], "low": cell["low"], "high": cell["high"]}
            for words, variant in (("baseline", "baseline"), ("with policy", "smollm2"))
            for size, cell in accuracy[variant].items()
        ]
        x = charts.size_axis([16, 32, 64, 128], "items")
        y = charts.percent_axis("accuracy (%)")
        panels.append(charts.lines_panel(name, rows, x, y, styles, height=130))
    return charts.figure(*panels, columns=3, minimum=165, names=list(styles))


def dispersion(width: int) -> Any:
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
    x, half = charts.size_axis(sizes, "number of items n"), charts.rule("y", 50.0)
    share = charts.percent_axis("weight (%)")
    nats = charts.axis("y", "entropy (nats)", (-0.3, 10.3), values=list(range(0, 11, 2)), grid=True)
    return charts.figure(
        charts.lines_panel("Largest possible weight of one item", weights, x, share, styles, under=[half]),
        charts.lines_panel("Smallest possible entropy", entropies, x, nats, styles),
        names=list(styles),
    )


def frequencies(width: int) -> Any:
    """β of every rotary frequency of the heads of one layer."""
    heads = sm.load_policy("smollm2").to_dict()["policies"][LAYER]
    rows = [
        {"x": frequency, "y": head, "value": beta - 1.0}
        for head, policy in enumerate(heads)
        for frequency, beta in enumerate(policy["values"])
    ]
    tips = charts.tooltip(y="head", x="frequency", value="β − 1|+.2f")
    panel = charts.heat_panel(
        "", rows, "rotary frequency (0 turns fastest)", "head", "β − 1",
        domain=[-0.5, 0.5], tips=tips, diverging=True, height=220,
    )  # fmt: skip
    return charts.figure(panel, columns=1)


def folding(width: int) -> Any:
    """The model file and the policy, the same file with β in its query weights, and the engines that load it."""
    alt = charts.altair()
    engines = ("transformers", "vLLM", "llama.cpp", "Ollama")
    # Stage, place within the stage, half of the width on a phone, title, subtitle.
    boxes = [
        (0, -0.3, 1.2, "model", "checkpoint or GGUF"), (0, 2.3, 1.2, "policy", "numbers β"),
        (1, 1.0, 1.4, "sharpmax fold", "once: Wq becomes β·Wq"), (2, 1.0, 1.4, "sharper model", "same format and size"),
        *((3, place * 4 / 3 - 1.0, 0.64, name, "") for place, name in enumerate(engines)),
    ]  # fmt: skip
    joints = [(0, 2), (1, 2), (2, 3), *((3, 4 + place) for place in range(len(engines)))]
    phone = width <= PHONE
    tall = 0.28 if phone else 0.55
    cells = []
    for stage, place, wide, title, subtitle in boxes:
        x, y, half = (place, -stage, wide) if phone else (stage, -place, 0.41)
        shift = 0.11 if phone else 0.22
        texts = {"title": title, "subtitle": subtitle, "up": y + (shift if subtitle else 0.0), "down": y - shift}
        cells.append({"x": x, "y": y, "x1": x - half, "x2": x + half, "y1": y - tall, "y2": y + tall, **texts})
    lines = [
        {"x": a["x"], "y": a["y1"], "x2": b["x"], "y2": b["y2"] + 0.06} if phone
        else {"x": a["x2"], "y": a["y"], "x2": b["x1"] - 0.03, "y2": b["y"]}
        for a, b in ((cells[start], cells[end]) for start, end in joints)
    ]  # fmt: skip
    span = {"x": (-1.7, 3.7), "y": (-3.4, 0.4)} if phone else {"x": (-0.45, 3.45), "y": (-3.7, 1.7)}
    across, up = (alt.Scale(domain=list(span[name]), nice=False) for name in "xy")

    def at(x: str, y: str) -> dict[str, Any]:
        return {"x": alt.X(f"{x}:Q", axis=None, scale=across), "y": alt.Y(f"{y}:Q", axis=None, scale=up)}

    subtitled = alt.Chart(charts.data([cell for cell in cells if cell["subtitle"]]))
    links, places = alt.Chart(charts.data(lines)), alt.Chart(charts.data(cells))
    shape = "triangle-down" if phone else "triangle-right"
    return charts.figure(
        charts.panel(
            "",
            links.mark_rule(color=charts.SOFT, strokeWidth=1.5).encode(**at("x", "y"), x2="x2:Q", y2="y2:Q"),
            links.mark_point(shape=shape, filled=True, size=70, color=charts.SOFT, opacity=1).encode(**at("x2", "y2")),
            places.mark_rect(fill=charts.PANEL, stroke=charts.LINK, cornerRadius=5).encode(
                **at("x1", "y1"), x2="x2:Q", y2="y2:Q"
            ),
            places.mark_text(color=charts.INK, fontSize=11 if phone else 13, fontWeight=600).encode(
                **at("x", "up"), text="title:N"
            ),
            subtitled.mark_text(color=charts.SOFT, fontSize=11).encode(**at("x", "down"), text="subtitle:N"),
            height=330 if phone else 250,
        ),
        columns=1,
        around=10,
    )


FIGURES = {
    "retrieval": (
        retrieval,
        "Finding one entry among n, SmolLM2-135M",
        "Six formats the policy was never trained on; 200 prompts per point, 95% intervals.",
    ),
    "dispersion": (
        dispersion,
        "The more items, the less weight the best one can have",
        "Spread: largest minus smallest logit, in nats. The horizon is the n at which a curve crosses half of the "
        "weight (dashed).",
    ),
    "frequencies": (
        frequencies,
        f"What calibration learned for the 9 heads of layer {LAYER} of SmolLM2",
        "Each cell is β for one head and one rotary frequency. Red (β above 1) sharpens, blue (β below 1) flattens.",
    ),
    "folding": (
        folding,
        "Fold once, run anywhere",
        "β goes into the query weights. The engines load an ordinary file and need no plugin and no extra time.",
    ),
}


def draw(name: str, width: int = 760) -> str:
    """One figure as the text of an SVG file."""
    make, title, caption = FIGURES[name]
    spec = fitted(charts.titled(make(width), title, caption), width)
    lines = {"text": textwrap.wrap(title, width // 10), "subtitle": textwrap.wrap(caption, width * 10 // 66)}
    spec["title"] |= {**lines, "limit": width}
    return charts.svg_of(spec)


if __name__ == "__main__":
    for name in FIGURES:
        (IMAGES / f"{name}.svg").write_text(draw(name), encoding="utf-8")
        print(f"wrote docs/images/{name}.svg")
