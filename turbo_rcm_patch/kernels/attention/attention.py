"""Non-causal attention, with the skip optionally fused into its only store.

    F   = softmax(scale · q kᵀ) v                 q [B, S, H, D]; k, v [B, Skv, H, D]
    out = c_skip · residual + c_out · F           residual, out [B, S, H, D]; coefficients over the H·D channels

The kernel for sm_90 (attention_sm90.py) takes no residual; the portable one (attention_portable.py) does. Both can also
store F in e4m3, for a linear in 8 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F

from ...config import ATTENTION_KERNELS
from .. import reference as torch_reference
from ..choice.measured import tuned_sdpa, why_torch
from ..choice.registry import (
    GLUON,
    PORTABLE,
    REFERENCE,
    Kernel,
    Op,
    Pick,
    Spec,
    spec_of,
    why_not_ours,
    why_not_reference,
)
from ..choice.tuned import BY_TUNE
from ..coefficient import Coefficient, canonical_coefficient
from ..dispatch import KernelsOp, is_sm90, kernel_op
from ..launch import recording
from ..quantized import FP8, LARGEST, TINY, Quantized, round_to
from . import attention_portable, attention_sm90
from .attention_backward import attention_backward
from .sdpa import BACKENDS, chosen_backend, name_if_replaced, preferring

MAX_HEAD_DIM = 256
SDPA = "PyTorch SDPA"
REPLACED = "F.scaled_dot_product_attention was replaced"


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(Spec):
    """``softmax(scale · q kᵀ) v`` for q [B, S, H, head_dim]. `result` is e4m3 for `attention_to_e4m3`.

    has_residual: True if the result includes the skip.
    attention: the user's choice for a model's attention, "auto", "triton" or "sdpa". None if the op is called by
        itself.
    crossing: True for cross-attention.
    sdpa: the backend that PyTorch's attention tries first (sdpa.py). None: the one that `turbo-rcm tune` found, else
        PyTorch's own order.
    replaced: the name of the function that somebody put in place of PyTorch's attention, or None. It is the user's
        choice, so it runs wherever "auto" would choose.
    """

    head_dim: int
    has_residual: bool = False
    attention: str | None = None
    crossing: bool = False
    sdpa: str | None = None
    replaced: str | None = None

    @property
    def has_backward(self) -> bool:
        return self.result != FP8


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
    attention: str | None = None,
    sdpa: str | None = None,
) -> torch.Tensor:
    """Return ``F = softmax(scale · q kᵀ) v``, or ``c_skip * residual + c_out * F`` if a residual is given.

    q: [B, S, H, D]. k, v: [B, Skv, H, D]. residual: [B, S, H, D], or None. All have one dtype, with any strides.
    c_skip, c_out: a number, [B], [C], [B, 1, C] or [B, S, C], with C = H·D channels.
    scale: positive. None: D**-0.5.
    implementation: "auto", "triton" or "torch" (dispatch.py). head_dims above 256 take PyTorch's attention.
    attention: "auto" for PyTorch's attention unless our kernel was measured to be as fast, "sdpa" for PyTorch's always,
        None or "triton" for our kernels if they can run. A function in place of F.scaled_dot_product_attention runs
        instead of PyTorch's, and with "auto" instead of ours too.
    sdpa: the backend (sdpa.BACKENDS) that PyTorch's attention tries first. If it cannot take the call, another does.

    Returns [B, S, H, D] in q's dtype. Every tensor has a gradient. Attention Is All You Need, eq. 1.
    Raises ValueError for shapes, dtypes, a scale or coefficients that do not fit, and for other choices.
    """
    _check(q, k, v, residual, c_skip, c_out, scale, implementation)
    _check_choices(attention, sdpa)
    batch, tokens, heads, head_dim = q.shape
    c_skip = canonical_coefficient("c_skip", c_skip, batch, tokens, heads * head_dim, q.device)
    c_out = canonical_coefficient("c_out", c_out, batch, tokens, heads * head_dim, q.device)
    scale = head_dim**-0.5 if scale is None else float(scale)
    operands = (q, k, v, residual, c_skip, c_out)
    if q.numel() == 0:
        return torch_reference.attention(*operands, scale)
    options = {"head_dim": head_dim, "has_residual": residual is not None, "attention": attention, "sdpa": sdpa}
    options["replaced"] = name_if_replaced(F.scaled_dot_product_attention)
    spec = spec_of(implementation, *operands, kind=AttentionSpec, **options)
    return ATTENTION.pick(spec).launch(*operands, scale)


def attention_to_e4m3(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None, implementation: str = "auto"
) -> Quantized:
    """Return ``softmax(scale · q kᵀ) v`` in e4m3, for a linear in 8 bits.

    q: [B, S, H, D]. k, v: [B, Skv, H, D]. scale: positive. None: D**-0.5.
    implementation: "auto", "triton" or "torch" (dispatch.py).

    Returns a Quantized [B, S, H·D] with one scale per sample, expanded to [B, S]. The scale maps v's largest magnitude
    to e4m3's, because no weighted mean of values exceeds it. Channels whose values are a thousandth of it lose digits.
    No gradient: under autograd the reference runs. Raises ValueError for shapes, dtypes or a scale that do not fit.
    """
    _check(q, k, v, None, None, None, scale, implementation)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    if q.numel() == 0:
        return Quantized(q.flatten(2).to(FP8), q.new_ones(q.shape[:2], dtype=torch.float32))
    spec = spec_of(implementation, q, k, v, kind=AttentionSpec, head_dim=q.shape[3], result=FP8)
    return ATTENTION_TO_E4M3.pick(spec).launch(q, k, v, scale)


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


def _check_choices(attention, sdpa):
    if attention not in (None, *ATTENTION_KERNELS):
        raise ValueError(f"attention={attention!r}; accepted are {', '.join(ATTENTION_KERNELS)} and None.")
    if sdpa is not None and sdpa not in BACKENDS:
        raise ValueError(f"sdpa={sdpa!r}; accepted are {', '.join(BACKENDS)} and None.")


def is_one(coefficient: Coefficient | None) -> bool:
    return coefficient is None or (isinstance(coefficient, (int, float)) and coefficient == 1)


def _allocate(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    residual: torch.Tensor | None,
    c_skip: torch.Tensor | None,
    c_out: torch.Tensor | None,
    scale: float,
    save_for_backward: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate out and F [B, S, H, D], and the logsumexp in base 2, fp32 [B, H, S]. Without save_for_backward F and the
    logsumexp are empty."""
    batch, tokens, heads, _ = q.shape
    out = q.new_empty(q.shape)
    if not save_for_backward:
        return out, q.new_empty(0), q.new_empty(0, dtype=torch.float32)
    return out, q.new_empty(q.shape), q.new_empty((batch, heads, tokens), dtype=torch.float32)


