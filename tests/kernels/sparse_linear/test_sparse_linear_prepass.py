"""The pre-passes of sparse-linear attention over all tokens, against its formulas in fp64."""

import pytest
import torch

from tests.kernels.attention_8bit.test_quantize_qkv import assert_same, formats
from tests.oracle import DTYPES, relative_error, torch_device
from turbo_rcm_patch.kernels.attention_8bit.quantize_qkv import QuantizedQKV, quantize_qkv
from turbo_rcm_patch.kernels.sparse_linear import sparse_linear_reference as definition
from turbo_rcm_patch.kernels.sparse_linear.sparse_linear_attention import (
    _pool_queries,
    _summarize_8bit,
    _summarize_keys,
)

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")

# B, S, H, D, tokens of a block: one token, one block of one token more than whole ones, more blocks than programs.
SHAPES = [(1, 1, 1, 64, 64), (2, 65, 3, 64, 64), (1, 200, 2, 128, 128), (1, 570, 1, 64, 64)]


def keys_and_values(device, dtype, B, S, H, D):
    k, v = torch.randn(2, B, S, H, D, device=torch_device(device))
    return (k + 3 * torch.randn(H, D, device=k.device)).to(dtype), v.to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_pools(device, shape):
    *sizes, block = shape
    for dtype in DTYPES[device]:
        k, v = keys_and_values(device, dtype, *sizes)
        pooled_q = _pool_queries(k, block)
        pooled_k, *_ = _summarize_keys(k, v, torch.eye(sizes[3], device=k.device), block)
        assert torch.equal(_summarize_keys(k, v, None, block)[0], pooled_k)
        exact = definition.pool(k.double(), block)
        centred = exact - k.double().mean(1)[:, :, None]
        for actual, wanted in ((pooled_q, exact), (pooled_k, centred)):
            assert actual.dtype == dtype
            assert actual.shape == wanted.shape
            # Means of k are of its mean's size; what is left of them without it is rounded as they are, in fp32.
            lost = torch.finfo(dtype).eps * wanted.norm() + 2e-6 * exact.norm()
            assert (actual.double() - wanted).norm() <= lost


@pytest.mark.parametrize("shape", SHAPES)
def test_the_state_is_of_projected_means_of_v(device, shape):
    *sizes, block = shape
    for dtype in DTYPES[device]:
        k, v = keys_and_values(device, dtype, *sizes)
        weight = torch.randn(sizes[3], sizes[3], device=k.device)
        _, key_weight, state = _summarize_keys(k, v, weight, block)
        phi = k.double().softmax(-1).transpose(1, 2)
        means = phi.mT @ v.double().transpose(1, 2) / phi.sum(2)[..., None]
        assert (key_weight.dtype, state.dtype) == (torch.float32, dtype)
        assert relative_error(key_weight, phi.sum(2)) < 1e-6
        assert relative_error(state, means @ weight.double().mT) <= max(torch.finfo(dtype).eps, 1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_8_bits_are_those_of_quantize_qkv(device, shape):
    *sizes, block = shape
    for dtype in DTYPES[device]:
        k, v = keys_and_values(device, dtype, *sizes)
        q, weight = v + k, torch.eye(sizes[3], device=k.device)
        flat = [x.flatten(2) for x in (q, k, v)]
        for v_format in formats(device):
            pooled_q, *summaries, q8, q_scale, k8, k_scale, v8, v_scale = _summarize_8bit(
                q, k, v, weight, block, block, v_format
            )
            actual = QuantizedQKV(q8, q_scale, k8, k_scale, v8, v_scale, dtype)
            assert_same(actual, quantize_qkv(*flat, heads=sizes[2], v_format=v_format, implementation="torch"))
            # On a GPU the two sum in other orders: what is rounded to a dtype may round otherwise.
            alone = (_pool_queries(q, block), *_summarize_keys(k, v, weight, block))
            largest = definition.pool(k.double(), block).norm()  # of means with k's own, which is taken off
            for ours, wanted in zip((pooled_q, *summaries), alone, strict=True):
                assert (ours.shape, ours.dtype) == (wanted.shape, wanted.dtype)
                lost = torch.finfo(wanted.dtype).eps * wanted.double().norm() + 2e-6 * largest
                assert (ours.double() - wanted.double()).norm() <= lost


def test_a_weight_of_any_strides(device):
    k, v = keys_and_values(device, torch.float32, 1, 70, 1, 64)
    weight = torch.randn(64, 64, device=k.device)
    assert torch.equal(_summarize_keys(k, v, weight.mT, 64)[2], _summarize_keys(k, v, weight.mT.contiguous(), 64)[2])


def test_samples_and_heads_do_not_mix(device):
    k, v = keys_and_values(device, torch.float32, 2, 70, 2, 64)
    weight = torch.randn(64, 64, device=k.device)
    alone = [_pool_queries(k[:1, :, :1], 64), *_summarize_keys(k[:1, :, :1], v[:1, :, :1], weight, 64)]
    for x in (k, v):
        x[1] = x[0, :, 1] = torch.nan
    both = [_pool_queries(k, 64), *_summarize_keys(k, v, weight, 64)]
    for ours, wanted in zip(both, alone, strict=True):
        assert wanted.isfinite().all()
        assert torch.equal(ours[:1, :1], wanted)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_nan_is_not_lost_in_8_bits(device):
    """One of a query makes its scale NaN; one of a key the mean, and so all keys' scales."""
    k, v = keys_and_values(device, torch.float32, 1, 70, 1, 64)
    q, weight = v + k, torch.eye(64, device=k.device)
    q[0, 3, 0, 5] = k[0, 2, 0, 1] = torch.nan
    q_scale, _, k_scale = _summarize_8bit(q, k, v, weight, 64, 64, torch.float16)[-5:-2]
    assert q_scale.flatten().isnan().nonzero().tolist() == [[3]]
    assert k_scale.isnan().all()


def test_a_channel_that_no_key_chooses(device):
    """Its weight underflows to 0; its means are then 0 and not 0 / 0."""
    k, v = keys_and_values(device, torch.float32, 1, 70, 1, 64)
    k[..., 3] = -1e4
    _, key_weight, state = _summarize_keys(k, v, torch.eye(64, device=k.device), 64)
    assert key_weight[0, 0, 3] == 0
    assert not state[0, 0, 3].any()
    assert state.isfinite().all()


def test_custom_op_contracts(device):
    k, v = keys_and_values(device, torch.float32, 1, 70, 2, 64)
    ops = torch.ops.turbo_rcm_patch
    torch.library.opcheck(ops.pool_queries.default, (k, 64))
    torch.library.opcheck(ops.summarize_keys.default, (k, v, torch.eye(64, device=k.device), 64))
    arguments = (k, k, v, torch.eye(64, device=k.device), 64, 64, torch.float16)
    torch.library.opcheck(ops.summarize_8bit.default, arguments)
    torch.library.opcheck(ops.summarize_keys.default, (k, v, None, 64))
    torch.library.opcheck(ops.summarize_8bit.default, (k, k, v, None, 64, 64, torch.float16))
