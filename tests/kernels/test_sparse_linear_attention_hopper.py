"""The sm_90 sparse-linear attention: what it refuses; its roles in threads on the CPU, its hand-overs above all; and on
the GPU its results."""

import pytest
import torch

from tests.kernels import gluon_on_cpu
from tests.oracle import relative_error
from turbo_rcm_patch.kernels import attention_8bit_hopper, attention_hopper, dispatch
from turbo_rcm_patch.kernels import sparse_linear_attention as op
from turbo_rcm_patch.kernels import sparse_linear_attention_hopper as hopper
from turbo_rcm_patch.kernels import sparse_linear_attention_reference as definition
from turbo_rcm_patch.kernels.quantize_qkv import QuantizedQKV
from turbo_rcm_patch.kernels.quantized import FP8
from turbo_rcm_patch.kernels.quantized_attention_reference import quantize_qkv
from turbo_rcm_patch.kernels.sparse_linear_attention_portable import Blocks, LinearBranch

kernel_module = pytest.importorskip("turbo_rcm_patch.kernels.sparse_linear_attention_hopper_kernel")
softmax_module = pytest.importorskip("turbo_rcm_patch.kernels.attention_8bit_hopper_kernel")
shared_module = pytest.importorskip("turbo_rcm_patch.kernels.attention_hopper_kernel")

# B, S, H, D, queries of a block, blocks kept: one token; a last block of queries and of keys that is cut, kept and
# left out; one block kept; all; two tiles of a list; several tiles per consumer.
SHAPES = {
    "one token": (1, 1, 1, 64, 64, 1),
    "one block": (2, 200, 2, 128, 64, 1),
    "all blocks": (1, 300, 1, 128, 64, 3),
    "two tiles of a list": (1, 449, 2, 64, 128, 2),
    "some blocks": (2, 700, 2, 64, 64, 4),
    "many tiles": (2, 410, 3, 128, 64, 3),
}


def inputs(dtype, B, S, H, D, block_q, kept, device="cpu"):
    """q, k, v, proj_l's weight and bias; lists of which about half end in the last block, which is cut."""
    q, k, v = torch.randn(3, B, S, H, D, device=device)
    k = k + torch.randn(H, D, device=device)
    blocks = torch.rand(B, H, -(-S // block_q), -(-S // 128), device=device)
    block_map = blocks.argsort(-1)[..., :kept].sort(-1).values.int()
    proj_l = torch.randn(D, D, device=device) / D**0.5, torch.randn(D, device=device)
    return [x.to(dtype) for x in (q, k, v)], proj_l, block_map


def prepared(q, k, v, weight, bias):
    """What the pre-passes leave, in plain torch."""
    D = q.shape[3]
    flat = (x.flatten(2) for x in (q, k, v))
    eight_bits = quantize_qkv(*flat, None, None, None, None, q.shape[2], 0.0, D**-0.5 * 1.4426950408889634, FP8)
    phi = k.double().softmax(-1).transpose(1, 2)
    key_weight = phi.sum(2)
    state = phi.mT @ v.double().transpose(1, 2) / key_weight[..., None] @ weight.double().T
    return QuantizedQKV(*eight_bits, q.dtype), LinearBranch(key_weight.float(), state.to(q.dtype), bias)


def assert_as_good(actual, qkv, proj_l, block_map, block_q):
    """As in test_sparse_linear_attention: weights are rounded relative to a row's maximum so far."""
    wide = (x.double() for x in (*qkv, *proj_l) if x is not None)
    wide = [*wide, None] if proj_l[1] is None else list(wide)
    exact = definition.sparse_linear_attention(*wide, block_map, block_q, 128)
    defined = definition.sparse_linear_attention_8bit(*qkv, *proj_l, block_map, block_q, 128, FP8)
    limit = 1.1 * relative_error(defined, exact) + torch.finfo(actual.dtype).eps
    assert relative_error(actual, exact) <= limit


# ---------------------------------------------------------------------------------------------------------------------
# Without a GPU
# ---------------------------------------------------------------------------------------------------------------------


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
    assert "sm_90" in hopper.why_not(cpu, **options)
    monkeypatch.setattr(dispatch, "is_hopper", lambda device: True)
    found = hopper.why_not(cpu, **options | changes)
    assert found is reason is None or reason in found
    monkeypatch.setattr(attention_hopper, "GLUON_ERROR", "cannot import name 'tma'")
    assert "'tma'" in hopper.why_not(cpu, **options | changes)


@pytest.fixture
def on_cpu(monkeypatch):
    """Runs the launcher with its kernel on the CPU, as a number of programs."""

    def run(*given, programs, seed):
        launched = []
        with monkeypatch.context() as patch:
            patch.setattr(hopper, "launch_kernel", lambda *given, **options: launched.append(given))
            hopper.sparse_attention_forward(*given)
        ((kernel, _, *arguments),) = launched
        modules = [kernel_module, softmax_module, shared_module]
        with gluon_on_cpu.on_cpu(monkeypatch, modules, programs, seed, opaque=lambda x: x) as machine:
            gluon_on_cpu.run(machine, kernel.fn, *map(gluon_on_cpu.argument, arguments))

    return run


@pytest.mark.parametrize(("programs", "seed"), [(1, 0), (3, 1), (40, 2)])
@pytest.mark.parametrize("name", SHAPES)
def test_hand_overs(name, programs, seed, on_cpu):
    """Programs with several tiles per consumer, with tiles for some consumers only, and with none at all."""
    block_q = SHAPES[name][4]
    qkv, proj_l, block_map = inputs(torch.float16, *SHAPES[name])
    proj_l = proj_l if seed else (proj_l[0], None)
    eight_bits, branch = prepared(*qkv, *proj_l)
    out = torch.full_like(qkv[0], torch.nan)
    blocks = Blocks(block_map, block_q, 128)
    on_cpu(eight_bits, qkv[0], blocks, branch, out, programs=programs, seed=seed)
    assert_as_good(out, qkv, proj_l, block_map, block_q)
