"""Attention blocks that end in the consistency skip, and sparse-linear attention, as nn.Modules over the kernels."""

from .rcm_attention import FusedRCMAttention, TorchFusedRCMAttention, TwoPassRCMAttention
from .sparse_linear_attention import SparseLinearAttention

__all__ = ["FusedRCMAttention", "SparseLinearAttention", "TorchFusedRCMAttention", "TwoPassRCMAttention"]
