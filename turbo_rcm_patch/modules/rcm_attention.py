"""Self-attention with the consistency skip, ``c_skip(t) · residual + c_out(t) · proj(attention(qkv(x)))``, three ways.

The three classes have the same constructor, ``forward`` and state_dict (qkv.weight, qkv.bias, proj.weight, proj.bias)
and the same result up to rounding. They differ in how projection and skip are computed:

- TwoPassRCMAttention: the projection writes its output, then the skip reads it again.
- TorchFusedRCMAttention: projection and skip are one torch expression, which torch.compile turns into one pass.
- FusedRCMAttention: this package's Triton kernels compute the skip in the projection's epilogue. With the preset
  "quantized" they run in 8 bits, within that tier's error limit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.autograd.forward_ad as fwAD
from torch import nn
from torch.nn import functional as F

from .. import coefficients, kernels
from ..coefficients import Time
from ..kernels import INT8, Quantized, QuantizedWeight, reference
from ..kernels.choice.registry import spec_of
from ..kernels.coefficient import canonical_coefficient
from ..kernels.dispatch import KERNEL_DTYPES
from ..kernels.rows.quantize_rows import QUANTIZE_ROWS
from ..plain import is_autocast, is_transformed, linear_of, why_not_linear
from .eight_bit_copies import EightBitCopies

PRESETS = ("exact", "quantized")


class TwoPassRCMAttention(nn.Module):
    """SDPA, the projection, then the skip as a separate operation: the baseline of the other two classes.

    Args:
        dim: channels C, a multiple of num_heads.
        num_heads: heads of the attention.
        qkv_bias: True if qkv has a bias (proj always has).
        sigma_data: the parameter of EDM's coefficients, which are used without c_skip and c_out.
        c_skip: a function that takes the timestep, a float or an fp32/fp64 tensor (see coefficients.user), and returns
            a number, one per sample [B], or any shape that the ops take.
        c_out: the same, for the output of the block.

    Raises ValueError for sizes that do not fit together.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        qkv_bias: bool = True,
        sigma_data: float = 1.0,
        c_skip: Callable[[Time], Time] | None = None,
        c_out: Callable[[Time], Time] | None = None,
    ):
        super().__init__()
        if num_heads < 1 or dim < 1 or dim % num_heads:
            raise ValueError(f"dim={dim} is not a positive multiple of num_heads={num_heads}; choose one that is.")
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads
        self.coefficients = _coefficients(sigma_data, c_skip, c_out)
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, timestep: Time, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return [B, N, C] in the residual's dtype. At timestep 0 it is the residual.

        Args:
            x: [B, N, C].
            timestep: a number, 0-d, or per sample [B]. Under torch.compile a number is a constant of the graph: pass
                timesteps as tensors there.
            residual: [B, N, C]. None: x.

        Raises:
            ValueError: shapes do not fit, or a timestep is negative or NaN.
        """
        residual = x if residual is None else residual
        self._check(x, residual, timestep)
        return self._run(x, residual, *self._coefficients_at(timestep, residual))

    def _run(self, x, residual, c_skip, c_out):
        """Run the block on x, residual [B, N, C] with canonical coefficients (kernels/coefficient.py)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(2)
        return self._attend_project_skip(q, k, v, residual, c_skip, c_out)

    def _attend_project_skip(self, q, k, v, residual, c_skip, c_out):
        """Return the attention of q, k, v [B, N, H, D], projected, with the skip: [B, N, C].

        residual: [B, N, C]. c_skip, c_out: canonical coefficients (kernels/coefficient.py).
        """
        output = self.proj(_sdpa(q, k, v))
        return kernels.skip(residual, output, c_skip=_or_one(c_skip), c_out=_or_one(c_out))

    def _check(self, x, residual, timestep):
        if x.dim() != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"x has shape {list(x.shape)}; accepted is [B, N, C={self.dim}].")
        if residual.shape != x.shape:
            raise ValueError(f"residual has shape {list(residual.shape)}; it must be that of x, {list(x.shape)}.")
        if isinstance(timestep, torch.Tensor) and timestep.shape not in ((), x.shape[:1]):
            raise ValueError(f"timestep has shape {list(timestep.shape)}; accepted are a number, 0-d and [B={len(x)}].")

    def _coefficients_at(self, timestep, residual):
        if isinstance(timestep, torch.Tensor):
            timestep = timestep.to(residual.device)
        return [
            canonical_coefficient(name, _per_sample(value, len(residual)), *residual.shape, residual.device)
            for name, value in zip(("c_skip", "c_out"), self.coefficients(timestep), strict=True)
        ]

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_heads={self.num_heads}"


