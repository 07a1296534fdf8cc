"""Skip coefficients (c_skip, c_out) of a consistency block: ``output = c_skip(t) · residual + c_out(t) · F``.

Every form takes a time ``t``. For a Python number it returns Python floats. For a 0-d or [B] tensor it returns tensors
of this shape, in fp64 for fp64, else in fp32. At t = 0 every form is exactly the identity, (1, 0).

A time outside a form's domain (each docstring names it), or NaN, raises ValueError. For a tensor on a GPU this check
waits for the GPU. It is left out while torch.compile traces and while a CUDA graph is captured.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch

from .wording import with_article

Time = float | torch.Tensor
CoefficientPair = tuple[Time, Time]


def edm(t: Time, sigma_data: float = 1.0) -> CoefficientPair:
    """Return σ_d²/(t²+σ_d²) and σ_d·t/√(t²+σ_d²) for a noise level t in [0, ∞]. The limits at ∞ are 0 and σ_d.

    Consistency Models (Song et al. 2023), appendix C with ε = 0, after EDM (Karras et al. 2022).
    """
    t, sigma_data = _time("edm", t, upper=math.inf), _sigma_data(sigma_data)
    if isinstance(t, torch.Tensor):
        t = t.clamp(max=torch.finfo(t.dtype).max)  # ∞/∞ would be NaN; the largest number gives the limits
        radius = torch.hypot(t, torch.full_like(t, sigma_data))
    else:
        t = min(t, sys.float_info.max)
        radius = math.hypot(t, sigma_data)
    return (sigma_data / radius) ** 2, sigma_data * (t / radius)


def trigflow(t: Time, sigma_data: float = 1.0) -> CoefficientPair:
    """Return cos t and −σ_d·sin t for a TrigFlow angle t in [0, π/2]. sCM (Lu & Song 2024), eq. 6."""
    t, sigma_data = _time("trigflow", t, upper=math.pi / 2), _sigma_data(sigma_data)
    return _cos(t), -sigma_data * _sin(t)


def rcm_boundary(t: Time) -> CoefficientPair:
    """Return 1/s and −sin t/s, s = cos t + sin t, for a TrigFlow angle t in [0, π/2] around a rectified-flow network.

    This is rCM's boundary (Zheng et al. 2025): the network sees the input times 1/s at the rectified-flow time sin t/s.
    """
    t = _time("rcm_boundary", t, upper=math.pi / 2)
    s = _cos(t) + _sin(t)
    return 1 / s, -_sin(t) / s


def rectified_flow(t: Time) -> CoefficientPair:
    """Return 1 and −t for a rectified-flow time t in [0, 1]: ``x0 = x − t·v``."""
    t = _time("rectified_flow", t, upper=1.0)
    one = torch.ones_like(t) if isinstance(t, torch.Tensor) else 1.0
    return one, -t


def gated_residual(gate: float | torch.Tensor) -> tuple[float, float | torch.Tensor]:
    """Return 1 and the gate: the coefficients of a residual in a diffusion transformer's block.

    The gate is returned unchanged. It has any dtype, and any shape that the ops take (a number, [B], [C], [B, 1, C],
    [B, S, C]).
    """
    return 1.0, gate


def user(c_skip: Callable[[Time], Time], c_out: Callable[[Time], Time]) -> Callable[[Time], CoefficientPair]:
    """Return one form from two callables of t in [0, ∞]. They get t as the other forms do: a float or fp32/fp64 tensor.

    Raises TypeError unless both are callable.
    """
    for name, function in (("c_skip", c_skip), ("c_out", c_out)):
        if not callable(function):
            raise TypeError(f"{name} is {function!r}; give a callable of the time t (and both c_skip and c_out).")

    def coefficients(t: Time) -> CoefficientPair:
        t = _time("user coefficients", t, upper=math.inf)
        return c_skip(t), c_out(t)

    return coefficients


def _time(form: str, t: Time, upper: float) -> Time:
    """Check that t is in [0, upper], and return it as a float or an fp32/fp64 tensor."""
    if isinstance(t, torch.Tensor):
        return _tensor_time(form, t, upper)
    if not isinstance(t, (int, float)):
        raise TypeError(
            f"{form}: t is {with_article(type(t).__name__)}; accepted are a number and a 0-d or [B] tensor."
        )
    if not 0 <= t <= upper:
        raise ValueError(f"{form}: t={t} is outside {_interval(upper)}.")
    return float(t)


def _tensor_time(form: str, t: torch.Tensor, upper: float) -> torch.Tensor:
    if t.dim() > 1 or t.is_complex() or t.dtype == torch.bool:
        raise ValueError(f"{form}: t has shape {list(t.shape)} and {t.dtype}; accepted are real 0-d and [B] tensors.")
    t = t.to(torch.promote_types(t.dtype, torch.float32))
    if _may_read(t) and not ((t >= 0) & (t <= upper)).all():
        raise ValueError(f"{form}: t={t.detach().cpu().tolist()} has values outside {_interval(upper)}.")
    return t


def _may_read(t: torch.Tensor) -> bool:
    """True if Python may read the values. Tracing and graph capture forbid it: it fails there or breaks the graph."""
    if torch.compiler.is_compiling() or t.is_meta:
        return False
    return not (t.is_cuda and torch.cuda.is_current_stream_capturing())


def _interval(upper: float) -> str:
    return "[0, ∞]" if upper == math.inf else f"[0, {upper:.6g}]"


def _sigma_data(sigma_data: float) -> float:
    if not 0 < sigma_data < math.inf:
        raise ValueError(
            f"sigma_data={sigma_data}; it must be a positive finite number (the data's standard deviation)."
        )
    return float(sigma_data)


def _cos(t: Time) -> Time:
    return t.cos() if isinstance(t, torch.Tensor) else math.cos(t)


def _sin(t: Time) -> Time:
    return t.sin() if isinstance(t, torch.Tensor) else math.sin(t)
