"""The convolution of conv_pairs on sm_90: the sizes it takes, and its launches.

The kernel is in conv_pairs_sm90_kernel.py.
"""

from __future__ import annotations

import functools

import torch

from ..dispatch import device_properties
from ..launch import launch_kernel
from ..sizes import cdiv
from . import conv_sm90
from .conv_sm90 import REMEMBERED, descriptor, fields_of, split_columns
from .conv_tiles import choose_box

if conv_sm90.GLUON_ERROR is None:
    from ..gluon_releases import RELEASE
    from .conv_pairs_sm90_kernel import PLANES, WINDOW, conv_pairs_kernel

    # From Triton 3.8 on, a tile of 192 columns spills registers in its loop, and ptxas serialises its products.
    HAS_WIDE = RELEASE < (3, 8)

PIXELS = 64  # of a box; a tile has two
DEPTH = 64  # channels of a step
CHUNK = 64  # columns that are stored at a time
WIDE, NARROW = (128, 64), (128, 0)  # columns of a tile, and of its tail
MEMORY = 208 << 10  # bytes of shared memory for the steps in flight and the staging buffer
# A pair of frames takes 2/3 of the products. An odd last frame takes as many as a pair. Above this share of the
# products, the larger input of the convolution costs more than is saved.
MOST_PRODUCTS = 0.8


def why_not(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], weight_shape: tuple[int, ...]
) -> str | None:
    """Return the reason why the kernel cannot or should not run for an input and a weight of these shapes, or None.

    shape: of the convolution's input, [B, T, H, W, C], without the frames before it. weight_shape: [N, kt, kh, kw, C].
    """
    reason = conv_sm90.why_not_on(device, dtype)
    if reason is not None:
        return reason
    if dtype != torch.bfloat16:
        return "not for a model in fp16, whose sums of frames would need more bits"
    B, T, H, W, C = shape
    N, *window, _ = weight_shape
    if window != [3, 3, 3] or not takes_channels(C, N):
        return "not for other windows than 3×3×3 or other channels"
    if not HAS_WIDE and N % sum(NARROW):
        return "not for these channels with Triton 3.8 and later"
    pairs = cdiv(T, 2)
    if pairs * PLANES.value > MOST_PRODUCTS * 3 * T:
        return "not for so few frames"
    if _count_tiles(B, pairs, H, W) * cdiv(N, sum(WIDE)) < device_properties(device)[1]:
        return "not for fewer tiles than multiprocessors"
    return None


def takes_channels(C: int, N: int) -> bool:
    """True if the kernel takes inputs of C channels and results of N."""
    return C % DEPTH == 0 and N % CHUNK == 0 and sum(NARROW) <= N


def _count_tiles(B: int, pairs: int, H: int, W: int) -> int:
    """Return the number of tiles that cover all pairs of frames, for each range of columns."""
    height, width = choose_box(H, W, PIXELS)
    return cdiv(B * pairs * cdiv(H, height) * cdiv(W, width), 2)


def launch(
    planes: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Write the convolution of planes [B, pairs, 4, H, W, C] with weight [N, 4, 9, C] to out [B, 2 · pairs, H, W, N].

    residual: [B, T, H, W, N], where T is 2 · pairs or one less. All tensors are packed. TMA can read them, because each
    begins with a whole pixel of 64 channels or more.
    """
    shapes = (None if tensor is None else tensor.shape for tensor in (planes, residual, out))
    launches = _launches(*shapes, out.dtype, device_properties(out.device)[1], HAS_WIDE)
    for columns, grid, fields, sizes, constants in launches:
        rows, shift = weight[columns], None if bias is None else bias[columns]
        result = out[..., columns]
        tensors = planes, rows, rows, result if residual is None else residual[..., columns], result
        launch_kernel(conv_pairs_kernel, grid, *map(descriptor, tensors, fields), shift, *sizes, **constants)


@functools.lru_cache(maxsize=REMEMBERED)
def _launches(
    planes: tuple[int, ...], residual: tuple[int, ...] | None, out: tuple[int, ...], dtype: torch.dtype,
    multiprocessors: int, has_wide: bool,
) -> list[tuple]:  # fmt: skip
    """Return for each launch its columns, the grid, the descriptors' fields, and the kernel's last arguments.

    has_wide: True if tiles may be WIDE.
    """
    B, pairs, _, H, W, C = planes
    N = out[-1]
    T = out[1] if residual is None else residual[1]
    box, tiles = choose_box(H, W, PIXELS), _count_tiles(B, pairs, H, W)
    launches = []
    for first, last in split_columns(N) if has_wide else [(0, N)]:
        count = last - first
        columns, tail = WIDE if has_wide and count % sum(WIDE) == 0 else NARROW
        step_bytes = (2 * PIXELS + columns + tail) * DEPTH * 2
        staging_bytes = 2 * PIXELS * (columns + tail) * dtype.itemsize
        views = ((B * frames, H, 1, W, count) for frames in (T, out[1]))
        fields = (
            fields_of((B * pairs * PLANES.value, H, W, C), torch.float16, (1, *box, DEPTH)),
            *(fields_of((count, PLANES.value * WINDOW.value * C), torch.float16, (part, part and DEPTH))
              for part in (columns, tail)),
            *(fields_of(view, dtype, (1, box[0], 1, box[1], CHUNK), N) for view in views),
        )  # fmt: skip
        launches.append((
            slice(first, last),
            (min(tiles * cdiv(count, columns + tail), multiprocessors),),
            fields,
            (tiles, pairs, T, H, W, count),
            {
                "C": C,
                "TAIL": tail,
                "STAGES": (MEMORY - staging_bytes) // step_bytes,
                "HAS_RESIDUAL": residual is not None,
                "num_warps": 4,
            },
        ))  # fmt: skip
    return launches
