"""`probe`: find the heads that lose focus as inputs grow."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
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
from sharpmax.probing.findings import RULE, Findings, findings_of, forecast_of, read_for_forecast
from sharpmax.probing.inputs import TEXT, Material, Passage, own_material, task_material, text_material
from sharpmax.probing.measurement import Progress, measure, work
from sharpmax.probing.summary import (
    Sheet,
    as_html,
    as_text,
    chain_table,
    forecast_sheet,
    forecast_table,
    heads_table,
    layers_sheet,
    layers_table,
    verdict,
)
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
    except ArgumentError:
        encoder = None if name in ALIASES else _encoder(name, device, dtype)
        if encoder is None:
            raise
        return encoder


def _encoder(name: str, device: str, dtype: str) -> LanguageModel | None:
    transformers = require("transformers", "hf", "a model to probe")
    place = Path(name).expanduser()
    options = {"local_files_only": place.exists()}
    with quiet():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(place), **options)
            model = transformers.AutoModel.from_pretrained(
                str(place), dtype=DTYPES[dtype], use_safetensors=True, **options
            )
            return LanguageModel(name, model.to(device).eval().requires_grad_(False), tokenizer)
        except Exception:  # why it is no causal language model is then what has to be said
            return None


@dataclass(frozen=True, eq=False)
class ProbeResult:
    """Which heads of a model lose focus as inputs grow, where, and how well that can be foreseen."""

    setting: Mapping[str, Any]
    findings: Mapping[str, Findings]
    """By task."""

    @property
    def verdict(self) -> list[str]:
        """Three sentences that say it all."""
        return verdict(str(self.setting["model"]), list(self.findings.values()))

    def heads(self, task: str | None = None) -> dict[str, Any]:
        """Every head by its name, "layer.head", on one task (the first unless told): kind, slope, curve, forecast."""
        return heads_table(self._of(task))

    def tables(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        tables: dict[str, Any] = {"setting": dict(self.setting), "verdict": self.verdict}
        for task, found in self.findings.items():
            tables[f"heads/{task}"] = heads_table(found)
            tables[f"layers/{task}"] = layers_table(found)
            if (errors := forecast_table(found)) is not None:
                tables[f"forecast/{task}"] = errors
            tables[f"chain/{task}"] = chain_table(found)
        return tables

    def sheets(self) -> list[Sheet]:
        """The small tables that are shown."""
        found = [sheet for one in self.findings.values() for sheet in (layers_sheet(one), forecast_sheet(one))]
        return [sheet for sheet in found if sheet is not None]

    def show(self) -> None:
        """Print the verdict and the small tables."""
        print(self)

    def __str__(self) -> str:
        return "\n\n".join(["\n".join(self.verdict), *map(as_text, self.sheets())])

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in self.verdict)
        return f"<ol>{sentences}</ol>" + "".join(map(as_html, self.sheets()))

    def to_frame(self) -> Any:
        """A pandas frame: a row for each task, layer, head and size."""
        pandas = require("pandas", "frame", "ProbeResult.to_frame")
        rows = []
        for task, found in self.findings.items():
            for name, about in heads_table(found).items():
                layer, _, head = name.partition(".")
                own = {"task": task, "layer": int(layer), "head": int(head), "kind": about["kind"]}
                own |= {key: about[key] for key in ("slope", "slope_low", "slope_high")}
                own["horizon"] = about["horizon"]["tokens"]
                for size, values in about["curve"].items():
                    foretold = about["forecast"].get(size, {})
                    more = {f"forecast_{key}": foretold.get(key) for key in ("entropy", "top")}
                    rows.append({**own, "size": int(size), **values, **more})
        return pandas.DataFrame(rows)

    def save(self, folder: str | Path) -> Path:
        """Write `results.json` into a folder, as `sharpmax probe` does, and name it; `sharpmax report` draws it."""
        results = collect(f"sharpmax.probe({self.setting['model']})", self.tables(), seed=self.setting["seed"])
        return results.save(Path(folder) / FILE_NAME)

    def _of(self, task: str | None) -> Findings:
        if task is None:
            return next(iter(self.findings.values()))
        if task not in self.findings:
            reject("task", repr(task), f"one of {list(self.findings)}")
        return self.findings[task]


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
    """Let a transformers model read prompts of growing size, and say which of its heads disperse.

    `tasks` are names of tasks, tasks, or "text" for plain text; without any, kv and text for a causal language model
    and text for others. Sizes are items of a task and tokens of text: those of the task, and text that doubles, up to
    what the model is made for, unless `sizes` says otherwise. Of each size 12 prompts are read, of long ones fewer,
    unless `prompts` says how many. `rows` is whose statistics count ("last", "log" or "all", of which the mean).
    `text` takes the place of Python's documentation. A policy that is applied takes part.

    `inputs` are the caller's own, for any family: by size, one or several dicts that the model is called with. Every
    sequence in them is a prompt; padding belongs before it, or the last row is padding.

    Slopes, kinds but for "local", top weights and horizons mean the same in every family, and can be compared between
    models that read inputs of the same sizes. "sink" is about the first key, in BERT and ViT a class token. "local" is
    about the keys just before the last row, so that it is a kind of causal models alone. Sizes of items or of image
    patches cannot be compared with tokens, and random weights say nothing of trained ones. Forecasts by crowding need
    a causal model that takes `position_ids`; others have lines.
    """
    check_model(model)
    check_choice(rows)
    if prompts is not None and (type(prompts) is not int or prompts < 1):
        reject("prompts", repr(prompts), "a whole number from 1, or None")
    causal = _looks_back(model)
    tell = progress or (lambda what, done, total, remark: None)
    if inputs is not None:
        if tasks is not None or sizes is not None:
            reject("inputs", "inputs together with tasks or sizes", "one or the other")
        materials = [own_material(inputs)]
    else:
        tokenizer = check_tokenizer(tokenizer, "or give inputs of your own: inputs={size: [{'input_ids': ids}, …]}")
        tell("preparing prompts", 0, 0, "")
        materials = _materials(model, tokenizer, tasks, sizes, prompts, text, seed, causal)
    crowds = rows == "last" and causal and "position_ids" in inspect.signature(model.forward).parameters
    step = _Steps(tell, sum(_work(one, crowds) for one in materials))
    with _at_rest(model):
        found = {one.task: _find(model, one, rows, causal, crowds, seed, step) for one in materials}
    return ProbeResult(_setting(model, name, materials, found, rows, seed), found)


class _Steps:
    """Progress over everything there is to read."""

    def __init__(self, tell: Progress, total: int) -> None:
        self._tell, self._total, self._done = tell, total, 0

    def __call__(self, what: str, length: int, remark: str) -> None:
        self._done += work(length)
        self._tell(what, self._done, self._total, remark)


def _materials(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str | Task] | None,
    sizes: Sequence[int] | None,
    prompts: int | None,
    text: str | None,
    seed: int,
    causal: bool,
) -> list[Material]:
    room = context_of(model)
    if sizes is not None:
        _check_sizes(sizes)
        sizes = sorted(set(sizes))
    if isinstance(tasks, (str, Task)):
        given = repr(tasks) if isinstance(tasks, str) else "a Task"
        reject_type("tasks", given, "a list of tasks", f"write tasks=[{given}]")
    if tasks is not None and not isinstance(tasks, Sequence):
        reject_type("tasks", type(tasks).__name__, "a list of tasks")
    found = []
    for task in tasks if tasks is not None else ("kv", TEXT) if causal else (TEXT,):
        if task == TEXT:
            plain = plain_text("test") if text is None else text
            found.append(text_material(plain, tokenizer, room, sizes, prompts, causal=causal))
        else:
            if isinstance(task, str):
                check_task(task)
            chosen = task if isinstance(task, Task) else get_task(task)
            found.append(task_material(chosen, tokenizer, room, sizes, prompts, seed))
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


def _check_sizes(sizes: Sequence[int]) -> None:
    for size in sizes:
        if type(size) is not int or size < 1:
            reject("sizes", repr(size), "whole numbers from 1")


def _looks_back(model: PreTrainedModel) -> bool:
    """Whether rows see nothing that comes after them."""
    return True in {module.is_causal for module in model.modules() if hasattr(module, "is_causal")}


def _find(
    model: PreTrainedModel, material: Material, rows: str, causal: bool, crowds: bool, seed: int, step: _Steps
) -> Findings:
    def done(passage: Passage, size: int) -> None:
        step(f"reading {material.task}", passage.length, f"{size:,} {material.unit}")

    def foretold(passage: Passage, size: int) -> None:
        step(f"forecasting {material.task}", passage.length, f"{size:,} {material.unit}")

    readings = measure(model, material, rows, done)
    forecast = forecast_of(model, material, readings, foretold if crowds else None)
    return findings_of(material, readings, causal, forecast, seed)


def _work(material: Material, crowds: bool) -> int:
    plain = sum(work(one.length) for passages in material.passages.values() for one in passages)
    return plain + sum(work(one.length) for one in read_for_forecast(material) if crowds)


@contextmanager
def _at_rest(model: PreTrainedModel) -> Iterator[None]:
    """Without dropout for a while."""
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
    materials: Sequence[Material],
    found: Mapping[str, Findings],
    rows: str,
    seed: int,
) -> dict[str, Any]:
    def by_task(value: Callable[[Material], Any]) -> dict[str, Any]:
        return {one.task: value(one) for one in materials}

    layers, heads = next(iter(found.values())).slope.shape
    policy = policy_of(model)
    return {
        "model": name or display_name(model.name_or_path or type(model).__name__),
        "family": str(model.config.model_type),
        "layers": layers,
        "heads": heads,
        "tasks": [one.task for one in materials],
        "sizes": by_task(lambda one: list(one.sizes)),
        "unit": by_task(lambda one: one.unit),
        "prompts_of_size": by_task(lambda one: {str(size): n for size, n in found[one.task].prompts.items()}),
        "rows": rows,
        "seed": seed,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "policy": None if policy is None else policy.describe(),
        "context": context_of(model),
        "fit_up_to": by_task(lambda one: one.fit_up_to),
        "kind_rule": dict(RULE),
    }
