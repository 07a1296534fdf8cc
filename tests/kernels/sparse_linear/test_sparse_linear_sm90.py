"""The sm_90 sparse-linear attention: its refusals, its roles in threads on the CPU, and its results on the GPU."""

from functools import partial
from itertools import cycle

import pytest
import torch

from tests.kernels import gluon_on_cpu
from tests.kernels.eight_bit import assert_rounded_once
from tests.oracle import relative_error
from turbo_rcm_patch.kernels import dispatch, sparse_linear_attention
from turbo_rcm_patch.kernels.attention import attention_sm90
from turbo_rcm_patch.kernels.attention_8bit.attention_8bit_reference import quantize_qkv
from turbo_rcm_patch.kernels.attention_8bit.quantize_qkv import QuantizedQKV
from turbo_rcm_patch.kernels.quantized import FP8
from turbo_rcm_patch.kernels.sparse_linear import sparse_linear_reference as definition
from turbo_rcm_patch.kernels.sparse_linear import sparse_linear_sm90 as sm90
from turbo_rcm_patch.kernels.sparse_linear.sparse_linear_portable import Blocks, LinearBranch

kernel_module = pytest.importorskip("turbo_rcm_patch.kernels.sparse_linear.sparse_linear_sm90_kernel")
softmax_module = pytest.importorskip("turbo_rcm_patch.kernels.attention_8bit.attention_8bit_sm90_kernel")
shared_module = pytest.importorskip("turbo_rcm_patch.kernels.attention.attention_sm90_kernel")

# B, S, H, D, queries of a block, blocks kept. The last block of queries and of keys is cut, and is kept or left out.
# "many tiles": several tiles per consumer.
SHAPES = {
    "one token": (1, 1, 1, 64, 64, 1),
    "one block": (2, 200, 2, 128, 64, 1),
    "all blocks": (1, 300, 1, 128, 64, 3),
    "two tiles of a list": (1, 449, 2, 64, 128, 2),
    "some blocks": (2, 700, 2, 64, 64, 4),
    "many tiles": (2, 410, 3, 128, 64, 3),
}


def inputs(dtype, B, S, H, D, block_q, kept, device="cpu"):
    """Return q, k, v, proj_l's weight and bias, and lists. About half of them end in the last block, which is cut."""
    q, k, v = torch.randn(3, B, S, H, D, device=device)
    k = k + torch.randn(H, D, device=device)
    blocks = torch.rand(B, H, -(-S // block_q), -(-S // 128), device=device)
    block_map = blocks.argsort(-1)[..., :kept].sort(-1).values.int()
    proj_l = torch.randn(D, D, device=device) / D**0.5, torch.randn(D, device=device)
    return [x.to(dtype) for x in (q, k, v)], proj_l, block_map


def prepared(q, k, v, weight, bias):
    """Return the pre-passes' results, in plain torch."""
    D = q.shape[3]
    flat = (x.flatten(2) for x in (q, k, v))
    eight_bits = quantize_qkv(*flat, None, None, None, None, q.shape[2], 0.0, D**-0.5 * 1.4426950408889634, FP8)
    phi = k.double().softmax(-1).transpose(1, 2)
    key_weight = phi.sum(2)
    state = phi.mT @ v.double().transpose(1, 2) / key_weight[..., None] @ weight.double().T
    return QuantizedQKV(*eight_bits, q.dtype), LinearBranch(key_weight.float(), state.to(q.dtype), bias)


def assert_as_good(actual, qkv, proj_l, block_map, block_q):
    """Allow 1.1 times the definition's error: weights are rounded relative to a row's maximum so far."""
    wide = [x if x is None else x.double() for x in (*qkv, *proj_l)]
    exact = definition.sparse_linear_attention(*wide, block_map, block_q, 128)
    defined = definition.sparse_linear_attention_8bit(*qkv, *proj_l, block_map, block_q, 128, FP8)
    limit = 1.1 * relative_error(defined, exact) + torch.finfo(actual.dtype).eps
    assert relative_error(actual, exact) <= limit


# Without a GPU


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"dtype": torch.float16, "head_dim": 64, "block_q": 128}, None),
        ({"dtype": torch.float32}, "float32"),
        ({"v_format": torch.float16}, "v in fp16"),
        ({"head_dim": 96}, "head_dim 96"),
        ({"block_k": 64}, "blocks of 64 queries and 64 keys"),
        ({"block_q": 96}, "blocks of 96 queries and 128 keys"),
    ],
)
def test_refuses(monkeypatch, changes, reason):
    options = {"dtype": torch.bfloat16, "v_format": FP8, "head_dim": 128, "block_q": 64, "block_k": 128}
    cpu = torch.device("cpu")
    assert "sm_90" in sm90.why_not(cpu, **options)
    monkeypatch.setattr(dispatch, "is_sm90", lambda device: True)
    found = sm90.why_not(cpu, **options | changes)
    assert found is reason is None or reason in found
    monkeypatch.setattr(attention_sm90, "GLUON_ERROR", "cannot import name 'tma'")
    assert "'tma'" in sm90.why_not(cpu, **options | changes)


