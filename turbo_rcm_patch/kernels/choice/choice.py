"""Which kernel runs for calls of a kind, and why PyTorch's is preferred: for those who choose, and for the summary.

The questions are those that the launchers ask, but for addresses and strides, which a call alone has.
"""

from __future__ import annotations

import torch

from ..coefficient import ONE, PER_CHANNEL, PER_TOKEN
from ..dispatch import is_sm90
from ..linear import gemm_sm90
from ..linear.spec import LinearSpec
from ..quantized import LARGEST
from .measured import why_torch

GLUON, PORTABLE = "sm_90 Gluon", "portable Triton"
LINEAR = "PyTorch linear"


def why_linear(op: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why PyTorch's linear is taken instead of `linear_skip`, `linear_gelu` or `linear_qkv` (op), in a few words; None
    where ours was measured to be as fast, and on the CPU. On sm_90 it is the Gluon kernel's."""
    reason = why_torch(op, device, dtype)
    if reason is None and device.type == "cuda" and is_sm90(device):
        reason = gemm_sm90.why_not_on(device, dtype)
    return reason


def gemm_kernel(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    N: int,
    K: int,
    *,
    samples: int = 1,
    per_token: bool = False,
    result: torch.dtype = torch.bfloat16,
    gated: torch.dtype | None = None,
    low_rank: bool = False,
) -> str:
    """What runs a `linear_skip`, `linear_gelu` or `linear_8bit` of an a [rows, K] and a weight [N, K]: "sm_90 Gluon" or
    "portable Triton", on sm_90 with the reason.

    dtype: of a and the weight, or their 8-bit format. result: its dtype or format. samples: in the rows, where the
    skip's coefficients vary by sample. per_token: whether they vary by token. gated: the residual's dtype, where c_out
    is a gate per channel. low_rank: whether there is such a product too.
    """
    low = (torch.bfloat16 if dtype.itemsize == 1 else dtype) if low_rank else None
    c_out = PER_TOKEN if per_token else ONE if gated is None else PER_CHANNEL
    spec = LinearSpec(
        **_sizes(device, dtype, rows, N, K), samples=samples, result=result, residual=gated, c_out=c_out, low=low
    )
    return _kernel_name(device, gemm_sm90.why_not(spec))


def linear_qkv_kernel(
    device: torch.device, dtype: torch.dtype, rows: int, N: int, K: int, *, result: torch.dtype = torch.bfloat16
) -> tuple[str, str | None]:
    """What runs a `linear_qkv` of an a [rows, K] and three weights [N, K], "sm_90 Gluon", "PyTorch linear" or, in an
    8-bit format, "portable Triton", and why that is not Gluon's kernel; None when it is. result: its dtype."""
    reason = gemm_sm90.why_not(LinearSpec(**_sizes(device, dtype, rows, N, K), weights=3, result=result))
    if reason is None:
        return GLUON, None
    return (PORTABLE if dtype in LARGEST else LINEAR), reason


def linear_low_rank_kernel(
    device: torch.device, dtype: torch.dtype, rows: int, N: int, K: int
) -> tuple[str, str | None]:
    """What should run a `linear_low_rank` of an a [rows, K] and a weight [N, K], "sm_90 Gluon" or "PyTorch linear", and
    why that is not Gluon's kernel; None when it is. The portable one was never timed beside PyTorch's two products."""
    reason = gemm_sm90.why_not(LinearSpec(**_sizes(device, dtype, rows, N, K), result=torch.bfloat16))
    return (GLUON, None) if reason is None else (LINEAR, reason)


def _sizes(device: torch.device, dtype: torch.dtype, rows: int, N: int, K: int) -> dict[str, object]:
    return {"op": "linear", "device": device, "dtype": dtype, "rows": rows, "N": N, "K": K}


def _kernel_name(device: torch.device, why_not_gluon: str | None) -> str:
    """The reason only where one would expect the other kernel."""
    if why_not_gluon is None:
        return GLUON
    return f"{PORTABLE} ({why_not_gluon})" if is_sm90(device) else PORTABLE
