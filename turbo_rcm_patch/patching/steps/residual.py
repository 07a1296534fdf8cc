"""How a block's residual is stored between its skips."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from .in_8_bits import why_not_beside_lora
from .plan import Call, Stream


class Storage(NamedTuple):
    """In dtype, divided by scale. reason: why not as it is asked for, in a few words, if so."""

    dtype: torch.dtype
    scale: float = 1.0
    reason: str | None = None

    def as_meant(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A stored x [B, S, C], multiplied, in dtype."""
        return x.to(dtype) if self.scale == 1 else (x.float() * self.scale).to(dtype)

    def __str__(self) -> str:
        divided = "" if self.scale == 1 else f", divided by {self.scale:g}"
        because = "" if self.reason is None else f" ({self.reason})"
        return f"{str(self.dtype).removeprefix('torch.')}{divided}{because}"


# Rounding the residual after each of three skips is most of a bf16 block's error. fp16 rounds with three more bits;
# divided like this it holds values up to 2e6, and below 2e-3 rounds to multiples of 2e-6, which is little beside the
# others of its token.
HELD = Storage(torch.float16, 32.0)
CUT_OFF = (
    "Hidden states beyond 2e6 were cut off: the residual that is kept in fp16 between a block's skips holds no more."
)


def residual_between_skips(stream: Stream, call: Call, gated: Iterable[nn.Module]) -> Storage:
    """How the residual is stored between a block's first skip and its last. gated: the linears before skips with a
    gate, of which none is to lose its faster kernel."""
    if call.config.residual != "fp16" or call.dtype != torch.bfloat16 or call.derivative is not None:
        return Storage(call.dtype)
    reason = next(filter(None, (why_not_beside_lora(linear, HELD.dtype, stream, call) for linear in gated)), None)
    return HELD if reason is None else Storage(call.dtype, reason=reason)
