"""Block-sparse attention: kernels against the plain-torch definition and an fp64 oracle, and its edges."""

import re

import pytest
import torch

from tests.kernels.attention_8bit.test_quantize_qkv import formats
from tests.kernels.block_sparse.test_block_sparse_reference import inputs as structured
from tests.kernels.eight_bit import assert_rounded_once
from tests.kernels.turns import dtypes_in_turns
from tests.oracle import DTYPES, assert_no_worse, relative_error, torch_device
from turbo_rcm_patch.kernels import (
    block_sparse_attention,
    block_sparse_attention_8bit,
    block_sparse_sizes,
    kept_share,
    quantize_qkv,
    sparse_linear_attention,
)
from turbo_rcm_patch.kernels.block_sparse import block_sparse_attention as op
from turbo_rcm_patch.kernels.block_sparse import block_sparse_map
from turbo_rcm_patch.kernels.block_sparse import block_sparse_reference as definition
from turbo_rcm_patch.kernels.choice.registry import PORTABLE
from turbo_rcm_patch.kernels.quantized import FP8

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")

# B, S, H, D, queries and keys of a block, mass. In order: one token, a last block that is cut, all blocks, whole
# blocks.
SHAPES = [
    (1, 1, 1, 64, 64, 64, 0.5),
    (2, 201, 1, 64, 128, 64, 0.6),
    (1, 200, 1, 128, 64, 128, 0.5),
    (1, 150, 1, 64, 64, 64, 1.0),
    (1, 192, 2, 64, 64, 64, 0.4),
]


def inputs(device, dtype, B, S, H, D):
    return [x.to(torch_device(device), dtype) for x in structured(B, S, H, D, torch.float32)]


def in_8_bits(q, k, v, v_format=torch.float16):
    heads = q.shape[2]
    return quantize_qkv(*(x.flatten(2) for x in (q, k, v)), heads=heads, v_format=v_format, implementation="torch")


def assert_same_lists(actual, expected):
    assert torch.equal(actual.counts, expected.counts)
    listed = torch.arange(actual.block_map.shape[3], device=actual.counts.device) < expected.counts[..., None]
    assert torch.equal(actual.block_map[listed], expected.block_map[listed])
    torch.testing.assert_close(actual.left, expected.left.float())
    torch.testing.assert_close(actual.kept_share, expected.kept_share.float())


@pytest.mark.parametrize("mass", [0.01, 0.5, 0.9, 0.999, 1.0])
def test_the_lists_are_the_definitions(device, mass):
    query_blocks = 2 if device == "interpreter" else 5
    for key_blocks, (block_q, block_k) in (
        (1, (64, 64)),
        (7, (128, 64)),
        (33, (64, 128)),
        (300, (128, 64)),
        (7, (192, 128)),
    ):
        shares = (3 * torch.randn(2, 2, query_blocks, key_blocks)).softmax(-1)
        shares[0, 0, 0, 1:] = 0  # as for scores that underflow
        shares[0, 0, 1] = 1 / key_blocks
        shares = shares.to(torch_device(device))
        actual = definition.Lists(*block_sparse_map._keep(shares, mass, block_q, block_k))
        if mass == 0.999:  # in fp32 a sum may pass it one block earlier or later
            assert (actual.counts - definition.keep(shares, mass, block_q, block_k).counts).abs().max() <= 1
        else:
            assert_same_lists(actual, definition.keep(shares, mass, block_q, block_k))


@pytest.mark.parametrize("shape", SHAPES)
def test_means_are_the_definitions(device, shape):
    B, S, H, D, block_q, block_k, _ = shape
    for dtype in DTYPES[device]:
        q, k, v = inputs(device, dtype, B, S, H, D)
        heads_first = k.transpose(1, 2).contiguous().transpose(1, 2)
        for x, block in ((q, block_q), (heads_first, block_k), (q, 192)):
            expected = definition.pool(x, block, 32)
            for of_means in {torch.float32, dtype}:
                actual = block_sparse_map.pool_estimated(x, block, of_means)
                torch.testing.assert_close(actual, expected.to(of_means))
        means = block_sparse_map.pool_parts(v, None, S, block_k, block_k, 1, torch.float32)
        torch.testing.assert_close(means, definition.pool(v, block_k, block_k))


