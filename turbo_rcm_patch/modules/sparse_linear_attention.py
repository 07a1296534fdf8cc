"""Sparse-linear attention as a module, which replaces softmax attention in models trained with it."""

from __future__ import annotations

import torch
from torch import nn

from .. import kernels


class SparseLinearAttention(nn.Module):
    """Softmax attention to the most important key blocks, plus projected linear attention to all tokens, of q, k, v.

    The formulas are in kernels/sparse_linear/sparse_linear_attention.py. All heads share proj_l, a
    Linear(head_dim, head_dim). It starts at 0, so that training from a dense model begins with softmax alone.

    Args:
        head_dim: channels of a head.
        topk: the share of key blocks that each block of queries keeps.
        block_q: the queries of a block in the checkpoint's training. Give both sizes or neither; without them the
            published sizes for the device are used.
        block_k: the keys of a block.
        quantized: True for softmax in 8 bits.
        implementation: "auto", "triton" or "torch".

    Raises:
        ValueError: a value is invalid.
    """

    def __init__(
        self,
        head_dim: int,
        topk: float = 0.1,
        *,
        block_q: int | None = None,
        block_k: int | None = None,
        quantized: bool = False,
        implementation: str = "auto",
    ):
        super().__init__()
        if head_dim < 1:
            raise ValueError(f"head_dim={head_dim}; it must be at least 1.")
        if implementation not in kernels.IMPLEMENTATIONS:
            raise ValueError(f"implementation={implementation!r}; accepted are {', '.join(kernels.IMPLEMENTATIONS)}.")
        kernels.check_sparsity(topk, block_q, block_k)
        self.head_dim, self.topk, self.block_q, self.block_k = head_dim, topk, block_q, block_k
        self.quantized, self.implementation = quantized, implementation
        self.proj_l = nn.Linear(head_dim, head_dim)
        nn.init.zeros_(self.proj_l.weight)
        nn.init.zeros_(self.proj_l.bias)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return attention of q, k, v [B, S, H, D] of one dtype, after their norms and rotation: [B, S, H, D] in it."""
        return kernels.sparse_linear_attention(
            q,
            k,
            v,
            self.proj_l.weight,
            self.proj_l.bias,
            topk=self.topk,
            block_q=self.block_q,
            block_k=self.block_k,
            quantized=self.quantized,
            implementation=self.implementation,
        )

    def kept_blocks(self, tokens: int, device: torch.device) -> kernels.KeptBlocks:
        """Return the number of key blocks that each block of queries keeps, for this many tokens on a device.

        The result also tells if the number was raised to one because the published rule keeps none.
        """
        block_k = self.block_k or kernels.sparse_block_sizes(device, quantized=self.quantized)[1]
        return kernels.kept_blocks(tokens, block_k, self.topk)

    def extra_repr(self) -> str:
        blocks = "as published" if self.block_q is None else f"{self.block_q}x{self.block_k}"
        return f"head_dim={self.head_dim}, topk={self.topk}, blocks={blocks}, quantized={self.quantized}"