_attention = KernelsOp("attention", _allocate)


def _launch_gluon(q, k, v, residual, c_skip, c_out, scale, save_for_backward):
    """Launch the kernel for sm_90, or the portable one if operands are not aligned. Takes `_allocate`'s arguments."""
    if not attention_sm90.fits_tma(q, k, v):
        return _launch_portable(q, k, v, None, None, None, scale, save_for_backward)
    out, raw_out, lse = _allocate(q, k, v, None, None, None, scale, save_for_backward)
    attention_sm90.attention_forward(q, k, v, scale, out, lse if save_for_backward else None)
    if save_for_backward:
        raw_out.copy_(out)  # a custom op must not return one tensor twice
    return out, raw_out, lse


def _launch_portable(q, k, v, residual, c_skip, c_out, scale, save_for_backward):
    out, raw_out, lse = _allocate(q, k, v, residual, c_skip, c_out, scale, save_for_backward)
    wanted = (raw_out, lse) if save_for_backward else (None, None)
    attention_portable.attention_forward(q, k, v, residual, c_skip, c_out, scale, out, *wanted)
    return out, raw_out, lse


def _fused(launch, q, k, v, residual, c_skip, c_out, scale):
    # The gradients of residual and c_skip need only these two. All others need F and the logsumexp.
    save_for_backward = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, c_out))
    return launch(q, k, v, residual, c_skip, c_out, scale, save_for_backward)[0]


