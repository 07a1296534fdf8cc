"""rms_norm_rope: RMSNorm over all heads together, then the rotary embedding, in one pass over q or k.

x is [B, S, H·D], perhaps a strided part of a fused projection. weight is [H·D], cos and sin [S, D/2] or None, and the
result [B, S, H, D].
Arithmetic is fp32 and rounded once to x's dtype. Pair i of each head, (x[2i], x[2i+1]), turns by the angle of column i
(Su et al. 2021, RoFormer, eq. 34). RMSNorm: Zhang and Sennrich 2019, eq. 4. No gradient: under autograd the reference
runs.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .. import reference
from ..choice.registry import spec_of, triton_or_reference
from ..dispatch import kernel_op
from ..launch import launch_kernel
from ..sizes import next_power_of_2
from .row_tiles import row_grid, row_tile


def rms_norm_rope(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    heads: int,
    eps: float,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """Return RMSNorm of x over its last dimension, then rotated by interleaved pairs: [B, S, heads, D], contiguous.

    x: [B, S, heads·D]. weight: [heads·D]. cos, sin: [S, D/2] of any strides, or both None for no rotation.
    implementation: "auto", "triton" or "torch" (see dispatch.py).
    Raises ValueError for shapes or devices that do not fit together.
    """
    if x.dim() != 3 or heads < 1 or x.shape[2] % heads:
        raise ValueError(f"rms_norm_rope: x has shape {list(x.shape)}, not [B, S, H·D] with H={heads} heads.")
    if weight.shape != x.shape[2:]:
        raise ValueError(f"rms_norm_rope: weight has shape {list(weight.shape)}, not [H·D={x.shape[2]}].")
    if (cos is None) != (sin is None):
        raise ValueError("rms_norm_rope: give cos and sin together, or neither.")
    head_dim = x.shape[2] // heads
    for name, table in (("cos", cos), ("sin", sin)):
        if table is not None and (head_dim % 2 or list(table.shape) != [x.shape[1], head_dim // 2]):
            raise ValueError(
                f"rms_norm_rope: {name} has shape {list(table.shape)}; it must be [S={x.shape[1]}, D/2] with an even "
                f"head_dim (here D={head_dim})."
            )
    tensors = (x, weight, cos, sin)
    return RMS_NORM_ROPE.pick(spec_of(implementation, *tensors)).launch(*tensors, heads, eps)


@kernel_op("rms_norm_rope")
def _rms_norm_rope(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, heads: int, eps: float
) -> torch.Tensor:
    B, S, C = x.shape
    head_dim = C // heads
    out = x.new_empty(B, S, heads, head_dim)
    if out.numel() == 0:
        return out
    if x.stride(2) != 1:
        x = x.contiguous()
    table_strides = (0, 0, 0, 0) if cos is None else (*cos.stride(), *sin.stride())
    tile = _tile(heads, head_dim, x.element_size())
    grid, strides = row_grid(x.device, tile["ROWS"], S, B), (x.stride(0), x.stride(1))
    operands = (x, weight.contiguous(), cos, sin, out, S, heads, *strides, *table_strides, eps)
    launch_kernel(_rms_norm_rope_kernel, grid, *operands, HEAD_DIM=head_dim, **tile)
    return out


@_rms_norm_rope.register_fake
def _(x, weight, cos, sin, heads, eps):
    B, S, C = x.shape
    return x.new_empty(B, S, heads, C // heads)


RMS_NORM_ROPE = triton_or_reference("rms_norm_rope", _rms_norm_rope, reference.rms_norm_rope)


@functools.cache
def _tile(heads: int, head_dim: int, element_size: int) -> dict[str, int]:
    block_h, block_d = next_power_of_2(heads), next_power_of_2(head_dim)
    row_bytes = block_h * block_d * element_size + 4 * block_d  # with cos and sin
    return {"BLOCK_H": block_h, "BLOCK_D": block_d, **row_tile(block_h * block_d, row_bytes)}


@triton.jit
def _rms_norm_rope_kernel(
    x, weight, cos, sin, out, S, heads, x_stride_b, x_stride_s,
    cos_stride_s, cos_stride_d, sin_stride_s, sin_stride_d, eps,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(1).to(tl.int64)
    head = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    channels = (head[:, None] * HEAD_DIM + d[None, :])[None, :, :]
    channel_mask = ((head < heads)[:, None] & (d < HEAD_DIM)[None, :])[None, :, :]
    gain = tl.load(weight + channels, mask=channel_mask, other=0.0).to(tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, S, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)
        row_mask = rows < S
        mask = row_mask[:, None, None] & channel_mask
        x_rows = x + sample * x_stride_b + rows.to(tl.int64)[:, None, None] * x_stride_s
        values = tl.load(x_rows + channels, mask=mask, other=0.0).to(tl.float32)
        mean_square = tl.sum(tl.sum(values * values, 2), 1) / (heads * HEAD_DIM)
        y = values * tl.rsqrt(mean_square + eps)[:, None, None] * gain
        if cos is not None:
            even, odd = tl.split(y.reshape(ROWS, BLOCK_H, BLOCK_D // 2, 2))
            pair = tl.arange(0, BLOCK_D // 2)
            angle_mask = row_mask[:, None] & (pair < HEAD_DIM // 2)[None, :]
            position = rows.to(tl.int64)[:, None]
            cosines = cos + position * cos_stride_s + pair[None, :] * cos_stride_d
            sines = sin + position * sin_stride_s + pair[None, :] * sin_stride_d
            c = tl.load(cosines, mask=angle_mask, other=0.0).to(tl.float32)[:, None, :]
            s = tl.load(sines, mask=angle_mask, other=0.0).to(tl.float32)[:, None, :]
            y = tl.join(even * c - odd * s, even * s + odd * c).reshape(ROWS, BLOCK_H, BLOCK_D)
        out_rows = out + (sample * S + rows)[:, None, None] * (heads * HEAD_DIM)
        tl.store(out_rows + channels, y.to(out.dtype.element_ty), mask=mask)
