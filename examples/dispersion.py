"""One row of logits, more and more items: softmax disperses, and policies answer. Draws dispersion.png."""

import matplotlib.pyplot as plt
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
print(f"half of the weight: never beyond {int(sm.horizon(SPREAD))} items without a policy")

figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
for name, weights in top.items():
    axes.plot(sizes, weights, marker="o", markersize=3, label=name)
axes.plot(sizes, sm.theory.weight_bounds(SPREAD, torch.tensor(sizes))[1], "k--", label="largest possible for softmax")
axes.axvline(sm.horizon(SPREAD), color="grey", linewidth=0.8)
axes.set(xscale="log", xlabel="items", ylabel="weight of the best item", title="Softmax disperses; policies answer")
axes.legend()
figure.savefig("dispersion.png", dpi=150)
print("wrote dispersion.png")
