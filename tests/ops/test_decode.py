"""`decode` against dense logits in float64: interpreted, or on a GPU with TRITON_INTERPRET=0."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import sharpmax as sm
from sharpmax.errors import UnsupportedError
from sharpmax.ops.kernels import decode_launch as launches
from sharpmax.ops.kernels import tables
from sharpmax.ops.kernels.decode_launch import KeyPlan, KeyTile
from sharpmax.policies.basic import Constant, LogLength, LogScale, PerFrequency
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import PAPER
from sharpmax.stats.call import hidden_by
from tests import numerics
from tests.kernel_cases import BRAIN, CURVE, DEVICE, HALF, INTERPRETED, LINEAR, SILENT, SINGLE, randn
from tests.kernel_cases import _poisoned_memory as _poisoned_memory
from tests.numerics import dense_attention

pytestmark = [SILENT, pytest.mark.filterwarnings("ignore::sharpmax.errors.OutOfRangeWarning")]

PLAN_FOR = launches.plan_for
CLOSE = {HALF: 2e-3, BRAIN: 1.6e-2, SINGLE: 3e-5}

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

needs_gpu = pytest.mark.skipif(INTERPRETED, reason="needs a GPU")


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    """In the interpreter few keys have to make several tiles and parts."""
    if INTERPRETED:
        plan = KeyPlan(KeyTile(32, 3, 4, 1), KeyTile(16, 2, 4, 1))
        monkeypatch.setattr(launches, "plan_for", lambda *_: plan)


def tensors(
    batch=1, heads=4, key_heads=2, queries=1, keys=70, width=16, value_width=None, dtype=SINGLE, size=2.0
) -> Triple:
    return (
        randn(batch, heads, queries, width, seed=1, dtype=dtype, size=size),
        randn(batch, key_heads, keys, width, seed=2, dtype=dtype),
        randn(batch, key_heads, keys, value_width or width, seed=3, dtype=dtype),
    )


def seen_by(q, k, lengths=None, mask=None):
    """Which keys each row sees, and what a float mask adds to its logits."""
    keys, queries = k.shape[2], q.shape[2]
    filled = torch.full((len(q),), keys, device=q.device) if lengths is None else lengths.to(q.device)
    last = filled[:, None] - torch.arange(queries - 1, -1, -1, device=q.device)
    visible = (torch.arange(keys, device=q.device) < last[..., None])[:, None]
    if mask is None:
        return visible, 0.0
    hidden = hidden_by(mask)
    return visible & ~hidden, 0.0 if mask.dtype == torch.bool else mask.double().masked_fill(hidden, 0.0)


def exact(q, k, v, policy="paper", lengths=None, mask=None, scale=None):
    heads = policy if isinstance(policy, (list, tuple)) else [policy]
    chosen = [sm.policies.resolve_policy(p) for p in heads]
    rule = chosen[0] if len(chosen) == 1 else PerHead((tuple(chosen),))
    visible, bias = seen_by(q, k, lengths, mask)
    return dense_attention(q, k, v, visible, rule, scale, bias)


def assert_close(got, want, close=None):
    assert got.shape == want.shape
    close = CLOSE[got.dtype] if close is None else close
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.allclose(got.double(), want, rtol=close, atol=close, equal_nan=True), (got - want).abs().max()


def assert_decodes(q, k, v, policy="paper", lengths=None, mask=None, scale=None, close=None):
    out = sm.decode(q, k, v, lengths=lengths, attn_mask=mask, scale=scale, policy=policy, impl="triton")
    assert out.dtype == q.dtype
    assert_close(out, exact(q, k, v, policy, lengths, mask, scale), close)


POLICIES = [
    None,
    "paper",
    Constant(0.0),
    Constant(3.0),
    LogLength(6.0),
    LINEAR,
    CURVE,
    EntropyTarget(1.0),
    EntropyTarget(2.5, floor=0.1),
    EntropyTarget(0.0, ceiling=20.0),
    [PAPER, EntropyTarget(0.7), LogLength(9.0), LINEAR],
    [None, "paper", CURVE, Constant(2.0)],
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_policies(policy):
    lengths = torch.tensor([70, 33], device=DEVICE)
    assert_decodes(*tensors(batch=2), policy, lengths, close=1e-4)


@pytest.mark.parametrize(
    "shape",
    [
        *({"queries": n, "batch": 3} for n in (2, 5, 8)),
        *({"keys": n} for n in (1, 15, 16, 17, 97)),
        {"heads": 1, "key_heads": 1},
        {"heads": 3, "key_heads": 3},
        {"heads": 8, "key_heads": 1, "queries": 8},
        {"heads": 6, "queries": 3},
    ],
    ids=lambda shape: "-".join(f"{name}{size}" for name, size in shape.items()),
)  # fmt: skip
def test_numbers_of_tokens_keys_and_heads(shape):
    q, k, v = tensors(**shape)
    lengths = torch.tensor([70, 17, 3], device=DEVICE) if len(q) == 3 else None
    assert_decodes(q, k, v, [LINEAR, *(LogLength(2.0 + h) for h in range(1, q.shape[1]))], lengths, scale=0.3)


@pytest.mark.parametrize(
    ("dtype", "width", "value_width"),
    [(dtype, *widths) for dtype in (HALF, BRAIN, SINGLE) for widths in ((59, 111), (256, 1))]
    + [(BRAIN, 1, 256), (HALF, 111, 59), (SINGLE, 64, 64)],
)
def test_dtypes_and_head_sizes(dtype, width, value_width):
    q, k, v = tensors(keys=40, width=width, value_width=value_width, dtype=dtype)
    assert_decodes(q, k, v, "paper")


@pytest.mark.parametrize("splits", [1, 2, 5, 40])
def test_any_number_of_parts(monkeypatch, splits):
    plan = KeyPlan(KeyTile(16, splits, 4, 1), KeyTile(16, max(1, splits // 2), 4, 1))
    monkeypatch.setattr(launches, "plan_for", lambda *_: plan)
    assert_decodes(*tensors(heads=2, key_heads=1, queries=2, keys=100), LINEAR)


@pytest.mark.parametrize("case", ["lengths", "tokens", "mask", "mixed mask", "pages", "widths"])
def test_one_launch(monkeypatch, case):
    """Both passes in one launch: interpreted as one part only, as its programs run one after the other."""
    parts = 1 if INTERPRETED else 5
    plan = KeyPlan(KeyTile(16, 3, 4, 1), KeyTile(16, 2, 4, 1), KeyTile(64 if parts > 1 else 16, parts, 4, 2))
    monkeypatch.setattr(launches, "plan_for", lambda *_: plan)
    heads = [PAPER, LINEAR, LogLength(9.0), CURVE]
    queries, keys = (3, 70) if case in ("tokens", "mixed mask") else (1, 40 if INTERPRETED else 4000)
    lengths = torch.tensor([keys, keys // 2], device=DEVICE)
    widths = (59, 111) if case == "widths" else (16, 16)
    q, k, v = tensors(2, queries=queries, keys=keys, width=widths[0], value_width=widths[1])
    if case == "pages":
        key_pages, value_pages, table = paged(k, v, 16)
        out = sm.decode(q, key_pages, value_pages, lengths=lengths, block_table=table, policy=heads, impl="triton")
        assert_close(out, exact(q, k, v, heads, lengths))
    else:
        mask = randn(1, 4 if case == "mixed mask" else 1, 1, keys, seed=4) > 0 if "mask" in case else None
        assert_decodes(q, k, v, heads, lengths, mask)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("bool", shape) for shape in ((2, 1, 1, 40), (1, 4, 1, 40), (4, 3, 1))]
    + [("float", shape) for shape in ((1, 1, 3, 40), (2, 4, 3, 40), (40,))],
    ids=str,
)
def test_masks(shape, kind):
    q, k, v = tensors(batch=2, queries=3, keys=40)
    mask = randn(*shape, seed=4, size=2.0)
    mask = mask > -1.0 if kind == "bool" else mask.masked_fill(mask > 1.0, -torch.inf)
    assert_decodes(q, k, v, LINEAR, torch.tensor([40, 29], device=DEVICE), mask)


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_most_negative_number_hides(dtype):
    q, k, v = tensors(keys=40, dtype=dtype)
    hide = randn(1, 4, 1, 40, seed=4) > 0
    hide[:, 1] = True
    bias = randn(1, 4, 1, 40, seed=5, dtype=dtype)
    outs = [
        sm.decode(q, k, v, attn_mask=bias.masked_fill(hide, value), impl="triton", policy="paper")
        for value in (-torch.inf, torch.finfo(dtype).min, torch.finfo(dtype).min / 2)
    ]
    assert all(torch.equal(outs[0], out) for out in outs)
    assert (outs[0][:, 1] == 0).all()
    assert_decodes(q, k, v, "paper", None, bias.masked_fill(hide, -torch.inf))


def paged(k, v, page, seed=5):
    """The same cache in pages of random order among others that hold NaN."""
    batch, heads, keys, _ = k.shape
    each = -(-keys // page)
    order = torch.randperm(batch * each + 3, generator=torch.Generator().manual_seed(seed))[: batch * each]
    table = order.view(batch, each).to(DEVICE)
    places = []
    for x in (k, v):
        pages = torch.full((batch * each + 3, page, heads, x.shape[-1]), torch.nan, dtype=x.dtype, device=DEVICE)
        for b in range(batch):
            for i in range(each):
                piece = x[b, :, i * page : (i + 1) * page].transpose(0, 1)
                pages[table[b, i], : len(piece)] = piece
        places.append(pages)
    return *places, table.int()


@pytest.mark.parametrize(("page", "queries"), [(1, 1), (7, 3), (16, 1), (48, 3)])
def test_paged_caches(page, queries):
    q, k, v = tensors(batch=2, queries=queries, value_width=24)
    lengths = torch.tensor([70, 18], device=DEVICE, dtype=torch.int32)
    key_pages, value_pages, table = paged(k, v, page)
    out = sm.decode(q, key_pages, value_pages, lengths=lengths, block_table=table, impl="triton", policy="paper")
    assert_close(out, exact(q, k, v, "paper", lengths))
    table[1, -(-18 // page) :] = -1  # pages that are not there yet
    again = sm.decode(q, key_pages, value_pages, lengths=lengths, block_table=table, impl="triton", policy="paper")
    assert torch.equal(out, again)
    plain = sm.decode(q, key_pages, value_pages, lengths=lengths, block_table=table, impl="torch", policy="paper")
    assert_close(plain, exact(q, k, v, "paper", lengths))


def test_strided_caches():
    q, k, v = tensors(batch=2)
    odd = [torch.stack((x, -x), -1)[..., 0].transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    sliced = [torch.cat((x, x), -1)[..., : x.shape[-1]] for x in odd]
    out = sm.decode(q, k, v, impl="triton", policy="paper")
    for other in (odd, sliced):
        got = sm.decode(q.transpose(1, 3).contiguous().transpose(1, 3), *other, impl="triton", policy="paper")
        assert torch.equal(out, got) if INTERPRETED else torch.allclose(out, got, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("value", "alike"), [(math.nan, True), (-math.inf, False)])
def test_what_is_not_visible_has_no_effect(value, alike):
    q, k, v = tensors(batch=2, queries=1 if alike else 3)
    lengths = torch.tensor([50, 33], device=DEVICE)
    mask = randn(1, 1 if alike else 4, 1, 70, seed=4) > 0
    mask[..., [3, 20]] = False
    for hidden in (None, mask):
        options: dict[str, Any] = {"lengths": lengths, "policy": "paper", "attn_mask": hidden}
        clean = sm.decode(q, k, v, **options, impl="triton")
        dirty_k, dirty_v = k.clone(), v.clone()
        for x in (dirty_k, dirty_v):
            x[0, :, 50:] = value
            x[1, :, 33:] = value
            if hidden is not None:
                x[:, :, [3, 20]] = value
        assert torch.equal(clean, sm.decode(q, dirty_k, dirty_v, **options, impl="triton"))
        if INTERPRETED or hidden is None:  # on CUDA this depends on PyTorch's kernel
            plain = sm.decode(q, dirty_k, dirty_v, **options, impl="torch")
            assert torch.allclose(plain, clean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("which", "policy"), [("key", "paper"), ("value", "paper"), ("value", Constant(2.0)), ("key", EntropyTarget(1.0))]
)
def test_nan_reaches_the_rows_that_see_it_and_no_others(which, policy):
    q, k, v = tensors(queries=3)
    clean = sm.decode(q, k, v, policy=policy, impl="triton")
    (k if which == "key" else v)[:, 0, 69, 2] = torch.nan  # the newest key, which the last row alone sees
    out = sm.decode(q, k, v, policy=policy, impl="triton")
    assert torch.equal(out[:, 2:], clean[:, 2:])
    assert torch.equal(out[:, :2, :2], clean[:, :2, :2])
    assert out[:, :2, 2, 2].isnan().all()
    if which == "key":
        assert out[:, :2, 2].isnan().all()


@pytest.mark.parametrize(
    ("policy", "masked"), [("paper", False), (EntropyTarget(0.5), True), ([CURVE, LINEAR, PAPER, None], True)], ids=str
)
def test_statistics(policy, masked):
    q, k, v = tensors(batch=2, queries=2)
    lengths = torch.tensor([70, 1], device=DEVICE)
    mask = randn(1, 4, 1, 70, seed=4) > 0 if masked else None
    options = {"lengths": lengths, "attn_mask": mask, "policy": policy, "impl": "triton"}
    out, stats = sm.decode(q, k, v, **options, return_stats=True)
    # Statistics that nobody asked for are not measured, and β of the same row may be merged in another order.
    assert torch.allclose(out, sm.decode(q, k, v, **options), rtol=1e-5, atol=1e-6)
    visible, _ = seen_by(q, k, lengths, mask)
    want = numerics.exact(q, k, attn_mask=visible, enable_gqa=True)
    assert torch.equal(stats.count, want.count)
    for name in ("max", "lse", "mean", "entropy", "var"):
        assert torch.allclose(getattr(stats, name).double(), getattr(want, name), rtol=1e-5, atol=2e-5), name
    plain = sm.decode(q, k, v, **{**options, "impl": "torch"}, return_stats=True)[1]
    assert torch.equal(plain.count, want.count)


@dataclass(frozen=True)
class Doubled(Constant):
    """A subclass with a rule of its own."""

    def rule(self, xp, stats, remeasure):
        return 2.0 * super().rule(xp, stats, remeasure)


@pytest.mark.parametrize(
    ("shape", "policy", "why"),
    [
        ({"queries": 2, "batch": 2}, LogScale(0.5, 4.0), "does not know the policy"),
        ({}, Doubled(1.5), "does not know the policy"),
        ({}, [PAPER, None, PAPER, Doubled(1.5)], "does not know the policy"),
        ({"queries": 9}, "paper", "9 tokens"),
        ({"width": 257, "value_width": 16, "keys": 3}, "paper", "257"),
    ],
    ids=["policy", "subclass", "one head", "tokens", "width"],
)
def test_what_the_kernels_cannot_do_is_plain_torch(shape, policy, why):
    q, k, v = tensors(**shape)
    assert_close(sm.decode(q, k, v, policy=policy), exact(q, k, v, policy))
    with pytest.raises(UnsupportedError, match=rf"{why}.*use impl='torch'"):
        sm.decode(q, k, v, policy=policy, impl="triton")


@pytest.mark.parametrize("policy", [None, "paper", [PAPER, None, Constant(2.0), LINEAR]], ids=str)
def test_plain_torch(policy):
    q, k, v = tensors(batch=2, queries=3)
    lengths = torch.tensor([70, 1], device=DEVICE)
    for mask in (None, randn(1, 4, 1, 70, seed=4) > 0, randn(2, 1, 3, 70, seed=4)):
        want = exact(q, k, v, policy, lengths, mask)
        out = sm.decode(q, k, v, lengths=lengths, attn_mask=mask, policy=policy, impl="torch")
        assert_close(out, want)
        auto = sm.decode(q, k, v, lengths=lengths, attn_mask=mask, policy=policy)
        assert torch.equal(auto, out) if INTERPRETED else torch.allclose(auto, out, rtol=1e-4, atol=1e-5)


def test_gradients_take_the_plain_path():
    torch.use_deterministic_algorithms(False)  # the backward of PyTorch's attention is not, on CUDA
    q, k, v = tensors()
    q.requires_grad_()
    sm.decode(q, k, v, policy="paper").sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()
    with pytest.raises(UnsupportedError, match=r"gradient.*impl='torch'"):
        sm.decode(q, k, v, impl="triton", policy="paper")
    with torch.no_grad():
        sm.decode(q, k, v, impl="triton", policy="paper")


@pytest.mark.parametrize("shape", [(0, 4, 1, 70), (1, 4, 0, 70), (1, 4, 1, 0)], ids=str)
def test_empty_sizes(shape):
    batch, heads, queries, keys = shape
    q, k, v = tensors(batch=batch, heads=heads, queries=queries, keys=keys, value_width=8)
    out = sm.decode(q, k, v, policy="paper")
    assert out.shape == (batch, heads, queries, 8)
    assert (out == 0).all()


def test_coefficients_are_kept_for_few_policies(monkeypatch):
    monkeypatch.setattr(tables, "_FEW", 3)
    for i in range(9):
        assert_decodes(*tensors(keys=20), Constant(1.0 + i))


def test_operators_are_registered_as_they_behave():
    q, k, v = tensors(keys=20)
    lengths = torch.tensor([18], device=DEVICE)
    table = tables.table_of((PAPER,), q.device)
    assert table is not None
    given = (q, k, v, lengths, None, None, 0.25, *table, True)
    torch.library.opcheck(launches.decode_op, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile, of its own parts
@pytest.mark.parametrize(
    ("policy", "dynamic"),
    # Every number a variable (which needs a call before), or those alone that are seen to change.
    [(PAPER, True), (PAPER, None), (PerFrequency((0.5,) * 4 + (2.0,) * 4), None)],
    ids=["dynamic", "paper", "frequency"],
)
def test_compiles_without_a_break(policy, dynamic):
    lengths = torch.tensor([33, 5], device=DEVICE)

    def step(q, k, v, lengths):
        for one in (policy, CURVE, policy):  # as the layers of a model
            q = sm.decode(q, k, v, lengths=lengths, policy=one, impl="triton") * 2.0
        return q

    given = [(*tensors(batch=2, keys=keys), lengths) for keys in (40, 35, 38)]
    tables._forms.clear()
    tables._tables.clear()
    torch._dynamo.reset()
    wanted = [step(*some) for some in given]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=dynamic)
    for number, (some, want) in enumerate(zip(given, wanted, strict=True)):
        assert torch.equal(compiled(*some), want)
        tables.table_of((Constant(3.0 + number),), torch.device(DEVICE))  # other policies meanwhile
    assert counter.frame_count <= (1 if dynamic else 2)
    torch._dynamo.reset()


@pytest.mark.parametrize(("pairs", "keys"), [(1, 1), (8, 131072), (64, 32768), (512, 8192), (300, 9000), (5000, 64)])
def test_parts_fill_the_device(pairs, keys, monkeypatch):
    monkeypatch.setattr(launches, "_processors", lambda device: 132)
    plan = PLAN_FOR.__wrapped__(torch.device("cuda"), 2, pairs, 4, keys, 128, False)
    for tile, resident in ((plan.logits, 2), (plan.values, 3)):
        assert 1 <= tile.splits <= 128
        assert tile.splits == 1 or keys // tile.splits >= 4 * tile.keys
        assert tile.splits == 1 or pairs * tile.splits <= resident * 132
        if keys >= 128 * 256:
            assert pairs * tile.splits > 0.9 * resident * 132
    assert (plan.whole is None) == (plan.values.splits > 1)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("policy", ["paper", EntropyTarget(0.5), [PAPER, None] * 4], ids=str)
def test_a_captured_graph_serves_every_length(policy):
    q, k, v = tensors(batch=2, heads=8, keys=4096, width=64, dtype=BRAIN)
    lengths = torch.tensor([4096, 100], device=DEVICE)
    sm.decode(q, k, v, lengths=lengths, policy=policy)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sm.decode(q, k, v, lengths=lengths, policy=policy)
    for filled in ([4096, 100], [1, 0], [4095, 3000]):
        lengths.copy_(torch.tensor(filled))
        graph.replay()
        assert torch.equal(out, sm.decode(q, k, v, lengths=lengths, policy=policy))
        assert_close(out, exact(q, k, v, policy, lengths))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("keys", [17, 97, 1023, 1025, 131072, 1048576])
@pytest.mark.parametrize("policy", ["paper", EntropyTarget(2.0), LINEAR], ids=str)
def test_long_caches(keys, policy):
    q, k, v = tensors(heads=8, key_heads=2, keys=keys, width=128, dtype=BRAIN)
    out = sm.decode(q, k, v, policy=policy)
    want = exact(q, k, v, policy)
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).double()
    theirs = (plain - exact(q, k, v, None)).abs().max()
    assert (out - want).abs().max() <= 2 * theirs + 4e-3 * want.abs().max()


@pytest.mark.gpu
@needs_gpu
def test_offsets_beyond_32_bits():
    far = torch.zeros(2**31 + 2**20, dtype=HALF, device=DEVICE)
    near_k, near_v = randn(1, 1, 9, 16, seed=2, dtype=HALF), randn(1, 1, 9, 16, seed=3, dtype=HALF)
    k = far.as_strided((1, 1, 9, 16), (0, 0, 2**28, 1))
    k.copy_(near_k)
    v = far.as_strided((1, 1, 9, 16), (0, 0, 2**28, 1), 32)
    v.copy_(near_v)
    q = randn(1, 2, 2, 16, seed=1, dtype=HALF)
    assert torch.equal(sm.decode(q, k, v, policy="paper"), sm.decode(q, near_k, near_v, policy="paper"))
    pages = far[: 2**31].view(2**31 // (64 * 16), 64, 1, 16)
    pages[-1, :9, 0] = near_k[0, 0]
    lengths = torch.tensor([9], device=DEVICE)
    table = torch.tensor([[len(pages) - 1]], device=DEVICE, dtype=torch.int32)
    out = sm.decode(q, pages, pages, lengths=lengths, block_table=table, policy="paper")
    assert torch.allclose(out, sm.decode(q, near_k, near_k, policy="paper"), rtol=1e-3, atol=1e-3)
