"""RMSNorm and SiLU as rms_norm_silu, written as the four planes of each pair of frames that conv_pairs multiplies.

With d = silu(norm(x)) of the frames 2t − 2 to 2t + 1, of which the first two of a chunk come from the chunk before:

    planes[t] = d₁ + d₂,  d₂ − d₁,  d₀ − d₂,  d₁ − d₃        in fp16

A program walks the frames of its pixels, so that it reads and normalises each frame once. It also keeps the last two
frames for the next chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import reference
from ..choice.registry import triton_or_reference
from ..dispatch import kernel_op
from ..launch import launch_kernel
from ..sizes import cdiv, next_power_of_2
from .rms_norm_silu import normalize, silu

ELEMENTS = 512  # of a frame, per program and per warp: 4 to 25 % faster than four warps with 2048 (H200)


@kernel_op("rms_norm_silu_pairs", mutates_args=("front",))
def _rms_norm_silu_pairs(x: torch.Tensor, weight: torch.Tensor, front: torch.Tensor) -> torch.Tensor:
    B, T, H, W, C = x.shape
    planes = x.new_empty((B, cdiv(T, 2), 4, H, W, C), dtype=torch.float16)
    block = next_power_of_2(C)
    rows = max(1, ELEMENTS // block)
    grid = (cdiv(H * W, rows), B)
    operands = (x.contiguous(), weight.contiguous(), front, planes, T, H * W, C, C**0.5)
    warps = min(32, max(1, block // ELEMENTS))
    launch_kernel(_rms_norm_silu_pairs_kernel, grid, *operands, ROWS=rows, BLOCK=block, num_warps=warps)
    return planes


@_rms_norm_silu_pairs.register_fake
def _(x, weight, front):
    B, T, H, W, C = x.shape
    return x.new_empty((B, cdiv(T, 2), 4, H, W, C), dtype=torch.float16)


def rms_norm_silu_pairs_reference(
    x: torch.Tensor, weight: torch.Tensor, front: torch.Tensor, dtype: torch.dtype = torch.float16
) -> torch.Tensor:
    """RMSNorm and SiLU of x as planes of this dtype, in plain torch."""
    kept, T = front.float(), x.shape[1]
    frames = torch.cat((kept, reference.rms_norm_silu(x.float(), weight.float(), True)), 1)
    front.copy_(frames[:, -2:])
    if T % 2:
        frames = torch.cat((frames, torch.zeros_like(frames[:, :1])), 1)
    d0, d1, d2, d3 = frames[:, :-2:2], frames[:, 1:-2:2], frames[:, 2::2], frames[:, 3::2]
    return torch.stack((d1 + d2, d2 - d1, d0 - d2, d1 - d3), 2).to(dtype)


# (x [B, T, H, W, C], weight [C], the two frames before x [B, 2, H, W, C] after norm and SiLU, in x's dtype and
# contiguous) -> planes [B, ⌈T / 2⌉, 4, H, W, C] in fp16, contiguous. Then the frames before hold the last two of x.
# With an odd T the frame after the last is zero.
RMS_NORM_SILU_PAIRS = triton_or_reference("rms_norm_silu_pairs", _rms_norm_silu_pairs, rms_norm_silu_pairs_reference)


@triton.jit(do_not_specialize=("T", "S"))
def _rms_norm_silu_pairs_kernel(
    x, weight, front, planes, T, S, C, scale, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """S: the pixels of a frame."""
    sample = tl.program_id(1).to(tl.int64)
    frame = tl.cast(S, tl.int64) * C  # values from one frame or plane to the next
    pixels = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (pixels < S)[:, None] & (columns < C)[None, :]
    places = pixels.to(tl.int64)[:, None] * C + columns[None, :]
    gain = scale * tl.load(weight + columns, mask=columns < C, other=0.0).to(tl.float32)[None, :]
    x += sample * T * frame + places
    front += sample * 2 * frame + places
    out = planes + sample * tl.cdiv(T, 2) * 4 * frame + places
    dtype = planes.dtype.element_ty
    d0 = tl.load(front, mask=mask, other=0.0).to(tl.float32)
    d1 = tl.load(front + frame, mask=mask, other=0.0).to(tl.float32)
    for t in range(0, T, 2):
        has_second = tl.minimum(T - 1 - t, 1)  # 0 in the last pair of an odd number of frames
        d2 = silu(normalize(tl.load(x, mask=mask, other=0.0).to(tl.float32), gain))
        second = tl.load(x + frame, mask=mask & (pixels < S * has_second)[:, None], other=0.0).to(tl.float32)
        d3 = silu(normalize(second, gain))
        tl.store(out, (d1 + d2).to(dtype), mask=mask)
        tl.store(out + frame, (d2 - d1).to(dtype), mask=mask)
        tl.store(out + 2 * frame, (d0 - d2).to(dtype), mask=mask)
        tl.store(out + 3 * frame, (d1 - d3).to(dtype), mask=mask)
        d0 = tl.where(has_second > 0, d2, d1)
        d1 = tl.where(has_second > 0, d3, d2)
        x += 2 * frame
        out += 4 * frame
    kept = front.dtype.element_ty
    tl.store(front, d0.to(kept), mask=mask)
    tl.store(front + frame, d1.to(kept), mask=mask)
