"""Measures of the difference between two tensors, in fp64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


def relative_l2(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ‖actual − reference‖ / ‖reference‖, or 0 for equal tensors, even if all are zeros."""
    actual, reference = actual.detach().double(), reference.detach().double()
    error = torch.linalg.vector_norm(actual - reference).item()
    return 0.0 if error == 0 else _ratio(error, torch.linalg.vector_norm(reference).item())


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


def frame_psnr(actual: torch.Tensor, reference: torch.Tensor, cap: float = 100.0) -> torch.Tensor:
    """Return the PSNR in dB of every frame of videos [..., C, H, W] in [0, 1], fp64. Equal frames have the cap."""
    mean_squared_error = (actual.detach() - reference.detach()).square().mean(dim=(-3, -2, -1), dtype=torch.float64)
    return (-10 * mean_squared_error.log10()).clamp(max=cap)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.inf


@dataclass(frozen=True)
class Difference:
    """Relative L2, cosine and PSNR in dB of frames in [0, 1]. The PSNR is None for latents and for equal frames."""

    relative_l2: float
    cosine: float
    psnr_db: float | None = None

    @classmethod
    def of_latents(cls, actual: torch.Tensor, reference: torch.Tensor) -> Difference:
        return cls(relative_l2(actual, reference), cosine(actual, reference))

    @classmethod
    def of_frames(cls, actual: torch.Tensor, reference: torch.Tensor) -> Difference:
        decibels = psnr(actual, reference)
        psnr_db = None if decibels == math.inf else decibels
        return cls(relative_l2(actual, reference), cosine(actual, reference), psnr_db)
