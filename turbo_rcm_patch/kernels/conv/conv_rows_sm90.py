"""The launch of the convolution on sm_90 that loads each row of pixels once for the three rows of the window.

It serves results of 96 channels. There the loads of the usual kernel (conv_sm90.py) are the limit: its tiles have few
products for each byte. The kernel is in conv_rows_sm90_kernel.py.
"""

from __future__ import annotations

import functools
from math import prod

import torch

from ..choice.registry import GLUON
from ..dispatch import device_properties
from ..launch import launch_kernel
from ..sizes import cdiv
from . import conv_sm90
from .conv_sm90 import REMEMBERED, choose_tile, descriptor, fields_of

if conv_sm90.GLUON_ERROR is None:
    from .conv_rows_sm90_kernel import LOADED, ROWS, conv_rows_kernel

ROWS_ONCE = f"{GLUON}, rows loaded once"
TILE = (64, 32)  # columns, and of the tail
PIXELS, DEPTH = 64, 32  # of a row of a tile; channels of a step
STAGES = 3  # of 50 KiB, beside a staging buffer of 72 KiB


def why_not(
    device: torch.device, shape: tuple[int, ...], weight_shape: tuple[int, ...], upsample: bool, interleave: int
) -> str | None:
    """Return the reason why the kernel cannot or should not run where conv_sm90's `why_not` has none, or None. Takes
    the arguments of that one."""
    N, _, kh, _, _ = weight_shape
    if upsample or interleave > 1 or kh == 1 or choose_tile(N, False, 1) != TILE:
        return "not for other windows than 3×3 or other channels of the result than 96"
    if _count_boxes(*shape[:4]) * cdiv(N, sum(TILE)) < device_properties(device)[1]:
        return "not for fewer tiles than multiprocessors"
    return None


def _count_boxes(B: int, T: int, H: int, W: int) -> int:
    return B * T * cdiv(H, 2 * ROWS.value) * cdiv(W, PIXELS)


def launch(
    x: torch.Tensor, front: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None,
    residual: torch.Tensor | None, out: torch.Tensor, upsample: bool, interleave: int,
) -> None:  # fmt: skip
    """Do what conv_sm90's `launch` does. upsample and interleave: False and 1, as `why_not` accepts them."""
    shapes = (None if tensor is None else tensor.shape for tensor in (x, front, weight, residual, out))
    grid, fields, sizes, constants = _arguments(*shapes, x.dtype, device_properties(x.device)[1])
    tensors = x, front, weight, weight, residual, out
    launch_kernel(conv_rows_kernel, grid, *map(descriptor, tensors, fields), bias, *sizes, **constants)


@functools.lru_cache(maxsize=REMEMBERED)
def _arguments(
    x: tuple[int, ...], front: tuple[int, ...] | None, weight: tuple[int, ...], residual: tuple[int, ...] | None,
    out: tuple[int, ...], dtype: torch.dtype, multiprocessors: int,
) -> tuple[tuple[int], tuple[dict[str, object] | None, ...], tuple[int, ...], dict[str, object]]:  # fmt: skip
    """Return the grid, the descriptors' fields, and the last arguments, for operands of these shapes."""
    _, _, H, W, C = x
    B, T, _, _, N = out
    kt = weight[1]
    boxes, (columns, tail) = _count_boxes(B, T, H, W), TILE
    images = (None if frames is None else (frames[0] * frames[1], H, W, C) for frames in (x, front))
    results = (None if view is None else (B * T, H, 1, W, N) for view in (residual, out))
    fields = (
        *(fields_of(image, dtype, (1, LOADED.value, PIXELS, DEPTH)) for image in images),
        *(fields_of((N, prod(weight[1:])), dtype, (part, DEPTH)) for part in TILE),
        *(fields_of(view, dtype, (1, 1, 1, PIXELS, tail)) for view in results),
    )
    grid = (min(boxes * cdiv(N, columns + tail), multiprocessors),)
    return grid, fields, (boxes, T, H, W, N), {"C": C, "KT": kt, "TAIL": tail, "STAGES": STAGES, "num_warps": 4}
