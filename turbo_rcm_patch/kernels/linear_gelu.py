"""linear_gelu: a projection with GELU in its epilogue, ``gelu_tanh(a Wᵀ + b)``, in one GEMM.

a [..., K], W [C, K], b [C] of one dtype (fp32, fp16, bf16); result [..., C] in that dtype, rounded once. No gradient:
under autograd the reference runs. The tanh approximation of Hendrycks and Gimpel, Gaussian Error Linear Units, sect. 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import gemm_hopper, reference
from .dispatch import kernel_op, use_triton
from .gelu import gelu_tanh
from .gemm import check_linear, gemm, launch


def linear_gelu(
    a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, implementation: str = "auto"
) -> torch.Tensor:
    """``gelu_tanh(a Wᵀ + b)`` for a [..., K], weight [C, K], bias [C] or None; returns [..., C].

    implementation: "auto", "triton" or "torch" (see dispatch.py).
    Raises ValueError for shapes, dtypes or devices that do not fit together.
    """
    check_linear("linear_gelu", a, weight, bias)
    tensors = (a, weight, bias)
    op = _linear_gelu if use_triton(implementation, *tensors, has_gradient=False) else reference.linear_gelu
    return op(*tensors)


@kernel_op("linear_gelu")
def _linear_gelu(a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = a.new_empty(*a.shape[:-1], weight.shape[0])
    if out.numel() == 0:
        return out
    a = a.reshape(-1, a.shape[-1])
    bias = None if bias is None else bias.contiguous()
    if gemm_hopper.why_not(a, weight) is None:
        gemm_hopper.launch(a, weight, bias, out.view(len(a), -1), gelu=True)
    else:
        launch(_linear_gelu_kernel, a, weight, 1, bias, out)
    return out


@_linear_gelu.register_fake
def _(a, weight, bias):
    return a.new_empty(*a.shape[:-1], weight.shape[0])


@triton.jit
def _linear_gelu_kernel(
    a, weight, samples, M, N, K, stride_a, stride_w, bias, out,
    DESCRIPTORS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    gemm(
        a, weight, samples, M, N, K, stride_a, stride_w, _store_gelu, (bias, out), None,
        DESCRIPTORS, ROWS, COLUMNS, DEPTH,
    )  # fmt: skip


@triton.jit
def _store_gelu(acc, sample, rows, columns, M, N, arguments, KINDS: tl.constexpr):
    bias, out = arguments
    column_mask = columns < N
    if bias is not None:
        acc += tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    offsets = (sample.to(tl.int64) * M + rows)[:, None] * N + columns[None, :]
    tl.store(out + offsets, gelu_tanh(acc).to(out.dtype.element_ty), mask=(rows < M)[:, None] & column_mask[None, :])
