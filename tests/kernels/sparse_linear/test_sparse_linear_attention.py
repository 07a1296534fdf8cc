"""Sparse-linear attention: kernels against the plain-torch definition and an fp64 oracle, and its edges."""

import re

import pytest
import torch

from tests.kernels.attention_8bit.test_quantize_qkv import formats
from tests.kernels.eight_bit import assert_rounded_once
from tests.kernels.turns import dtypes_in_turns
from tests.oracle import DTYPES, assert_no_worse, relative_error, torch_device
from turbo_rcm_patch.kernels import chosen_key_blocks, sparse_block_map, sparse_block_sizes, sparse_linear_attention
from turbo_rcm_patch.kernels.attention_8bit.attention_8bit_reference import quantized_values
from turbo_rcm_patch.kernels.choice.registry import PORTABLE
from turbo_rcm_patch.kernels.dispatch import meta_is_gpu
from turbo_rcm_patch.kernels.quantized import FP8, quantize_reference, round_to
from turbo_rcm_patch.kernels.sparse_linear import sparse_linear_attention as op
from turbo_rcm_patch.kernels.sparse_linear import sparse_linear_reference as definition

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")

# B, S, H, D, queries and keys of a block, blocks kept. There are one token, a last block that is cut (with one key and
# with more), all blocks kept, and whole blocks.
SHAPES = [
    (1, 1, 1, 64, 64, 64, 1),
    (2, 129, 2, 64, 128, 64, 2),
    (1, 200, 1, 128, 64, 128, 1),
    (1, 150, 2, 64, 64, 64, 3),
    (1, 256, 1, 64, 128, 128, 1),
]


def inputs(device, dtype, B, S, H, D):
    """q, k, v in dtype; proj_l in fp32."""
    q, k, v = torch.randn(3, B, S, H, D)
    tensors = [x.to(dtype) for x in (q, k + torch.randn(H, D), v)] + [torch.randn(D, D), torch.randn(D)]
    return [x.to(torch_device(device)) for x in tensors]


