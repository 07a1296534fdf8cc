"""The convolution of conv_skip on sm_90: the inputs it takes, and its launch.

    residual + (x ∗ W + b)        all tensors in bf16, or all in fp16, or x and W in int8 (conv_8bit.py)

The kernel is in conv_sm90_kernel.py.
"""

from __future__ import annotations

import functools
from itertools import product

import torch

from ..dispatch import device_properties, why_not_sm90
from ..launch import launch_kernel
from ..sizes import cdiv
from .conv_tiles import choose_box, choose_columns

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .conv_sm90_kernel import conv_kernel
except (ImportError, AttributeError) as error:
    GLUON_ERROR = str(error)
else:
    GLUON_ERROR = None

PIXELS = 128  # per tile
COLUMNS = ((128, 64), (128, 0), (64, 32), (64, 0))  # columns of a tile, and of its tail
SHARED_PIXELS, SHARED_COLUMNS = 64, 256  # for tiles of two boxes that share the weight's rows: pixels per box, columns
MEMORY = 208 << 10  # bytes of shared memory for the steps in flight and the staging buffer
MOST_STAGES = 8


def why_not_on(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why the kernel cannot run on this device and dtype, or None if it can."""
    return why_not_sm90(device, dtype, GLUON_ERROR)


def why_not(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], weight_shape: tuple[int, ...],
    upsample: bool = False, interleave: int = 1,
) -> str | None:  # fmt: skip
    """Return the reason why the kernel cannot or should not run for x and a weight of these shapes, or None.

    shape: of x, [B, T, H, W, C], without the frames before it. weight_shape: [N · interleave, kt, kh, kw, C].
    upsample: True if x is doubled in height and width first. interleave: result frames per frame of x.
    """
    reason = why_not_on(device, dtype)
    if reason is not None:
        return reason
    B, T, H, W, C = shape
    N, _, kh, _, _ = weight_shape
    if C % 32:
        return "channels that are no multiple of 32"
    if N < 64 or N // interleave % 8:
        return "fewer than 64 channels of the result, or no multiple of 8"
    columns = sum(choose_tile(N, upsample, interleave))
    if not columns:
        return "tiles with columns of two pixels or frames"
    boxes = count_boxes(B * T, *((H, W) if kh > 1 else (1, H * W)), upsample)
    if boxes * cdiv(N, columns) < device_properties(device)[1]:
        return "fewer tiles than multiprocessors"
    return None


def fits_tma(*tensors: torch.Tensor | None) -> bool:
    """True if TMA can read these packed tensors: all begin at multiples of 16 bytes."""
    return all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)


def choose_tile(N: int, upsample: bool, interleave: int) -> tuple[int, int]:
    """Return the columns and tail of a tile whose columns all belong to one pixel and frame, or (0, 0)."""
    candidates = COLUMNS
    if upsample or interleave > 1:
        candidates = tuple(pair for pair in COLUMNS if N // interleave % sum(pair) == 0)
    return choose_columns(N, candidates) if candidates else (0, 0)


def choose_depths(C: int, in_8_bits: bool = False) -> tuple[int, int]:
    """Return the channels of x that a step multiplies, in two parts: the compiler's tensors have power-of-two sizes
    only. A line has at most 128 bytes."""
    if C == 96:
        return 64, 32
    if in_8_bits and C % 128 == 0:
        return 128, 0
    return (32, 0) if C % 64 else (64, 0)


def count_boxes(frames: int, H: int, W: int, upsample: bool, pixels: int = PIXELS) -> int:
    """Return the number of boxes of `pixels` pixels of x that cover the frames, for all phases."""
    height, width = choose_box(H, W, pixels)
    return frames * (4 if upsample else 1) * cdiv(H, height) * cdiv(W, width)


def launch(
    x: torch.Tensor, front: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None,
    residual: torch.Tensor | None, out: torch.Tensor, upsample: bool, interleave: int,
    factor: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Write ``residual + (factor · (x ∗ W) + b)`` to out. All tensors are packed, and `why_not` and `fits_tma` accept
    them. factor: as of conv_portable.py."""
    N = len(weight)
    shape = (x.shape[0], out.shape[1] // interleave, *x.shape[2:])
    # Triton has no instruction of 256 columns for int8.
    shared = factor is None and shares_rows(x.device, shape, weight.shape, upsample)
    parts = [(0, N)] if shared or upsample or interleave > 1 else split_columns(N)
    for first, last in parts:
        rows = weight[first:last], None if bias is None else bias[first:last]
        results = (None if tensor is None else tensor[..., first:last] for tensor in (residual, out))
        of_rows = None if factor is None else factor[first:last]
        _launch_columns(x, front, *rows, *results, upsample, interleave, shared, of_rows)


def shares_rows(
    device: torch.device, shape: tuple[int, ...], weight_shape: tuple[int, ...], upsample: bool
) -> bool:  # fmt: skip
    """True if a tile has two boxes of pixels that are multiplied at the same time.

    Such tiles have 256 columns. They read less than tiles of 192 columns, and divide 1024, 512 and 256 channels.
    """
    B, T, H, W, C = shape
    N, _, kh, _, _ = weight_shape
    if kh == 1 or N % SHARED_COLUMNS or C % 64:
        return False
    tiles = cdiv(count_boxes(B * T, H, W, upsample, SHARED_PIXELS), 2) * (N // SHARED_COLUMNS)
    return tiles >= device_properties(device)[1]


def split_columns(N: int) -> list[tuple[int, int]]:
    """Return the ranges of columns, one per launch: the columns that fill tiles of 192, and the rest.

    On an H200 tiles of 192 columns reach 757 TFLOP/s, tiles of 128 columns 601 to 649.
    """
    widest = sum(COLUMNS[0])
    whole = N // widest * widest
    if N - whole == COLUMNS[-1][0]:
        whole -= widest  # two tiles of 128 are faster than one of 192 and one of 64
    return [(0, N)] if whole <= 0 or whole == N else [(0, whole), (whole, N)]


def _launch_columns(
    x: torch.Tensor, front: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None,
    residual: torch.Tensor | None, out: torch.Tensor, upsample: bool, interleave: int, shared: bool,
    factor: torch.Tensor | None,
) -> None:  # fmt: skip
    """Do what `launch` does, for a residual and out that may be some columns of packed ones. shared: from
    `shares_rows`."""
    B, _, *edges, C = x.shape
    H, W = edges if factor is None else (edge - 2 for edge in edges)
    N, kt, kh, _, _ = weight.shape
    if kh == 1:
        H, W = edges = 1, H * W  # no pixel reads another
    T, scale, channels = out.shape[1] // interleave, 2 if upsample else 1, N // interleave
    pixels, (columns, tail) = PIXELS, choose_tile(N, upsample, interleave)
    if shared:
        pixels, (columns, tail) = SHARED_PIXELS, (SHARED_COLUMNS, 0)
    box, of_tile = choose_box(H, W, pixels), 2 if shared else 1
    depth, rest = choose_depths(C, x.element_size() == 1)
    boxes = cdiv(count_boxes(B * T, H, W, upsample, pixels), of_tile)
    tiles = boxes * cdiv(N, columns + tail)
    images = [None if frames is None else frames.view(-1, *edges, C) for frames in (x, front)]
    rows = weight.view(N, kt * kh * kh * C)
    step_bytes = (PIXELS + columns + tail) * (depth + rest) * x.element_size()
    staging_bytes = PIXELS * (columns + tail) * out.element_size()
    chunk = min(64, tail or columns)
    repeats = (1, 1, 1) if residual is None else tuple(map(cdiv, out.shape[1:4], residual.shape[1:4]))
    if residual is not None:
        residual = residual.view(-1, H, scale // repeats[1], W, scale // repeats[2] * channels)
    results = residual, out.view(-1, H, scale, W, scale * channels)
    launch_kernel(
        conv_kernel,
        (min(tiles, device_properties(x.device)[1]),),
        *(descriptor(frames, 1, *box, size) for frames, size in product(images, (depth, rest))),
        *(descriptor(rows, columns, size) for size in (depth, rest)),
        *(descriptor(rows, tail, tail and size) for size in (depth, rest)),
        *(descriptor(tensor, 1, box[0], 1, box[1], chunk) for tensor in results),
        *(factor, bias),
        *(boxes, T, H, W, N),
        C=C,
        KT=kt,
        KH=kh,
        UPSAMPLE=upsample,
        INTERLEAVE=interleave,
        REPEATS=repeats,
        TAIL=tail,
        STAGES=min(MOST_STAGES, (MEMORY - staging_bytes) // step_bytes),
        BOXES=of_tile,
        num_warps=4,
    )


def descriptor(tensor: torch.Tensor | None, *box: int) -> TensorDescriptor | None:
    """Return a TMA descriptor, or None without a tensor or columns."""
    if tensor is None or not box[-1]:
        return None
    return TensorDescriptor.from_tensor(tensor, list(box), _layout(len(box), box[-1], tensor.element_size()))


@functools.cache
def _layout(rank: int, columns: int, itemsize: int) -> gl.NVMMASharedLayout:
    """Return the swizzled shared-memory layout of a box whose lines have `columns` elements."""
    return gl.NVMMASharedLayout(swizzle_byte_width=itemsize * columns, element_bitwidth=8 * itemsize, rank=rank)
