"""`probe`: find the heads that lose focus as inputs grow."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpmax.errors import ArgumentError, reject, reject_type
from sharpmax.files import display_name
from sharpmax.integrations.transformers.application import policy_of
from sharpmax.integrations.transformers.support import check_model
from sharpmax.lazy import require
from sharpmax.models.language import (
    ALIASES,
    DTYPES,
    LanguageModel,
    check_tokenizer,
    context_of,
    load_language_model,
    quiet,
)
from sharpmax.probing.capture import check_choice
from sharpmax.probing.findings import RULE, Findings, heads_table, tables_of, verdict
from sharpmax.probing.forecast import forecast_of, forecast_work
from sharpmax.probing.inputs import TEXT, Passage, ProbeInputs, own_inputs, task_inputs, text_inputs
from sharpmax.probing.measurement import Progress, measure
from sharpmax.results import FILE_NAME, collect
from sharpmax.tasks.prompt import Task
from sharpmax.tasks.registry import TASKS, get_task
from sharpmax.tasks.text import plain_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_model(name: str, *, device: str = "cpu", dtype: str = "float32") -> LanguageModel:
    """Load a model with its tokenizer as `load_language_model` does, or an encoder such as BERT."""
    try:
        return load_language_model(name, device=device, dtype=dtype)
    except ArgumentError as problem:
        if name in ALIASES:
            raise
        transformers = require("transformers", "hf", "a model to probe")
        place = Path(name).expanduser()
        options = {"local_files_only": place.exists()}
        with quiet():
            try:
                tokenizer = transformers.AutoTokenizer.from_pretrained(str(place), **options)
                model = transformers.AutoModel.from_pretrained(
                    str(place), dtype=DTYPES[dtype], use_safetensors=True, **options
                )
            except Exception:
                raise problem from None  # the error of the causal language model says what is wrong
        return LanguageModel(name, model.to(device).eval().requires_grad_(False), tokenizer)


@dataclass(frozen=True, eq=False, repr=False)
class ProbeResult:
    """Which heads of a model lose focus as inputs grow, where, and how well that can be forecast."""

    setting: Mapping[str, Any]
    findings: Mapping[str, Findings]
    """By task."""

    @property
    def verdict(self) -> list[str]:
        """Three sentences: how many heads lose focus, in which layers, and the error of the forecast."""
        return verdict(str(self.setting["model"]), list(self.findings.values()))

    def heads(self, task: str | None = None) -> dict[str, Any]:
        """Every head by its name, "layer.head", on one task (by default the first): kind, slope, curve, forecast."""
        if task is not None and task not in self.findings:
            reject("task", repr(task), f"one of {list(self.findings)}")
        return heads_table(self.findings[task or next(iter(self.findings))])

    def tables(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        tables: dict[str, Any] = {"setting": dict(self.setting), "verdict": self.verdict}
        for task, found in self.findings.items():
            tables |= {f"{kind}/{task}": table for kind, table in tables_of(found).items()}
        return tables

    def show(self) -> None:
        """Print the verdict, and how many heads of each kind there are on each task."""
        print(self)

    def __str__(self) -> str:
        counts = {task: Counter(found.kinds.flat) for task, found in self.findings.items()}
        kinds = {task: ", ".join(f"{many} {kind}" for kind, many in one.most_common()) for task, one in counts.items()}
        return "\n".join([*self.verdict, *(f"Heads on {task}: {words}." for task, words in kinds.items())])

    def __repr__(self) -> str:
        return f"ProbeResult({self.setting['model']!r}, tasks={list(self.findings)})\n" + "\n".join(self.verdict)

    def to_frame(self) -> Any:
        """Return a pandas frame with a row for each task, layer, head and size."""
        pandas = require("pandas", "frame", "ProbeResult.to_frame")
        rows = []
        for task in self.findings:
            for name, about in self.heads(task).items():
                layer, _, head = name.partition(".")
                own = {"task": task, "layer": int(layer), "head": int(head)}
                own |= {key: about[key] for key in ("kind", "slope", "slope_low", "slope_high")}
                own["horizon"] = about["horizon"]["tokens"]
                for size, values in about["curve"].items():
                    predicted = about["forecast"].get(size, {})
                    more = {f"forecast_{key}": predicted.get(key) for key in ("entropy", "top")}
                    rows.append({**own, "size": int(size), **values, **more})
        return pandas.DataFrame(rows)

    def save(self, folder: str | Path) -> Path:
        """Write `results.json` into a folder, as `sharpmax probe` does, and return its path."""
        results = collect(f"sharpmax.probe({self.setting['model']})", self.tables(), seed=self.setting["seed"])
        return results.save(Path(folder) / FILE_NAME)


def probe(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    tasks: Sequence[str | Task] | None = None,
    sizes: Sequence[int] | None = None,
    prompts: int | None = None,
    rows: str = "last",
    inputs: Mapping[int, Sequence[Mapping[str, Any]]] | None = None,
    text: str | None = None,
    name: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> ProbeResult:
    """Let a transformers model read prompts of growing size, and report which of its heads disperse.

    `tasks` are names of tasks, tasks, or "text" for plain text; by default kv and text for a causal language model
    and text for others. Sizes are items of a task and tokens of text; by default those of the task, and text that
    doubles, up to the context of the model. By default 12 prompts of each size are read, of long ones fewer. `rows`
    selects the rows whose statistics count ("last", "log" or "all", of which the mean). `text` replaces Python's
    documentation. A policy that is applied takes effect.

    `inputs` are the caller's own, for any family: by size, one or several dicts that the model is called with. Every
    sequence in them is a prompt; padding belongs before it, or the last row is padding.

    Slopes, kinds but for "local", top weights and horizons mean the same in every family, and can be compared between
    models that read inputs of the same sizes. "sink" is about the first key, in BERT and ViT a class token. "local" is
    about the keys just before the last row, a kind of causal models alone. Sizes of items or of image patches cannot be
    compared with tokens. Forecasts by key replication need a causal model that takes `position_ids`; other models get
    forecasts by lines.
    """
    check_model(model)
    check_choice(rows)
    if prompts is not None and (type(prompts) is not int or prompts < 1):
        reject("prompts", repr(prompts), "a whole number from 1, or None")
    causal = True in {module.is_causal for module in model.modules() if hasattr(module, "is_causal")}
    notify = progress or (lambda what, done, total, remark: None)
    if inputs is not None:
        if tasks is not None or sizes is not None:
            reject("inputs", "inputs together with tasks or sizes", "one or the other")
        read = [own_inputs(inputs)]
    else:
        tokenizer = check_tokenizer(tokenizer, "or give inputs of your own: inputs={size: [{'input_ids': ids}, …]}")
        notify("preparing prompts", 0, 0, "")
        read = _inputs(model, tokenizer, tasks, sizes, prompts, text, seed, causal)
    replicates = rows == "last" and causal and "position_ids" in inspect.signature(model.forward).parameters
    total = sum(passage.work for one in read for passages in one.passages.values() for passage in passages)
    total, done = total + sum(forecast_work(one) for one in read if replicates), 0

    def step(what: str, one: ProbeInputs) -> Callable[[Passage, int], None]:
        def after(passage: Passage, size: int) -> None:
            nonlocal done
            done += passage.work
            notify(f"{what} {one.task}", done, total, f"{size:,} {one.unit}")

        return after

    found = {}
    with _evaluating(model):
        for one in read:
            readings = measure(model, one, rows, step("reading", one))
            forecast = forecast_of(model, one, readings, step("forecasting", one) if replicates else None)
            found[one.task] = Findings.of(one, readings, causal, forecast, seed)
    return ProbeResult(_setting(model, name, read, found, rows, seed), found)


def _inputs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str | Task] | None,
    sizes: Sequence[int] | None,
    prompts: int | None,
    text: str | None,
    seed: int,
    causal: bool,
) -> list[ProbeInputs]:
    context = context_of(model)
    for size in sizes or ():
        if type(size) is not int or size < 1:
            reject("sizes", repr(size), "whole numbers from 1")
    sizes = None if sizes is None else sorted(set(sizes))
    tasks = (("kv", TEXT) if causal else (TEXT,)) if tasks is None else tasks
    if isinstance(tasks, str) or not isinstance(tasks, Sequence):
        if isinstance(tasks, str):
            reject_type("tasks", repr(tasks), "a list of tasks", f"write tasks=[{tasks!r}]")
        reject_type("tasks", type(tasks).__name__, "a list of tasks")
    found = []
    for task in tasks:
        if task == TEXT:
            plain = plain_text("test") if text is None else text
            found.append(text_inputs(plain, tokenizer, context, sizes, prompts, causal=causal))
        else:
            if isinstance(task, str):
                check_task(task)
            chosen = task if isinstance(task, Task) else get_task(task)
            found.append(task_inputs(chosen, tokenizer, context, sizes, prompts, seed))
    names = [one.task for one in found]
    if not names or len(set(names)) < len(names):
        reject("tasks", names, "one or several tasks, each once")
    for one in found:
        if len(one.sizes) < 2:
            reject("sizes", f"{list(one.sizes)} for {one.task!r}", "two sizes or more: a slope needs them")
    return found


def check_task(name: str) -> None:
    """Refuse what is neither the name of a task, "text" nor a file."""
    if name != TEXT and name not in TASKS and not Path(name).is_file():
        reject("task", repr(name), f"one of {[*sorted(TASKS), TEXT]} or the path of a Python file that defines TASK")


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode inside the block; afterwards every module is in its mode of before."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(False)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _setting(
    model: PreTrainedModel,
    name: str | None,
    inputs: Sequence[ProbeInputs],
    found: Mapping[str, Findings],
    rows: str,
    seed: int,
) -> dict[str, Any]:
    layers, heads = next(iter(found.values())).kinds.shape
    policy = policy_of(model)
    return {
        "model": name or display_name(model.name_or_path or type(model).__name__),
        "family": str(model.config.model_type),
        "layers": layers,
        "heads": heads,
        "tasks": [one.task for one in inputs],
        "sizes": {one.task: list(one.sizes) for one in inputs},
        "unit": {one.task: one.unit for one in inputs},
        "prompts_of_size": {task: {str(size): n for size, n in one.prompts.items()} for task, one in found.items()},
        "rows": rows,
        "seed": seed,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "policy": None if policy is None else policy.describe(),
        "context": context_of(model),
        "fit_up_to": {one.task: one.fit_up_to for one in inputs},
        "kind_rule": dict(RULE),
    }
