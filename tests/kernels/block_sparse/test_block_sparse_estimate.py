"""The kernel that estimates the shares of key blocks, against the definition in fp64."""

import pytest
import torch

from tests.kernels.block_sparse.test_block_sparse_reference import inputs as structured
from tests.oracle import DTYPES, assert_no_worse, torch_device
from turbo_rcm_patch.kernels.block_sparse import block_sparse_reference as definition
from turbo_rcm_patch.kernels.block_sparse.block_sparse_estimate import estimate_blocks

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")

# B, S, H, D, queries and keys of a block. In order: one token; a last part that is cut, and empty ones; whole blocks;
# blocks of queries that do not fill a program's rows, and keys that do not fill the last tile.
SHAPES = [
    (1, 1, 1, 64, 64, 64),
    (2, 201, 2, 64, 128, 64),
    (1, 256, 1, 128, 64, 128),
    (1, 1100, 2, 64, 192, 128),
    (1, 2500, 1, 64, 192, 128),
]


def means(device, dtype, B, S, H, D, block_q, block_k):
    q, k, _ = structured(B, S, H, D, torch.float32)
    pooled = (definition.pool(x, block, definition.part_size(block)) for x, block in ((q, block_q), (k, block_k)))
    return [x.to(torch_device(device), dtype) for x in pooled]


def assert_as_defined(device, dtype, shape):
    """Assert that p errs no more than the definition in fp32. The kernel adds up in fp32 for every dtype of means."""
    pooled, options = means(device, dtype, *shape), (shape[3] ** -0.5, shape[1], *shape[4:])
    actual = estimate_blocks(*pooled, *options)
    exact = definition.estimate(*(x.double() for x in pooled), *options)
    assert (actual.shape, actual.dtype) == (exact.shape, torch.float32)
    assert_no_worse(actual, definition.estimate(*(x.float() for x in pooled), *options), exact)
    torch.testing.assert_close(actual.sum(-1), torch.ones_like(actual[..., 0]))


@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_definition(device, shape):
    for dtype in DTYPES[device]:
        assert_as_defined(device, dtype, shape)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [28672, 32760, 75600])
def test_matches_the_definition_at_full_size(tokens):
    assert_as_defined("cuda", torch.bfloat16, (1, tokens, 2, 128, 192, 128))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scores_far_from_zero(device, dtype):
    """Weights of most parts underflow, and every maximum replaces an earlier one."""
    pooled_q, pooled_k = means(device, dtype, 1, 1100, 1, 64, 192, 128)
    pooled_q[..., 0] = 60
    pooled_k[..., 0] = torch.linspace(-60, 60, pooled_k.shape[2], device=pooled_k.device)
    shares = estimate_blocks(pooled_q, pooled_k, 0.125, 1100, 192, 128)
    exact = definition.estimate(pooled_q.double(), pooled_k.double(), 0.125, 1100, 192, 128)
    # Each of 64 additions rounds a score of up to 450, and so the largest one. exp makes both errors relative.
    rounded = 64 * 450 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(shares, exact.float(), rtol=rounded, atol=1e-30)
    assert (exact.max(-1).values > 0.9).all()


def test_nan_stays_with_its_block_of_queries(device):
    pooled_q, pooled_k = means(device, torch.float16, 1, 1100, 1, 64, 192, 128)
    clean = estimate_blocks(pooled_q, pooled_k, 0.125, 1100, 192, 128)
    pooled_q[:, :, 9] = torch.nan  # a part of the second block
    shares = estimate_blocks(pooled_q, pooled_k, 0.125, 1100, 192, 128)
    assert shares[:, :, 1].isnan().all()
    assert torch.equal(shares[:, :, [0, 2, 3, 4, 5]], clean[:, :, [0, 2, 3, 4, 5]])


def test_custom_op_contract(device):
    pooled = means(device, torch.float16, 1, 300, 1, 64, 192, 128)
    arguments = (*pooled, 0.125, 300, 192, 128)
    torch.library.opcheck(torch.ops.turbo_rcm_patch.estimate_blocks.default, arguments)
