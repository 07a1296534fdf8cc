"""The spec that a kernel for 8-bit attention is chosen by, and the checks that the kernels share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..choice.registry import Spec, why_not_ours
from ..dispatch import device_capability, interpreting, is_gpu
from ..quantized import FP8, FP8_CAPABILITY

HEAD_DIMS = (64, 128)


@dataclass(frozen=True, kw_only=True)
class Attention8BitSpec(Spec):
    """Attention of int8 q and k [B, S, H, head_dim] and v in v_format, or their quantisation (quantize_qkv)."""

    head_dim: int
    v_format: torch.dtype


def default_v_format(device: torch.device, implementation: str = "auto") -> torch.dtype:
    """Return e4m3 if the GPU multiplies e4m3, else float16. On the CPU, return e4m3 unless implementation is "triton":
    Triton's interpreter rounds e4m3 wrongly."""
    if device.type == "cpu":
        return torch.float16 if implementation == "triton" else FP8
    return torch.float16 if is_gpu(device) and device_capability(device) < FP8_CAPABILITY else FP8


def why_no_8bit_kernel(device: torch.device, v_format: torch.dtype, head_dim: int) -> str | None:
    """Return the reason why the kernels of 8-bit attention cannot take these inputs, or None if they can. Triton itself
    is not checked."""
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim}"
    if v_format == FP8 and device.type == "cpu" and interpreting():
        return "e4m3 in Triton's interpreter, which rounds it wrongly"
    if v_format == FP8 and default_v_format(device) != FP8:
        return "e4m3 on a GPU older than sm_89"
    return None


def why_not_fused(spec: Attention8BitSpec) -> str | None:
    """Return the reason why no kernel of ours runs for a spec, or None if one can."""
    return why_not_ours(spec) or why_no_8bit_kernel(spec.device, spec.v_format, spec.head_dim)
