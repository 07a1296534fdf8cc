"""The contest of a VAE decoder's convolutions, beside cuDNN's. Checked and timed as ops.py says."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import kernels
from ..kernels import reference
from .ops import COMPILED, Contest, Draws

EAGER = "torch"


def conv_skip(
    T: int, H: int, W: int, C: int, N: int, kt: int, kh: int, upsample: int, interleave: int,
    device: torch.device, compiled: Callable,
) -> Contest:  # fmt: skip
    """A convolution of T frames and the residual added to it, channels last; without a residual where pixels or frames
    are multiplied (upsample, interleave: by 1 or 2). The rivals are PyTorch's convolution and addition, also compiled.
    """
    draw = Draws(device)
    x, bias = draw(1, T + kt - 1, H, W, C), draw(interleave * N)
    front, rest = x.split((kt - 1, T), dim=1)  # as the decoder has them; the rivals need them in one
    weight = draw(interleave * N, kt, kh, kh, C) * (kt * kh * kh * C) ** -0.5
    residual = draw(1, T, H, W, N) if upsample == interleave == 1 else None
    result_sizes = T * interleave, H * upsample, W * upsample

    def ours(implementation: str = "auto") -> torch.Tensor:
        options = {"upsample": upsample == 2, "interleave": interleave, "implementation": implementation}
        return kernels.conv_skip(rest, weight, bias, residual, front=front, **options).flatten(1, 3)

    def rival(x, weight, bias, residual):
        sums = reference.conv_skip(x, weight, bias, None, None, upsample == 2, interleave)
        return (sums if residual is None else sums + residual).flatten(1, 3)

    compiled_rival = compiled(rival)

    def oracle(rows: torch.Tensor) -> torch.Tensor:
        frame, *place = torch.unravel_index(rows, result_sizes)
        window, inside = gather_windows(x, frame // interleave, place, weight.shape[1:3], upsample)
        sums = torch.einsum("rtyxc,ntyxc->rn", (window * inside[..., None]).double(), weight.double()) + bias.double()
        sums = sums.unflatten(1, (interleave, N))[torch.arange(len(rows), device=device), frame % interleave]
        return (sums if residual is None else sums + residual.flatten(1, 3)[0, rows].double())[None]

    return Contest(
        ours={"conv_skip": ours},
        rivals={
            EAGER: lambda: rival(x, weight, bias, residual),
            COMPILED: lambda: compiled_rival(x, weight, bias, residual),
        },
        oracle=oracle,
        fallback=lambda: ours("torch"),
        tokens=T * interleave * H * upsample * W * upsample,
        flops=2 * T * interleave * H * upsample * W * upsample * N * kt * kh * kh * C,
    )


def gather_windows(
    x: torch.Tensor, frame: torch.Tensor, place: list[torch.Tensor], window: tuple[int, int], upsample: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs of the results at the given frames and places (y and x), each [R].

    These are pixels of x [R, kt, kh, kh, C], and True for those within the image [R, 1, kh, kh]. upsample: how often a
    pixel of x is repeated."""
    kt, kh = window
    near = torch.arange(kh, device=x.device) - kh // 2
    pairs = [(at[:, None] + near, size * upsample) for at, size in zip(place, x.shape[2:4], strict=True)]
    inside_y, inside_x = (((at >= 0) & (at < size)) for at, size in pairs)
    ys, xs = (at.clamp(0, size - 1) // upsample for at, size in pairs)
    frames = frame[:, None] + torch.arange(kt, device=x.device)
    pixels = x[0, frames[:, :, None, None], ys[:, None, :, None], xs[:, None, None, :]]
    return pixels, (inside_y[:, :, None] & inside_x[:, None, :])[:, None]