@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_reference(device, shape):
    *sizes, block_q, block_k, mass = shape
    options = {"mass": mass, "block_q": block_q, "block_k": block_k}
    for dtype in dtypes_in_turns(device, (shape, SHAPES)):
        q, k, v = inputs(device, dtype, *sizes)
        exact = definition.block_sparse_attention(q.double(), k.double(), v.double(), *options.values())
        actual, defined = (block_sparse_attention(q, k, v, **options, implementation=i) for i in ("triton", "torch"))
        assert (actual.shape, actual.dtype) == (exact.shape, dtype)
        assert_no_worse(actual, defined, exact)
        for v_format in formats(device):
            qkv = in_8_bits(q, k, v, v_format)
            actual, defined = (
                block_sparse_attention_8bit(qkv, **options, implementation=i) for i in ("triton", "torch")
            )
            assert (actual.shape, actual.dtype) == (exact.shape, dtype)
            # It rounds weights relative to a row's maximum so far: its error is another one, but as large.
            limit = 1.1 * relative_error(defined, exact) + torch.finfo(dtype).eps
            assert relative_error(actual, exact) <= limit


def test_keys_far_from_zero_keep_the_same_blocks(device):
    """Their mean is subtracted before the means of parts are rounded. These keys are exact in fp16, also 64 higher."""
    q, k, v = inputs(device, torch.float16, 1, 500, 1, 64)
    k = (8 * k).round() / 8
    options = {"mass": 0.5, "block_q": 64, "block_k": 64, "implementation": "triton"}
    near, far = (block_sparse_attention(q, keys, v, **options) for keys in (k, k + 64))
    assert relative_error(far, near) <= 1e-3


def test_the_result_is_divided_by_its_scale(device):
    """The result is in fp32, because Triton's interpreter rounds to e4m3 wrongly."""
    q, k, v = inputs(device, torch.float32, 2, 130, 2, 64)
    qkv = in_8_bits(q, k, v)
    plain, scaled = (
        op._fused_8bit(op._portable, qkv, 0.5, 64, 64, torch.float32, scale)
        for scale in (None, torch.tensor([0.5, 3.0], device=q.device))
    )
    torch.testing.assert_close(scaled[0] * 0.5, plain[0])
    torch.testing.assert_close(scaled[1] * 3.0, plain[1])


@pytest.mark.parametrize("outlier", [1, 100])
def test_e4m3_results(device, outlier):
    """Their error is that of rows which a separate pass rounds, also with one large channel."""
    q, k, v = inputs(device, torch.float32, 2, 400, 2, 64)
    v[:, :, 0, 0] *= outlier
    qkv = in_8_bits(q, k, v, None)
    wide, result = (
        block_sparse_attention_8bit(qkv, mass=0.5, block_q=64, block_k=64, result=dtype) for dtype in (None, FP8)
    )
    assert_rounded_once(result, wide)


@pytest.mark.parametrize("quantized", [False, True])
def test_samples_and_heads_do_not_mix(device, quantized):
    q, k, v = inputs(device, torch.float32, 2, 130, 2, 64)
    options = {"mass": 0.5, "block_q": 64, "block_k": 64, "implementation": "triton"}

    def run(*qkv):
        if quantized:
            return block_sparse_attention_8bit(in_8_bits(*qkv), **options)
        return block_sparse_attention(*qkv, **options)

    alone = run(*(x[:1, :, :1] for x in (q, k, v)))
    for x in (q, k, v):
        x[1] = x[0, :, 1] = torch.nan
    torch.testing.assert_close(run(q, k, v)[:1, :, :1], alone)


def test_any_strides(device):
    fused = torch.randn(1, 130, 3 * 2 * 64, device=torch_device(device))
    parts = [x.unflatten(2, (2, 64)) for x in fused.chunk(3, -1)]
    options = {"mass": 0.5, "block_q": 64, "block_k": 64, "implementation": "triton"}
    expected = block_sparse_attention(*(x.contiguous() for x in parts), **options)
    assert torch.equal(block_sparse_attention(*parts, **options), expected)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts]
    assert torch.equal(block_sparse_attention(*heads_first, **options), expected)


