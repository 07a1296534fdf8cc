"""quantize_qkv: norm, rotation and quantisation before 8-bit attention, in two reads of k and v and one of q.

    q' = RoPE(RMSNorm(q)),  k' = RoPE(RMSNorm(k)) - mean over the tokens        RMSNorm over all heads together
    q' ≈ q · q_scale / (scale · log2 e),   k' ≈ k · k_scale,   v' ≈ v · v_scale

The mean of k adds the same number to all scores of a query, which does not change the softmax. Without the mean, k uses
the range of 8 bits better (Zhang et al. 2024, SageAttention, section 4.2). q has a scale for each token and head, k for
each head and KEY_GROUP tokens, v for each head and channel. One kernel finishes q. A second collects k's sums and v's
maxima, a third reduces them, and a fourth writes k and v. No gradient: under autograd the reference runs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..attention.attention_tiles import LOG2_E
from ..choice.registry import REFERENCE, TRITON, Kernel, Op, spec_of, why_not_reference
from ..dispatch import kernel_op
from ..launch import launch_kernel
from ..quantized import FP8
from ..rows.quantize_rows import largest_magnitude
from ..rows.row_tiles import row_grid, row_tile
from ..sizes import cdiv, next_power_of_2
from . import attention_8bit_reference as reference
from .attention_8bit_reference import KEY_GROUP, SCALE_FLOOR, V_FORMATS
from .spec import Attention8BitSpec, default_v_format, why_not_fused

KV_WARPS = 8
SHORT = 1024  # shorter rows, many at a time, get twice the threads; otherwise the compiler spills registers
REDUCED_CHANNELS, REDUCED_ROWS, REDUCED_WARPS = 32, 128, 8
MAGIC = tl.constexpr(12582912.0)  # 1.5 · 2^23: added to |x| < 2^22, it leaves the integer nearest to x in the last bits
MAGIC_BITS = tl.constexpr(0x4B400000)


class QuantizedQKV(NamedTuple):
    """q, k and v of self-attention in 8 bits: B samples, S tokens, H heads, D head_dim.

    q: [B, S, H, D] int8. q_scale: [B, S, H] fp32, including the softmax's scale and log2 e.
    k: [B, S, H, D] int8, minus its mean over the tokens. k_scale: [B, H, ⌈S / KEY_GROUP⌉] fp32.
    v: e4m3 [B, H, D, T], where T is S rounded up to a multiple of KEY_GROUP. Tokens past S are 0, and every 32 tokens
        are in `key_order`. For GPUs without e4m3, v is fp16 [B, S, H, D]. The largest magnitude is 448 in both.
    v_scale: [B, H, D] fp32. dtype: the dtype of q, k and v before they were quantised.
    """

    q: torch.Tensor
    q_scale: torch.Tensor
    k: torch.Tensor
    k_scale: torch.Tensor
    v: torch.Tensor
    v_scale: torch.Tensor
    dtype: torch.dtype

    def dequantize_qk(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q times the softmax's scale, and k minus its mean, fp32 [B, S, H, D]. Their product gives the
        scores."""
        q = self.q.float() * (self.q_scale / LOG2_E)[..., None]
        return q, self.k.float() * reference.per_token(self.k_scale, self.k.shape[1])[..., None]

    def dequantize_v(self) -> torch.Tensor:
        """Return v as fp32 [B, S, H, D]."""
        v = reference.untranspose(self.v, self.k.shape[1]) if self.v.dtype == FP8 else self.v.float()
        return v * self.v_scale[:, None]


def quantize_qkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    heads: int,
    norm_q: torch.Tensor | None = None,
    norm_k: torch.Tensor | None = None,
    eps: float = 1e-6,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    scale: float | None = None,
    v_format: torch.dtype | None = None,
    implementation: str = "auto",
) -> QuantizedQKV:
    """Apply RMSNorm and rotation to q and k, and return q, k and v in 8 bits.

    q, k, v: [B, S, heads·D] of one dtype, perhaps parts of a fused projection.
    norm_q, norm_k: weights [heads·D], or None for no norm.
    cos, sin: [S, D/2] with any strides, or both None for no rotation.
    scale: the softmax's, positive. None: D**-0.5.
    v_format: float8_e4m3fn or float16. None: see `default_v_format`.
    implementation: "auto", "triton" or "torch" (see dispatch.py). head_dims other than 64 and 128 take the reference.

    Raises ValueError for shapes, dtypes, devices, a scale or a format that do not fit together.
    """
    _check(q, k, v, heads, norm_q, norm_k, cos, sin, scale, v_format)
    head_dim = q.shape[2] // heads
    scale = (head_dim**-0.5 if scale is None else float(scale)) * LOG2_E
    tensors = (q, k, v, norm_q, norm_k, cos, sin)
    v_format = v_format or default_v_format(q.device, implementation)
    spec = spec_of(implementation, *tensors, kind=Attention8BitSpec, head_dim=head_dim, v_format=v_format)
    run = reference.quantize_qkv if q.numel() == 0 else QUANTIZE_QKV.pick(spec).launch
    return QuantizedQKV(*run(*tensors, heads, eps, scale, v_format), q.dtype)