def _by_pytorch(backend, q, *others):
    if recording():
        return torch.empty_like(q)  # PyTorch's attention is slow, and programs that replace it may count calls
    with preferring(backend):
        return torch_reference.attention(q, *others)


def _why_not_fused(spec: AttentionSpec) -> str | None:
    """Return the reason why no kernel of ours runs for a spec, or None if one can.

    The measurements cover the forward only, so they do not choose our kernel if a backward follows. On sm_90 they are
    of the kernel for sm_90, so that one must be able to run.
    """
    if spec.attention == "sdpa":
        return "attention='sdpa'"
    if spec.replaced and spec.attention == spec.implementation == "auto":
        return REPLACED
    reason = why_not_ours(spec)
    if reason is None and spec.attention == spec.implementation == "auto" and spec.device.type == "cuda":
        reason = why_torch("attention", spec.device, spec.dtype)
        if reason is None and is_sm90(spec.device):
            reason = attention_sm90.why_not(spec.device, spec.dtype, spec.head_dim)
        if reason is None and spec.derivative == "backward":
            return "not measured with a backward"
    if reason is None and spec.head_dim > MAX_HEAD_DIM:
        return f"head_dim {spec.head_dim}"
    return reason


def _why_not_gluon(spec: AttentionSpec) -> str | None:
    reason = _why_not_fused(spec) or attention_sm90.why_not(spec.device, spec.dtype, spec.head_dim)
    return "a residual" if reason is None and spec.has_residual else reason


def _why_not_pytorch(spec: AttentionSpec) -> str | None:
    is_needed = spec.attention == "sdpa" or spec.head_dim > MAX_HEAD_DIM
    return None if is_needed else why_not_reference(spec)


def _why_not_backend(backend: str, spec: AttentionSpec) -> str | None:
    return _why_not_pytorch(spec) or (None if _preferred(spec) == backend else f"not chosen {BY_TUNE}")


def _preferred(spec: AttentionSpec) -> str | None:
    """Return the backend that PyTorch's attention tries first, or None for PyTorch's own order."""
    if spec.sdpa is not None or spec.attention is None:
        return spec.sdpa
    if spec.implementation == "torch" or spec.derivative is not None or spec.replaced:
        return None
    return tuned_sdpa(spec.device, spec.dtype, crossing=spec.crossing)


ATTENTION = Op(
    "attention",
    (
        Kernel(GLUON, _why_not_gluon, partial(_fused, _attention.launch(GLUON, _launch_gluon))),
        Kernel(PORTABLE, _why_not_fused, partial(_fused, _attention.launch(PORTABLE, _launch_portable))),
        *(
            Kernel(f"{SDPA}, {name} first", partial(_why_not_backend, name), partial(_by_pytorch, name), is_fused=False)
            for name in BACKENDS
        ),
        Kernel(SDPA, _why_not_pytorch, partial(_by_pytorch, None), is_fused=False),
    ),
)


def attention_label(pick: Pick, spec: AttentionSpec) -> str:
    """Return the label of a pick of ATTENTION. The label of PyTorch's attention names the backend that PyTorch takes
    for example tensors with this spec, if PyTorch tells. If PyTorch's attention was replaced, the label names the
    function that runs."""
    if pick.kernel.is_fused:
        return pick.label
    if spec.replaced:
        return f"{spec.replaced} in place of {SDPA}"
    if torch.compiler.is_compiling():
        return SDPA
    preferred, with_backward = _preferred(spec), spec.derivative == "backward"
    with torch.inference_mode(False), torch.set_grad_enabled(with_backward), preferring(preferred):
        q = torch.empty(
            1, 128, 2, spec.head_dim, device=spec.device, dtype=spec.dtype, requires_grad=with_backward
        ).transpose(1, 2)
        backend = chosen_backend(q, q, q)
    if backend is None:
        return SDPA
    return f"{SDPA} ({backend}, {BY_TUNE})" if backend == preferred else f"{SDPA} ({backend})"