def test_scores_far_from_zero(device):
    """Keys beyond the last token would win the softmax, and shares of other blocks underflow."""
    for dtype in DTYPES[device]:
        q, k, v = inputs(device, dtype, 1, 200, 1, 64)
        q[..., 0], k[..., 0] = 60, -60
        k[:, :100, :, 1] += 60
        options = {"mass": 0.9, "block_q": 64, "block_k": 64}
        exact = definition.block_sparse_attention(q.double(), k.double(), v.double(), *options.values())
        actual, defined = (block_sparse_attention(q, k, v, **options, implementation=i) for i in ("triton", "torch"))
        rounded = 4 * 450 * torch.finfo(torch.float32).eps  # exp makes the rounding of the scores relative
        limit = 1.1 * relative_error(defined, exact) + torch.finfo(dtype).eps + rounded
        assert relative_error(actual, exact) <= limit


def test_it_is_not_sparse_linear_attention(device):
    """The kernel that both share adds no linear branch here, and nothing that stands for left blocks there."""
    q, k, v = inputs(device, torch.float32, 1, 150, 1, 64)
    options = {"block_q": 64, "block_k": 64, "implementation": "triton"}
    dense = block_sparse_attention(q, k, v, mass=1.0, **options)
    zero = torch.zeros(64, 64, device=q.device)
    assert torch.equal(sparse_linear_attention(q, k, v, zero, topk=1.0, **options), dense)


def test_gradients_are_the_references(device):
    operands = inputs(device, torch.float32, 1, 150, 2, 64)
    options = {"mass": 0.5, "block_q": 64, "block_k": 64}

    def gradients(implementation):
        leaves = [x.clone().requires_grad_() for x in operands]
        out = block_sparse_attention(*leaves, **options, implementation=implementation)
        return torch.autograd.grad(out.square().sum(), leaves)

    for grad, expected in zip(gradients("triton"), gradients("torch"), strict=True):
        assert grad.any()
        torch.testing.assert_close(grad, expected)


def test_no_tokens():
    empty = torch.zeros(2, 0, 3, 64)
    assert block_sparse_attention(empty, empty, empty, mass=0.5).shape == empty.shape
    result = block_sparse_attention_8bit(in_8_bits(empty, empty, empty), mass=0.5, result=FP8)
    assert (result.format, result.values.shape, result.scale.shape) == (FP8, (2, 0, 192), (2, 0))


def test_other_sizes_take_the_reference(device):
    q, k, v = inputs(device, torch.float32, 1, 70, 1, 32)
    options = {"mass": 0.5, "block_q": 16, "block_k": 48}
    expected = definition.block_sparse_attention(q, k, v, *options.values())
    assert torch.equal(block_sparse_attention(q, k, v, **options), expected)
    with pytest.raises(ValueError, match=r"no kernel can run .*head_dim 32"):
        block_sparse_attention(q, k, v, mass=0.5, implementation="triton")
    q, k, v = inputs(device, torch.float32, 1, 70, 1, 64)
    with pytest.raises(ValueError, match=r"no kernel can run .*blocks of 64 queries and 32 keys"):
        block_sparse_attention(q, k, v, mass=0.5, block_q=64, block_k=32, implementation="triton")


def test_compiles_to_one_graph_for_all_lengths(device):
    options = {"mass": 0.5, "block_q": 64, "block_k": 64, "implementation": "triton"}

    def block(q, k, v):
        return block_sparse_attention(q, k, v, **options)

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="eager")
    for tokens in (70, 130):
        operands = inputs(device, torch.float32, 1, tokens, 1, 64)
        torch.testing.assert_close(compiled(*operands), block(*operands))


