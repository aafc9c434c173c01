"""Tiny random models of every family that is proven: two layers, four heads, hidden size 32, vocabulary 97."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sharpmax.policies import Constant, LogLength, PerHead, Polynomial

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

LENGTH = 12


@dataclass(frozen=True)
class Family:
    name: str
    model: str
    config: str
    options: dict[str, Any]
    kind: str = "causal"  # causal | encoder | image | seq2seq | speech

    @property
    def attentions(self) -> tuple[str, ...]:
        """The implementations that transformers allows; softcapped logits are eager's alone."""
        return ("eager",) if "attn_logit_softcapping" in self.options else ("sdpa", "eager")

    def build(self, attention: str | None = None, **changes: Any) -> Any:
        """A model in evaluation mode, the same at every call."""
        if attention is None and len(self.attentions) == 1:  # older releases choose another one by themselves
            attention = self.attentions[0]
        options = {"attn_implementation": attention} if attention else {}
        config = getattr(transformers, self.config)(**copy.deepcopy({**self.options, **changes}), **options)
        torch.manual_seed(1)
        model = getattr(transformers, self.model)(config)
        # Random weights as they come attend almost uniformly; then nothing about β would show.
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim >= 2:
                    weight.normal_(0.0, 0.25)
                else:
                    weight.add_(torch.randn_like(weight), alpha=0.1)
        return model.eval()

    def inputs(self, model: Any, batch: int = 2, length: int = LENGTH) -> dict[str, Tensor]:
        torch.manual_seed(2)
        ids = torch.randint(3, 97, (batch, length))
        dtype = model.dtype
        if self.kind == "image":
            return {"pixel_values": torch.randn(batch, 3, 8, 8, dtype=dtype)}
        if self.kind == "speech":
            features = torch.randn(batch, 8, 20, dtype=dtype)
            return {"input_features": features, "decoder_input_ids": ids}
        if self.kind == "seq2seq":
            return {"input_ids": ids, "decoder_input_ids": ids.flip(1)[:, : max(1, length - 2)]}
        return {"input_ids": ids}

    def logits(self, model: Any, **inputs: Any) -> Tensor:
        out = model(**(inputs or self.inputs(model)))
        found: Tensor = out.logits if "logits" in out else out.last_hidden_state
        return found


def _read(group: str) -> dict[str, Family]:
    groups = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return {one["name"]: Family(**one) for one in groups[group]}


FAMILIES = _read("proven")
OTHERS = _read("others")
"""Families that single tests need."""

LLAMA, PHI3, OLMO2 = FAMILIES["llama"], OTHERS["phi3"], OTHERS["olmo2"]
BIDIRECTIONAL = (FAMILIES["bert"], OTHERS["bart"], FAMILIES["whisper"])
"""Models with attention that is not causal: of encoders, and of decoders to an encoder's output."""

MIXTURE = PerHead(
    (
        (Constant(1.0), LogLength(3.0), LogLength(2.0), Constant(2.0)),
        (Polynomial((0.5, 1.0), (0.0, 9.0)), Constant(1.0), Constant(1.0), Polynomial((0.2, 1.5), (0.0, 9.0))),
    )
)
"""A policy of several kinds for two layers of four heads."""
