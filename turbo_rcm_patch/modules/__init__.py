"""nn.Modules over the kernels: self-attention with the consistency skip, and sparse-linear attention."""

from .rcm_attention import FusedRCMAttention, TorchFusedRCMAttention, TwoPassRCMAttention
from .sparse_linear_attention import SparseLinearAttention

__all__ = ["FusedRCMAttention", "SparseLinearAttention", "TorchFusedRCMAttention", "TwoPassRCMAttention"]
