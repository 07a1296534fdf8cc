"""Which kernel runs for calls of a kind, and why PyTorch's is preferred: for those who choose, and for the summary.

The questions are those that the launchers ask, but for addresses and strides, which a call alone has.
"""

from __future__ import annotations

import torch

from ..attention import attention_sm90
from ..attention.sdpa import chosen_backend, preferring
from ..attention_8bit import attention_8bit_sm90
from ..attention_8bit.quantize_qkv import default_v_format
from ..block_sparse import block_sparse_sm90
from ..block_sparse.block_sparse_attention import why_no_block_sparse_kernel
from ..coefficient import ONE, PER_CHANNEL, PER_TOKEN
from ..conv import conv_sm90
from ..dispatch import is_sm90
from ..linear import gemm_sm90
from ..linear.spec import LinearSpec
from ..quantized import LARGEST
from ..sparse_linear import sparse_linear_sm90
from ..sparse_linear.sparse_linear_attention import why_no_sparse_kernel
from .measured import why_torch
from .tuned import BY_TUNE

GLUON, PORTABLE = "sm_90 Gluon", "portable Triton"
SDPA, LINEAR, CONV = "PyTorch SDPA", "PyTorch linear", "PyTorch convolution"


def why_sdpa(device: torch.device, dtype: torch.dtype, head_dim: int, *, with_backward: bool = False) -> str | None:
    """Why PyTorch's attention is taken instead of `attention`, in a few words; None where ours was measured to be as
    fast, and on the CPU.

    Only the forward was measured, and without a residual; on sm_90 it is the Gluon kernel's, which does not take every
    head_dim.
    """
    if device.type != "cuda":
        return None
    reason = why_torch("attention", device, dtype)
    if reason is None and is_sm90(device):
        reason = attention_sm90.why_not_on(device, dtype, head_dim)
    return "not measured with a backward" if reason is None and with_backward else reason


def why_linear(op: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why PyTorch's linear is taken instead of `linear_skip`, `linear_gelu` or `linear_qkv` (op), in a few words; None
    where ours was measured to be as fast, and on the CPU. On sm_90 it is the Gluon kernel's."""
    reason = why_torch(op, device, dtype)
    if reason is None and device.type == "cuda" and is_sm90(device):
        reason = gemm_sm90.why_not_on(device, dtype)
    return reason


def why_conv(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why PyTorch's convolution is taken instead of `conv_skip`, in a few words; None where ours was measured to be as
    fast, and on the CPU. On sm_90 it is the Gluon kernel's."""
    reason = why_torch("conv_skip", device, dtype)
    if reason is None and device.type == "cuda" and is_sm90(device):
        reason = conv_sm90.why_not_on(device, dtype)
    return reason


def conv_kernel(
    implementation: str,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    *,
    upsample: bool = False,
    interleave: int = 1,
) -> str:
    """What runs a `conv_skip` of an x [B, T, H, W, C] behind a front and a weight of these shapes: "sm_90 Gluon",
    "portable Triton", on sm_90 with the reason, or "PyTorch convolution".

    implementation: the one it is given, with which it can run.
    """
    if implementation == "torch":
        return CONV
    return _kernel_name(device, conv_sm90.why_not_sizes(device, dtype, shape, weight_shape, upsample, interleave))


def attention_kernel_name(
    implementation: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    with_backward: bool = False,
    sdpa: str | None = None,
) -> str:
    """What runs an `attention` without residual: "sm_90 Gluon", "portable Triton", or PyTorch's SDPA with its backend.

    implementation, sdpa: those it is given, with which it can run.
    """
    if implementation == "torch":
        return _sdpa_name(device, dtype, head_dim, with_backward, sdpa)
    return _kernel_name(device, attention_sm90.why_not_on(device, dtype, head_dim))


def attention_8bit_kernel(device: torch.device, result: torch.dtype) -> tuple[str, torch.dtype]:
    """What runs an `attention_8bit` without residual, "sm_90 Gluon" or "portable Triton", and the format of its v.

    result: its dtype or format.
    """
    v_format = default_v_format(device)
    return _kernel_name(device, attention_8bit_sm90.why_not_on(device, v_format, result)), v_format


def sparse_attention_kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int, blocks: tuple[int, int], *, quantized: bool
) -> tuple[str, str | None]:
    """What runs a `sparse_linear_attention` of q, k and v of this dtype on a GPU, with its formats where they are
    quantized, and why that is the reference, if so."""
    v_format = default_v_format(device) if quantized else None
    reason = why_no_sparse_kernel(device, head_dim, *blocks, v_format)
    why_not_gluon = None
    if reason is None and quantized:
        why_not_gluon = sparse_linear_sm90.why_not(device, dtype, v_format, head_dim, *blocks)
    return _sparse_kernel_name(device, v_format, reason, why_not_gluon)


def block_sparse_attention_kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int, blocks: tuple[int, int], *, quantized: bool
) -> tuple[str, str | None]:
    """The same of a `block_sparse_attention`."""
    if not quantized:
        return _sparse_kernel_name(device, None, why_no_sparse_kernel(device, head_dim, *blocks, None), None)
    v_format = default_v_format(device)
    sizes = (device, dtype, v_format, head_dim, *blocks)
    reason, why_not_gluon = why_no_block_sparse_kernel(*sizes), block_sparse_sm90.why_not(*sizes)
    return _sparse_kernel_name(device, v_format, reason, why_not_gluon)


def _sparse_kernel_name(
    device: torch.device, v_format: torch.dtype | None, reason: str | None, why_not_gluon: str | None
) -> tuple[str, str | None]:
    if reason is not None:
        return "torch reference", reason
    if v_format is None:
        return PORTABLE, None
    formats = " int8, fp16" if v_format == torch.float16 else " int8, e4m3"
    return _kernel_name(device, why_not_gluon) + formats, None


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


def _sdpa_name(
    device: torch.device, dtype: torch.dtype, head_dim: int, with_backward: bool, preferred: str | None
) -> str:
    """PyTorch's attention and, where it tells, the backend that it takes for some tensors of this kind."""
    if torch.compiler.is_compiling():
        return SDPA
    with torch.inference_mode(False), torch.set_grad_enabled(with_backward), preferring(preferred):
        q = torch.empty(1, 128, 2, head_dim, device=device, dtype=dtype, requires_grad=with_backward)
        q = q.transpose(1, 2)
        backend = chosen_backend(q, q, q)
    if backend is None:
        return SDPA
    return f"{SDPA} ({backend}, {BY_TUNE})" if backend == preferred else f"{SDPA} ({backend})"
