"""rms_norm_rope: RMSNorm over all heads together, then the rotary embedding, in one pass over q or k.

x is [B, S, H·D], perhaps a strided part of a fused projection. weight is [H·D], and the result [B, S, H, D]. cos and
sin are [S, D/2], or [B|1, S, H|1, D/2] if samples or heads have angles of their own, or None.
Arithmetic is fp32 and rounded once to x's dtype. Pair i of each head turns by the angle of column i (Su et al. 2021,
RoFormer, eq. 34). It is (x[2i], x[2i+1]), or with halves (x[i], x[i + D/2]), which a second kernel loads apart.
RMSNorm: Zhang and Sennrich 2019, eq. 4. No gradient: under autograd the reference runs.
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
    halves: bool = False,
    implementation: str = "auto",
) -> torch.Tensor:
    """Return RMSNorm of x over its last dimension, then rotated by pairs of channels: [B, S, heads, D], contiguous.

    x: [B, S, heads·D]. weight: [heads·D].
    cos, sin: [S, D/2] or [B|1, S, heads|1, D/2], of any strides and one shape, or both None for no rotation.
    halves: True if a pair is a channel of a head's first half and one of its second, False if it is two neighbours.
    implementation: "auto", "triton" or "torch" (see dispatch.py).
    Raises ValueError for shapes or devices that do not fit together.
    """
    if x.dim() != 3 or heads < 1 or x.shape[2] % heads:
        raise ValueError(f"rms_norm_rope: x has shape {list(x.shape)}, not [B, S, H·D] with H={heads} heads.")
    if weight.shape != x.shape[2:]:
        raise ValueError(f"rms_norm_rope: weight has shape {list(weight.shape)}, not [H·D={x.shape[2]}].")
    if (cos is None) != (sin is None):
        raise ValueError("rms_norm_rope: give cos and sin together, or neither.")
    _check_tables(x, cos, sin, heads)
    tensors = (x, weight, cos, sin)
    return RMS_NORM_ROPE.pick(spec_of(implementation, *tensors)).launch(*tensors, heads, eps, halves)


def _check_tables(x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, heads: int) -> None:
    """Raise ValueError unless both tables are None or fit x [B, S, H·D]."""
    B, S, head_dim = *x.shape[:2], x.shape[2] // heads
    for name, table in (("cos", cos), ("sin", sin)):
        if table is None:
            continue
        common = table.dim() == 2 and list(table.shape) == [S, head_dim // 2]
        own = table.dim() == 4 and table.shape[0] in (1, B) and table.shape[2] in (1, heads)
        own = own and (table.shape[1], table.shape[3]) == (S, head_dim // 2)
        if head_dim % 2 or not (common or own) or table.shape != cos.shape:
            raise ValueError(
                f"rms_norm_rope: {name} has shape {list(table.shape)}; it must be [S={S}, D/2] or [{B}|1, S, "
                f"{heads}|1, D/2], as the other table, with an even head_dim (here D={head_dim})."
            )


@kernel_op("rms_norm_rope")
def _rms_norm_rope(
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    heads: int,
    eps: float,
    halves: bool = False,
) -> torch.Tensor:
    B, S, C = x.shape
    head_dim = C // heads
    out = x.new_empty(B, S, heads, head_dim)
    if out.numel() == 0:
        return out
    if x.stride(2) != 1:
        x = x.contiguous()
    by_head = cos is not None and cos.dim() == 4 and cos.shape[2] > 1
    tile = _tile(heads, head_dim, x.element_size(), by_head)
    grid, strides = row_grid(x.device, tile["ROWS"], S, B), (x.stride(0), x.stride(1))
    operands = (x, weight.contiguous(), cos, sin, out, S, heads, *strides, *_strides(cos), *_strides(sin), eps)
    kernel = _rms_norm_rope_halves_kernel if halves and cos is not None else _rms_norm_rope_kernel
    launch_kernel(kernel, grid, *operands, HEAD_DIM=head_dim, BY_HEAD=by_head, **tile)
    return out


@_rms_norm_rope.register_fake
def _(x, weight, cos, sin, heads, eps, halves=False):
    B, S, C = x.shape
    return x.new_empty(B, S, heads, C // heads)


RMS_NORM_ROPE = triton_or_reference("rms_norm_rope", _rms_norm_rope, reference.rms_norm_rope)


def _strides(table: torch.Tensor | None) -> tuple[int, int, int, int]:
    """Return a table's strides over (sample, token, head, pair), 0 where it does not vary."""
    if table is None:
        return 0, 0, 0, 0
    if table.dim() == 2:
        return 0, table.stride(0), 0, table.stride(1)
    by_sample, by_token, by_head, by_pair = table.stride()
    return 0 if table.shape[0] == 1 else by_sample, by_token, 0 if table.shape[2] == 1 else by_head, by_pair