def random_map(device, B, S, H, block_q, block_k, kept):
    """Lists in no order, with and without the last block."""
    order = torch.rand(B, H, -(-S // block_q), -(-S // block_k)).argsort(-1)
    return order[..., :kept].int().to(torch_device(device))


def oracle(operands, block_map, block_q, block_k):
    return definition.sparse_linear_attention(*(x.double() for x in operands), block_map, block_q, block_k)


@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_reference(device, shape):
    *sizes, block_q, block_k, kept = shape
    for dtype in dtypes_in_turns(device, (shape, SHAPES)):
        operands = inputs(device, dtype, *sizes)
        options = {
            "block_map": random_map(device, *sizes[:3], block_q, block_k, kept),
            "block_q": block_q,
            "block_k": block_k,
        }
        exact = oracle(operands, *options.values())
        actual, defined = (
            sparse_linear_attention(*operands, **options, implementation=name) for name in ("triton", "torch")
        )
        assert (actual.shape, actual.dtype) == (exact.shape, dtype)
        assert_no_worse(actual, defined, exact)
        for v_format in formats(device):
            actual, defined = (
                sparse_linear_attention(*operands, **options, quantized=True, v_format=v_format, implementation=name)
                for name in ("triton", "torch")
            )
            assert (actual.shape, actual.dtype) == (exact.shape, dtype)
            # It rounds weights as the definition, but relative to a row's maximum so far: as large an error.
            limit = 1.1 * relative_error(defined, exact) + torch.finfo(dtype).eps
            assert relative_error(actual, exact) <= limit


def launched_in_8_bits(device, operands, block_map, out_scale):
    """Return the portable kernel's result in fp32, and the scale that an e4m3 result would get."""
    q, k, v, weight, bias = operands
    _, _, key_weight, state, *qkv = op._summarize_8bit(q, k, v, weight, 64, 64, formats(device)[0])
    branch = (None, None, None) if weight is None else (key_weight, state, bias)
    out = op.launch_portable_8bit(*qkv, q, block_map, *branch, 64, 64, torch.float32, out_scale)
    return out, op._output_scale(qkv[5], *branch[1:])


@pytest.mark.parametrize("linear", [True, False])
def test_the_result_is_divided_by_its_scale(device, linear):
    """The result is in fp32, because Triton's interpreter rounds to e4m3 wrongly."""
    operands, block_map = inputs(device, torch.float32, 2, 130, 2, 64), random_map(device, 2, 130, 2, 64, 64, 2)
    operands[3:] = operands[3:] if linear else (None, None)
    plain, scaled = (
        launched_in_8_bits(device, operands, block_map, scale)[0]
        for scale in (None, torch.tensor([0.5, 3.0], device=block_map.device))
    )
    torch.testing.assert_close(scaled[0] * 0.5, plain[0])
    torch.testing.assert_close(scaled[1] * 3.0, plain[1])


PROJECTIONS = {"no linear part": (0, 0), "no bias": (0.1, 0), "bias": (0.1, 1), "large bias": (0.1, 100)}


@pytest.mark.parametrize("outlier", [1, 100])
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_the_scale_bounds_the_result_and_costs_no_accuracy(device, projection, outlier):
    """Beside one large channel too. PyTorch rounds here, so that this also holds on the CPU."""
    operands, block_map = inputs(device, torch.float32, 2, 200, 2, 64), random_map(device, 2, 200, 2, 64, 64, 2)
    operands[2][1, :, 0, 0] *= outlier
    for place, factor in zip((3, 4), PROJECTIONS[projection], strict=True):
        operands[place] = operands[place] * factor if factor else None
    wide, scale = launched_in_8_bits(device, operands, block_map, None)
    result = round_to(wide / scale[:, None, None, None], FP8)
    assert_rounded_once(quantized_values(result, scale), wide)
    assert (448 * scale <= 20 * wide.abs().amax((1, 2, 3))).all()  # 9 times was seen, on random data


@pytest.mark.gpu
@pytest.mark.parametrize("linear", [True, False])
def test_e4m3_results_of_the_portable_kernel(linear):
    q, k, v, weight, bias = inputs("cuda", torch.float32, 2, 400, 2, 64)
    proj_l = (weight / 8, bias) if linear else (None, None)
    options = {"topk": 0.5, "block_q": 64, "block_k": 64, "quantized": True}
    wide, result = (sparse_linear_attention(q, k, v, *proj_l, **options, result=dtype) for dtype in (None, FP8))
    assert_rounded_once(result, wide)


def test_the_reference_in_e4m3():
    operands = inputs("interpreter", torch.float32, 2, 130, 2, 64)
    options = {"topk": 0.5, "quantized": True, "implementation": "torch"}
    result = sparse_linear_attention(*operands, **options, result=FP8)
    expected = quantize_reference(sparse_linear_attention(*operands, **options).flatten(2), FP8)
    assert torch.equal(result.values.float(), expected.values.float())
    assert torch.equal(result.scale, expected.scale)


def test_topk_keeps_what_the_block_map_says(device):
    for dtype in DTYPES[device]:
        operands = inputs(device, dtype, 2, 200, 1, 64)
        options = {"block_q": 128, "block_k": 64, "implementation": "triton"}
        block_map = sparse_block_map(*operands[:2], 2, 128, 64)
        expected = sparse_linear_attention(*operands, block_map=block_map, **options)
        assert torch.equal(sparse_linear_attention(*operands, topk=0.5, **options), expected)
        options["implementation"] = "torch"
        expected = sparse_linear_attention(*operands, block_map=block_map, **options)
        assert torch.equal(sparse_linear_attention(*operands, topk=0.5, **options), expected)


def test_the_choice_by_itself_is_the_one_that_attention_makes(device):
    for dtype in DTYPES[device]:
        q, k, v, *proj_l = inputs(device, dtype, 1, 200, 2, 64)
        for implementation in ("triton", "torch"):
            options = {"block_q": 128, "block_k": 64, "implementation": implementation}
            chosen = chosen_key_blocks(q, k, 2, **options)
            assert torch.equal(chosen.sort(-1).values, chosen)
            kept = sparse_linear_attention(q, k, v, *proj_l, block_map=chosen, **options)
            assert torch.equal(kept, sparse_linear_attention(q, k, v, *proj_l, topk=0.5, **options))


def test_where_the_published_rule_keeps_nothing_one_block_is_kept(device):
    operands = inputs(device, torch.float32, 1, 150, 1, 64)
    options = {"block_q": 64, "block_k": 64, "implementation": "triton"}
    out = sparse_linear_attention(*operands, topk=0.1, **options)
    block_map = sparse_block_map(*operands[:2], 1, 64, 64)
    assert torch.equal(out, sparse_linear_attention(*operands, block_map=block_map, **options))
    assert out.isfinite().all()


@pytest.mark.parametrize("quantized", [False, True])
def test_samples_and_heads_do_not_mix(device, quantized):
    operands = inputs(device, torch.float32, 2, 70, 2, 64)
    options = {"topk": 0.5, "block_q": 64, "block_k": 64, "implementation": "triton", "quantized": quantized}
    options["v_format"] = torch.float16 if quantized else None
    alone = sparse_linear_attention(*(x[:1, :, :1] for x in operands[:3]), *operands[3:], **options)
    for x in operands[:3]:
        x[1] = x[0, :, 1] = torch.nan
    both = sparse_linear_attention(*operands, **options)
    # The mean of k is added up in another order, which may turn a rounding to 8 bits.
    assert relative_error(both[:1, :, :1], alone) <= (1e-3 if quantized else 1e-6)


@pytest.mark.parametrize("quantized", [False, True])
def test_any_strides(device, quantized):
    fused = torch.randn(2, 70, 3 * 2 * 64, device=torch_device(device))
    parts = [x.unflatten(2, (2, 64)) for x in fused.chunk(3, -1)]
    weight, bias = torch.randn(64, 64, device=fused.device), torch.randn(128, device=fused.device)[::2]
    options = {"topk": 0.5, "block_q": 64, "block_k": 64, "implementation": "triton", "quantized": quantized}
    options["v_format"] = torch.float16 if quantized else None
    expected = sparse_linear_attention(*(x.contiguous() for x in parts), weight, bias.contiguous(), **options)
    assert torch.equal(sparse_linear_attention(*parts, weight, bias, **options), expected)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts]
    transposed = weight.mT.contiguous().mT
    assert torch.equal(sparse_linear_attention(*heads_first, transposed, bias, **options), expected)


@pytest.mark.parametrize("quantized", [False, True])
def test_without_a_bias(device, quantized):
    *qkv, weight, _ = inputs(device, torch.float32, 1, 70, 1, 64)
    options = {"topk": 0.5, "block_q": 64, "block_k": 64, "implementation": "triton", "quantized": quantized}
    options["v_format"] = torch.float16 if quantized else None
    expected = sparse_linear_attention(*qkv, weight, torch.zeros(64, device=weight.device), **options)
    assert torch.equal(sparse_linear_attention(*qkv, weight, **options), expected)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_without_a_linear_branch(device, shape, quantized):
    *sizes, block_q, block_k, kept = shape
    *qkv, weight, _ = inputs(device, torch.float32, *sizes)
    options = {"block_q": block_q, "block_k": block_k, "quantized": quantized}
    options["v_format"] = torch.float16 if quantized else None
    block_map = random_map(device, *sizes[:3], block_q, block_k, kept)
    ways = [{"block_map": block_map}, {"topk": 0.7}]
    if device == "interpreter":  # one of them, another one for the next shape
        ways = [ways[(SHAPES.index(shape) + quantized) % 2]]
    for kept_as in ways:
        expected = sparse_linear_attention(
            *qkv, torch.zeros_like(weight), **options, **kept_as, implementation="triton"
        )
        for name in ("triton", "torch"):
            actual = sparse_linear_attention(*qkv, None, **options, **kept_as, implementation=name)
            assert relative_error(actual, expected) <= (1e-6 if name == "triton" else 2e-3 if quantized else 1e-5)


@pytest.mark.parametrize("quantized", [False, True])
def test_scores_far_from_zero(device, quantized):
    """Keys beyond the last token would win the softmax. Their φ is 1 in one channel and underflows in others."""
    for dtype in DTYPES[device]:
        operands = inputs(device, dtype, 1, 100, 1, 64)
        operands[0][..., 0], operands[1][..., 0] = 60, -60
        options = {"topk": 1.0, "block_q": 64, "block_k": 64, "quantized": quantized}
        options["v_format"] = torch.float16 if quantized else None
        block_map = torch.arange(2, device=operands[0].device).expand(1, 1, 2, 2)
        exact = oracle(operands, block_map, 64, 64)
        actual, defined = (
            sparse_linear_attention(*operands, **options, implementation=name) for name in ("triton", "torch")
        )
        rounded = 4 * 450 * torch.finfo(torch.float32).eps  # exp makes the rounding of the scores relative
        limit = 1.1 * relative_error(defined, exact) + torch.finfo(dtype).eps + rounded
        assert relative_error(actual, exact) <= limit


@pytest.mark.parametrize("quantized", [False, True])
def test_gradients_are_the_references(device, quantized):
    operands = inputs(device, torch.float32, 1, 70, 2, 64)
    options = {"topk": 0.5, "block_q": 64, "block_k": 64, "quantized": quantized}

    def gradients(implementation):
        leaves = [x.clone().requires_grad_() for x in operands]
        out = sparse_linear_attention(*leaves, **options, implementation=implementation)
        return out, torch.autograd.grad(out.square().sum(), leaves)

    out, ours = gradients("triton")
    torch.testing.assert_close(out, sparse_linear_attention(*operands, **options, implementation="torch"))
    for grad, expected, x in zip(ours, gradients("torch")[1], operands, strict=True):
        assert grad.shape == x.shape
        assert grad.any()
        torch.testing.assert_close(grad, expected)


def test_no_tokens():
    empty = torch.zeros(2, 0, 3, 64)
    assert sparse_linear_attention(empty, empty, empty, torch.eye(64), topk=0.1).shape == empty.shape
    result = sparse_linear_attention(empty, empty, empty, None, topk=0.1, quantized=True, result=FP8)
    assert (result.format, result.values.shape, result.scale.shape) == (FP8, (2, 0, 192), (2, 0))


def test_published_block_sizes():
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert [sparse_block_sizes(cpu, quantized=quantized) for quantized in (False, True)] == [(128, 64)] * 2
    for capability, expected in (((9, 0), (64, 128)), ((8, 9), (128, 64)), ((12, 0), (128, 64))):
        with meta_is_gpu(capability, 1):
            assert sparse_block_sizes(meta, quantized=True) == expected
            assert sparse_block_sizes(meta, quantized=False) == (128, 64)


def test_other_sizes_take_the_reference(device):
    operands = inputs(device, torch.float32, 1, 70, 1, 32)
    out = sparse_linear_attention(*operands, topk=0.5, block_q=16, block_k=48)
    assert torch.equal(
        out, sparse_linear_attention(*operands, topk=0.5, block_q=16, block_k=48, implementation="torch")
    )
    with pytest.raises(ValueError, match=r"no kernel can run .*head_dim 32"):
        sparse_linear_attention(*operands, topk=0.5, implementation="triton")
    operands = inputs(device, torch.float32, 1, 70, 1, 64)
    with pytest.raises(ValueError, match=r"no kernel can run .*blocks of 64 queries and 32 keys"):
        sparse_linear_attention(*operands, topk=0.5, block_q=64, block_k=32, implementation="triton")


def test_compiles_to_one_graph_for_all_lengths(device):
    options = {"topk": 0.5, "block_q": 64, "block_k": 64, "implementation": "triton"}
    in_8_bits = {"quantized": True, "v_format": torch.float16}

    def block(*operands):
        exact = sparse_linear_attention(*operands, **options)
        return torch.stack((exact, sparse_linear_attention(*operands, **options, **in_8_bits)))

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="eager")
    for tokens in (70, 130):
        operands = inputs(device, torch.float32, 1, tokens, 1, 64)
        assert torch.equal(compiled(*operands), block(*operands))


