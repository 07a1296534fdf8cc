"""The storage of a block's residual between its skips."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from .in_8_bits import why_not_beside_lora
from .plan import Call, Shared, Stream

logger = logging.getLogger(__name__)


class Storage(NamedTuple):
    """A tensor's storage: in dtype, divided by scale. reason: why it is not what the config asks for, or None."""

    dtype: torch.dtype
    scale: float = 1.0
    reason: str | None = None

    def as_meant(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a stored x [B, S, C] multiplied by scale, in dtype."""
        return x.to(dtype) if self.scale == 1 else (x.float() * self.scale).to(dtype)

    def __str__(self) -> str:
        divided = "" if self.scale == 1 else f", divided by {self.scale:g}"
        because = "" if self.reason is None else f" ({self.reason})"
        return f"{str(self.dtype).removeprefix('torch.')}{divided}{because}"


# Rounding the residual after each of three skips is most of a bf16 block's error. fp16 has three more bits. Divided by
# 32 it holds values up to 2e6. Values below 2e-3 are rounded to multiples of 2e-6, which is little beside the token's
# other values.
HELD = Storage(torch.float16, 32.0)
CUT_OFF = (
    "Hidden states beyond 2e6 were cut off: the residual that is kept in fp16 between a block's skips holds no more."
)


def residual_between_skips(stream: Stream, call: Call, gated: Iterable[nn.Module]) -> Storage:
    """Return the storage of the residual between a block's first skip and its last.

    gated: the linears before skips with a gate. If fp16 would cost one of them its faster kernel, fp16 is not used.
    """
    if call.config.residual != "fp16" or call.dtype != torch.bfloat16 or call.derivative is not None:
        return Storage(call.dtype)
    reason = next(filter(None, (why_not_beside_lora(linear, HELD.dtype, stream, call) for linear in gated)), None)
    return HELD if reason is None else Storage(call.dtype, reason=reason)


def warn_of_saturation(shared: Shared) -> None:
    """Warn once if a residual was too large for its dtype. On a GPU a later block notices it."""
    if shared.has_warned or not shared.saturation.happened():
        return
    shared.has_warned = True
    logger.warning("%s Patch with residual='same' to keep it in the model's dtype.", CUT_OFF)
