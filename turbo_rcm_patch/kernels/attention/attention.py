"""Non-causal attention whose only store may end in the skip.

    F   = softmax(scale · q kᵀ) v                 q [B, S, H, D]; k, v [B, Skv, H, D]
    out = c_skip · residual + c_out · F           residual, out [B, S, H, D]; coefficients over the H·D channels

On sm_90 without a residual the forward is attention_sm90's, else the portable one of attention_forward. For a linear
in 8 bits they store F in e4m3.
"""

from __future__ import annotations

import math

import torch

from .. import reference as torch_reference
from ..coefficient import Coefficient, canonical_coefficient
from ..dispatch import kernel_op, use_triton
from ..launch import recording
from ..quantized import FP8, LARGEST, TINY, Quantized, round_to
from . import attention_sm90
from .attention_backward import attention_backward
from .attention_portable import attention_forward
from .sdpa import preferring

MAX_HEAD_DIM = 256


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    c_skip: Coefficient = 1.0,
    c_out: Coefficient = 1.0,
    scale: float | None = None,
    implementation: str = "auto",
    sdpa: str | None = None,
) -> torch.Tensor:
    """softmax(scale · q kᵀ) v, or ``c_skip * residual + c_out * (that)`` when a residual is given.

    q [B, S, H, D]; k, v [B, Skv, H, D]; residual [B, S, H, D]; all of one dtype, any strides. Coefficients: a number,
    [B], [C], [B, 1, C] or [B, S, C] with C = H·D channels. scale > 0 defaults to D**-0.5. Returns [B, S, H, D] in q's
    dtype. Differentiable in every tensor. implementation: see dispatch.use_triton; head_dims above 256 take the torch
    reference. sdpa: the backend, of sdpa.BACKENDS, that PyTorch's attention prefers where that runs; one that cannot
    take a call leaves it to the others. Raises ValueError for shapes, dtypes, a scale or coefficients that do not fit.
    """
    _check(q, k, v, residual, c_skip, c_out, scale, implementation)
    batch, tokens, heads, head_dim = q.shape
    c_skip = canonical_coefficient("c_skip", c_skip, batch, tokens, heads * head_dim, q.device)
    c_out = canonical_coefficient("c_out", c_out, batch, tokens, heads * head_dim, q.device)
    scale = head_dim**-0.5 if scale is None else float(scale)
    operands = (q, k, v, residual, c_skip, c_out)
    wants_kernel = use_triton(implementation, *operands, has_gradient=True)
    if not wants_kernel or head_dim > MAX_HEAD_DIM or q.numel() == 0:
        if recording():
            return torch.empty_like(q)  # PyTorch's attention takes long, and programs that replace it may count calls
        with preferring(sdpa):
            return torch_reference.attention(*operands, scale)
    # The skip's own gradients need only the residual and c_skip; all others need the raw output and the logsumexp.
    save_for_backward = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, c_out))
    return _attention(*operands, scale, save_for_backward)[0]


def attention_to_e4m3(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None, implementation: str = "auto"
) -> Quantized:
    """softmax(scale · q kᵀ) v, stored in e4m3 for a linear in 8 bits.

    q [B, S, H, D]; k, v [B, Skv, H, D]; scale, implementation: as of `attention`. Returns a Quantized [B, S, H·D] with
    one scale per sample, expanded to [B, S]: v's largest magnitude is e4m3's, and no mean of values is beyond it.
    Channels whose values are a thousandth of that lose digits. No gradient: under autograd the reference runs. Raises
    ValueError as `attention`.
    """
    _check(q, k, v, None, None, None, scale, implementation)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    if q.numel() == 0:
        return Quantized(q.flatten(2).to(FP8), q.new_ones(q.shape[:2], dtype=torch.float32))
    largest = torch.linalg.vector_norm(
        v.flatten(1), torch.inf, dim=1, dtype=torch.promote_types(v.dtype, torch.float32)
    )
    out_scale = (largest / LARGEST[FP8]).clamp_min(TINY).float()
    scaled = (v / out_scale[:, None, None, None]).to(v.dtype)
    fused = use_triton(implementation, q, k, v, has_gradient=False, result=FP8)
    if fused and q.shape[3] <= MAX_HEAD_DIM:
        values = _attention_to_e4m3(q, k, scaled, scale)
    else:
        values = round_to(attention(q, k, scaled, scale=scale, implementation="torch"), FP8)
    return Quantized(values.flatten(2), out_scale[:, None].expand(q.shape[:2]))


def _check(q, k, v, residual, c_skip, c_out, scale, implementation):
    if q.dim() != 4:
        raise ValueError(f"q has shape {list(q.shape)}; attention takes [B, S, H, D].")
    batch, _, heads, head_dim = q.shape
    for name, x in (("k", k), ("v", v)):
        if x.dim() != 4 or (x.shape[0], *x.shape[2:]) != (batch, heads, head_dim) or x.shape[1] != k.shape[1]:
            raise ValueError(
                f"{name} has shape {list(x.shape)} beside q {list(q.shape)} and k {list(k.shape)}; k and v must be "
                f"[B, Skv, H, D] with B={batch}, H={heads}, D={head_dim}."
            )
    if k.shape[1] == 0:
        raise ValueError("k and v have no tokens (Skv = 0); a softmax over nothing is undefined, so skip the call.")
    if residual is not None and residual.shape != q.shape:
        raise ValueError(f"residual has shape {list(residual.shape)}; it must have q's, {list(q.shape)}.")
    for name, x in (("k", k), ("v", v), ("residual", residual)):
        if x is not None and x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype} but q is {q.dtype}; cast them to one dtype.")
    if residual is None and not all(is_one(c) for c in (c_skip, c_out)):
        raise ValueError("c_skip or c_out is given without a residual; give the residual, or leave both at 1.")
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale={scale}; it must be positive and finite.")
    if implementation == "triton" and head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}; the kernel takes up to {MAX_HEAD_DIM}. Use 'auto' or 'torch'.")


