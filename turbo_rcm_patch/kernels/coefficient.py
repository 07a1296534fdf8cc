"""Skip coefficients as kernels see them: a tensor of shape [B|1, S|1, C|1], or None for the constant 1.

Every op that ends in the skip computes ``c_skip * residual + c_out * F`` in fp32 and rounds once. A coefficient's
shape says how it varies, so one epilogue serves a consistency block (one value per sample), a Wan block (a gate per
channel) and per-token timesteps (a gate per token and channel).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ONE = 0  # no tensor: the constant 1
PER_SAMPLE = 1  # [B|1, 1, 1]
PER_CHANNEL = 2  # [B|1, 1, C]
PER_TOKEN = 3  # [B|1, S, C|1]

Coefficient = float | int | torch.Tensor


def canonical_coefficient(
    name: str, value: Coefficient | None, batch: int, tokens: int, channels: int, device: torch.device
) -> torch.Tensor | None:
    """Bring a user's coefficient to the shape [B|1, S|1, C|1] (a view where possible), or None for the constant 1.

    Accepted: a number, 0-d, per sample [B], per channel [C] or [B, 1, C], per token [B, S, C], and any 3-d shape whose
    dimensions are 1 or full. Raises ValueError for another shape, for a 1-d shape that could mean both [B] and [C],
    and for a tensor on another device.
    """
    if value is None or (isinstance(value, (int, float)) and value == 1):
        return None
    if isinstance(value, (int, float)):
        return torch.full((1, 1, 1), float(value), dtype=torch.float32, device=device)
    if value.device != device and value.dim() > 0:
        raise ValueError(f"{name} is on {value.device} but the residual is on {device}; move it there first.")
    if value.dim() == 0:
        return value.to(device).reshape(1, 1, 1)
    if value.dim() == 1:
        return _canonical_1d(name, value, batch, channels)
    full = (batch, tokens, channels)
    if value.dim() != 3 or any(size not in (1, wanted) for size, wanted in zip(value.shape, full, strict=True)):
        raise ValueError(
            f"{name} has shape {list(value.shape)}; accepted are a number, [B], [C], [B, 1, C] and [B, S, C] "
            f"with B={batch}, S={tokens}, C={channels}."
        )
    return value


def _canonical_1d(name: str, value: torch.Tensor, batch: int, channels: int) -> torch.Tensor:
    size = value.shape[0]
    if size == 1:
        return value.reshape(1, 1, 1)
    if size == batch == channels:
        raise ValueError(
            f"{name} has shape [{size}], which here is both the batch and the channel count; "
            f"give it as [B, 1, 1] or as [1, 1, C]."
        )
    if size == batch:
        return value.reshape(batch, 1, 1)
    if size == channels:
        return value.reshape(1, 1, channels)
    raise ValueError(
        f"{name} has shape [{size}]; a 1-d coefficient is per sample [B={batch}] or per channel [C={channels}]."
    )


def coefficient_kind(value: torch.Tensor | None) -> int:
    """How a canonical coefficient varies: ONE, PER_SAMPLE, PER_CHANNEL or PER_TOKEN."""
    if value is None:
        return ONE
    if value.shape[1] > 1:
        return PER_TOKEN
    return PER_CHANNEL if value.shape[2] > 1 else PER_SAMPLE


def coefficient_strides(value: torch.Tensor | None) -> tuple[int, int, int]:
    """Element strides of a canonical coefficient over (sample, token, channel); 0 where it does not vary."""
    if value is None:
        return 0, 0, 0
    return tuple(0 if size == 1 else stride for size, stride in zip(value.shape, value.stride(), strict=True))


@triton.jit
def load_coefficient(
    pointer, sample, rows, columns, row_mask, column_mask, stride_b, stride_s, stride_c, KIND: tl.constexpr
):
    """Load a coefficient for the tile (sample, rows [M], columns [N]) as fp32 [1,1], [1,N] or [M,N] by KIND."""
    base = pointer + sample.to(tl.int64) * stride_b
    if KIND == 1:
        value = tl.load(base).to(tl.float32)[None, None]
    elif KIND == 2:
        value = tl.load(base + columns * stride_c, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    else:
        offsets = rows.to(tl.int64)[:, None] * stride_s + columns[None, :] * stride_c
        value = tl.load(base + offsets, mask=row_mask[:, None] & column_mask[None, :], other=0.0).to(tl.float32)
    return value
