"""Training: the observer and its callbacks, QK-clip and the entropy band, against dense attention."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sharpmax.errors import SharpmaxError, UnsupportedError
from sharpmax.integrations.trainer import (
    AttentionObserver,
    EntropyBand,
    QKClip,
    StepStatistics,
    lightning_callback,
    trainer_callback,
)
from sharpmax.integrations.transformers.interface import observed
from sharpmax.report.page import report_of, write_page
from tests.integrations import trained
from tests.integrations.families import FAMILIES, LLAMA, PHI3, transformers
from tests.integrations.trained import HEADS, LAYERS, batch, llama


def dense(model: Any, *inputs: Tensor) -> dict[str, Tensor]:
    """Statistics by head `[layers, heads]` from the weights that eager attention returns, in float64."""
    eager = copy.deepcopy(model).double()
    eager.set_attn_implementation("eager")
    probabilities = [torch.stack(eager(one, output_attentions=True).attentions).detach() for one in inputs]
    sums: dict[str, list[Tensor]] = {"entropy": [], "relative_entropy": [], "top_weight": []}
    for p in probabilities:
        n = torch.arange(2, p.shape[-1] + 1)
        h = -torch.special.xlogy(p, p).sum(-1)[..., 1:]
        for name, value in zip(sums, (h, h / n.log(), p.amax(-1)[..., 1:]), strict=True):
            sums[name].append(value.transpose(1, 2).flatten(2))
    return {name: torch.cat(values, dim=-1).mean(-1) for name, values in sums.items()}


def close(found: StepStatistics, wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(torch.tensor(getattr(found, name)).double(), value, rtol=1e-4, atol=1e-5)


def train(model: Any, observer: AttentionObserver, steps: int, passes: int = 1) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(observer.steps, observer.steps + steps):
        with observer.step():
            for part in range(passes):
                tokens = batch(passes * step + part)
                model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_observer_measures_every_kth_step_with_accumulated_passes(checkpointing: bool) -> None:
    model = llama().train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    logged: list[tuple[int, dict[str, float]]] = []
    observer = AttentionObserver(model, every=2, by_head=True, log=lambda step, metrics: logged.append((step, metrics)))
    wanted = dense(model, batch(0), batch(1))
    train(model, observer, 3, passes=2)
    assert [one.step for one in observer.history] == [1, 3] == [step for step, _ in logged]
    close(observer.history[0], wanted)
    metrics = logged[0][1]
    assert metrics["attention/entropy"] == pytest.approx(float(wanted["entropy"].mean()), rel=1e-4)
    assert metrics["attention/entropy/1.2"] == pytest.approx(float(wanted["entropy"][1, 2]), rel=1e-4)
    assert metrics["attention/dispersed_heads"] == pytest.approx(
        float((wanted["relative_entropy"] > 0.95).float().mean())
    )
    assert "sharpmax" not in model.config._attn_implementation
    assert not model._forward_pre_hooks


def test_the_largest_logit_is_that_of_queries_and_keys() -> None:
    model, seen = llama().eval(), list[Tensor]()

    def keep(call: Any) -> None:
        scores = call.query.double() @ call.k.double().repeat_interleave(2, dim=1).transpose(-1, -2) * call.scale
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        seen.append(scores.masked_fill(hidden, -math.inf).amax((0, 2, 3)))

    observer = AttentionObserver(model, every=1)
    with observed(model, keep), observer.step(), torch.no_grad():
        model(batch())
    found = torch.tensor(observer.history[0].max_logit).double()
    torch.testing.assert_close(found, torch.stack(seen), rtol=1e-5, atol=1e-6)


def test_a_torch_module_is_measured() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, HEADS, 32, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, LAYERS).train(), torch.randn(3, 12, 32)
    observer = AttentionObserver(model, every=2)
    for _ in range(2):
        with observer.step():
            model(x).square().mean().backward()
    assert observer.tables()["setting"]["heads"] == [HEADS] * LAYERS
    first: Any = model.layers[0]
    p = first.self_attn(x, x, x, average_attn_weights=False)[1].double()
    wanted = -torch.special.xlogy(p, p).sum(-1).mean((0, 2))
    torch.testing.assert_close(torch.tensor(observer.history[0].entropy[0]).double(), wanted, rtol=1e-4, atol=1e-5)
    assert len(observer.history) == 1


def test_a_failed_step_is_not_measured() -> None:
    model = llama()
    observer = AttentionObserver(model, every=1)
    with pytest.raises(RuntimeError, match="boom"), observer.step():
        raise RuntimeError("boom")
    assert observer.steps == 0
    assert not model._forward_hooks
    with pytest.raises(SharpmaxError, match="no step was measured"):
        observer.save("nowhere")


def test_the_state_goes_on_after_a_checkpoint(tmp_path: Path) -> None:
    whole, parts = (AttentionObserver(llama().train(), every=2) for _ in range(2))
    train(whole.model, whole, 6)
    train(parts.model, parts, 4)
    again = AttentionObserver(parts.model, every=2)
    again.load_state_dict(json.loads(json.dumps(parts.state_dict())))
    train(again.model, again, 2)
    assert again.steps == 6
    assert [one.step for one in again.history] == [one.step for one in whole.history] == [1, 3, 5]
    assert again.history[:2] == whole.history[:2]


def trainer_for(model: Any, folder: Path, steps: int) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        report_to=[], disable_tqdm=True, use_cpu=True, logging_strategy="no", save_steps=3, learning_rate=1e-3,
    )  # fmt: skip
    data = [{"input_ids": one, "labels": one} for one in batch(rows=16)]
    return transformers.Trainer(model=model, args=arguments, train_dataset=data)


def test_the_callback_of_the_trainer_logs_and_resumes(tmp_path: Path, capsys: Any) -> None:
    trainer = trainer_for(llama(), tmp_path, 3)
    trainer_callback(trainer, every=2)
    trainer.train()
    assert [one["step"] for one in trainer.state.log_history if "attention/entropy" in one] == [1, 3]
    trainer = trainer_for(llama(), tmp_path, 5)
    observer = trainer_callback(trainer, every=2)
    trainer.train(resume_from_checkpoint=True)
    assert [one.step for one in observer.history] == [1, 3, 5]
    tables = json.loads((tmp_path / "results.json").read_text())["tables"]
    assert [one["step"] for one in tables["training_heads"]] == [1, 3, 5]
    assert len(tables["training_heads"][0]["entropy"]) == LAYERS


def test_the_callback_of_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    with pytest.raises(UnsupportedError, match="pip install lightning"):
        lightning_callback(llama())
    fake = ModuleType("lightning.pytorch")
    fake.Callback = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning.pytorch", fake)
    monkeypatch.setitem(sys.modules, "lightning", ModuleType("lightning"))
    model = llama()
    logged: list[Any] = []
    module = nn.Sequential(model)
    module.log_dict = logged.append  # type: ignore[assignment]
    callback, trainer = lightning_callback(module, every=2), SimpleNamespace(global_step=0)
    for number in range(4):  # two batches for each step
        callback.on_train_batch_start(trainer, module, None, number)
        model(batch(number))
        trainer.global_step += number % 2
        callback.on_train_batch_end(trainer, module, None, None, number)
    assert len(logged) == 1
    assert callback.observer.steps == 2
    close(callback.observer.history[0], dense(model, batch(0), batch(1)))
    other = lightning_callback(llama(), every=2)
    other.load_state_dict(callback.state_dict())
    assert other.observer.history == callback.observer.history
    callback.on_train_end(trainer, module)


def test_the_page_shows_heads_over_steps(tmp_path: Path) -> None:
    observer = AttentionObserver(llama().train(), every=1, out=tmp_path)
    train(observer.model, observer, 3)
    saved = json.loads(observer.save().read_text())
    saved["tables"]["training_heads"][1]["max_logit"][0][0] = None  # an overflow
    report = report_of(saved["tables"])
    assert report.headline[0].startswith("Mean entropy / ln n: 1.000 → 1.000. Largest logit: 0.0")
    assert [figure.name for figure in report.figures] == ["relative-entropy", "max-logit"]
    page = write_page(saved["command"], saved["provenance"], saved["tables"], tmp_path).read_text()
    assert "Largest logit of every head over training" in page


@pytest.mark.parametrize("family", ["opt", "llama", "gpt2", "gpt_neox", "phi3"])
def test_qk_clip_scales_the_heads_above_tau_down_to_it(family: str) -> None:
    model = {**FAMILIES, "phi3": PHI3}[family].build()
    first = AttentionObserver(model, every=1)
    with first.step(), torch.no_grad():
        model(batch())
    before = torch.tensor(first.history[0].max_logit[0])  # of the first layer, whose input stays as it is
    tau = float(before.sort().values[1:3].mean())
    clip = QKClip(model, tau)
    observer = AttentionObserver(model, every=1, clip=clip)
    for _ in range(2):
        with observer.step(), torch.no_grad():
            model(batch())
    after = torch.tensor(observer.history[1].max_logit[0])
    torch.testing.assert_close(after, before.clamp_max(tau), rtol=1e-5, atol=1e-5)
    assert {(layer, head) for _, layer, head, _ in clip.clipped if layer == 0} == {
        (0, head) for head in range(HEADS) if before[head] > tau
    }


def test_qk_clip_refuses_what_it_cannot_scale() -> None:
    with pytest.raises(SharpmaxError, match="layer 0, head 1 is nan"):
        QKClip(llama())(StepStatistics(3, [], [], [], [[1.0, math.nan, 1.0, 1.0]] * LAYERS))


@pytest.mark.parametrize(("low", "high", "checkpointing"), [(0.0, 0.3, False), (0.9, 1.0, True)])
def test_the_entropy_band_moves_the_chosen_heads_into_it(low: float, high: float, checkpointing: bool) -> None:
    model = LLAMA.build().train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = batch(rows=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    losses = []
    with EntropyBand(model, low, high, heads=[(0, 1), (1, 3)]) as band:
        for _ in range(40):
            model(tokens)
            loss = band.loss()
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert losses[-1] < 0.5 * losses[0]
    assert "sharpmax" not in model.config._attn_implementation


def test_the_entropy_band_agrees_with_dense_weights() -> None:
    model = llama().eval()
    with EntropyBand(model, 0.2, 0.8) as band:
        model(batch())
        found = band.loss()
    eager = copy.deepcopy(model).double()
    eager.set_attn_implementation("eager")
    p = torch.stack(eager(batch(), output_attentions=True).attentions)
    h = -torch.special.xlogy(p, p).sum(-1)[..., 1:] / torch.arange(2, p.shape[-1] + 1).log()
    wanted = (torch.relu(0.2 - h) + torch.relu(h - 0.8)).square().mean()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-4)


def test_processes_are_measured_as_one(tmp_path: Path) -> None:
    command = [sys.executable, trained.__file__, str(tmp_path)]
    started = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
    assert [one.wait(1200) for one in started] == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    close(StepStatistics(**first["history"][0]), dense(llama(), batch(0), batch(1)))
