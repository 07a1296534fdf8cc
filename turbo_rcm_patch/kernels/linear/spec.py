"""The spec that a linear's kernel is chosen by, and the checks that the kernels share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ...config import LINEAR_KERNELS
from ..choice import registry
from ..choice.measured import why_torch, why_torch_at
from ..choice.registry import Spec, why_not_ours, why_not_reference
from ..coefficient import ONE, PER_RUN
from ..dispatch import is_sm90
from . import gemm_sm90
from .gemm_portable import SecondPair

LINEAR = "PyTorch linear"
NOT_FOR_8_BITS, NOT_FOR_16_BITS = "not for 8 bits", "not for 16 bits"


@dataclass(frozen=True, kw_only=True)
class LinearSpec(Spec):
    """``c_skip ⊙ residual + c_out ⊙ f(a Wᵀ + low upᵀ + b)`` for an a [rows, K] and weights [N, K].

    op: the op whose measurements count. weights: the number of weights.
    samples: the number of samples in the rows if a coefficient varies by sample or token, else 1.
    residual: the residual's dtype, or None. c_skip, c_out: how these vary (coefficient.py).
    low, rank: the dtype and rank of the second product, None and 0 without one.
    linears: the user's choice for the projections, "auto", "triton" or "torch". None if an op is called by itself.
    """

    op: str
    rows: int
    N: int
    K: int
    weights: int = 1
    samples: int = 1
    residual: torch.dtype | None = None
    c_skip: int = ONE
    c_out: int = ONE
    low: torch.dtype | None = None
    rank: int = 0
    linears: str | None = None

    @property
    def has_backward(self) -> bool:
        return self.op == "linear_skip" and self.low is None and self.c_out != PER_RUN and not self.eight_bits


def spec_of(
    op: str,
    implementation: str,
    a: torch.Tensor,
    weight: torch.Tensor,
    *others: torch.Tensor | None,
    result: torch.dtype,
    second: SecondPair,
    **options: object,
) -> LinearSpec:
    """Return the spec of a call of an op with a [..., K], a weight [N, K] and other operands. options: further fields.

    Raises ValueError for an unknown implementation or choice of linears, and for operands on different devices.
    """
    if options.get("linears") not in (None, *LINEAR_KERNELS):
        raise ValueError(f"linears={options['linears']!r}; accepted are {', '.join(LINEAR_KERNELS)} and None.")
    low = {} if second.low is None else {"low": second.low.dtype, "rank": second.up.shape[1]}
    return registry.spec_of(
        implementation,
        *(a, weight, *others, *second),
        kind=LinearSpec,
        eight_bits=(a.dtype,) if a.dtype.itemsize == 1 else (),
        result=result,
        op=op,
        rows=math.prod(a.shape[:-1]),
        N=weight.shape[0],
        K=weight.shape[1],
        **low,
        **options,
    )


def why_not_allowed(spec: LinearSpec) -> str | None:
    """Return the reason why no GEMM of ours may run for a spec, however fast it is, or None if one may."""
    reason = why_not_ours(spec)
    return "linears='torch'" if reason is None and spec.linears == "torch" else reason


def why_not_fused(spec: LinearSpec) -> str | None:
    """Return the reason why no GEMM of ours runs for a spec, or None if one can."""
    reason = why_not_allowed(spec)
    if reason is None and _is_measured(spec):
        return why_torch(spec.op, spec.device, spec.dtype) or _why_torch_here(spec)
    return reason


def _why_torch_here(spec: LinearSpec) -> str | None:
    """Return the reason why PyTorch's linear runs at this size on this GPU alone, or None. It has no second product."""
    if spec.eight_bits or spec.low is not None or torch.compiler.is_compiling():
        return None
    return why_torch_at(spec.op, (spec.rows, spec.N, spec.K), spec.device, spec.dtype)


def _is_measured(spec: LinearSpec) -> bool:
    """True if the measurements choose between our GEMM and PyTorch's."""
    return spec.linears == "auto" and spec.implementation == "auto"


def why_not_gluon(spec: LinearSpec) -> str | None:
    """Return the reason why the GEMM for sm_90 does not run for a spec, or None if it does."""
    return why_not_fused(spec) or gemm_sm90.why_not(spec)


def why_not_portable(spec: LinearSpec) -> str | None:
    """Return the reason why the portable GEMM does not run for a spec, or None if it does."""
    reason = why_not_fused(spec)
    return why_linear(spec.op, spec.device, spec.dtype) if reason is None and _is_measured(spec) else reason


def why_linear(op: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why PyTorch's linear is preferred for an op (`linear_skip`, `linear_gelu` or `linear_qkv`), or
    None if ours was measured to be as fast. On sm_90 the GEMM for sm_90 was measured, so that one must be able to
    run."""
    reason = why_torch(op, device, dtype)
    if reason is None and device.type == "cuda" and is_sm90(device):
        return gemm_sm90.why_not_on(device, dtype)
    return reason


def why_not_pytorch(spec: LinearSpec) -> str | None:
    """Return the reason why PyTorch's linear, followed by a separate epilogue, does not run for a spec, or None."""
    if spec.eight_bits:
        return NOT_FOR_8_BITS
    if spec.linears is None:
        return "not for an op that is called by itself"
    return None if spec.linears == "torch" else why_not_reference(spec)


def why_not_pytorch_alone(spec: LinearSpec) -> str | None:
    """Return the reason why PyTorch's linear without an epilogue does not run for a spec, or None if it does.

    It also runs if Triton's kernels were asked for and can run on the device: most GPUs have no kernel for this case.
    """
    if spec.eight_bits:
        return NOT_FOR_8_BITS
    runs = spec.linears == "torch" or why_not_ours(spec) is None
    return None if runs else why_not_reference(spec)
