"""The contests of the quantized tier's ops, beside other implementations in 8 bits. The limits are the tier's."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from .. import kernels
from ..kernels import reference
from ..kernels.quantized import FP8, LARGEST, Quantized, quantize_weight
from .ops import EPS, Contest, Draws, attention_oracle

SCALED_MM, OURS_EXACT = "_scaled_mm + compiled", "ours, exact"
ATTENTION_ERROR = 4.1e-2  # that attention may have on normal values: P and V in e4m3 alone cost 3.75e-2


def autoregressive(noise: torch.Tensor, rho: float) -> torch.Tensor:
    """Return x[t] = ρ x[t-1] + √(1-ρ²) noise[t] along dimension 1, as a convolution with the powers of ρ."""
    tokens = noise.shape[1]
    powers = rho ** torch.arange(tokens, device=noise.device, dtype=torch.float32)
    spectra = (torch.fft.rfft(x, n=2 * tokens, dim=1) for x in (noise, powers.view(1, -1, 1, 1)))
    return (1 - rho**2) ** 0.5 * torch.fft.irfft(math.prod(spectra), n=2 * tokens, dim=1)[:, :tokens]


def norms_attention_8bit(heads: int, tokens: int, head_dim: int, device: torch.device, compiled: Callable) -> Contest:
    """RMSNorm and RoPE of q and k, quantising, and the attention; the rival is our own without quantising."""
    quantize, turn, turned, v = drawn_norms(heads, tokens, head_dim, device)
    return Contest(
        ours={"quantize_qkv, attention": lambda: kernels.attention_8bit(quantize())},
        rivals={OURS_EXACT: lambda: kernels.attention(*turn(), v)},
        oracle=lambda rows: attention_oracle(*turned(), v)(rows),
        tokens=tokens,
        flops=4 * heads * tokens * tokens * head_dim,
        limit=lambda _: ATTENTION_ERROR,
    )


def drawn_norms(heads: int, tokens: int, head_dim: int, device: torch.device, scale: float | None = None) -> tuple:
    """Draw q, k and v. Return three functions and v [1, S, H, D].

    The first function norms, rotates and quantises all three, the second only norms and rotates q and k, and the third
    does the same in fp32."""
    draw = Draws(device)
    C = heads * head_dim
    q, k, v = (draw(1, tokens, C) for _ in range(3))
    norm_q, norm_k = (1 + 0.1 * draw(C) for _ in range(2))
    angles = torch.rand(tokens, head_dim // 2, device=device, generator=draw.generator) * 2 * torch.pi
    options = {"heads": heads, "eps": EPS, "cos": angles.cos(), "sin": angles.sin()}

    def quantize() -> kernels.QuantizedQKV:
        return kernels.quantize_qkv(q, k, v, norm_q=norm_q, norm_k=norm_k, scale=scale, **options)

    def turn() -> tuple[torch.Tensor, ...]:
        return tuple(kernels.rms_norm_rope(x, norm, **options) for x, norm in ((q, norm_q), (k, norm_k)))

    def turned() -> tuple[torch.Tensor, ...]:
        wide = ((x.float(), norm.float()) for x, norm in ((q, norm_q), (k, norm_k)))
        return tuple(kernels.rms_norm_rope(*pair, **options, implementation="torch") for pair in wide)

    return quantize, turn, turned, v.unflatten(2, (heads, -1))


def linear_skip_8bit(tokens: int, C: int, K: int, device: torch.device, compiled: Callable) -> Contest:
    """A projection in e4m3 and the gated residual after it; both sides quantise in a kernel of their own."""
    return _linear_skip(tokens, C, K, device, compiled, is_fed=False)


def fed_linear_skip_8bit(
    tokens: int, C: int, K: int, device: torch.device, compiled: Callable, format: torch.dtype = FP8
) -> Contest:
    """A projection and the gated residual after it, on an input that our producer already quantised, as in a block.

    The rival's producer cannot do this. No producer writes int8, so in that format ours quantises the input too."""
    return _linear_skip(tokens, C, K, device, compiled, is_fed=format == FP8, format=format)


