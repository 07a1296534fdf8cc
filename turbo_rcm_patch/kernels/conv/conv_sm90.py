"""The convolution of conv_skip on sm_90: the inputs it takes, and its launch.

    residual + (x ∗ W + b)        all tensors in bf16, or all in fp16, or x and W in int8 (conv_8bit.py)

The kernel is in conv_sm90_kernel.py.
"""

from __future__ import annotations

import functools
from itertools import product
from math import prod
from typing import NamedTuple

import torch

from ..dispatch import device_properties, why_not_sm90
from ..launch import launch_kernel
from ..sizes import cdiv
from ..tma import described
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
REMEMBERED = 1024  # launches by their operands' shapes; a decode has about 30


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
    shapes = (None if tensor is None else tensor.shape for tensor in (x, front, weight, residual, out))
    of_gpu = device_properties(x.device)[1]
    sizes = _Sizes(*shapes, x.dtype, out.dtype, upsample, interleave, factor is not None, of_gpu)
    for part in _parts(sizes):
        operands = weight, bias, factor, residual, out
        _launch_part(part, x, front, *(operands if part.columns is None else _columns_of(part.columns, *operands)))


def _launch_part(part: _Part, x, front, weight, bias, factor, residual, out) -> None:
    tensors = x, x, front, front, weight, weight, weight, weight, residual, out
    descriptors = map(descriptor, tensors, part.fields)
    launch_kernel(conv_kernel, part.grid, *descriptors, factor, bias, *part.sizes, **part.constants)


class _Sizes(NamedTuple):
    """The shapes of `launch`'s operands, the dtypes of x and out, its options, and the GPU's multiprocessors.

    in_8_bits: True if x and weight are int8, and images have one more pixel on each side.
    """

    x: tuple[int, ...]
    front: tuple[int, ...] | None
    weight: tuple[int, ...]
    residual: tuple[int, ...] | None
    out: tuple[int, ...]
    dtype: torch.dtype
    result: torch.dtype
    upsample: bool
    interleave: int
    in_8_bits: bool
    multiprocessors: int


class _Part(NamedTuple):
    """One launch for operands of some sizes, without the operands themselves.

    columns: the columns of the result that it computes. None: all. fields: for each of the kernel's descriptors those
    besides the tensor, or None. sizes, constants: the kernel's last arguments.
    """

    columns: slice | None
    grid: tuple[int]
    fields: tuple[dict[str, object] | None, ...]
    sizes: tuple[int, ...]
    constants: dict[str, object]


def _columns_of(columns: slice, weight, bias, factor, residual, out):
    """Return these tensors of `launch` for some columns of the result."""
    of_rows = (None if tensor is None else tensor[columns] for tensor in (weight, bias, factor))
    results = (None if tensor is None else tensor[..., columns] for tensor in (residual, out))
    return *of_rows, *results


