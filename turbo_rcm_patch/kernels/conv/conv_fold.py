"""Fold the doubling of pixels into a convolution's weight: four windows of 2×2 on the image, one for each phase.

A window of 3×3 on a doubled image reads only 2×2 pixels of the image itself, some of them twice. Weights that multiply
the same pixel can be added first, which leaves 4/9 of the products. A model in bf16 has its sums in fp16, because
rounding them to bf16 would err as much as rounding the result. fp16 has less range. So x is divided by 16, and the
weight multiplied: values of x up to a million fit. If those of x are about 0.001, the result errs 1.005 times as much
as one that is rounded once, and about 0.0001 twice as much.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import kernel_op
from ..launch import launch_kernel
from ..sizes import cdiv

CHANNELS = 128  # per program
# By the model's dtype: what the kernels take, and by how much the weight is multiplied and x divided. In fp16 the sums
# would need more bits than the model has.
_FORMS = {torch.bfloat16: (torch.float16, 16.0), torch.float32: (torch.float32, 1.0)}


def folds(dtype: torch.dtype, upsample: bool) -> bool:
    """True if a convolution in this dtype folds the doubling of pixels into its weight."""
    return upsample and dtype in _FORMS


def fold_input(x: torch.Tensor) -> torch.Tensor:
    """Return x packed, as a folded weight needs it: bf16 as fp16, divided by 16."""
    dtype, scale = _FORMS[x.dtype]
    if scale == 1:
        return x.contiguous()
    return torch.mul(x, 1 / scale, out=torch.empty(x.shape, dtype=dtype, device=x.device))


@kernel_op("fold_weight")
def fold_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return the folded weight [N, 4, 2, 2, C] for one of [N, 1, 3, 3, C] with any strides: bf16 as fp16, times 16.

    The 4 are the phases of the result: even rows and columns first, then odd columns, then odd rows.
    """
    dtype, scale = _FORMS[weight.dtype]
    N, _, _, _, C = weight.shape
    folded = weight.new_empty(N, 4, 2, 2, C, dtype=dtype)
    strides = weight.stride(0), weight.stride(2), weight.stride(3), weight.stride(4)
    arguments = weight, folded, C, *strides, scale
    launch_kernel(_fold_weight_kernel, (N, cdiv(C, CHANNELS)), *arguments, BLOCK=CHANNELS, num_warps=4)
    return folded


@fold_weight.register_fake
def _(weight):
    N, _, _, _, C = weight.shape
    return weight.new_empty(N, 4, 2, 2, C, dtype=_FORMS[weight.dtype][0])


@triton.jit
def _fold_weight_kernel(
    weight, folded, C, stride_n, stride_y, stride_x, stride_c, scale, BLOCK: tl.constexpr
):  # fmt: skip
    """Add up the weights of one row and BLOCK channels that multiply the same pixel, for each phase and pixel."""
    n = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < C
    row = weight + n * stride_n + channels * stride_c
    for phase in tl.static_range(4):
        for place in tl.static_range(4):
            total = tl.zeros((BLOCK,), tl.float32)
            for tap in tl.static_range(9):
                # A tap of the 3×3 window reads row (phase + tap + 1) // 2 - phase of the two, and the column likewise.
                if (phase // 2 + tap // 3 + 1) // 2 - phase // 2 == place // 2 and (
                    phase % 2 + tap % 3 + 1
                ) // 2 - phase % 2 == place % 2:
                    total += tl.load(row + tap // 3 * stride_y + tap % 3 * stride_x, mask=mask, other=0).to(tl.float32)
            sums = folded + ((n * 4 + phase) * 4 + place) * C + channels
            tl.store(sums, (total * scale).to(folded.dtype.element_ty), mask=mask)