@pytest.fixture
def on_cpu(monkeypatch):
    """Runs the launcher with its kernel on the CPU, as a number of programs."""

    def run(*given, programs, seed):
        launch = partial(sm90.sparse_attention_forward, *given)
        modules = kernel_module, softmax_module, shared_module
        gluon_on_cpu.run_launches(monkeypatch, sm90, launch, modules, programs, seed, opaque=lambda x: x)

    return run


@pytest.mark.parametrize(
    ("name", "programs", "seed"),
    [
        *((name, 3, 1) for name in SHAPES),
        *zip(SHAPES, cycle((1, 40)), cycle((0, 2, 2, 0))),
        ("many tiles", 3, 2),
        ("many tiles", 40, 1),
    ],
)
def test_hand_overs(name, programs, seed, on_cpu):
    """Programs with several tiles per consumer, with tiles for some consumers only, and with none at all."""
    block_q = SHAPES[name][4]
    qkv, proj_l, block_map = inputs(torch.float16, *SHAPES[name])
    eight_bits, branch = prepared(*qkv, *proj_l)
    if seed == 0:
        proj_l, branch = (proj_l[0], None), branch._replace(bias=None)
    elif seed == 2:
        proj_l, branch = (None, None), None
    out = torch.full_like(qkv[0], torch.nan)
    blocks = Blocks(block_map, block_q, 128)
    out_scale = 1 / torch.arange(3.0, 3 + len(out)) if seed > 0 else None
    on_cpu(eight_bits, qkv[0], blocks, branch, out, out_scale, programs=programs, seed=seed)
    if out_scale is not None:
        out = (out.float() * out_scale[:, None, None, None]).half()
    assert_as_good(out, qkv, proj_l, block_map, block_q)


# On a GPU

# More tiles than all consumers of a GPU have at a time, in lists of one block and of several.
LARGE = {
    "two tiles per consumer": (1, 5000, 11, 128, 64, 4),
    "many short lists": (2, 4101, 16, 64, 64, 1),
}


@pytest.fixture
def taken(monkeypatch):
    """Collect the op's launches of the kernel."""
    launched = []
    forward = sm90.sparse_attention_forward
    monkeypatch.setattr(sm90, "sparse_attention_forward", lambda *given: launched.append(given) or forward(*given))
    return launched


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SHAPES | LARGE)
def test_matches_the_oracle_as_well_as_the_definition(name, dtype, sm_90, taken):
    sizes = (SHAPES | LARGE)[name]
    block_q = sizes[4]
    qkv, proj_l, block_map = inputs(dtype, *sizes, device="cuda")
    options = {"block_map": block_map, "block_q": block_q, "block_k": 128, "quantized": True}
    for weight, bias in (proj_l, (proj_l[0], None), tuple(x.to(dtype) for x in proj_l), (None, None)):
        out = sparse_linear_attention(*qkv, weight, bias, **options)
        assert taken
        taken.clear()
        assert_as_good(out, qkv, (weight, bias), block_map, block_q)
        again = sparse_linear_attention(*qkv, weight, bias, **options)
        assert torch.equal(again, out)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES | LARGE)
def test_e4m3_results(name, sm_90, taken):
    qkv, proj_l, block_map = inputs(torch.float16, *(SHAPES | LARGE)[name], device="cuda")
    options = {"block_map": block_map, "block_q": (SHAPES | LARGE)[name][4], "block_k": 128, "quantized": True}
    for weight, bias in (proj_l, (proj_l[0], None), (None, None)):
        wide, result = (sparse_linear_attention(*qkv, weight, bias, **options, result=dtype) for dtype in (None, FP8))
        assert len(taken) == 2
        taken.clear()
        assert_rounded_once(result, wide)


