"""One row of logits with more and more items: softmax disperses, policies keep it focused. Draws dispersion.png."""

import altair as alt
import torch

import sharpmax as sm

SPREAD = 4.0
POLICIES = {
    "softmax": None,
    "β ∝ ln n": sm.policies.LogLength(reference=16),
    "H = 1 nat": sm.policies.EntropyTarget(1.0),
}
sizes = [2**power for power in range(1, 17)]
generator = torch.Generator().manual_seed(0)
top: dict[str, list[float]] = {name: [] for name in POLICIES}

print("weight of the best item, which leads by 3 nats or more")
print("   items   possible", *(f"{name:>10}" for name in POLICIES))
for n in sizes:
    logits = torch.cat((torch.tensor([SPREAD]), torch.rand(n - 1, generator=generator)))
    for name, policy in POLICIES.items():
        top[name].append(float(sm.softmax(logits, policy=policy)[0]))
    _, most = sm.theory.weight_bounds(SPREAD, n)
    print(f"{n:8,d} {most:10.4f}", *(f"{weights[-1]:10.4f}" for weights in top.values()))
print(f"without a policy, no item can have half of the weight beyond {int(sm.horizon(SPREAD))} items")

top["largest possible for softmax"] = sm.theory.weight_bounds(SPREAD, torch.tensor(sizes))[1].tolist()
rows = [
    {"policy": name, "items": n, "weight": w}
    for name, weights in top.items()
    for n, w in zip(sizes, weights, strict=True)
]
lines = alt.Chart(alt.Data(values=rows)).mark_line(point=True)
chart = lines.encode(
    x=alt.X("items:Q", scale=alt.Scale(type="log")),
    y=alt.Y("weight:Q", title="weight of the best item"),
    color=alt.Color("policy:N", title=None),
)
chart = chart.properties(title="Softmax disperses; policies keep it focused", width=480, height=300)
chart.save("dispersion.png", scale_factor=2)
print("wrote dispersion.png")
