"""Which heads of a language model lose focus when a list grows from 8 names to 64: a map in the terminal."""

import math

import torch

import sharpmax as sm
from sharpmax.models.language import load_language_model
from sharpmax.models.scoring import encode
from sharpmax.tasks.registry import get_task

SIZES = (8, 64)
SHADES = " ░▒▓█"

smol = load_language_model("smollm2")
entropy: dict[int, torch.Tensor] = {}
tokens: dict[int, int] = {}
for size in SIZES:
    measured = []
    for prompt in get_task("kv").prompts(size, count=2, seed=0):
        ids = torch.tensor([encode(smol.tokenizer, prompt).ids])
        with torch.no_grad(), sm.capture(smol.model) as rows:  # the last row predicts the answer
            smol.model(ids)
        measured.append(rows.stack("entropy")[:, 0, :, -1])
        tokens[size] = ids.shape[1]
    entropy[size] = torch.stack(measured).mean(0)

few, many = SIZES
slope = (entropy[many] - entropy[few]) / math.log(tokens[many] / tokens[few])
print(f"{len(slope)} layers as rows, {slope.shape[1]} heads as columns")
print("the darker, the faster the entropy of the head rises with the length: █ is full dispersion\n")
for layer, heads in enumerate(slope):
    steps = (heads.clamp(0, 0.99) * len(SHADES)).long().tolist()
    print(f"layer {layer:2}  " + "".join(2 * SHADES[step] for step in steps))

layer, head = divmod(int(slope.argmax()), slope.shape[1])
shared = [float(entropy[size][layer, head].exp()) for size in SIZES]
print(f"\n{int((slope > 0.5).sum())} of {slope.numel()} heads have a slope above one half")
print(f"steepest: layer {layer}, head {head}: its weight is shared by {shared[0]:.0f} tokens, then by {shared[1]:.0f}")