def test_custom_op_contracts(device):
    q, k, v = inputs(device, torch.float32, 1, 130, 1, 64)
    ops = torch.ops.turbo_rcm_patch
    shares = torch.randn(1, 1, 3, 3, device=q.device).softmax(-1)
    torch.library.opcheck(ops.pool_parts.default, (q, None, 130, 64, 32, 1, q.dtype))
    torch.library.opcheck(ops.keep_blocks.default, (shares, 0.5, 64, 64))
    found = definition.keep(shares, 0.5, 64, 64)
    arguments = (found.block_map, found.counts, found.kept_share, torch.randn(1, 1, 3, 64, device=q.device), 64, 64)
    torch.library.opcheck(ops.block_sparse_attention.default, (q, k, v, *arguments))
    qkv = in_8_bits(q, k, v)
    torch.library.opcheck(
        ops.block_sparse_attention_8bit.default, (PORTABLE, *qkv[:6], *arguments, torch.float32, None, 0.5)
    )
    scaled = (torch.float32, torch.ones(1, device=q.device), 0.5)
    torch.library.opcheck(ops.block_sparse_attention_8bit.default, (PORTABLE, *qkv[:6], *arguments, *scaled))


@pytest.mark.gpu
@pytest.mark.parametrize("quantized", [False, True])
def test_at_full_size(quantized):
    """Compare some rows of Wan's 12 heads and 32,760 tokens with fp64 over the blocks that the definition keeps."""
    q, k, v = (x.to("cuda", torch.bfloat16) for x in structured(1, 32760, 12, 128, torch.float32))
    out = (
        block_sparse_attention_8bit(in_8_bits(q, k, v, None), mass=0.5)
        if quantized
        else block_sparse_attention(q, k, v, mass=0.5)
    )
    block_q, block_k = block_sparse_sizes(q.device, q.dtype, quantized=quantized)
    pooled_q = definition.pool(q, block_q, 32)
    pooled_k = definition.less_mean(definition.pool(k, block_k, 32), 32760, 32)
    pooled = (x.to(q.dtype).float() for x in (pooled_q, pooled_k))  # the kernel rounds no scores
    shares = definition.estimate(*pooled, 128**-0.5, 32760, block_q, block_k)
    found = definition.keep(shares, 0.5, block_q, block_k)
    left_value = found.left.double() @ definition.pool(v, block_k, block_k).double()
    assert 0 < kept_share(q, k, mass=0.5) < 1
    for row in (0, 4321, 32759):
        block = row // block_q
        blocks = found.block_map[0, 5, block, : found.counts[0, 5, block]].long()
        keys = (blocks[:, None] * block_k + torch.arange(block_k, device="cuda")).flatten()
        keys = keys[keys < 32760]
        scores = k[0, keys, 5].double() @ q[0, row, 5].double() * 128**-0.5
        attended = scores.softmax(0) @ v[0, keys, 5].double()
        exact = found.kept_share[0, 5, block] * attended + left_value[0, 5, block]
        # Rounding to 8 bits may turn the choice among blocks at the threshold.
        assert relative_error(out[0, row, 5], exact) <= (1e-1 if quantized else 4 * torch.finfo(q.dtype).eps)


def test_errors_name_what_was_given():
    q = torch.zeros(2, 130, 3, 64)
    valid = {"q": q, "k": q, "v": q, "mass": 0.5}
    for message, arguments in {
        "q has shape [130, 3, 64]": {"q": q[0]},
        "k is torch.float32 [2, 129, 3, 64]": {"k": q[:, 1:]},
        "v is torch.float16": {"v": q.half()},
        "mass=0": {"mass": 0},
        "mass=1.5": {"mass": 1.5},
        "mass=nan": {"mass": float("nan")},
        "block_q=0": {"block_q": 0},
        "block_k=-1": {"block_k": -1},
        "implementation='fast'": {"implementation": "fast"},
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            block_sparse_attention(**valid | arguments)
    for message, options in (("mass=2", {"mass": 2}), ("result=torch.int8", {"mass": 0.5, "result": torch.int8})):
        with pytest.raises(ValueError, match=message):
            block_sparse_attention_8bit(in_8_bits(q, q, q), **options)


def test_the_8_bit_reference_is_taken_for_e4m3_in_the_interpreter():
    qkv = in_8_bits(*inputs("interpreter", torch.float32, 1, 70, 1, 64), FP8)
    expected = block_sparse_attention_8bit(qkv, mass=0.5, implementation="torch")
    assert torch.equal(block_sparse_attention_8bit(qkv, mass=0.5), expected)
