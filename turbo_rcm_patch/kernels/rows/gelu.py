"""gelu: ``gelu_tanh(x)`` as a pass of its own, for when no epilogue can do it.

x has any shape (fp32, fp16, bf16). Arithmetic is fp32; the result is rounded once to x's dtype. No gradient: under
autograd the reference runs. The tanh approximation of Hendrycks and Gimpel, Gaussian Error Linear Units, sect. 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import reference
from ..choice.registry import spec_of, triton_or_reference
from ..dispatch import kernel_op
from ..launch import launch_kernel
from ..sizes import cdiv

BLOCK, NUM_WARPS = 4096, 8


def gelu(x: torch.Tensor, *, implementation: str = "auto") -> torch.Tensor:
    """Return ``gelu_tanh(x)`` in x's shape and dtype, contiguous.

    implementation: "auto", "triton" or "torch" (see dispatch.py).
    """
    return GELU.pick(spec_of(implementation, x)).launch(x)


@kernel_op("gelu")
def _gelu(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel() > 0:
        grid = (cdiv(x.numel(), BLOCK),)
        launch_kernel(_gelu_kernel, grid, x.contiguous(), out, x.numel(), BLOCK=BLOCK, num_warps=NUM_WARPS)
    return out


@_gelu.register_fake
def _(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@kernel_op("gelu_in_place", mutates_args=("x",))
def _gelu_in_place(x: torch.Tensor) -> None:
    launch_kernel(_gelu_kernel, (cdiv(x.numel(), BLOCK),), x, x, x.numel(), BLOCK=BLOCK, num_warps=NUM_WARPS)


@_gelu_in_place.register_fake
def _(x):
    pass


def _overwrite(x: torch.Tensor) -> torch.Tensor:
    if x.numel() == 0 or not x.is_contiguous():
        return _gelu(x)
    _gelu_in_place(x)
    return x


GELU = triton_or_reference("gelu", _gelu, reference.gelu)
# The same for an x that nobody reads afterwards: the kernel writes over it, which spares a tensor of x's size.
GELU_OVER_X = triton_or_reference("gelu", _overwrite, reference.gelu)


@triton.jit
def _gelu_kernel(x, out, elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < elements
    values = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offsets, gelu_tanh(values).to(out.dtype.element_ty), mask=mask)


@triton.jit
def gelu_tanh(x):
    """0.5 x (1 + tanh(u)) = x / (1 + exp(-2u)) with u = √(2/π) (x + 0.044715 x³). This form gives no NaN
    when exp overflows."""
    u = 0.7978845608028654 * x * (1 + 0.044715 * x * x)
    return x / (1 + tl.exp(-2 * u))