def test_custom_op_contracts(device):
    q, k, v, _, bias = inputs(device, torch.float32, 1, 70, 2, 64)
    arguments = (random_map(device, 1, 70, 2, 64, 64, 1), torch.rand(1, 2, 64, device=q.device))
    arguments += (torch.randn(1, 2, 64, 64, device=q.device), bias, 64, 64)
    ops = torch.ops.turbo_rcm_patch
    torch.library.opcheck(ops.sparse_linear_attention.default, (q, k, v, *arguments))
    qkv = [x.flatten(2) for x in (q, k, v)]
    eight_bits = ops.quantize_qkv(*qkv, None, None, None, None, 2, 1e-6, 0.2, torch.float16)
    scaled = (torch.float32, torch.ones(1, device=q.device))
    torch.library.opcheck(ops.sparse_linear_attention_8bit.default, (PORTABLE, *eight_bits, q, *arguments, *scaled))
    arguments = (arguments[0], None, None, None, 64, 64)
    torch.library.opcheck(ops.sparse_linear_attention.default, (q, k, v, *arguments))
    plain = (torch.float32, None)
    torch.library.opcheck(ops.sparse_linear_attention_8bit.default, (PORTABLE, *eight_bits, q, *arguments, *plain))


@pytest.mark.gpu
@pytest.mark.parametrize("quantized", [False, True])
def test_at_full_size(quantized):
    """Wan's 12 heads and 32,760 tokens, of some rows against fp64."""
    q, k, v = torch.randn(3, 1, 32760, 12, 128, device="cuda").bfloat16()
    weight, bias = torch.randn(128, 128, device="cuda") / 11, torch.randn(128, device="cuda")
    block_q, block_k = sparse_block_sizes(q.device, quantized=quantized)
    block_map = sparse_block_map(q, k, definition.kept_blocks(32760, block_k, 0.1).count, block_q, block_k)
    actual = sparse_linear_attention(q, k, v, weight, bias, block_map=block_map, quantized=quantized)
    phi_q, phi_k = (x[0, :, 5].double().softmax(-1) for x in (q, k))
    for row in (0, 4321, 32759):
        blocks = block_map[0, 5, row // block_q].long()
        keys = (blocks[:, None] * block_k + torch.arange(block_k, device="cuda")).flatten()
        keys = keys[keys < 32760]
        scores = k[0, keys, 5].double() @ q[0, row, 5].double() * 128**-0.5
        phi = phi_k @ phi_q[row]
        linear = phi @ v[0, :, 5].double() / (1e-5 + phi.sum())
        exact = scores.softmax(0) @ v[0, keys, 5].double() + weight.double() @ linear + bias.double()
        assert relative_error(actual[0, row, 5], exact) <= (4.1e-2 if quantized else 2 * torch.finfo(q.dtype).eps)


def test_errors_name_what_was_given():
    q = torch.zeros(2, 130, 3, 64)
    valid = {"q": q, "k": q, "v": q, "proj_weight": torch.eye(64), "topk": 0.5, "block_q": 64, "block_k": 64}
    lists = torch.zeros(2, 3, 3, 1, dtype=torch.int32)
    for message, arguments in {
        "q has shape [130, 3, 64]": {"q": q[0]},
        "k is torch.float32 [2, 129, 3, 64]": {"k": q[:, 1:]},
        "v is torch.float16": {"v": q.half()},
        "proj_weight is torch.float32 [32, 64]": {"proj_weight": torch.zeros(32, 64)},
        "proj_weight is torch.float64": {"proj_weight": torch.eye(64).double()},
        "proj_bias is torch.float32 [32]": {"proj_bias": torch.zeros(32)},
        "either topk or block_map": {"topk": None},
        "topk=0.0": {"topk": 0.0},
        "topk=1.5": {"topk": 1.5},
        "topk=nan": {"topk": float("nan")},
        "block_q and block_k together": {"block_k": None},
        "block_k=0": {"block_k": 0},
        "block_map is torch.float32": {"topk": None, "block_map": lists.float()},
        "block_map is torch.int32 [2, 3, 2, 1]": {"topk": None, "block_map": lists[:, :, 1:]},
        "int32 or int64 [2, 3, 3, 'kept']": {"topk": None, "block_map": lists[..., :0]},
        "with 1 to 3 blocks kept": {"topk": None, "block_map": lists.expand(-1, -1, -1, 4)},
        "block_map names the blocks -1 to -1": {"topk": None, "block_map": lists - 1},
        "block_map names the blocks 3 to 3; there are the blocks 0 to 2": {"topk": None, "block_map": lists + 3},
        "block_map names a block twice in a list": {"topk": None, "block_map": lists.expand(-1, -1, -1, 2)},
        "v_format=torch.float16 with quantized=False": {"v_format": torch.float16},
        "v_format=torch.int8": {"v_format": torch.int8, "quantized": True},
        "result=torch.float8_e4m3fn with quantized=False": {"result": FP8},
        "result=torch.int8": {"result": torch.int8, "quantized": True},
        "implementation='fast'": {"implementation": "fast"},
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            sparse_linear_attention(**valid | arguments)


def test_the_8_bit_reference_is_taken_for_e4m3_in_the_interpreter():
    operands = inputs("interpreter", torch.float32, 1, 70, 1, 64)
    options = {"topk": 0.5, "quantized": True}
    expected = sparse_linear_attention(*operands, **options, v_format=FP8, implementation="torch")
    assert torch.equal(sparse_linear_attention(*operands, **options), expected)