def _check(q, k, v, heads, norm_q, norm_k, cos, sin, scale, v_format):
    if q.dim() != 3 or heads < 1 or q.shape[2] == 0 or q.shape[2] % heads:
        raise ValueError(f"quantize_qkv: q has shape {list(q.shape)}, not [B, S, H·D] with H={heads} heads and D > 0.")
    for name, x in (("k", k), ("v", v)):
        if x.shape != q.shape or x.dtype != q.dtype:
            raise ValueError(
                f"quantize_qkv: {name} is {x.dtype} {list(x.shape)}; it must be like q, {q.dtype} {list(q.shape)}."
            )
    for name, weight in (("norm_q", norm_q), ("norm_k", norm_k)):
        if weight is not None and weight.shape != q.shape[2:]:
            raise ValueError(f"quantize_qkv: {name} has shape {list(weight.shape)}, not [H·D={q.shape[2]}].")
    if (cos is None) != (sin is None):
        raise ValueError("quantize_qkv: give cos and sin together, or neither.")
    head_dim = q.shape[2] // heads
    for name, table in (("cos", cos), ("sin", sin)):
        if table is not None and (head_dim % 2 or list(table.shape) != [q.shape[1], head_dim // 2]):
            raise ValueError(
                f"quantize_qkv: {name} has shape {list(table.shape)}; it must be [S={q.shape[1]}, D/2] with an even "
                f"head_dim (here D={head_dim})."
            )
    if scale is not None and not 0 < scale < float("inf"):
        raise ValueError(f"quantize_qkv: scale={scale}; it must be positive and finite.")
    if v_format not in (None, *V_FORMATS):
        raise ValueError(f"quantize_qkv: v_format={v_format}; accepted are float8_e4m3fn, float16 and None.")


@kernel_op("quantize_qkv")
def _quantize_qkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    norm_q: torch.Tensor | None,
    norm_k: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    heads: int,
    eps: float,
    scale_log2: float,
    v_format: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    out = allocate_qkv(q, k, v, norm_q, norm_k, cos, sin, heads, eps, scale_log2, v_format)
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    norm_q, norm_k = (None if weight is None else weight.contiguous() for weight in (norm_q, norm_k))
    # Three kernels read cos and sin. diffusers passes every other column of a table; reading that costs more than a
    # copy.
    cos, sin = (None if table is None else table.contiguous() for table in (cos, sin))
    _quantize_q(q, norm_q, cos, sin, heads, eps, scale_log2, *out[:2])
    _quantize_kv(k, v, norm_k, cos, sin, heads, eps, *out[2:])
    return out


@_quantize_qkv.register_fake
def allocate_qkv(q, k, v, norm_q, norm_k, cos, sin, heads, eps, scale_log2, v_format):
    B, S, C = q.shape
    head_dim, groups = C // heads, (S + KEY_GROUP - 1) // KEY_GROUP
    packed = (B, S, heads, head_dim)
    return (
        q.new_empty(packed, dtype=torch.int8),
        q.new_empty((B, S, heads), dtype=torch.float32),
        q.new_empty(packed, dtype=torch.int8),
        q.new_empty((B, heads, groups), dtype=torch.float32),
        q.new_empty((B, heads, head_dim, groups * KEY_GROUP) if v_format == FP8 else packed, dtype=v_format),
        q.new_empty((B, heads, head_dim), dtype=torch.float32),
    )


QUANTIZE_QKV = Op(
    "quantize_qkv",
    (
        Kernel(TRITON, why_not_fused, _quantize_qkv),
        Kernel(REFERENCE, why_not_reference, reference.quantize_qkv, is_fused=False),
    ),
)


def _row_tile(x: torch.Tensor, heads: int) -> dict[str, int]:
    block_h, head_dim = next_power_of_2(heads), x.shape[2] // heads
    block = block_h * head_dim
    row_bytes = block * x.element_size() + 4 * head_dim
    return {"BLOCK_H": block_h, **row_tile(block, row_bytes, spread=block < SHORT)}


def _quantize_q(q, weight, cos, sin, heads, eps, scale_log2, out, out_scale) -> None:
    B, S, C = q.shape
    tile = _row_tile(q, heads)
    launch_kernel(
        _quantize_q_kernel,
        row_grid(q.device, tile["ROWS"], S, B),
        q,
        weight,
        cos,
        sin,
        out,
        out_scale,
        S,
        heads,
        *q.stride()[:2],
        eps,
        scale_log2,
        HEAD_DIM=C // heads,
        FLOOR=SCALE_FLOOR,
        **tile,
    )


def _quantize_kv(k, v, weight, cos, sin, heads, eps, out_k, k_scale, out_v, v_scale) -> None:
    B, S, C = k.shape
    tile = _row_tile(k, heads)
    grid = row_grid(k.device, tile["ROWS"], S, B)
    k_sums, v_maxima = (k.new_empty((B, grid[0], C), dtype=torch.float32) for _ in range(2))
    k_mean = k.new_empty((B, C), dtype=torch.float32)
    rstd = None if weight is None else k.new_empty((B, S), dtype=torch.float32)
    sizes = (S, heads, *k.stride()[:2], *v.stride()[:2])
    options = {"HEAD_DIM": C // heads}
    launch_kernel(
        _summarize_kv_kernel, (*grid, 2), k, v, weight, cos, sin, rstd, k_sums, v_maxima, *sizes, eps, **options, **tile
    )
    launch_kernel(
        _reduce_summaries_kernel,
        (cdiv(C, REDUCED_CHANNELS), B),
        k_sums,
        v_maxima,
        k_mean,
        v_scale,
        S,
        C,
        grid[0],
        FLOOR=SCALE_FLOOR,
        CHANNELS=REDUCED_CHANNELS,
        ROWS=REDUCED_ROWS,
        num_warps=REDUCED_WARPS,
    )
    quantize_kv_tiles(k, v, weight, cos, sin, heads, rstd, k_mean, v_scale, out_k, k_scale, out_v)


def quantize_kv_tiles(k, v, weight, cos, sin, heads, rstd, k_mean, v_scale, out_k, k_scale, out_v) -> None:
    """Write out_k, k_scale and out_v for k, v [B, S, H·D], once k's mean and v's scale, [B, H·D], are known."""
    B, S, C = k.shape
    launch_kernel(
        _quantize_kv_kernel,
        (heads, cdiv(S, KEY_GROUP), B),  # programs that run together share cos and sin
        k,
        v,
        weight,
        cos,
        sin,
        rstd,
        k_mean,
        v_scale,
        out_k,
        k_scale,
        out_v,
        S,
        heads,
        *k.stride()[:2],
        *v.stride()[:2],
        HEAD_DIM=C // heads,
        FLOOR=SCALE_FLOOR,
        GROUP=KEY_GROUP,
        TRANSPOSED=out_v.dtype == FP8,
        num_warps=KV_WARPS,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def int8_step(x, axis: tl.constexpr, FLOOR: tl.constexpr):
    """Return the scale with which fp32 x fits int8, along an axis or, for None, as a whole. NaN in x gives NaN."""
    return tl.maximum(largest_magnitude(x, axis) / 127.0, FLOOR, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def to_int8(x):
    """Round x, within ±127, to the nearest integer, ties to even."""
    return ((x + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS).to(tl.int8)


@triton.jit
def _load_angles(table, positions, mask, PAIRS: tl.constexpr):
    """Load rows of cos or sin as fp32 [positions, PAIRS]."""
    pointers = table + positions[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    return tl.load(pointers, mask=mask[:, None], other=0.0).to(tl.float32)


@triton.jit
def _rotate_rows(y, cos, sin, rows, row_mask):
    """Rotate the interleaved pairs of y [ROWS, BLOCK_H, D] fp32 by the angles of its rows."""
    ROWS: tl.constexpr = y.shape[0]
    BLOCK_H: tl.constexpr = y.shape[1]
    D: tl.constexpr = y.shape[2]
    rows = rows.to(tl.int64)
    c = _load_angles(cos, rows, row_mask, D // 2)[:, None, :]
    s = _load_angles(sin, rows, row_mask, D // 2)[:, None, :]
    even, odd = tl.split(y.reshape(ROWS, BLOCK_H, D // 2, 2))
    return tl.join(even * c - odd * s, even * s + odd * c).reshape(ROWS, BLOCK_H, D)


@triton.jit(do_not_specialize=["S", "heads"])
def _quantize_q_kernel(
    q, weight, cos, sin, out, out_scale, S, heads, q_stride_b, q_stride_s, eps, scale_log2,
    HEAD_DIM: tl.constexpr, FLOOR: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program walks rows, all heads of ROWS tokens at a time, as in rms_norm_rope."""
    sample = tl.program_id(1).to(tl.int64)
    head = tl.arange(0, BLOCK_H)
    channels = (head[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :])[None, :, :]
    head_mask = (head < heads)[None, :]
    if weight is not None:
        gain = tl.load(weight + channels, mask=head_mask[:, :, None], other=0.0).to(tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, S, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)
        row_mask = rows < S
        mask = row_mask[:, None] & head_mask
        q_rows = q + sample * q_stride_b + rows.to(tl.int64)[:, None, None] * q_stride_s
        y = tl.load(q_rows + channels, mask=mask[:, :, None], other=0.0).to(tl.float32)
        if weight is not None:
            mean_square = tl.sum(tl.sum(y * y, 2), 1) / (heads * HEAD_DIM)
            y = y * tl.rsqrt(mean_square + eps)[:, None, None] * gain
        if cos is not None:
            y = _rotate_rows(y, cos, sin, rows, row_mask)
        step = int8_step(y, 2, FLOOR)
        values = to_int8(y * (1.0 / step)[:, :, None])
        token = sample * S + rows
        tl.store(out + token[:, None, None] * (heads * HEAD_DIM) + channels, values, mask=mask[:, :, None])
        row_scale = tl.maximum(step * scale_log2, FLOOR, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out_scale + token[:, None] * heads + head[None, :], row_scale, mask=mask)


@triton.jit(do_not_specialize=["S", "heads"])
def _summarize_kv_kernel(
    k, v, weight, cos, sin, rstd, k_sums, v_maxima, S, heads, k_stride_b, k_stride_s, v_stride_b, v_stride_s, eps,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Summarise the rows that a program walks.

    Programs whose last grid index is 0 write the sums of rotated k, [B, programs, H·D], and every row's norm factor,
    rstd [B, S], if there is a norm. Programs with index 1 write the maxima of |v|, [B, programs, H·D].
    """
    sample = tl.program_id(1).to(tl.int64)
    head = tl.arange(0, BLOCK_H)
    channels = (head[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :])[None, :, :]
    head_mask = (head < heads)[None, :, None]
    summary = tl.zeros((ROWS, BLOCK_H, HEAD_DIM), tl.float32)
    summary_rows = (sample * tl.num_programs(0) + tl.program_id(0)) * (heads * HEAD_DIM) + channels
    if tl.program_id(2) == 0:
        if weight is not None:
            gain = tl.load(weight + channels, mask=head_mask, other=0.0).to(tl.float32)
        for first in tl.range(tl.program_id(0) * ROWS, S, tl.num_programs(0) * ROWS, num_stages=STAGES):
            rows = first + tl.arange(0, ROWS)
            row_mask = rows < S
            k_rows = k + sample * k_stride_b + rows.to(tl.int64)[:, None, None] * k_stride_s
            y = tl.load(k_rows + channels, mask=row_mask[:, None, None] & head_mask, other=0.0).to(tl.float32)
            if weight is not None:
                factor = tl.rsqrt(tl.sum(tl.sum(y * y, 2), 1) / (heads * HEAD_DIM) + eps)
                tl.store(rstd + sample * S + rows, factor, mask=row_mask)
                y = y * factor[:, None, None] * gain
            if cos is not None:
                y = _rotate_rows(y, cos, sin, rows, row_mask)
            summary += y
        tl.store(k_sums + summary_rows, tl.sum(summary, 0)[None, :, :], mask=head_mask)
    else:
        for first in tl.range(tl.program_id(0) * ROWS, S, tl.num_programs(0) * ROWS, num_stages=STAGES):
            rows = first + tl.arange(0, ROWS)
            v_rows = v + sample * v_stride_b + rows.to(tl.int64)[:, None, None] * v_stride_s
            values = tl.load(v_rows + channels, mask=(rows < S)[:, None, None] & head_mask, other=0.0)
            summary = tl.maximum(summary, tl.abs(values.to(tl.float32)))
        tl.store(v_maxima + summary_rows, tl.max(summary, 0)[None, :, :], mask=head_mask)


@triton.jit(do_not_specialize=["S", "summaries"])
def _reduce_summaries_kernel(
    k_sums, v_maxima, k_mean, v_scale, S, C, summaries,
    FLOOR: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Reduce all programs' summaries [B, summaries, C] to k's mean over the S tokens and v's scale, [B, C]."""
    sample = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    k_sum = tl.zeros((ROWS, CHANNELS), tl.float32)
    v_maximum = tl.zeros((ROWS, CHANNELS), tl.float32)
    for first in range(0, summaries, ROWS):
        rows = first + tl.arange(0, ROWS)
        mask = (rows < summaries)[:, None] & (channel < C)[None, :]
        offsets = (sample * summaries + rows)[:, None] * C + channel[None, :]
        k_sum += tl.load(k_sums + offsets, mask=mask, other=0.0)
        v_maximum = tl.maximum(v_maximum, tl.load(v_maxima + offsets, mask=mask, other=0.0))
    tl.store(k_mean + sample * C + channel, tl.sum(k_sum, 0) / S, mask=channel < C)
    tl.store(v_scale + sample * C + channel, tl.maximum(tl.max(v_maximum, 0) / 448.0, FLOOR), mask=channel < C)


@triton.jit(do_not_specialize=["S", "heads"])
def _quantize_kv_kernel(
    k, v, weight, cos, sin, rstd, k_mean, v_scale, out_k, k_scale, out_v,
    S, heads, k_stride_b, k_stride_s, v_stride_b, v_stride_s,
    HEAD_DIM: tl.constexpr, FLOOR: tl.constexpr, GROUP: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """One program quantises GROUP tokens of k and v of one head."""
    head = tl.program_id(0)
    group = tl.program_id(1)
    sample = tl.program_id(2).to(tl.int64)
    # Offsets are 64-bit up to the tile, 32-bit inside it.
    first = tl.cast(group, tl.int64) * GROUP
    d = tl.arange(0, HEAD_DIM)
    rows = tl.arange(0, GROUP)
    row_mask = rows < S - first
    channels = head * HEAD_DIM + d
    k_tile = k + sample * k_stride_b + first * k_stride_s + head * HEAD_DIM
    y = tl.load(k_tile + rows[:, None] * k_stride_s + d[None, :], mask=row_mask[:, None], other=0.0).to(tl.float32)
    if weight is not None:
        factor = tl.load(rstd + sample * S + first + rows, mask=row_mask, other=0.0)
        y = y * factor[:, None] * tl.load(weight + channels).to(tl.float32)[None, :]
    if cos is not None:
        c = _load_angles(cos + first * (HEAD_DIM // 2), rows, row_mask, HEAD_DIM // 2)
        s = _load_angles(sin + first * (HEAD_DIM // 2), rows, row_mask, HEAD_DIM // 2)
        even, odd = tl.split(y.reshape(GROUP, HEAD_DIM // 2, 2))
        y = tl.join(even * c - odd * s, even * s + odd * c).reshape(GROUP, HEAD_DIM)
    y -= tl.load(k_mean + sample * (heads * HEAD_DIM) + channels)[None, :]
    y = tl.where(row_mask[:, None], y, 0.0)
    step = int8_step(y, None, FLOOR)
    corner = (sample * S + first) * (heads * HEAD_DIM) + head * HEAD_DIM
    packed = rows[:, None] * (heads * HEAD_DIM) + d[None, :]
    tl.store(out_k + corner + packed, to_int8(y * (1.0 / step)), mask=row_mask[:, None])
    tl.store(k_scale + (sample * heads + head) * tl.num_programs(1) + group, step)

    v_rows = rows
    if TRANSPOSED:
        v_rows = _key_order(rows)
    v_tile = v + sample * v_stride_b + first * v_stride_s + head * HEAD_DIM
    v_mask = (v_rows < S - first)[:, None]
    values = tl.load(v_tile + v_rows[:, None] * v_stride_s + d[None, :], mask=v_mask, other=0.0)
    inverse = 1.0 / tl.load(v_scale + sample * (heads * HEAD_DIM) + channels)
    values = (values.to(tl.float32) * inverse[None, :]).to(out_v.dtype.element_ty)
    if TRANSPOSED:
        tokens = tl.num_programs(1).to(tl.int64) * GROUP
        v_corner = out_v + (sample * (heads * HEAD_DIM) + channels)[:, None] * tokens + first
        tl.store(v_corner + rows[None, :], tl.trans(values))
    else:
        tl.store(out_v + corner + packed, values, mask=row_mask[:, None])


@triton.jit
def _key_order(i):
    """Return key_order of attention_8bit_reference: position 16a + 4c + 2b + e holds token 16a + 8b + 2c + e."""
    return (i & ~14) | ((i & 2) << 2) | ((i & 12) >> 1)
