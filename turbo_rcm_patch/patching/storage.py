"""How a block's residual is stored between its skips."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .plan import Call


class Storage(NamedTuple):
    """In dtype, divided by scale."""

    dtype: torch.dtype
    scale: float = 1.0

    def as_meant(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A stored x [B, S, C], multiplied, in dtype."""
        return x.to(dtype) if self.scale == 1 else (x.float() * self.scale).to(dtype)

    def __str__(self) -> str:
        divided = "" if self.scale == 1 else f", divided by {self.scale:g}"
        return f"{str(self.dtype).removeprefix('torch.')}{divided}"


# Rounding the residual after each of three skips is most of a bf16 block's error. fp16 rounds with three more bits;
# divided like this it holds values up to 2e6, and below 2e-3 rounds to multiples of 2e-6, which is little beside the
# others of its token.
HELD = Storage(torch.float16, 32.0)


def residual_between_skips(call: Call) -> Storage:
    """How the residual is stored between a block's first skip and its last."""
    held = call.config.residual == "fp16" and call.dtype == torch.bfloat16 and call.derivative is None
    return HELD if held else Storage(call.dtype)
