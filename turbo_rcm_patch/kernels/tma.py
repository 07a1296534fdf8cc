"""Which tensors TMA can read in place: rows packed, and every one at a multiple of 16 bytes."""

from __future__ import annotations

import torch

TMA_CAPABILITY = (9, 0)


def matrix_fits_tma(matrix: torch.Tensor) -> bool:
    """Whether TMA can read a matrix [rows, columns]."""
    row, column = matrix.stride()
    aligned = row * matrix.element_size() % 16 == 0 and matrix.data_ptr() % 16 == 0
    return column == 1 and row >= matrix.shape[1] and aligned


def heads_fit_tma(x: torch.Tensor) -> bool:
    """Whether TMA can read x [B, S, H, D]."""
    aligned = all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in head_strides(x))
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and aligned


def head_strides(x: torch.Tensor | None) -> tuple[int, int, int]:
    """Strides of x [B, S, H, D] over (B, S, H); zeros for None. A dimension of size 1 may carry any stride; it gets
    the packed one."""
    if x is None:
        return 0, 0, 0
    (batch, tokens, heads, head_dim), (by_sample, by_token, by_head, _) = x.shape, x.stride()
    return (
        tokens * heads * head_dim if batch == 1 else by_sample,
        heads * head_dim if tokens == 1 else by_token,
        head_dim if heads == 1 else by_head,
    )
