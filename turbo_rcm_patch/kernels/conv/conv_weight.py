"""Pack a convolution's weight for conv_skip: from a module's [N, C, kt, kh, kw] in memory to [N, kt, kh, kw, C].

PyTorch's copy reads one element per memory sector at a time. Here a program reads whole rows and transposes them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import kernel_op
from ..launch import launch_kernel
from ..sizes import cdiv, next_power_of_2

CHANNELS = 128  # per program


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [N, kt, kh, kw, C], contiguous. The weight must be on a device that Triton can run on."""
    if weight.is_contiguous():
        return weight
    as_in_module = weight.permute(0, 4, 1, 2, 3)
    return _pack_weight(as_in_module) if as_in_module.is_contiguous() else weight.contiguous()


@kernel_op("pack_weight")
def _pack_weight(as_in_module: torch.Tensor) -> torch.Tensor:
    N, C, *window = as_in_module.shape
    taps = window[0] * window[1] * window[2]
    packed = as_in_module.new_empty(N, *window, C)
    launch_kernel(
        _pack_weight_kernel,
        (N, cdiv(C, CHANNELS)),
        *(as_in_module, packed, C),
        TAPS=taps,
        BLOCK=next_power_of_2(taps),
        CHANNELS=CHANNELS,
        num_warps=4,
    )
    return packed


@_pack_weight.register_fake
def _(as_in_module):
    N, C, *window = as_in_module.shape
    return as_in_module.new_empty(N, *window, C)


@triton.jit
def _pack_weight_kernel(
    weight, packed, C, TAPS: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """Transpose weight [N, C, TAPS] to packed [N, TAPS, C]."""
    first = tl.program_id(0).to(tl.int64) * C * TAPS
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    taps = tl.arange(0, BLOCK)
    mask = (channels < C)[:, None] & (taps < TAPS)[None, :]
    values = tl.load(weight + first + channels[:, None] * TAPS + taps[None, :], mask=mask)
    tl.store(packed + first + taps[:, None] * C + channels[None, :], values.T, mask=mask.T)
