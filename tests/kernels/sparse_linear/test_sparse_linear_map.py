"""The blocks of keys that sparse-linear attention keeps: the kernel's lists against a sort."""

import pytest
import torch

from tests.oracle import torch_device
from turbo_rcm_patch.kernels.launch import launch_kernel
from turbo_rcm_patch.kernels.sparse_linear import sparse_linear_reference as definition
from turbo_rcm_patch.kernels.sparse_linear.sparse_linear_map import (
    _block_scores,
    _keep_largest,
    _keep_largest_kernel,
    choose_blocks,
)


def scores_of(device, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch_device(device))


@pytest.mark.parametrize("columns", [1, 2, 7, 64, 100])
def test_the_largest_of_each_row_in_their_order(device, columns):
    for shift in (0.0, 100.0, -100.0):
        scores = scores_of(device, 2, 1, 2, columns) + shift
        for kept in {1, (columns + 1) // 2, columns}:
            lists = _keep_largest(scores, kept)
            assert lists.dtype == torch.int32
            torch.testing.assert_close(lists.long(), scores.topk(kept).indices.sort(-1).values)


def test_of_equal_scores_the_first(device):
    scores = torch.tensor([[1.0, 3.0, 1.0, 1.0, -2.0], [-0.0, 0.0] * 2 + [0.0], [-1.0, -1.0, -5.0, -1.0, -1.0]])
    lists = _keep_largest(scores[None, None].to(torch_device(device)), 3)
    assert lists[0, 0].tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 3]]


def test_equal_scores_do_not_reach_the_next_list(device):
    scores, lists = torch.ones(1, 7), torch.full((3, 3), -1, dtype=torch.int32)
    scores, lists = (x.to(torch_device(device)) for x in (scores, lists))
    launch_kernel(_keep_largest_kernel, (1,), scores, lists, 7, 3, BLOCK=8)
    assert lists.tolist() == [[0, 1, 2], [-1] * 3, [-1] * 3]


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_no_list_is_short_whatever_the_scores(device, value):
    """The attention reads as many entries of each list as are kept."""
    scores = scores_of(device, 1, 1, 4, 9)
    scores[:, :, 1, :4] = value
    scores[:, :, 2] = value
    lists = _keep_largest(scores, 5)[0, 0].tolist()
    assert all(row == sorted(set(row) & set(range(9))) and len(row) == 5 for row in lists)
    assert lists[2] == [0, 1, 2, 3, 4]


def test_a_long_row(device):
    scores = scores_of(device, 1, 1, 2, 3000)
    torch.testing.assert_close(_keep_largest(scores, 300).long(), scores.topk(300).indices.sort(-1).values)


def test_as_the_reference_chooses(device):
    q, k = (scores_of(device, 1, 2, blocks, 64).half() for blocks in (5, 11))
    torch.testing.assert_close(choose_blocks(q, k, 4), definition.choose_blocks(q, k, 4))


def test_scores_of_16_bits_are_added_up_in_fp32(device):
    """There are more blocks than one program takes, in both directions."""
    for head_dim in (64, 128):
        q, k = (scores_of(device, 2, 3, blocks, head_dim).half() for blocks in (131, 140))
        scores, exact = _block_scores(q, k), q.double() @ k.double().mT
        assert scores.dtype == torch.float32
        assert (scores - exact).abs().max() < 1e-5 * exact.abs().max()


def test_under_autocast(device):
    """Autocast computes the scores in 16 bits."""
    q, k = (scores_of(device, 1, 2, blocks, 64) for blocks in (5, 11))
    with torch.autocast(q.device.type, torch.bfloat16):
        scores, lists = definition.block_scores(q, k), choose_blocks(q, k, 4)
    assert scores.dtype == torch.bfloat16
    assert torch.equal(scores.gather(3, lists.long()).sort().values, scores.topk(4).values.sort().values)


def test_opcheck(device):
    q, k = (scores_of(device, 1, 2, blocks, 64).half() for blocks in (3, 5))
    torch.library.opcheck(torch.ops.turbo_rcm_patch.block_scores.default, (q, k))
    torch.library.opcheck(torch.ops.turbo_rcm_patch.keep_largest.default, (scores_of(device, 1, 2, 3, 5), 2))
