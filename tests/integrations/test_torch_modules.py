"""Policies in torch modules that are not transformers models, against attention written out by hand."""

from __future__ import annotations

import copy
import itertools
import math
import os
import runpy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sharpmax as sm
from sharpmax.errors import ArgumentError, UnsupportedError
from sharpmax.integrations.torch_modules import call_sites
from sharpmax.policies import PAPER, Constant, LogLength, PerHead, Policy
from tests.integrations.oracle import beta

pytestmark = pytest.mark.filterwarnings("ignore::sharpmax.errors.OutOfRangeWarning", "ignore:.*nested tensors")


class Attention(nn.Module):
    """Attention of a vision transformer, as in timm."""

    def __init__(self, width: int, heads: int, fused: bool = True) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.fused:
            x = F.scaled_dot_product_attention(q, k, v)
        else:
            x = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v
        out: Tensor = self.proj(x.transpose(1, 2).reshape(batch, length, width))
        return out


class ViT(nn.Module):
    def __init__(self, fused: tuple[bool, ...] = (True, True)) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 2, 2)
        self.blocks = nn.ModuleList(Attention(16, 4, one) for one in fused)
        self.head = nn.Linear(16, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x.mean(1))
        return out


def strong(model: nn.Module) -> Any:
    """The model in float64 with weights that attend sharply enough for β to show."""
    torch.manual_seed(1)
    for weight in model.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, 0.0, 0.5)
    return model.double().eval()


@contextmanager
def by_hand(policy: Policy) -> Iterator[None]:
    """PyTorch's attention row by row, with other formulas for β; each call is the next site of the policy."""
    sites = itertools.count()

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *_: Any) -> Tensor:
        q, k, v, site, out = q.detach(), k.detach(), v.detach(), next(sites), torch.zeros_like(q)
        visible = (q.new_zeros(()) if mask is None else mask).expand(*q.shape[:3], k.shape[2]) == 0
        for b, h, i in itertools.product(*map(range, q.shape[:3])):
            seen = visible[b, h, i]
            s = (k[b, h] @ q[b, h, i] * q.shape[-1] ** -0.5)[seen]
            one = policy.policies[site][h] if isinstance(policy, PerHead) else policy
            out[b, h, i] = (s * beta(one, s.numpy())).softmax(-1) @ v[b, h][seen]
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", attend)
        yield


def mixed(sites: int) -> PerHead:
    kinds: list[Policy] = [Constant(1.0), Constant(2.5), LogLength(3.0), PAPER]
    return PerHead(tuple(tuple(kinds[(site + head) % 4] for head in range(4)) for site in range(sites)))


@pytest.mark.parametrize("policy", [PAPER, mixed(2)], ids=["paper", "mixed"])
def test_a_vision_transformer(policy: Policy) -> None:
    model, image = strong(ViT()), torch.randn(2, 3, 8, 6, dtype=torch.float64)
    assert [site.name for site in call_sites(model, image)] == ["blocks.0", "blocks.1"]
    plain = model(image)
    with by_hand(policy):
        expected = model(image)
    with sm.applied(model, policy, example_inputs=image):
        assert sm.policy_of(model) == policy
        torch.testing.assert_close(model(image), expected, rtol=1e-9, atol=1e-10)
        copied = copy.deepcopy(model)
    assert (expected - plain).abs().max() > 1e-3
    assert torch.equal(model(image), plain)
    assert sm.policy_of(model) is None
    torch.testing.assert_close(copied(image), expected, rtol=1e-9, atol=1e-10)
    assert torch.equal(sm.restore(copied)(image), plain)


@pytest.mark.parametrize("policy", [PAPER, mixed(2)], ids=["paper", "mixed"])
@pytest.mark.parametrize("padded", [False, True])
def test_an_encoder_whose_fused_path_is_back_afterwards(policy: Policy, padded: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = strong(nn.TransformerEncoder(layer, 2))
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    padding = torch.arange(9).expand(2, -1) >= torch.tensor([[9], [6]]) if padded else None
    rows = slice(None) if padding is None else ~padding
    with by_hand(policy):  # with gradients, which have no fused path
        expected = model(x, src_key_padding_mask=padding)[rows].detach()
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=padding)  # fused, and nested with padding
        with sm.applied(model, policy, example_inputs={"src": x, "src_key_padding_mask": padding}):
            found = model(x, src_key_padding_mask=padding)[rows]
        assert torch.equal(model(x, src_key_padding_mask=padding), plain)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    assert (expected - plain[rows]).abs().max() > 1e-3


