"""The exact tier: the contest of its layer norm, and the sizes at which its ops are timed."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from turbo_rcm_patch import kernels
from turbo_rcm_patch.bench.ops import COMPILED, COPY, EPS, SDPA, Contest, Draws, OpCase, op_case
from turbo_rcm_patch.bench.ops_exact import FOLDED, attention, linear_gelu, linear_qkv, linear_skip, rms_norm_rope
from turbo_rcm_patch.kernels import reference


def layer_norm_modulate(tokens: int, C: int, device: torch.device, compiled: Callable) -> Contest:
    """A block's norm and its modulation."""
    draw = Draws(device)
    x, scale, shift = draw(1, tokens, C), draw(1, 1, C).float(), draw(1, 1, C).float()

    @compiled
    def norm(x, scale, shift):
        return (F.layer_norm(x.float(), x.shape[-1:], eps=EPS) * (1 + scale) + shift).type_as(x)

    def oracle(rows: torch.Tensor) -> torch.Tensor:
        values = (x[:, rows].double(), None, None, scale.double(), shift.double())
        return reference.layer_norm_modulate(*values, EPS)

    return Contest(
        ours={"layer_norm_modulate": lambda: kernels.layer_norm_modulate(x, scale=scale, shift=shift, eps=EPS)},
        rivals={COMPILED: lambda: norm(x, scale, shift)},
        oracle=oracle,
        tokens=tokens,
        bytes_moved=2 * x.nbytes,
    )


def _case(contest: Callable, *sizes: int, **targets: float) -> OpCase:
    names = {"sdpa": SDPA, "compiled": COMPILED, "folded": FOLDED, "copy": COPY}
    return op_case(contest, *sizes, targets={names[key]: target for key, target in targets.items()})


# The sizes are those of Wan 2.1's 1.3B at 832x480 and 14B at 1280x720, with 81 frames, and once with 17 frames.
# Attention: heads, queries, keys, head_dim. Linears: tokens, C, K. Norms: tokens, C, or tokens, heads, head_dim.
CASES = (
    _case(attention, 12, 32760, 32760, 128, sdpa=1.0),
    _case(attention, 40, 75600, 75600, 128, sdpa=1.0),
    _case(attention, 12, 32760, 512, 128, sdpa=1.0),
    _case(attention, 40, 75600, 512, 128, sdpa=1.0),
    _case(linear_skip, 32760, 1536, 1536, compiled=1.1, folded=1.0),
    _case(linear_skip, 32760, 1536, 8960, compiled=1.0, folded=1.0),
    _case(linear_skip, 75600, 5120, 5120, compiled=1.1, folded=1.0),
    _case(linear_skip, 75600, 5120, 13824, compiled=1.0, folded=1.0),
    _case(linear_skip, 7800, 1536, 1536, compiled=1.1, folded=1.0),
    _case(linear_gelu, 32760, 8960, 1536, compiled=1.05),
    _case(linear_gelu, 75600, 13824, 5120, compiled=1.05),
    _case(linear_qkv, 32760, 1536, 1536, compiled=1.05),
    _case(linear_qkv, 75600, 5120, 5120, compiled=1.05),
    _case(layer_norm_modulate, 32760, 1536, copy=0.8),
    _case(layer_norm_modulate, 75600, 5120, copy=0.8),
    _case(rms_norm_rope, 32760, 12, 128, copy=0.8),
    _case(rms_norm_rope, 75600, 40, 128, copy=0.8),
)