# ---------------------------------------------------------------------------------------------------------------------
# To e4m3
# ---------------------------------------------------------------------------------------------------------------------


def _allocate_e4m3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Allocate F [B, S, H, D] in e4m3."""
    return q.new_empty(q.shape, dtype=FP8)


_attention_to_e4m3 = KernelsOp("attention_to_e4m3", _allocate_e4m3)


def _launch_gluon_to_e4m3(q, k, v, scale):
    if not attention_sm90.fits_tma(q, k, v):
        return _launch_portable_to_e4m3(q, k, v, scale)
    out = _allocate_e4m3(q, k, v, scale)
    attention_sm90.attention_forward(q, k, v, scale, out, None)
    return out


def _launch_portable_to_e4m3(q, k, v, scale):
    out = _allocate_e4m3(q, k, v, scale)
    attention_portable.attention_forward(q, k, v, None, None, None, scale, out, None, None)
    return out


def _to_e4m3_by_pytorch(q, k, v, scale):
    return round_to(_by_pytorch(None, q, k, v, None, None, None, scale), FP8)


def _to_e4m3(attend, q, k, v, scale):
    """Scale v so that its largest magnitude is e4m3's, attend, and return a Quantized.

    attend: a function that returns F [B, S, H, D] in e4m3 for the scaled v.
    """
    largest = torch.linalg.vector_norm(
        v.flatten(1), torch.inf, dim=1, dtype=torch.promote_types(v.dtype, torch.float32)
    )
    out_scale = (largest / LARGEST[FP8]).clamp_min(TINY).float()
    scaled = (v / out_scale[:, None, None, None]).to(v.dtype)
    values = attend(q, k, scaled, scale)
    return Quantized(values.flatten(2), out_scale[:, None].expand(q.shape[:2]))


ATTENTION_TO_E4M3 = Op(
    "attention_to_e4m3",
    tuple(
        Kernel(name, why_not, partial(_to_e4m3, attend), is_fused=name != REFERENCE)
        for name, why_not, attend in (
            (GLUON, _why_not_gluon, _attention_to_e4m3.launch(GLUON, _launch_gluon_to_e4m3)),
            (PORTABLE, _why_not_fused, _attention_to_e4m3.launch(PORTABLE, _launch_portable_to_e4m3)),
            (REFERENCE, _why_not_pytorch, _to_e4m3_by_pytorch),
        )
    ),
)


# ---------------------------------------------------------------------------------------------------------------------
# Backward
# ---------------------------------------------------------------------------------------------------------------------


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
    """Return the gradients of q, k and v for the gradient of F, [B, S, H, D]. Gradients that nobody needs are empty."""
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
    _, q, k, v, residual, c_skip, c_out, ctx.scale, _ = inputs
    _, raw_out, lse = output
    ctx.mark_non_differentiable(raw_out, lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, residual, c_skip, c_out, raw_out, lse)


def _backward(ctx, grad, _grad_raw_out, _grad_lse):
    q, k, v, residual, c_skip, c_out, raw_out, lse = ctx.saved_tensors
    needs_q, needs_k, needs_v, needs_residual, needs_c_skip, needs_c_out = ctx.needs_input_grad[1:7]
    grad_q = grad_k = grad_v = None
    if needs_q or needs_k or needs_v:
        grad_raw_out = _scaled(grad, c_out)
        grad_q, grad_k, grad_v = _attention_backward(
            grad_raw_out, q, k, v, raw_out, lse, ctx.scale, needs_q, needs_k or needs_v
        )
    return (
        None,
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
    """Return coefficient * grad [B, S, H, D], computed in fp32 and rounded once."""
    if coefficient is None:
        return grad
    return (grad.flatten(2).float() * coefficient.float()).to(grad.dtype).view(grad.shape)


def _coefficient_gradient(grad: torch.Tensor, factor: torch.Tensor, coefficient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a coefficient that multiplied ``factor`` [B, S, H, D], in the coefficient's shape."""
    product = grad.flatten(2).float() * factor.flatten(2).float()
    return product.sum_to_size(coefficient.shape).to(coefficient.dtype)


_attention.register_autograd(_backward, setup_context=_save)