class TorchFusedRCMAttention(TwoPassRCMAttention):
    """Projection and skip in one torch expression. Compile it with torch.compile to run them as one pass."""

    def _attend_project_skip(self, q, k, v, residual, c_skip, c_out):
        return reference.skip(residual, self.proj(_sdpa(q, k, v)), c_skip, c_out)


class FusedRCMAttention(TwoPassRCMAttention):
    """Attention on the Triton kernels, then projection and skip in one GEMM that stores only the result.

    Args:
        implementation: "auto" takes the kernels that were measured to be as fast as PyTorch's
            (kernels/choice/measured.py), and torch where no GPU is. "triton" and "torch" insist on one
            (kernels/dispatch.py).
        preset: "exact" or "quantized". The other arguments are those of `TwoPassRCMAttention`.

    Under autocast, and if proj is not a plain nn.Linear (LoRA, quantised, hooked), the modules are called as in the
    two-pass version, because the kernels read proj's weights directly.

    The preset "quantized" runs both projections in int8 and attention as SageAttention2: QKᵀ in
    int8, and PV in e4m3, before sm_89 in fp16. The parameters keep their dtype. 8-bit copies are kept beside them until
    they change (eight_bit_copies.py says which changes are detected). `why_exact` says why a call runs as with "exact"
    nevertheless. The error of ``proj(attention(qkv(x)))`` is within the tier's limit, 5 %, unless attention is very
    sharp or one channel of x is far larger than the others. It was 2 % for scores of standard deviation 1, 4.2 to 4.7 %
    at 3, and 7.5 % at 8.6 with one channel 20 times as large as the rest. implementation="torch" simulates the same
    arithmetic in fp32.

    With either preset the skip is in the epilogue of proj's GEMM, the last operation. kernels.attention and
    kernels.attention_8bit can include a skip too, for blocks without a projection after attention. It is not used here.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        qkv_bias: bool = True,
        sigma_data: float = 1.0,
        c_skip: Callable[[Time], Time] | None = None,
        c_out: Callable[[Time], Time] | None = None,
        implementation: str = "auto",
        preset: str = "exact",
    ):
        super().__init__(dim, num_heads, qkv_bias=qkv_bias, sigma_data=sigma_data, c_skip=c_skip, c_out=c_out)
        if implementation not in kernels.IMPLEMENTATIONS:
            raise ValueError(f"implementation={implementation!r}; accepted are {', '.join(kernels.IMPLEMENTATIONS)}.")
        if preset not in PRESETS:
            raise ValueError(f"preset={preset!r}; accepted are {', '.join(PRESETS)}.")
        self.implementation, self.preset = implementation, preset
        self._copies = EightBitCopies()

    def why_exact(self, x: torch.Tensor, timestep: Time, residual: torch.Tensor | None = None) -> str | None:
        """Return the reason why `forward` of these arguments would not compute in 8 bits, or None if it would."""
        residual = x if residual is None else residual
        self._check(x, residual, timestep)
        return self._why_exact(x, residual, *self._coefficients_at(timestep, residual))

    def _run(self, x, residual, c_skip, c_out):
        if self._why_exact(x, residual, c_skip, c_out) is None:
            return self._run_in_8_bits(x, residual, c_skip, c_out)
        self._copies.forget()  # training may follow, and its optimizer may write undetected
        return super()._run(x, residual, c_skip, c_out)

    def _why_exact(self, x, *others) -> str | None:
        if self.preset != "quantized":
            return f"preset {self.preset!r}"
        if self.head_dim not in kernels.HEAD_DIMS_8BIT:
            return f"head_dim {self.head_dim}"
        if x.dtype not in KERNEL_DTYPES:
            return f"{str(x.dtype).removeprefix('torch.')} tensors"
        if is_autocast(x.device):
            return "autocast"
        reasons = (why_not_linear(linear_of(linear), x.device, x.dtype) for linear in (self.qkv, self.proj))
        return next(filter(None, reasons), None) or self._why_derivative(x, *others) or self._why_no_kernel(x)

    def _why_derivative(self, *tensors) -> str | None:
        tensors = (tensor for tensor in (*tensors, *self.parameters()) if tensor is not None)
        recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        return "autograd" if recorded or fwAD._current_level >= 0 or is_transformed() else None

    def _why_no_kernel(self, x) -> str | None:
        """Return the reason why no 8-bit kernel runs, or None. With "auto", exact kernels beat simulated 8 bits."""
        if self.implementation != "auto":
            return None  # an op that cannot run raises an error
        return QUANTIZE_ROWS.why_not_fused(spec_of("auto", x, result=INT8))

    def _run_in_8_bits(self, x, residual, c_skip, c_out):
        options = {"implementation": self.implementation}
        qkv, proj = linear_of(self.qkv), linear_of(self.proj)
        projected = kernels.linear_8bit(self._rows(x), self._weight("qkv", qkv), qkv.bias, dtype=x.dtype, **options)
        quantized = kernels.quantize_qkv(*projected.chunk(3, -1), heads=self.num_heads, **options)
        attended = kernels.attention_8bit(quantized, **options).flatten(2)
        # Attention could store e4m3 directly, but int8 has a third of its error as the projection's input.
        weights = self._weight("proj", proj), proj.bias
        coefficients = {"c_skip": _or_one(c_skip), "c_out": _or_one(c_out)}
        return kernels.linear_skip(self._rows(attended), *weights, residual, **coefficients, **options)

    def _rows(self, x: torch.Tensor) -> Quantized:
        return kernels.quantize_rows(x, INT8, implementation=self.implementation)

    def _weight(self, name: str, linear: nn.Linear) -> QuantizedWeight:
        return self._copies.get(name, linear.weight, self._in_8_bits)

    def _in_8_bits(self, weight: torch.Tensor) -> QuantizedWeight:
        values, scale, _ = self._rows(weight)
        return QuantizedWeight(values, scale)

    def _apply(self, fn: Callable, recurse: bool = True) -> FusedRCMAttention:
        self._copies.forget()  # copies would stay on the old device
        return super()._apply(fn, recurse)

    def _attend_project_skip(self, q, k, v, residual, c_skip, c_out):
        proj = linear_of(self.proj)
        if is_autocast(q.device) or why_not_linear(proj, q.device, q.dtype) is not None:
            return super()._attend_project_skip(q, k, v, residual, c_skip, c_out)
        attended = kernels.attention(q, k, v, implementation=self.implementation, attention="auto").flatten(2)
        return kernels.linear_skip(
            attended,
            proj.weight,
            proj.bias,
            residual,
            c_skip=_or_one(c_skip),
            c_out=_or_one(c_out),
            implementation=self.implementation,
            linears="auto" if self.implementation == "auto" else None,
        )


def _coefficients(sigma_data, c_skip, c_out) -> Callable[[Time], coefficients.CoefficientPair]:
    if c_skip is None and c_out is None:
        coefficients.edm(0.0, sigma_data)  # rejects a bad sigma_data here rather than in the first forward
        return functools.partial(coefficients.edm, sigma_data=sigma_data)
    return coefficients.user(c_skip, c_out)


def _per_sample(value, batch: int):
    """Return a coefficient of one value per sample as [B, 1, 1], so that it is not read as one value per channel."""
    if isinstance(value, torch.Tensor) and value.shape == (batch,):
        return value.reshape(batch, 1, 1)
    return value


def _or_one(coefficient: torch.Tensor | None) -> torch.Tensor | float:
    """Return a canonical coefficient as the ops' arguments take it: 1.0 for None."""
    return 1.0 if coefficient is None else coefficient


def _sdpa(q, k, v):
    """Return attention of q, k, v [B, N, H, D] with its heads joined: [B, N, C]."""
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2).flatten(2)
