"""`probe`: find the heads that lose focus as inputs grow."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sharpmax.errors import ArgumentError, reject, reject_type
from sharpmax.files import display_name
from sharpmax.integrations.torch_modules import evaluating, observable_sites
from sharpmax.integrations.transformers.application import policy_of
from sharpmax.integrations.transformers.interface import installed
from sharpmax.integrations.transformers.support import check_model, is_torch_module
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
from sharpmax.probing.capture import LOCAL, check_choice
from sharpmax.probing.forecast import Forecast, forecast_of, replicated_reads
from sharpmax.probing.measurement import (
    TEXT,
    Numbers,
    ProbeInputs,
    Progress,
    Readings,
    finite_or_none,
    fit,
    measure,
    own_inputs,
    task_inputs,
)
from sharpmax.results import FILE_NAME, collect
from sharpmax.tasks.prompt import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HALF = 0.5
"""The share of the weight, or of the keys, that decides the kind of a head."""

DISPERSES = 0.25
"""Slope of entropy against ln n, a quarter of that of a uniform head. If inputs grow eightfold, as from the sizes that
forecasts are fitted to to those they are tested on, the effective number of keys then grows by a factor of 1.7."""

RULE: Mapping[str, str] = MappingProxyType(
    {
        "uniform": f"at the largest size the weight is spread over {HALF:.0%} or more of all keys, in effect",
        "sink": f"otherwise, at the largest size the first key has {HALF:.0%} or more of the weight",
        "local": f"otherwise, at the largest size the last {LOCAL} keys have {HALF:.0%} or more of the weight "
        f"(causal models, rows of more than {2 * LOCAL} keys)",
        "dispersing": f"otherwise, entropy rises with ln n by a slope of {DISPERSES} or more",
        "sharp": "otherwise: the head attends to about as many keys at every size",
    }
)
"""The kinds of heads and their conditions, checked in this order."""

_SHOWN = ("count", "entropy", "top", "sink", "spread", "local", "effective")


def load_model(name: str, *, device: str = "cpu", dtype: str = "float32") -> LanguageModel:
    """Load a language model as `load_language_model` does, or an encoder such as BERT, with its tokenizer."""
    try:
        return load_language_model(name, device=device, dtype=dtype)
    except ArgumentError as problem:
        if name in ALIASES:
            raise
        transformers = require("transformers", "hf", "a model to probe")
        place = Path(name).expanduser()
        options: dict[str, Any] = {"local_files_only": place.exists()}
        try:
            with quiet():
                tokenizer = transformers.AutoTokenizer.from_pretrained(str(place), **options)
                options |= {"dtype": DTYPES[dtype], "use_safetensors": True}
                model = transformers.AutoModel.from_pretrained(str(place), **options)
        except Exception:
            raise problem from None  # this one says what is wrong with the name
        return LanguageModel(name, model.to(device).eval().requires_grad_(False), tokenizer)


def kinds_of(slope: Numbers, last: Mapping[str, Numbers], causal: bool) -> NDArray[Any]:
    """Return the kind of every head from its slope and its statistics at the largest size, all `[layers, heads]`.

    A head without numbers is "unknown". Only heads of `causal` models can be "local": elsewhere the last keys are not
    the nearest. Without a causal mask, "sink" is about whatever comes first, such as a class token.
    """
    asked = {
        "uniform": np.exp(last["entropy"]) >= HALF * last["count"],
        "sink": last["sink"] >= HALF,
        "local": (last["local"] >= HALF) & (last["count"] > 2 * LOCAL) & causal,
        "dispersing": slope >= DISPERSES,
    }
    found = np.select(list(asked.values()), list(asked), default="sharp")
    return np.where(np.isnan(last["entropy"]) | np.isnan(slope), "unknown", found)


def tables_of(
    inputs: ProbeInputs, readings: Readings, causal: bool, forecast: Forecast | None, seed: int
) -> dict[str, Any]:
    """Return the tables of one task: kind, slope, curve, forecast and horizon of heads, slope and rank of layers.

    Slopes and horizons have 95% intervals. The forecast has its errors at the sizes it was not fitted to: median, 90th
    percentile and bias over heads.
    """
    curves, slopes, horizons = fit(readings, inputs.nested, HALF, seed)
    kinds = kinds_of(slopes[0], {name: values[-1] for name, values in curves.items()}, causal)
    predicted = {} if forecast is None else forecast.values
    heads = {}
    for layer, head in np.argwhere(curves["count"][-1] > 0).tolist():

        def at(values: Numbers, place: tuple[int, int] = (layer, head)) -> float | None:
            return finite_or_none(values[place])

        heads[f"{layer}.{head}"] = {
            "kind": str(kinds[layer, head]),
            **dict(zip(("slope", "slope_low", "slope_high"), map(at, slopes), strict=True)),
            "curve": {
                str(size): {name: at(curves[name][place]) for name in _SHOWN} for place, size in enumerate(readings)
            },
            "forecast": {
                str(size): {name: at(values[name]) for name in ("entropy", "top")} for size, values in predicted.items()
            },
            "horizon": dict(zip(("tokens", "low", "high"), map(at, horizons), strict=True)),
        }
    by_layer = np.ma.masked_invalid(slopes[0]).mean(1).filled(np.nan)
    order = sorted(np.flatnonzero(np.isfinite(by_layer)).tolist(), key=lambda layer: -by_layer[layer])
    ranks = {layer: rank for rank, layer in enumerate(order, 1)}
    layers = {
        str(layer): {"slope": finite_or_none(slope), "rank": ranks.get(layer)} for layer, slope in enumerate(by_layer)
    }
    tables: dict[str, Any] = {"heads": heads, "layers": layers}
    if forecast is not None:
        tested = {}
        for size, values in predicted.items():
            cell: dict[str, Any] = {}
            for name in ("entropy", "top"):
                apart = values[name] - curves[name][inputs.sizes.index(size)]
                apart = apart[np.isfinite(apart)]
                cell["heads"] = len(apart)
                cell[name] = dict.fromkeys(("median", "p90", "bias"))
                if len(apart):
                    median, p90 = np.quantile(np.abs(apart), [0.5, 0.9])
                    cell[name] = {"median": float(median), "p90": float(p90), "bias": float(apart.mean())}
            tested[str(size)] = cell
        tables["forecast"] = {"method": forecast.method, "fitted": list(forecast.fitted), "tested": tested}
    return tables


@dataclass(frozen=True, eq=False, repr=False)
class ProbeResult:
    """Which heads of a model lose focus as inputs grow, in which layers, and how well that can be forecast."""

    setting: Mapping[str, Any]
    findings: Mapping[str, Mapping[str, Any]]
    """The tables of heads, of layers and of the forecast, if there is one, as plain JSON values by task."""

    @property
    def verdict(self) -> list[str]:
        """Three sentences: how many heads lose focus, in which layers, and the error of the forecast."""
        task, *others = self.findings
        heads, layers = self.heads(task).values(), self.findings[task]["layers"]
        sizes, unit = self.setting["sizes"][task], self.setting["unit"][task]
        known = sum(about["slope"] is not None for about in heads)
        lost = (
            f"{self._losing(task)} of {self.setting['model']}'s {known:,} heads lose focus as inputs grow from "
            f"{sizes[0]:,} to {sizes[-1]:,} {unit}{''.join(f'; on {other} {self._losing(other)}' for other in others)}."
        )
        ranked = sorted((about["rank"], layer) for layer, about in layers.items() if about["rank"])
        steepest = ", ".join(layer for _, layer in ranked[:3]) or "none"
        sharp = [
            sum((about["curve"][str(size)]["top"] or 0) >= HALF for about in heads) for size in (sizes[0], sizes[-1])
        ]
        where = (
            f"Layers that disperse most: {steepest} of {len(layers)}. Heads with half of their weight on one token: "
            f"{sharp[0]:,} in the smallest inputs, {sharp[1]:,} in the largest."
        )
        tested = self.findings[task].get("forecast", {}).get("tested", {})
        off = tested[str(sizes[-1])]["entropy"] if tested else {"median": None}
        if off["median"] is None:
            return [lost, where, "There is no forecast: it needs two sizes to fit, a larger one to test, and numbers."]
        apart = f"{off['median']:.2f} nats (median head) and {off['p90']:.2f} (90th percentile)"
        fitted = self.setting["fit_up_to"][task]
        return [lost, where, f"Forecast from sizes up to {fitted:,}, entropy at {sizes[-1]:,} is off by {apart}."]

    def _losing(self, task: str) -> str:
        """The number and share of heads that are dispersing or uniform."""
        known = [about["kind"] for about in self.heads(task).values() if about["slope"] is not None]
        many = sum(kind in ("dispersing", "uniform") for kind in known)
        return f"{many:,} ({many / max(1, len(known)):.0%})"

    def heads(self, task: str | None = None) -> dict[str, Any]:
        """Kind, slope, curve and forecast of every head by name, "layer.head", on a task (default: the first)."""
        if task is not None and task not in self.findings:
            reject("task", repr(task), f"one of {list(self.findings)}")
        return dict(self.findings[task or next(iter(self.findings))]["heads"])

    def tables(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        tables = {f"{kind}/{task}": table for task, found in self.findings.items() for kind, table in found.items()}
        return {"setting": dict(self.setting), "verdict": self.verdict, **tables}

    def show(self) -> None:
        """Print the verdict and the number of heads of each kind on each task."""
        print(self)

    def __str__(self) -> str:
        lines = self.verdict
        for task in self.findings:
            kinds = Counter(about["kind"] for about in self.heads(task).values())
            lines.append(f"Heads on {task}: {', '.join(f'{many} {kind}' for kind, many in kinds.most_common())}.")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"ProbeResult({self.setting['model']!r}, tasks={list(self.findings)})\n" + "\n".join(self.verdict)

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with a row for each task, layer, head and size."""
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
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    tasks: Sequence[str | Task] | None = None,
    sizes: Sequence[int] | None = None,
    prompts: int | None = None,
    rows: str = "last",
    inputs: Mapping[int, Any] | None = None,
    text: str | None = None,
    name: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> ProbeResult:
    """Measure the attention of a model on inputs of growing size, and report which of its heads disperse.

    `tasks` are tasks, their names, or "text" for plain text; by default kv and text for a causal language model, text
    for other models. `sizes` count items of a task and tokens of text; by default those of the task, and text that
    doubles, up to the context of the model. `prompts` of each size are read, by default 12, fewer of long ones. `rows`
    selects the rows whose mean statistics count: "last", "log" or "all". `text` replaces Python's documentation. The
    policy applied to the model, if any, takes effect.

    `inputs` replaces tasks, for any model family: for each size, one or several dicts of keyword arguments of the
    model. Every sequence in them is a prompt, padded on the left. Any other torch module that attends by
    `scaled_dot_product_attention` or `nn.MultiheadAttention` needs inputs, each a tensor, a tuple of arguments or a
    dict: `probe(vit, inputs={196: images, 784: larger})`.

    Slopes, kinds except "local", top weights and horizons are comparable between models that read inputs of the same
    number of tokens. "sink" is about the first key, a class token in BERT and ViT. "local" is about the keys just
    before the last row, in causal models only. Forecasts by key replication need a causal model that takes
    `position_ids` and has no policy that reads row statistics; other models get forecasts by lines.
    """
    module = is_torch_module(model)
    state = None if module else installed(check_model(model))
    check_choice(rows)
    if prompts is not None and (type(prompts) is not int or prompts < 1):
        reject("prompts", repr(prompts), "a whole number from 1, or None")
    causal = any(getattr(part, "is_causal", None) is True for part in model.modules())
    notify = progress or (lambda what, done, total, remark: None)
    if inputs is not None or module:
        if tasks is not None or sizes is not None:
            reject("inputs", "inputs together with tasks or sizes", "one or the other")
        read = [own_inputs(inputs, module)]
        if module:
            smallest, *_ = read[0].passages.values()
            causal = any(site.causal for site in observable_sites(model, smallest[0].inputs))
    else:
        tokenizer = check_tokenizer(tokenizer, "or give inputs of your own: inputs={size: [{'input_ids': ids}, …]}")
        notify("preparing prompts", 0, 0, "")
        tasks = (("kv", TEXT) if causal else (TEXT,)) if tasks is None else tasks
        if isinstance(tasks, str) or not isinstance(tasks, Sequence):
            reject_type("tasks", repr(tasks), "a list of tasks", "write tasks=['kv']")
        read = [task_inputs(one, tokenizer, context_of(model), sizes, prompts, seed, text, causal) for one in tasks]
        names = [one.task for one in read]
        if not names or len(set(names)) < len(names):
            reject("tasks", names, "one or more different tasks")
    # A policy that reads row statistics would count a replicated key once.
    ruled = module or (state is not None and any(layer.rules for layer in state.layers))
    positions = "position_ids" in inspect.signature(model.forward).parameters
    replicates = rows == "last" and causal and positions and not ruled
    total = sum(one.reads + (len(replicated_reads(one)) if replicates else 0) for one in read)
    done = itertools.count(1)

    def step(what: str, one: ProbeInputs) -> Callable[[int], None]:
        return lambda size: notify(f"{what} {one.task}", next(done), total, f"{size:,} {one.unit}")

    found: dict[str, Any] = {}
    counts: dict[str, Any] = {}
    with evaluating(model):
        for one in read:
            readings = measure(model, one, rows, step("reading", one))
            forecast = forecast_of(model, one, readings, step("forecasting", one) if replicates else None)
            found[one.task] = tables_of(one, readings, causal, forecast, seed)
            counts[one.task] = {str(size): len(values["count"]) for size, values in readings.items()}
    policy, weight, first = policy_of(model), next(model.parameters(), torch.empty(0)), next(iter(found.values()))
    setting = {
        "model": name or display_name(getattr(model, "name_or_path", None) or type(model).__name__),
        "family": str(getattr(getattr(model, "config", None), "model_type", type(model).__name__)),
        "layers": len(first["layers"]),
        "heads": 1 + max((int(name.partition(".")[2]) for name in first["heads"]), default=-1),
        "tasks": list(found),
        "sizes": {one.task: list(one.sizes) for one in read},
        "unit": {one.task: one.unit for one in read},
        "prompts_of_size": counts,
        "rows": rows,
        "seed": seed,
        "dtype": str(getattr(model, "dtype", weight.dtype)).removeprefix("torch."),
        "device": getattr(model, "device", weight.device).type,
        "policy": None if policy is None else policy.describe(),
        "context": context_of(model),
        "fit_up_to": {one.task: one.fit_up_to for one in read},
        "kind_rule": dict(RULE),
    }
    return ProbeResult(setting, found)