def _linear_skip(tokens, C, K, device, compiled, is_fed: bool, format: torch.dtype = FP8) -> Contest:
    draw = Draws(device)
    a, weight, bias, residual = draw(1, tokens, K), draw(C, K) * K**-0.5, draw(C), draw(1, tokens, C)
    gate = draw(1, 1, C).float()
    weight_8 = quantize_weight(weight, format)
    a_8 = kernels.quantize_rows(a, format)
    quantize = compiled(_quantize)

    @compiled
    def gated_residual(residual, output, gate):
        return (residual.float() + output * gate).type_as(residual)

    def scaled_mm() -> torch.Tensor:
        return gated_residual(residual, scaled_mm_linear(quantize(a), weight_8, bias), gate)

    def ours() -> torch.Tensor:
        return kernels.linear_skip(
            a_8 if is_fed else kernels.quantize_rows(a, format), weight_8, bias, residual, c_out=gate
        )

    def oracle(rows: torch.Tensor) -> torch.Tensor:
        linear = a[:, rows].double() @ weight.double().T + bias.double()
        return residual[:, rows].double() + gate.double() * linear

    return Contest(
        ours={"linear_skip": ours},
        rivals={SCALED_MM: scaled_mm},
        oracle=oracle,
        tokens=tokens,
        flops=2 * tokens * C * K,
    )


def linear_gelu_8bit(
    tokens: int,
    C: int,
    K: int,
    device: torch.device,
    compiled: Callable,
    format: torch.dtype = FP8,
    result: torch.dtype | None = FP8,
) -> Contest:
    """The feed-forward's first projection and its GELU.

    format: the input's format. result: e4m3, which the second projection takes, or None for bf16.
    """
    draw = Draws(device)
    a, weight, bias = draw(1, tokens, K), draw(C, K) * K**-0.5, draw(C)
    weight_8, a_8 = quantize_weight(weight, format), kernels.quantize_rows(a, format, with_norm=True)
    options = {} if result is None else {"result": result, "bias_bound": bias.float().abs().amax()}
    gelu = compiled(lambda x: _quantize(F.gelu(x, approximate="tanh")))

    def oracle(rows: torch.Tensor) -> torch.Tensor:
        return reference.linear_gelu(a[:, rows].double(), weight.double(), bias.double())

    return Contest(
        ours={"linear_gelu": lambda: kernels.linear_gelu(a_8, weight_8, bias, **options)},
        rivals={SCALED_MM: lambda: gelu(scaled_mm_linear(a_8, weight_8, bias))},
        oracle=oracle,
        tokens=tokens,
        flops=2 * tokens * C * K,
    )


def linear_qkv_8bit(
    tokens: int, C: int, K: int, device: torch.device, compiled: Callable, format: torch.dtype = FP8
) -> Contest:
    """A self-attention's three projections of an e4m3 input, or of an int8 one."""
    draw = Draws(device)
    a_8 = kernels.quantize_rows(a := draw(1, tokens, K), format)
    weights, biases = [draw(C, K) * K**-0.5 for _ in range(3)], [draw(C) for _ in range(3)]
    weights_8 = [quantize_weight(weight, format) for weight in weights]

    def three_scaled_mm() -> tuple[torch.Tensor, ...]:
        return tuple(scaled_mm_linear(a_8, weight, bias) for weight, bias in zip(weights_8, biases, strict=True))

    def oracle(rows: torch.Tensor) -> torch.Tensor:
        wide = ([tensor.double() for tensor in tensors] for tensors in (weights, biases))
        return torch.cat(reference.linear_qkv(a[:, rows].double(), *wide), dim=-1)

    return Contest(
        ours={"linear_qkv": lambda: kernels.linear_qkv(a_8, weights_8, biases)},
        rivals={SCALED_MM: three_scaled_mm},
        oracle=oracle,
        tokens=tokens,
        flops=3 * 2 * tokens * C * K,
    )


def _quantize(x: torch.Tensor) -> Quantized:
    """Quantise rows to e4m3 as a program without this package would, to be compiled."""
    scale = x.abs().amax(-1).float() / LARGEST[FP8]
    return Quantized((x.float() / scale[..., None]).to(FP8), scale)


def scaled_mm_linear(a: Quantized, weight: Quantized, bias: torch.Tensor) -> torch.Tensor:
    scales = {"scale_a": a.scale[0, :, None], "scale_b": weight.scale[None]}
    return torch._scaled_mm(a.values[0], weight.values.T, **scales, bias=bias, out_dtype=torch.bfloat16)[None]
