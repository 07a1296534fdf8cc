"""Checks for tensors that TMA can read in place: the elements of a row are packed, and every row starts at a multiple
of 16 bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

TMA_CAPABILITY = (9, 0)


def matrix_fits_tma(matrix: torch.Tensor) -> bool:
    """True if TMA can read a matrix [rows, columns]."""
    row, column = matrix.stride()
    aligned = row * matrix.element_size() % 16 == 0 and matrix.data_ptr() % 16 == 0
    return column == 1 and row >= matrix.shape[1] and aligned


def heads_fit_tma(x: torch.Tensor) -> bool:
    """True if TMA can read x [B, S, H, D]."""
    if x.stride(-1) != 1 or x.data_ptr() % 16:
        return False
    by_sample, by_token, by_head = head_strides(x)
    if min(by_sample, by_token, by_head) <= 0:
        return False
    units = 16 // math.gcd(16, x.element_size())
    return by_sample % units == by_token % units == by_head % units == 0


def head_strides(x: torch.Tensor | None) -> tuple[int, int, int]:
    """Return the strides of x [B, S, H, D] over (B, S, H), or zeros for None.

    A dimension of size 1 may have any stride; the packed stride is returned for it.
    """
    if x is None:
        return 0, 0, 0
    (batch, tokens, heads, head_dim), (by_sample, by_token, by_head, _) = x.shape, x.stride()
    return (
        tokens * heads * head_dim if batch == 1 else by_sample,
        heads * head_dim if tokens == 1 else by_token,
        head_dim if heads == 1 else by_head,
    )


def descriptor_of(kind: type, base: torch.Tensor, shape: Sequence[int], strides: Sequence[int], **fields: object):
    """Return a TensorDescriptor of this kind, Triton's or Gluon's, without the checks of its constructor.

    The checks take ten Python calls each time. Launchers check once what TMA needs (`matrix_fits_tma`,
    `heads_fit_tma`). fields: the block_shape, and the layout of Gluon's. Other fields have their defaults.
    """
    return described(kind, base, {"shape": shape, "strides": strides, **fields})


def described(kind: type, base: torch.Tensor, fields: Mapping[str, object]):
    """Return `descriptor_of` for fields that were put together once, for many tensors of one shape."""
    descriptor = object.__new__(kind)
    descriptor.__dict__ = {"base": base, **fields}
    return descriptor
