"""A small decoder learns to find the largest of 16 numbers. Its heads are observed, and QK-clip keeps logits small.

Writes training/results.json. `sharpmax report training` draws a heat map of heads over steps.
"""

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from sharpmax.integrations.trainer import AttentionObserver, QKClip

NUMBERS, ITEMS, STEPS, TAU = 64, 16, 240, 20.0
SHADES = "█▓▒░ "


def train(clipped: bool) -> tuple[AttentionObserver, QKClip, float]:
    """Train one model; return its observer, its clip and the accuracy at the end."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=NUMBERS + 1, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).train()
    clip = QKClip(model, TAU)
    every, out = (1, "training") if clipped else (20, None)
    observer = AttentionObserver(model, every=every, out=out, clip=clip if clipped else None)
    # The learning rate of queries and keys is too high on purpose: without a clip, their logits explode.
    fast = [weight for name, weight in model.named_parameters() if "q_proj" in name or "k_proj" in name]
    slow = [weight for name, weight in model.named_parameters() if "q_proj" not in name and "k_proj" not in name]
    optimizer = torch.optim.AdamW([{"params": fast, "lr": 0.1}, {"params": slow, "lr": 3e-3}])
    right = []
    for _ in range(STEPS):
        items = torch.randint(NUMBERS, (64, ITEMS))
        asked = torch.full((64, 1), NUMBERS)
        with observer.step():  # forward, backward and optimizer step
            logits = model(torch.cat([items, asked], dim=1)).logits[:, -1]
            F.cross_entropy(logits, items.amax(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        right.append((logits.argmax(-1) == items.amax(1)).float().mean().item())
    return observer, clip, sum(right[-20:]) / 20


print(f"the largest of {ITEMS} numbers, {STEPS} steps")
for clipped in (False, True):
    observer, clip, accuracy = train(clipped)
    largest = max(max(row) for row in observer.history[-1].max_logit)
    name = f"QK-clip at {TAU:g}" if clipped else "no clip"
    print(f"{name:15} accuracy {accuracy:.0%}, largest logit {largest:,.0f}, heads clipped {len(clip.clipped)} times")

observer.save()
print("\nentropy of each head over the steps: █ collapsed (one key), blank dispersed (all keys equal)")
for layer in range(2):
    for head in range(4):
        shares = [one.relative_entropy[layer][head] for one in observer.history[::5]]
        print(f"layer {layer} head {head}  " + "".join(SHADES[min(4, int(5 * share))] for share in shares))