@functools.cache
def _tile(heads: int, head_dim: int, element_size: int, by_head: bool) -> dict[str, int]:
    block_h, block_d = next_power_of_2(heads), next_power_of_2(head_dim)
    row_bytes = block_h * block_d * element_size + 4 * block_d * (block_h if by_head else 1)  # with cos and sin
    return {"BLOCK_H": block_h, "BLOCK_D": block_d, **row_tile(block_h * block_d, row_bytes)}


@triton.jit
def _rms_norm_rope_kernel(
    x, weight, cos, sin, out, S, heads, x_stride_b, x_stride_s,
    cos_stride_b, cos_stride_s, cos_stride_h, cos_stride_d, sin_stride_b, sin_stride_s, sin_stride_h, sin_stride_d, eps,
    HEAD_DIM: tl.constexpr, BY_HEAD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
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
            c = _load_angles(
                cos + sample * cos_stride_b, rows, head, pair, row_mask, heads,
                cos_stride_s, cos_stride_h, cos_stride_d, HEAD_DIM, BY_HEAD,
            )  # fmt: skip
            s = _load_angles(
                sin + sample * sin_stride_b, rows, head, pair, row_mask, heads,
                sin_stride_s, sin_stride_h, sin_stride_d, HEAD_DIM, BY_HEAD,
            )  # fmt: skip
            y = tl.join(even * c - odd * s, even * s + odd * c).reshape(ROWS, BLOCK_H, BLOCK_D)
        out_rows = out + (sample * S + rows)[:, None, None] * (heads * HEAD_DIM)
        tl.store(out_rows + channels, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_rope_halves_kernel(
    x, weight, cos, sin, out, S, heads, x_stride_b, x_stride_s,
    cos_stride_b, cos_stride_s, cos_stride_h, cos_stride_d, sin_stride_b, sin_stride_s, sin_stride_h, sin_stride_d, eps,
    HEAD_DIM: tl.constexpr, BY_HEAD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    sample = tl.program_id(1).to(tl.int64)
    head = tl.arange(0, BLOCK_H)
    pair = tl.arange(0, BLOCK_D // 2)
    channels = (head[:, None] * HEAD_DIM + pair[None, :])[None, :, :]
    channel_mask = ((head < heads)[:, None] & (pair < HALF)[None, :])[None, :, :]
    gain_a = tl.load(weight + channels, mask=channel_mask, other=0.0).to(tl.float32)
    gain_b = tl.load(weight + channels + HALF, mask=channel_mask, other=0.0).to(tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, S, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)
        row_mask = rows < S
        mask = row_mask[:, None, None] & channel_mask
        x_rows = x + sample * x_stride_b + rows.to(tl.int64)[:, None, None] * x_stride_s
        a = tl.load(x_rows + channels, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x_rows + channels + HALF, mask=mask, other=0.0).to(tl.float32)
        mean_square = tl.sum(tl.sum(a * a + b * b, 2), 1) / (heads * HEAD_DIM)
        factor = tl.rsqrt(mean_square + eps)[:, None, None]
        a *= factor * gain_a
        b *= factor * gain_b
        c = _load_angles(
            cos + sample * cos_stride_b, rows, head, pair, row_mask, heads,
            cos_stride_s, cos_stride_h, cos_stride_d, HEAD_DIM, BY_HEAD,
        )  # fmt: skip
        s = _load_angles(
            sin + sample * sin_stride_b, rows, head, pair, row_mask, heads,
            sin_stride_s, sin_stride_h, sin_stride_d, HEAD_DIM, BY_HEAD,
        )  # fmt: skip
        out_rows = out + (sample * S + rows)[:, None, None] * (heads * HEAD_DIM)
        tl.store(out_rows + channels, (a * c - b * s).to(out.dtype.element_ty), mask=mask)
        tl.store(out_rows + channels + HALF, (a * s + b * c).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _load_angles(
    table,
    rows,
    head,
    pair,
    row_mask,
    heads,
    stride_s,
    stride_h,
    stride_d,
    HEAD_DIM: tl.constexpr,
    BY_HEAD: tl.constexpr,
):
    """Load a sample's cos or sin [S, H|1, D/2] for these rows as fp32 [ROWS, BLOCK_H|1, BLOCK_D / 2]."""
    pointers = table + rows.to(tl.int64)[:, None] * stride_s + pair[None, :] * stride_d
    mask = row_mask[:, None] & (pair < HEAD_DIM // 2)[None, :]
    if BY_HEAD:
        pointers = pointers[:, None, :] + (head * stride_h)[None, :, None]
        angles = tl.load(pointers, mask=mask[:, None, :] & (head < heads)[None, :, None], other=0.0).to(tl.float32)
    else:
        angles = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)[:, None, :]
    return angles
