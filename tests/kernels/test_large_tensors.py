"""The portable GEMM and convolution in tensors of more than 2³¹ elements. Only pages that are touched exist."""

import sys

import pytest
import torch
import triton
import triton.language as tl

from turbo_rcm_patch.kernels import interpreting, linear_gelu
from turbo_rcm_patch.kernels.conv.conv_portable import _load_box
from turbo_rcm_patch.kernels.conv.conv_portable import _store as _store_conv

_store_gelu = sys.modules["turbo_rcm_patch.kernels.linear.linear_gelu"]._store_gelu
_store_sum = sys.modules["turbo_rcm_patch.kernels.linear.linear"]._store_sum
_store_skip = sys.modules["turbo_rcm_patch.kernels.linear.linear_skip"]._store_skip

pytestmark = pytest.mark.skipif(not interpreting(), reason="the interpreter's memory is the CPU's, which is lazy")
FAR = 2**31  # the first element that 32 bits do not reach
COLUMNS = 16


@pytest.fixture
def memory():
    """Memory in fp16 with FAR elements before the tensors, so that an offset that wraps reads wrong elements."""
    return torch.empty(2 * FAR + 2**20, dtype=torch.float16)


def with_rows_far_apart(memory, values):
    matrix = memory[FAR:].as_strided(values.shape, (FAR // 2 + 1, 1))
    matrix.copy_(values)
    return matrix


@pytest.mark.parametrize("operand", ["a", "weight"])
def test_operands(memory, operand):
    tensors = {"a": torch.randn(3, 5).half(), "weight": torch.randn(3, 5).half()}
    expected = linear_gelu(*tensors.values(), None, implementation="triton")
    tensors[operand] = with_rows_far_apart(memory, tensors[operand])
    assert torch.equal(linear_gelu(*tensors.values(), None, implementation="triton"), expected)


@triton.jit
def _store_last_row(residual, out, M, N, EPILOGUE: tl.constexpr, COLUMNS: tl.constexpr):
    """Store the last row of a sample [M, N], as ``gemm`` hands over a tile of one row."""
    acc = tl.full((1, COLUMNS), 2.0, tl.float32)
    rows = M - 1 + tl.arange(0, 1)
    columns = tl.arange(0, COLUMNS)
    if EPILOGUE == "skip":
        coefficients = (None, None, 1.0, 1.0, (0, 0, 0), (0, 0, 0), None, 0)
        arguments = (None, residual, out, None, coefficients)
        _store_skip(acc, tl.program_id(0), rows, columns, M, N, arguments, (0, 0, 0))
    elif EPILOGUE == "sum":
        _store_sum(acc, tl.program_id(0), rows, columns, M, N, (None, out), None)
    else:
        _store_gelu(acc, tl.program_id(0), rows, columns, M, N, (None, out, None, None, None, None), None)


@pytest.mark.parametrize("epilogue", ["skip", "sum", "gelu"])
def test_results(memory, epilogue):
    tensor = memory[FAR:]
    last_row = tensor[FAR : FAR + COLUMNS]
    last_row.fill_(3)
    _store_last_row[(1,)](tensor, tensor, FAR // 2048 + 1, 2048, epilogue, COLUMNS)
    gelu = torch.nn.functional.gelu(torch.tensor(2.0), approximate="tanh").item()
    expected = {"skip": 3.0 + 2.0, "sum": 2.0, "gelu": gelu}[epilogue]
    torch.testing.assert_close(last_row, torch.full_like(last_row, expected))


@triton.jit
def _copy_box(x, out, image):
    box = _load_box(x, (image + tl.program_id(0), 0, 0), 0, 1, 16, COLUMNS, False, 1, 16, COLUMNS)
    tl.store(out + tl.arange(0, 16)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :], box)


def test_a_convolutions_operand(memory):
    x, out = memory[FAR:], torch.zeros(16, 16).half()
    box = x[FAR : FAR + 256].copy_(torch.randn(256))
    _copy_box[(1,)](x, out, FAR // 256)
    assert torch.equal(out, box.view(16, 16))


@triton.jit
def _store_pixel(tensor, pixel, pixels_of_frame, column):
    """Store the columns of one pixel from `column` on. Those from COLUMNS on belong to the second of two frames."""
    pixels = pixel + tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    arguments = (None, None, tensor, tensor, pixels, pixels, pixels >= 0, pixels_of_frame, COLUMNS)
    acc = tl.full((1, COLUMNS), 2.0, tl.float32)
    _store_conv(acc, 0, 0, column + tl.arange(0, COLUMNS), 1, 2 * COLUMNS, arguments, None)


@pytest.mark.parametrize("far", ["pixel", "frame"])
def test_a_convolutions_result(memory, far):
    tensor = memory[FAR:]
    place = tensor[FAR : FAR + COLUMNS].fill_(3)
    if far == "pixel":
        _store_pixel[(1,)](tensor, FAR // COLUMNS, 1, 0)
    else:
        _store_pixel[(1,)](tensor, 0, FAR // COLUMNS, COLUMNS)
    assert (place == 5).all()