def shares_rows(
    multiprocessors: int, shape: tuple[int, ...], weight_shape: tuple[int, ...], upsample: bool
) -> bool:  # fmt: skip
    """True if a tile has two boxes of pixels that are multiplied at the same time.

    Such tiles have 256 columns. They read less than tiles of 192 columns, and divide 1024, 512 and 256 channels.
    """
    B, T, H, W, C = shape
    N, _, kh, _, _ = weight_shape
    if kh == 1 or N % SHARED_COLUMNS or C % 64:
        return False
    tiles = cdiv(count_boxes(B * T, H, W, upsample, SHARED_PIXELS), 2) * (N // SHARED_COLUMNS)
    return tiles >= multiprocessors


def split_columns(N: int) -> list[tuple[int, int]]:
    """Return the ranges of columns, one per launch: the columns that fill tiles of 192, and the rest.

    On an H200 tiles of 192 columns reach 757 TFLOP/s, tiles of 128 columns 601 to 649.
    """
    widest = sum(COLUMNS[0])
    whole = N // widest * widest
    if N - whole == COLUMNS[-1][0]:
        whole -= widest  # two tiles of 128 are faster than one of 192 and one of 64
    return [(0, N)] if whole <= 0 or whole == N else [(0, whole), (whole, N)]


@functools.lru_cache(maxsize=REMEMBERED)
def _parts(sizes: _Sizes) -> tuple[_Part, ...]:
    """Return the launches for operands of these sizes. A video is decoded in many chunks of the same sizes."""
    N, shape = sizes.weight[0], (sizes.x[0], sizes.out[1] // sizes.interleave, *sizes.x[2:])
    # Triton has no instruction of 256 columns for int8.
    shared = not sizes.in_8_bits and shares_rows(sizes.multiprocessors, shape, sizes.weight, sizes.upsample)
    is_whole = shared or sizes.upsample or sizes.interleave > 1
    return tuple(_part(sizes, *columns, shared) for columns in ([(0, N)] if is_whole else split_columns(N)))


def _part(sizes: _Sizes, first: int, last: int, shared: bool) -> _Part:
    """Return the launch for the columns from `first` to `last`. shared: from `shares_rows`."""
    x, front, weight, residual, out, dtype, result, upsample, interleave, in_8_bits, multiprocessors = sizes
    B, _, *edges, C = x
    H, W = (edge - 2 for edge in edges) if in_8_bits else edges
    _, kt, kh, _, _ = weight
    if kh == 1:
        H, W = edges = 1, H * W  # no pixel reads another
    kt = 1 if upsample else kt  # a folded weight has its phases there
    N, T, scale = last - first, out[1] // interleave, 2 if upsample else 1
    pixels, (columns, tail) = PIXELS, choose_tile(N, upsample, interleave)
    if shared:
        pixels, (columns, tail) = SHARED_PIXELS, (SHARED_COLUMNS, 0)
    box, of_tile = choose_box(H, W, pixels), 2 if shared else 1
    depth, rest = choose_depths(C, in_8_bits)
    boxes = scale**2 * cdiv(count_boxes(B * T, H, W, False, pixels), of_tile)
    step_bytes = (PIXELS + columns + tail) * (depth + rest) * dtype.itemsize
    staging_bytes = PIXELS * (columns + tail) * result.itemsize
    repeats = (1, 1, 1) if residual is None else tuple(map(cdiv, out[1:4], residual[1:4]))
    images = [None if frames is None else (frames[0] * frames[1], *edges, C) for frames in (x, front)]
    rows, chunk = (N, prod(weight[1:])), min(64, tail or columns)
    channels = N // interleave
    old = residual and (residual[0] * residual[1], H, scale // repeats[1], W, scale // repeats[2] * channels)
    new = out[0] * out[1], H, scale, W, scale * channels
    is_whole = weight[0] == N
    # A line of a view is as long as its columns, but in memory as long as a pixel's channels if these are only a part.
    width = None if is_whole else out[4]
    return _Part(
        columns=None if is_whole else slice(first, last),
        grid=(min(boxes * cdiv(N, columns + tail), multiprocessors),),
        fields=(
            *(fields_of(image, dtype, (1, *box, size)) for image, size in product(images, (depth, rest))),
            *(fields_of(rows, dtype, (columns, size)) for size in (depth, rest)),
            *(fields_of(rows, dtype, (tail, tail and size)) for size in (depth, rest)),
            *(fields_of(view, result, (1, box[0], 1, box[1], chunk), width) for view in (old, new)),
        ),
        sizes=(boxes, T, H, W, N),
        constants={
            "C": C,
            "KT": kt,
            "KH": kh,
            "UPSAMPLE": upsample,
            "INTERLEAVE": interleave,
            "REPEATS": repeats,
            "TAIL": tail,
            "STAGES": min(MOST_STAGES, (MEMORY - staging_bytes) // step_bytes),
            "BOXES": of_tile,
            "num_warps": 4,
        },
    )


def fields_of(
    shape: tuple[int, ...] | None, dtype: torch.dtype, box: tuple[int, ...], width: int | None = None
) -> dict[str, object] | None:
    """Return the fields of a descriptor besides the tensor, or None without a shape or columns of the box.

    shape: as the kernel sees the tensor, which is packed. width: from one line to the next, if a line is only a part of
    what is packed.
    """
    if shape is None or not box[-1]:
        return None
    strides = [1]
    for size in (width or shape[-1], *shape[-2:0:-1]):
        strides.insert(0, strides[0] * size)
    layout = _layout(len(box), box[-1], dtype.itemsize)
    return {"shape": shape, "strides": tuple(strides), "block_shape": list(box), "layout": layout}


def descriptor(tensor: torch.Tensor, fields: dict[str, object] | None) -> TensorDescriptor | None:
    """Return a TMA descriptor with these fields. `fits_tma` has checked the tensor's address, and `why_not` its
    channels."""
    return None if fields is None else described(TensorDescriptor, tensor, fields)


@functools.cache
def _layout(rank: int, columns: int, itemsize: int) -> gl.NVMMASharedLayout:
    """Return the swizzled shared-memory layout of a box whose lines have `columns` elements."""
    return gl.NVMMASharedLayout(swizzle_byte_width=itemsize * columns, element_bitwidth=8 * itemsize, rank=rank)