def is_one(coefficient: Coefficient | None) -> bool:
    return coefficient is None or (isinstance(coefficient, (int, float)) and coefficient == 1)


@kernel_op("attention")
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    residual: torch.Tensor | None,
    c_skip: torch.Tensor | None,
    c_out: torch.Tensor | None,
    scale: float,
    save_for_backward: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, F [B, S, H, D] and the logsumexp in base 2, fp32 [B, H, S]; F and it are empty unless save_for_backward."""
    out, raw_out, lse = _allocate(q, k, v, residual, c_skip, c_out, scale, save_for_backward)
    wanted_lse = lse if save_for_backward else None
    if residual is None and attention_sm90.why_not(q, k, v) is None:
        attention_sm90.attention_forward(q, k, v, scale, out, wanted_lse)
        if save_for_backward:
            raw_out.copy_(out)  # a custom op's results may not be one tensor twice
    else:
        wanted_raw_out = raw_out if save_for_backward else None
        attention_forward(q, k, v, residual, c_skip, c_out, scale, out, wanted_raw_out, wanted_lse)
    return out, raw_out, lse


@_attention.register_fake
def _allocate(q, k, v, residual, c_skip, c_out, scale, save_for_backward):
    batch, tokens, heads, _ = q.shape
    out = q.new_empty(q.shape)
    if not save_for_backward:
        return out, q.new_empty(0), q.new_empty(0, dtype=torch.float32)
    return out, q.new_empty(q.shape), q.new_empty((batch, heads, tokens), dtype=torch.float32)


@kernel_op("attention_to_e4m3")
def _attention_to_e4m3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """F [B, S, H, D] in e4m3."""
    out = q.new_empty(q.shape, dtype=FP8)
    if attention_sm90.why_not(q, k, v) is None:
        attention_sm90.attention_forward(q, k, v, scale, out, None)
    else:
        attention_forward(q, k, v, None, None, None, scale, out, None, None)
    return out


@_attention_to_e4m3.register_fake
def _(q, k, v, scale):
    return q.new_empty(q.shape, dtype=FP8)


@kernel_op("attention_backward")
def _attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    raw_out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    needs_q: bool,
    needs_kv: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v for the gradient of F, [B, S, H, D]; the ones not needed are empty."""
    grad_q, grad_k, grad_v = _allocate_gradients(grad, q, k, v, raw_out, lse, scale, needs_q, needs_kv)
    wanted_kv = (grad_k, grad_v) if needs_kv else None
    attention_backward(grad, q, k, v, raw_out, lse, scale, grad_q if needs_q else None, wanted_kv)
    return grad_q, grad_k, grad_v


@_attention_backward.register_fake
def _allocate_gradients(grad, q, k, v, raw_out, lse, scale, needs_q, needs_kv):
    return (
        q.new_empty(q.shape if needs_q else 0),
        k.new_empty(k.shape if needs_kv else 0),
        v.new_empty(v.shape if needs_kv else 0),
    )


def _save(ctx, inputs, output):
    q, k, v, residual, c_skip, c_out, ctx.scale, _ = inputs
    _, raw_out, lse = output
    ctx.mark_non_differentiable(raw_out, lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, residual, c_skip, c_out, raw_out, lse)


def _backward(ctx, grad, _grad_raw_out, _grad_lse):
    q, k, v, residual, c_skip, c_out, raw_out, lse = ctx.saved_tensors
    needs_q, needs_k, needs_v, needs_residual, needs_c_skip, needs_c_out, _, _ = ctx.needs_input_grad
    grad_q = grad_k = grad_v = None
    if needs_q or needs_k or needs_v:
        grad_raw_out = _scaled(grad, c_out)
        grad_q, grad_k, grad_v = _attention_backward(
            grad_raw_out, q, k, v, raw_out, lse, ctx.scale, needs_q, needs_k or needs_v
        )
    return (
        grad_q if needs_q else None,
        grad_k if needs_k else None,
        grad_v if needs_v else None,
        _scaled(grad, c_skip) if needs_residual else None,
        _coefficient_gradient(grad, residual, c_skip) if needs_c_skip else None,
        _coefficient_gradient(grad, raw_out, c_out) if needs_c_out else None,
        None,
        None,
    )


def _scaled(grad: torch.Tensor, coefficient: torch.Tensor | None) -> torch.Tensor:
    """coefficient * grad [B, S, H, D], in fp32, rounded once."""
    if coefficient is None:
        return grad
    return (grad.flatten(2).float() * coefficient.float()).to(grad.dtype).view(grad.shape)


def _coefficient_gradient(grad: torch.Tensor, factor: torch.Tensor, coefficient: torch.Tensor) -> torch.Tensor:
    """Gradient of a coefficient that multiplied ``factor`` [B, S, H, D], in the coefficient's own shape."""
    product = grad.flatten(2).float() * factor.flatten(2).float()
    return product.sum_to_size(coefficient.shape).to(coefficient.dtype)


_attention.register_autograd(_backward, setup_context=_save)