@pytest.mark.gpu
def test_writes_nothing_behind_the_result(sm_90):
    qkv, proj_l, block_map = inputs(torch.bfloat16, 2, 200, 2, 128, 64, 2, device="cuda")
    eight_bits, branch = prepared(*qkv, *proj_l)
    q = qkv[0]
    memory = torch.full((2, *q.shape), 7.0, dtype=q.dtype, device="cuda")
    sm90.sparse_attention_forward(eight_bits, q, Blocks(block_map, 64, 128), branch, memory[0], None)
    assert (memory[1] == 7).all()
    assert_as_good(memory[0], qkv, proj_l, block_map, 64)
    in_e4m3 = torch.full_like(memory, 7.0).to(FP8)
    out_scale = memory[0].float().abs().amax((1, 2, 3)) / 300
    sm90.sparse_attention_forward(eight_bits, q, Blocks(block_map, 64, 128), branch, in_e4m3[0], out_scale)
    assert (in_e4m3[1].float() == 7).all()
    out = in_e4m3[0].float() * out_scale[:, None, None, None]
    assert (out - memory[0].float()).abs().max() <= out.abs().max() / 15  # e4m3 rounds by 1/16 at most


@pytest.mark.gpu
def test_reads_strided_queries(sm_90):
    """q as a part of a fused projection, and with its heads first."""
    qkv, proj_l, block_map = inputs(torch.bfloat16, 2, 200, 2, 64, 64, 2, device="cuda")
    eight_bits, branch = prepared(*qkv, *proj_l)
    blocks = Blocks(block_map, 64, 128)

    def attend(q):
        out = torch.empty_like(qkv[0])
        sm90.sparse_attention_forward(eight_bits, q, blocks, branch, out, None)
        return out

    q = qkv[0]
    expected = attend(q)
    assert torch.equal(attend(torch.cat([q, q], -1)[..., :64]), expected)
    assert torch.equal(attend(q.transpose(1, 2).contiguous().transpose(1, 2)), expected)


@pytest.mark.gpu
def test_neighbours_do_not_leak(sm_90):
    """NaN in the next sample's and the next head's rows of v and of the branch stays there."""
    qkv, proj_l, block_map = inputs(torch.bfloat16, 2, 200, 2, 128, 64, 2, device="cuda")
    options = {"block_q": 64, "block_k": 128, "quantized": True}
    clean = sparse_linear_attention(*qkv, *proj_l, block_map=block_map, **options)
    for x in qkv:
        x[1] = x[0, :, 1] = torch.nan
    poisoned = sparse_linear_attention(*qkv, *proj_l, block_map=block_map, **options)
    assert clean.isfinite().all()
    assert torch.equal(poisoned[0, :, 0], clean[0, :, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_far_from_zero(head_dim, sm_90, monkeypatch):
    """Keys behind the last token would win the softmax. Their φ is 1 in one channel and underflows in others."""
    qkv, proj_l, block_map = inputs(torch.bfloat16, 1, 100, 1, head_dim, 64, 1, device="cuda")
    qkv[0][..., 0], qkv[1][..., 0] = 60, -60
    options = {"block_map": block_map, "block_q": 64, "block_k": 128, "quantized": True}
    out = sparse_linear_attention(*qkv, *proj_l, **options)
    monkeypatch.setattr(sm90, "why_not", lambda *_: "test")
    expected = sparse_linear_attention(*qkv, *proj_l, **options)
    assert relative_error(out, expected) <= 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("descending", [False, True])
def test_a_maximum_that_rises_from_key_to_key(descending, sm_90):
    qkv, proj_l, block_map = inputs(torch.bfloat16, 1, 600, 1, 64, 64, 5, device="cuda")
    q, k, _ = qkv
    q.zero_()
    k.mul_(0.1)
    q[..., 0], k[..., 0] = 8, torch.linspace(-40, 40, 600, device="cuda").to(k.dtype)[None, :, None]
    qkv[1] = k.flip(1) if descending else k
    out = sparse_linear_attention(*qkv, *proj_l, block_map=block_map, block_q=64, block_k=128, quantized=True)
    assert_as_good(out, qkv, proj_l, block_map, 64)