@pytest.mark.parametrize("options", [{}, {"need_weights": False}, {"average_attn_weights": False}], ids=str)
@pytest.mark.parametrize("masked", ["none", "bool", "float", "per head", "padding", "both"])
@pytest.mark.parametrize("separate", [False, True])
def test_multihead_attention_is_torch_s_at_a_beta_of_one(options: dict[str, Any], masked: str, separate: bool) -> None:
    """The rows of β = 1 by way of the statistics; the weights it returns are those it used."""
    model = strong(nn.MultiheadAttention(16, 4, batch_first=True, **({"kdim": 6, "vdim": 5} if separate else {})))
    q = torch.randn(2, 7, 16, dtype=torch.float64)
    k, v = torch.randn(2, 5, 6 if separate else 16).double(), torch.randn(2, 5, 5 if separate else 16).double()
    future = torch.ones(7, 5, dtype=torch.bool).triu(2)
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    masks: dict[str, Any] = {
        "none": {}, "bool": {"attn_mask": future}, "float": {"attn_mask": torch.randn(7, 5).double()},
        "per head": {"attn_mask": torch.randn(8, 7, 5).double()}, "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": future.double() * -1e4, "key_padding_mask": padding.double() * -1e4},
    }  # fmt: skip
    arguments = {"query": q, "key": k, "value": v, **masks[masked], **options}
    expected = model(**arguments)
    with sm.applied(model, LogLength(1e9), example_inputs=arguments):
        out, weights = model(**arguments)
        single = model(q[0], k[0], v[0])[0]
    torch.testing.assert_close((out, weights), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(single, model(q[0], k[0], v[0])[0], rtol=1e-9, atol=1e-12)
    with sm.applied(model, Constant(3.0), example_inputs=arguments):
        sharper, weights = model(**arguments)
    assert not torch.allclose(sharper, expected[0])
    assert weights is None or torch.allclose(weights.sum(-1), torch.ones_like(weights[..., 0]))


class Shared(nn.Module):
    """One attention module for both of two layers, and a call of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor, extra: bool = False) -> Tensor:
        for _ in range(3 if extra else 2):
            x = x + self.attention(x, x, x)[0]
        return x + F.scaled_dot_product_attention(x, x, x)


def test_names_of_call_sites_and_what_example_inputs_did_not_show() -> None:
    model, x = strong(Shared()), torch.randn(1, 6, 16, dtype=torch.float64)
    sites = call_sites(model, x)
    assert [(site.name, site.heads) for site in sites] == [("attention", 4), ("attention#2", 4), ("Shared", 1)]
    with pytest.raises(ArgumentError, match=r"3 × 1/4, the attention layers × heads of Shared"):
        sm.apply(model, mixed(3), example_inputs=x)
    with sm.applied(model, LogLength(2.0), example_inputs=x):
        assert torch.isfinite(model(x, extra=True)).all()  # one policy for all calls needs no names
    attention = strong(nn.TransformerDecoderLayer(16, 4, 32, batch_first=True))
    assert [site.name for site in call_sites(attention, (x, x))] == ["self_attn", "multihead_attn"]
    model.forward = lambda x, extra=False: model.attention(x, x, x)[0] + (model.attention(x, x, x)[0] if extra else 0)
    sm.apply(model, mixed(1), example_inputs=x)
    with pytest.raises(UnsupportedError, match="attends where it did not with example_inputs"):
        model(x, extra=True)
    assert torch.isfinite(model(x)).all()  # nothing is left behind by the error
    with pytest.raises(ArgumentError, match="1 layers × 4 heads"):
        sm.apply(model, mixed(1), example_inputs=(x, True))


def test_what_cannot_be_reached_may_be_skipped() -> None:
    half, image = strong(ViT((True, False))), torch.randn(1, 3, 4, 4, dtype=torch.float64)
    with sm.applied(half, "paper", example_inputs=image, skip_unsupported=True):
        assert torch.isfinite(half(image)).all()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Attention(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        again: Tensor = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)
        return again if self.training else self.block(x)


def test_gradients_flow_and_checkpoints_are_refused() -> None:
    model, image = strong(ViT()), torch.randn(1, 3, 4, 4, dtype=torch.float64)
    with sm.applied(model, "paper", example_inputs=image):
        model(image).sum().backward()
    weight = model.blocks[0].qkv.weight
    found, step = weight.grad[0, 0].item(), 1e-6
    with torch.no_grad(), sm.applied(model, "paper", example_inputs=image):
        weight[0, 0] += step
        above = model(image).sum()
        weight[0, 0] -= 2 * step
        slope = (above - model(image).sum()) / (2 * step)
    assert found == pytest.approx(slope.item(), rel=1e-5)
    x = torch.randn(1, 4, 16, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match="gradient checkpointing"):
        sm.apply(strong(Checkpointed()), "paper", example_inputs=x)


def test_compiled_code_leaves_attention_to_python() -> None:
    model, image = strong(ViT()), torch.randn(1, 3, 4, 4, dtype=torch.float64)
    sm.apply(model, "paper", example_inputs=image)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        expected = model(image)
        torch.testing.assert_close(torch.compile(model, backend="eager")(image), expected)
        model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
        torch.testing.assert_close(model(image), expected)


def test_training_flags_and_the_random_state_survive_the_trial() -> None:
    model: Any = nn.Sequential(nn.TransformerEncoderLayer(16, 4, 32, dropout=0.5), nn.BatchNorm1d(5))
    model[0].eval()
    model[1].train()
    state, means = torch.random.get_rng_state(), model[1].running_mean.clone()
    call_sites(model, torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1)))
    assert (model[0].training, model[1].training) == (False, True)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(means, model[1].running_mean)


def test_capture_sees_the_calls_of_a_module_and_leaves_nothing() -> None:
    model, image = strong(ViT()), torch.randn(2, 3, 8, 6, dtype=torch.float64)
    plain = model(image)
    with sm.capture(model, rows="all") as found:
        assert torch.equal(model(image), plain)
        call_sites(strong(ViT()), image)  # another module is no part of it
    assert found.stack("entropy").shape == (2, 2, 4, 12)
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(("rows", "keys"), [((), ()), ((3,), (3,)), ((2, 3, 2), (2, 3, 2)), ((1, 4), (2, 4))])
def test_the_axes_that_torch_takes(rows: tuple[int, ...], keys: tuple[int, ...]) -> None:
    q, k = torch.randn(*rows, 7, 4, dtype=torch.float64), torch.randn(*keys, 5, 4, dtype=torch.float64)
    mask = torch.randn(7, 5, dtype=torch.float64)

    class Plain(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, k, attn_mask=mask.to(q.dtype))

    model = Plain()
    with sm.applied(model, LogLength(2.0), example_inputs=(q, k)):
        found = model(q, k)
        with torch.autocast("cpu", torch.bfloat16):
            narrow = model(q.float(), k.bfloat16())
    logits = q @ k.transpose(-2, -1) / 2 + mask
    expected = (logits * math.log(5) / math.log(2)).softmax(-1) @ k
    torch.testing.assert_close(found, expected)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.double(), expected, rtol=0.1, atol=0.1)


def test_tabpfn() -> None:
    """TabPFN's rows all see the training rows: a log-length rule is a constant there, which weights can hold."""
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "tabpfn.py"))
    folder = os.environ.get("SHARPMAX_TABPFN")  # the unpacked archive, if there is one
    torch.manual_seed(0)
    model = example["load"](Path(folder)) if folder else strong(example["TabPFN"](32, 4, 2, 10))
    model = model.double()
    inputs = [x.double() if isinstance(x, Tensor) else x for x in example["inputs"](*example["synthetic"](0, 60), 40)]
    sites = [site.name for site in call_sites(model, tuple(inputs))]
    assert sites[1] == "transformer_encoder.layers.1.self_attn"
    with torch.no_grad():
        plain = model(*inputs)
        with sm.applied(model, LogLength(20.0), example_inputs=tuple(inputs)):
            found = model(*inputs)
        assert torch.equal(model(*inputs), plain)
        for layer in model.transformer_encoder["layers"]:
            width = layer.self_attn.embed_dim
            layer.self_attn.in_proj_weight[:width] *= math.log(40) / math.log(20)
            layer.self_attn.in_proj_bias[:width] *= math.log(40) / math.log(20)
        torch.testing.assert_close(found, model(*inputs), rtol=1e-7, atol=1e-8)
    assert (found - plain).abs().max() > 1e-3
