"""Attention blocks that end in the consistency skip, as nn.Modules over the kernels."""

from .rcm_attention import FusedRCMAttention, TorchFusedRCMAttention, TwoPassRCMAttention

__all__ = ["FusedRCMAttention", "TorchFusedRCMAttention", "TwoPassRCMAttention"]
