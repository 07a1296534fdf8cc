"""A second product of low rank that is added to a linear's, as in LoRA (Hu et al. 2021, LoRA, eq. 3):

    a Wᵀ + (a downᵀ) upᵀ = [a, low] [W, up]ᵀ        low = a downᵀ

low, which is small beside a, is written to memory. Then the GEMM's sum over K continues over the rank, in the same
accumulators. If a and W have 8 bits, down has too. low and up are then bf16, and the scales of a's and W's rows apply
to both products.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..quantized import Quantized, QuantizedWeight


class LowRank(NamedTuple):
    """The two low-rank factors of one weight [N, K] (G = 1), or of G = 3 weights of one input in the weights' order.

    down: [G·R, K], in a's dtype, or for a Quantized a a QuantizedWeight of its format.
    up: [G·N, R], in a's dtype, or for a Quantized a in fp32, fp16 or bf16 with each row divided by the scale of the
        weight's row.
    norm: a bound on the L2 norm of every row of the factors' product, 0-d fp32, for an fp8 result; else None.

    The kernel for sm_90 takes ranks R that are multiples of RANK_STEP; zeros may pad them. With 8-bit operands its up
    must be bf16.
    """

    down: torch.Tensor | QuantizedWeight
    up: torch.Tensor
    norm: torch.Tensor | None = None


RANK_STEP = 64  # 16-bit columns in a step along K


def check_low_rank(op: str, a: torch.Tensor | Quantized, N: int, low_rank: LowRank | None, weights: int = 1) -> None:
    """Raise ValueError if the factors do not fit a [..., K] and this number of weights [N, K]. None always fits."""
    if low_rank is None:
        return
    down, up, _ = low_rank
    quantized = isinstance(a, Quantized)
    if quantized != isinstance(down, QuantizedWeight):
        raise ValueError(
            f"{op}: a is a {type(a).__name__} and low_rank's down a {type(down).__name__}; give a Quantized and a "
            "QuantizedWeight, or neither."
        )
    values, matrix = (a.values, down.values) if quantized else (a, down)
    expected = [weights * up.shape[-1], values.shape[-1]], [weights * N, up.shape[-1]]
    if (list(matrix.shape), list(up.shape)) != expected:
        raise ValueError(
            f"{op}: low_rank has down {list(matrix.shape)} and up {list(up.shape)}; for {weights} weight(s) "
            f"[{N}, {values.shape[-1]}] they must be {expected[0]} and {expected[1]}."
        )
    if matrix.dtype != values.dtype or not (quantized or up.dtype == a.dtype):
        raise ValueError(
            f"{op}: a is in {values.dtype}, low_rank's down in {matrix.dtype} and up in {up.dtype}; down must have a's "
            "dtype, and so must up unless a has 8 bits."
        )
