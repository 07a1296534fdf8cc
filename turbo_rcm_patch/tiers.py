"""The tiers: kinds of arithmetic that a patch may use, each with its error limits. Their options are in config.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FP32_BYTES = 4


@dataclass(frozen=True)
class ErrorLimits:
    """The allowed distance of a patched result from an oracle of higher precision, as a relative L2 error.

    factor: the patched error may be this many times the unpatched error.
    fp32: always allowed for fp32 and wider results, because long sums in another order differ.
    block, part, step: always allowed for a block's output, for the output of a sub-layer or an op, and for a model's
        output: the cost of the tier's own arithmetic.
    choice: how much of their scores a choice of key blocks may lose, in roundings of the model's dtype (½ ulp of 1).
    """

    factor: float
    fp32: float
    block: float = 0.0
    part: float = 0.0
    step: float = 0.0
    choice: float = 0.0

    def allowed(self, unpatched_error: float, dtype: torch.dtype, of: str = "block") -> float:
        """Return the limit for a result of this dtype: NaN, which no error meets, if the unpatched error is NaN.

        of: "block", "part" or "step", the kind of result. With an error of 0 the unpatched result is itself the oracle,
        and the limit is on the difference from it.
        """
        limit = self.factor * unpatched_error
        if limit != limit:
            return limit
        return max(limit, getattr(self, of), 0.0 if is_low_precision(dtype) else self.fp32)

    def allowed_choice(self, unit_roundoff: float) -> float:
        """Return how much a choice of key blocks may lose, in a dtype of this unit roundoff (½ ulp of 1)."""
        return max(self.choice * unit_roundoff, self.fp32)


def is_low_precision(dtype: torch.dtype) -> bool:
    """True for dtypes narrower than fp32, whose own rounding is most of a result's error."""
    return dtype.itemsize < FP32_BYTES


@dataclass(frozen=True)
class Tier:
    """One kind of arithmetic. Tiers are never mixed: a configuration belongs to one. description: one sentence."""

    name: str
    description: str
    limits: ErrorLimits


EXACT = Tier(
    name="exact",
    description="Arithmetic in the model's own bf16, fp16 or fp32, no less accurate than the unpatched model.",
    # The same roundings in another order differ by a few percent, long sums in fp32 by some of its last bits.
    limits=ErrorLimits(factor=1.05, fp32=1e-5),
)


def decibels(signal_to_noise: float) -> float:
    """Return the relative L2 error that a signal-to-noise ratio in dB stands for."""
    return 10 ** (-signal_to_noise / 20)


# The VAE's decoder in 8 bits, in any tier: 42 dB PSNR for frames from -1 to 1 whose root mean square is 0.5.
DECODED_IN_8_BITS = replace(EXACT.limits, block=decibels(30))

QUANTIZED = Tier(
    name="quantized",
    description="8-bit attention and linears with everything around them fused, within error limits of its own.",
    # Two roundings to e4m3, of a GEMM's operands, cost 3.7 % (28.5 dB). A step passes through all blocks.
    limits=ErrorLimits(factor=1.05, fp32=1e-5, block=decibels(28), part=decibels(26), step=decibels(20)),
)
SPARSE = Tier(
    name="sparse",
    description="Sparse-linear attention (SLA), for weights that were trained with it; by default in 8 bits.",
    # The model itself defines what is sparse: with the same key blocks kept, it errs as the quantized tier does.
    # part: three GEMMs of 8-bit operands lie in a row, with an error of 3.7 % each: v's projection, PV and the output's
    # projection. Dense attention averages the error of the first two over all keys. A few kept keys do not.
    # choice: blocks are chosen by the products q̄ k̄ of means that are rounded once each. This moves a product by up to
    # two roundings of |q̄| |k̄|. So a block that is chosen in place of a better one is worse by up to four.
    limits=replace(QUANTIZED.limits, part=3**0.5 * 0.037, choice=4.0),
)
BLOCK_SPARSE = Tier(
    name="block_sparse",
    description="Block-sparse attention, for weights that were trained without it; by default in 8 bits.",
    # It leaves out keys that the model was trained to see. The limits say how far that takes it from dense attention.
    limits=ErrorLimits(factor=1.05, fp32=1e-5, block=decibels(20), part=decibels(10), step=decibels(10)),
)

TIERS = {tier.name: tier for tier in (EXACT, QUANTIZED, SPARSE, BLOCK_SPARSE)}
