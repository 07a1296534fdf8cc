"""The definition of sparse-linear attention against its formulas written out with whole matrices, in fp64."""

import pytest
import torch

from tests.oracle import relative_error
from turbo_rcm_patch.kernels import kept_blocks, sparse_block_map
from turbo_rcm_patch.kernels.quantized import FP8
from turbo_rcm_patch.kernels.sparse_linear import sparse_linear_reference as definition

# B, S, H, D, queries and keys of a block: one token, lengths that no block divides and that both do.
SHAPES = [(1, 1, 1, 8, 64, 64), (2, 77, 3, 16, 32, 16), (1, 200, 2, 8, 64, 128), (2, 128, 1, 16, 64, 32)]


def inputs(B, S, H, D, dtype=torch.float64):
    """q, k, v, W and b; k has a mean."""
    q, k, v = torch.randn(3, B, S, H, D)
    return [x.to(dtype) for x in (q, k + 2 * torch.randn(H, D), v, torch.randn(D, D), torch.randn(D))]


def random_map(B, S, H, block_q, block_k, kept):
    blocks = -(-S // block_k)
    order = torch.rand(B, H, -(-S // block_q), blocks).argsort(-1)
    return order[..., :kept].sort(-1).values.int()


def written_out(q, k, v, weight, bias, block_map, block_q, block_k):
    """Compute it from matrices of all queries and keys."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    token = torch.arange(q.shape[2])
    lists = block_map.long()[:, :, token // block_q]
    allowed = (lists[..., None, :] == (token // block_k)[:, None]).any(-1)
    scores = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(~allowed, -torch.inf)
    phi = q.softmax(-1) @ k.softmax(-1).mT
    linear = phi @ v / (1e-5 + phi.sum(-1, keepdim=True))
    return (scores.softmax(-1) @ v + linear @ weight.mT + bias).transpose(1, 2)


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_formulas(shape):
    *sizes, block_q, block_k = shape
    operands = inputs(*sizes)
    blocks = -(-sizes[1] // block_k)
    for kept in {1, (blocks + 1) // 2, blocks}:
        block_map = random_map(*sizes[:3], block_q, block_k, kept)
        actual = definition.sparse_linear_attention(*operands, block_map, block_q, block_k)
        torch.testing.assert_close(actual, written_out(*operands, block_map, block_q, block_k))


def test_with_all_blocks_the_softmax_is_dense():
    q, k, v, weight, _ = inputs(2, 77, 3, 16)
    block_map = random_map(2, 77, 3, 32, 16, 5)
    actual = definition.sparse_linear_attention(q, k, v, torch.zeros_like(weight), None, block_map, 32, 16)
    dense = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    torch.testing.assert_close(actual, dense.transpose(1, 2))


@pytest.mark.parametrize("shape", SHAPES)
def test_kept_are_the_blocks_with_the_largest_products_of_means(shape):
    B, S, H, D, block_q, block_k = shape
    q, k, *_ = inputs(B, S, H, D)
    blocks = -(-S // block_k)
    kept = (blocks + 1) // 2
    block_map = sparse_block_map(q, k, kept, block_q, block_k)
    assert block_map.dtype == torch.int32
    assert block_map.shape == (B, H, -(-S // block_q), kept)
    k = k - k.mean(1, keepdim=True)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, block_map.shape[:3])):
        mean = q[b, i * block_q : (i + 1) * block_q, h].mean(0)
        scores = torch.stack([mean @ k[b, j * block_k : (j + 1) * block_k, h].mean(0) for j in range(blocks)])
        assert block_map[b, h, i].tolist() == scores.topk(kept).indices.sort().values.tolist()


def test_the_kept_blocks_of_the_published_rule():
    assert kept_blocks(32760, 64, 0.1) == (51, False)
    assert kept_blocks(32760, 128, 0.15) == (38, False)
    assert kept_blocks(640, 64, 0.1) == (1, False)
    assert kept_blocks(639, 64, 1.0) == (10, False)
    assert kept_blocks(576, 64, 0.1) == (1, True)
    assert kept_blocks(1, 128, 0.99) == (1, True)


@pytest.mark.parametrize("v_format", [torch.float16, FP8])
def test_8_bits_cost_what_they_cost_dense_attention(v_format):
    """The rounding of 8-bit attention (4.1e-2 on normal data), and in the fp64 linear branch none."""
    operands = inputs(2, 333, 2, 64, torch.float32)
    block_map = random_map(2, 333, 2, 128, 64, 3)
    exact = written_out(*(x.double() for x in operands), block_map, 128, 64)
    actual = definition.sparse_linear_attention_8bit(*operands, block_map, 128, 64, v_format)
    linear = definition.linear_attention(*(x.double() for x in operands[:3])) @ operands[3].double().mT + operands[4]
    assert actual.dtype == torch.float32
    assert 1e-4 < relative_error(actual - linear, exact - linear) <= (4.1e-2 if v_format == FP8 else 1.5e-2)


def gradients(function, operands, *arguments):
    operands = [x.clone().requires_grad_() for x in operands]
    out = function(*operands, *arguments)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return torch.autograd.grad((out * weight).sum(), operands)


def test_gradients_are_those_of_the_formulas(monkeypatch):
    operands = inputs(2, 77, 3, 16)
    block_map = random_map(2, 77, 3, 32, 16, 3)
    expected = gradients(written_out, operands, block_map, 32, 16)
    for values in (1, 1 << 24):  # one block of queries at a time, and all
        monkeypatch.setattr(definition, "GATHERED_VALUES", values)
        actual = gradients(definition.sparse_linear_attention, operands, block_map, 32, 16)
        for ours, wanted in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("v_format", [torch.float16, FP8])
def test_gradients_through_8_bits_are_close_to_the_exact_ones(v_format):
    operands = inputs(1, 200, 2, 64, torch.float32)
    block_map = random_map(1, 200, 2, 64, 64, 2)
    exact = gradients(written_out, [x.double() for x in operands], block_map, 64, 64)
    actual = gradients(definition.sparse_linear_attention_8bit, operands, block_map, 64, 64, v_format)
    for ours, wanted in zip(actual, exact, strict=True):
        assert relative_error(ours, wanted) < 0.06


def test_no_matrix_of_all_queries_and_keys(monkeypatch):
    """Gathered at a time: GATHERED_VALUES of keys, however many tokens there are."""
    largest = []
    attend = definition._attend_exactly
    monkeypatch.setattr(definition, "GATHERED_VALUES", 1 << 14)
    monkeypatch.setattr(definition, "_attend_exactly", lambda *x: largest.append(x[1].numel()) or attend(*x))
    operands = inputs(1, 1000, 2, 16, torch.float32)
    block_map = random_map(1, 1000, 2, 64, 32, 4)
    definition.sparse_linear_attention(*operands, block_map, 64, 32)
    assert max(largest) <= 1 << 14
    assert sum(largest) == block_map.numel() * 32 * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_in_every_dtype(dtype):
    operands = inputs(1, 150, 2, 64, torch.float32)
    low = [x.to(dtype) for x in operands[:3]] + operands[3:]  # proj_l in fp32
    block_map = sparse_block_map(*low[:2], 2, 64, 64)
    actual = definition.sparse_linear_attention(*low, block_map, 64, 64)
    exact = written_out(*(x.double() for x in low), block_map, 64, 64)
    assert actual.dtype == dtype
    assert relative_error(actual, exact) <= 2 * torch.finfo(dtype).eps


def test_fp16_holds_sums_over_many_tokens():
    """Σ φ(k)ᵀ v would be beyond fp16's largest, 65504."""
    q, k, v = torch.zeros(3, 1, 300, 1, 8, dtype=torch.float16)
    k[..., 0], v[...] = 50, 30000
    out = definition.linear_attention(q, k, v)
    torch.testing.assert_close(out, v)
