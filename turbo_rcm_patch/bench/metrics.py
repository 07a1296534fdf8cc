"""Measures of the difference between two tensors, in fp64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

AT_ONCE = 2**22  # values in fp64 at a time
SSIM_WINDOW, SSIM_SIGMA, SSIM_K1, SSIM_K2 = 11, 1.5, 0.01, 0.03  # of Wang et al. 2004


def relative_l2(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ‖actual − reference‖ / ‖reference‖, or 0 for equal tensors, even if all are zeros."""
    error = size = 0.0
    for some, exact in zip(*(x.detach().flatten().split(AT_ONCE) for x in (actual, reference)), strict=True):
        some, exact = some.double(), exact.double()
        error += (some - exact).square().sum()
        size += exact.square().sum()
    error, size = math.sqrt(error), math.sqrt(size)
    return 0.0 if error == 0 else _ratio(error, size)


def relative_l1(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Return Σ|actual − reference| / Σ|reference|, or 0 for equal tensors, even if all are zeros."""
    actual, reference = actual.detach().double(), reference.detach().double()
    error = (actual - reference).abs().sum().item()
    return 0.0 if error == 0 else _ratio(error, reference.abs().sum().item())


def cosine(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the cosine of the angle between the flattened tensors, or NaN if one is all zeros."""
    actual, reference = actual.detach().double().flatten(), reference.detach().double().flatten()
    norms = torch.linalg.vector_norm(actual) * torch.linalg.vector_norm(reference)
    return (torch.dot(actual, reference) / norms).item()


def psnr(actual: torch.Tensor, reference: torch.Tensor, peak: float = 1.0) -> float:
    """Return the peak signal-to-noise ratio in dB, 10·log10(peak² / MSE), for values in [0, peak]."""
    mean_squared_error = (actual.detach().double() - reference.detach().double()).square().mean().item()
    return 10 * math.log10(_ratio(peak**2, mean_squared_error)) if not math.isnan(mean_squared_error) else math.nan


def frame_psnr(actual: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the PSNR in dB of every frame of videos [..., C, H, W] in [0, 1], fp64. Equal frames have 100 dB."""
    mean_squared_error = (actual.detach() - reference.detach()).square().mean(dim=(-3, -2, -1), dtype=torch.float64)
    return (-10 * mean_squared_error.log10()).clamp(max=100.0)


def ssim(actual: torch.Tensor, reference: torch.Tensor, device: torch.device | None = None) -> float | None:
    """Return the structural similarity (Wang et al. 2004) of frames [..., H, W, C] in [0, 1].

    It is 1 for equal frames: the mean over frames, channels, and all Gaussian windows of 11×11 pixels that are within a
    frame. None for frames smaller than a window.

    device: where a frame at a time is compared. A GPU takes milliseconds for a frame, a CPU half a second at 832×480.
    """
    if min(actual.shape[-3:-1]) < SSIM_WINDOW:
        return None
    pairs = zip(*(x.detach().flatten(0, -4).movedim(-1, 1) for x in (actual, reference)), strict=True)
    return torch.stack([_ssim_of_frame(*(frame.to(device) for frame in pair)) for pair in pairs]).mean().item()


def _ssim_of_frame(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean similarity of two frames [C, H, W]."""
    x, y = (frame.double().contiguous() for frame in (x, y))
    moments = torch.stack([x, y, x * x, y * y, x * y])
    mean_x, mean_y, xx, yy, xy = _in_windows(_in_windows(moments, 2), 3)
    c1, c2 = SSIM_K1**2, SSIM_K2**2
    means, covariance = mean_x * mean_y, xy - mean_x * mean_y
    variances = xx - mean_x**2 + yy - mean_y**2
    return ((2 * means + c1) * (2 * covariance + c2) / ((mean_x**2 + mean_y**2 + c1) * (variances + c2))).mean()


def _in_windows(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the Gaussian means of the windows along a dimension. In fp64 this is ten times as fast as conv2d."""
    centre, size = SSIM_WINDOW // 2, x.shape[dim] - SSIM_WINDOW + 1
    weights = [math.exp(-((i - centre) ** 2) / (2 * SSIM_SIGMA**2)) for i in range(SSIM_WINDOW)]
    result = torch.zeros_like(x.narrow(dim, 0, size))
    for i, weight in enumerate(weights):
        result.add_(x.narrow(dim, i, size), alpha=weight / sum(weights))
    return result


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.inf


@dataclass(frozen=True)
class Difference:
    """Relative L2, cosine, and of frames in [0, 1] the PSNR in dB and the SSIM.

    Both are None for latents, the PSNR for equal frames too, and the SSIM for frames smaller than its window.
    """

    relative_l2: float
    cosine: float
    psnr_db: float | None = None
    ssim: float | None = None

    @classmethod
    def of_latents(cls, actual: torch.Tensor, reference: torch.Tensor) -> Difference:
        return cls(relative_l2(actual, reference), cosine(actual, reference))

    @classmethod
    def of_frames(cls, actual: torch.Tensor, reference: torch.Tensor, device: torch.device | None = None) -> Difference:
        """Return the differences of frames [..., H, W, C]. device: where their SSIM is computed."""
        decibels = psnr(actual, reference)
        psnr_db = None if decibels == math.inf else decibels
        return cls(relative_l2(actual, reference), cosine(actual, reference), psnr_db, ssim(actual, reference, device))
