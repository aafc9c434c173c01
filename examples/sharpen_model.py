"""SmolLM2 finds numbers in a list of names, with and without its packaged policy."""

import sharpmax as sm
from sharpmax.models.language import load_language_model
from sharpmax.models.scoring import encode, judge
from sharpmax.tasks.registry import get_task

PROMPTS = 4

smol = load_language_model("smollm2")
task = get_task("kv")
print("a prompt of 3 names:", task.prompts(size=3, count=1, seed=0)[0].user, sep="\n", end="\n\n")

print(f"correct answers of {PROMPTS}")
print("names   baseline    with policy")
for size in (8, 20):
    lists = [encode(smol.tokenizer, prompt) for prompt in task.prompts(size, PROMPTS, seed=1)]
    plain = sum(answer.right for answer in judge(smol.model, lists))
    with sm.applied(smol.model, "smollm2"):  # no weight changes; the block removes the policy
        sharp = sum(answer.right for answer in judge(smol.model, lists))
    print(f"{size:5d} {plain:13d} {sharp:13d}")
