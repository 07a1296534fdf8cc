"""Combine a convolution's weight along the window's frames, for conv_pairs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import kernel_op
from ..launch import launch_kernel
from ..sizes import cdiv

CHANNELS = 128  # per program


@kernel_op("pair_weight")
def pair_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight [N, 4, 9, C] in fp16 that multiplies the planes of conv_pairs, for one of [N, 3, 3, 3, C] with
    any strides, such as ``Conv3d.weight.permute(0, 2, 3, 4, 1)``. The arithmetic is fp32 and rounded once."""
    N, _, _, _, C = weight.shape
    combined = weight.new_empty(N, 4, 9, C, dtype=torch.float16)
    launch_kernel(
        _pair_weight_kernel, (N, 9, cdiv(C, CHANNELS)), weight, combined, C, *weight.stride(), BLOCK=CHANNELS,
        num_warps=4,
    )  # fmt: skip
    return combined


@pair_weight.register_fake
def _(weight):
    N, _, _, _, C = weight.shape
    return weight.new_empty(N, 4, 9, C, dtype=torch.float16)


@triton.jit
def _pair_weight_kernel(
    weight, combined, C, stride_n, stride_t, stride_y, stride_x, stride_c, BLOCK: tl.constexpr
):  # fmt: skip
    """Combine the three frames of the weight at one position of the window, for one row and BLOCK channels."""
    n = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1)
    channels = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < C
    row = weight + n * stride_n + place // 3 * stride_y + place % 3 * stride_x + channels * stride_c
    first = tl.load(row, mask=mask, other=0).to(tl.float32)
    middle = tl.load(row + stride_t, mask=mask, other=0).to(tl.float32)
    last = tl.load(row + 2 * stride_t, mask=mask, other=0).to(tl.float32)
    out = combined + (n * 36 + place) * C + channels
    dtype = combined.dtype.element_ty
    tl.store(out, ((first + middle + last) * 0.5).to(dtype), mask=mask)
    tl.store(out + 9 * C, ((first - middle + last) * 0.5).to(dtype), mask=mask)
    tl.store(out + 18 * C, first.to(dtype), mask=mask)
    tl.store(out + 27 * C, (-last).to(dtype), mask=mask)
