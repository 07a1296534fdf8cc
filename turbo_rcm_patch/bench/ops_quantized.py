"""The contests of the quantized tier's ops, beside what others compute in 8 bits. The limits are the tier's."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from .. import kernels
from ..kernels import reference
from ..kernels.quantized import FP8, INT8, LARGEST, Quantized, quantize_weight
from ..tiers import QUANTIZED
from .ops import EPS, Contender, Contest, Draws, attention_oracle, op_case

SCALED_MM, FLASH_ATTENTION, OURS_EXACT = "_scaled_mm + compiled", "FlashAttention-3 fp8", "ours, exact"
SEPARATE_SKIP = "ours, then a compiled skip"
ATTENTION_ERROR = 4.1e-2  # that attention may have on normal values: P and V in e4m3 alone cost 3.75e-2
UNIT_SCALES_ERROR = 5.1e-2  # FlashAttention-3's in fp8 on structured values, as measured on an H200
ATTENTION_TERAFLOPS = 860  # per second, that the attention's kernel alone is to reach on an H200


def attention_8bit(heads: int, tokens: int, head_dim: int, device: torch.device, compiled: Callable) -> Contest:
    """Self-attention of normal values that are in 8 bits already."""
    draw = Draws(device)
    return _attention(*(draw(1, tokens, heads, head_dim) for _ in range(3)), limit=lambda _: ATTENTION_ERROR)


def structured_attention_8bit(
    heads: int, tokens: int, head_dim: int, device: torch.device, compiled: Callable
) -> Contest:
    """The same of values that are like a model's (see `structured_qkv`), with at most half of the rival's error."""
    qkv = structured_qkv(Draws(device), heads, tokens, head_dim)
    return _attention(*qkv, limit=lambda errors: errors.get(FLASH_ATTENTION, UNIT_SCALES_ERROR) / 2)


def structured_qkv(draw: Draws, heads: int, tokens: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    """q, k, v [1, S, H, D]: neighbouring tokens are alike, AR(1) with ρ = 0.95; keys have a mean of their own in every
    channel, 3 · N(0, 1), and four channels that are five times as large; values two that are eight times as large."""
    q, k, v = (autoregressive(draw(1, tokens, heads, head_dim).float(), 0.95) for _ in range(3))
    k = k + 3 * draw(1, 1, heads, head_dim)
    k[..., :4] *= 5
    v[..., :2] *= 8
    return tuple(x.bfloat16().contiguous() for x in (q, k, v))


def autoregressive(noise: torch.Tensor, rho: float) -> torch.Tensor:
    """x[t] = ρ x[t-1] + √(1-ρ²) noise[t] along dimension 1: a convolution with the powers of ρ."""
    tokens = noise.shape[1]
    powers = rho ** torch.arange(tokens, device=noise.device, dtype=torch.float32)
    spectra = (torch.fft.rfft(x, n=2 * tokens, dim=1) for x in (noise, powers.view(1, -1, 1, 1)))
    return (1 - rho**2) ** 0.5 * torch.fft.irfft(math.prod(spectra), n=2 * tokens, dim=1)[:, :tokens]


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, limit: Callable) -> Contest:
    _, tokens, heads, head_dim = q.shape
    quantized = kernels.quantize_qkv(q.flatten(2), k.flatten(2), v.flatten(2), heads=heads)
    return Contest(
        ours={"attention": lambda: kernels.attention_8bit(quantized)},
        rivals=_flash_attention_3(q, k, v),
        oracle=attention_oracle(q, k, v),
        tokens=tokens,
        flops=4 * heads * tokens * tokens * head_dim,
        limit=limit,
    )


def attention_skip_8bit(heads: int, tokens: int, head_dim: int, device: torch.device, compiled: Callable) -> Contest:
    """The same with the skip of a consistency block at t = 0.5, σ_d = 0.5 in its epilogue, and as a pass of its own."""
    draw = Draws(device)
    q, k, v, residual = (draw(1, tokens, heads, head_dim) for _ in range(4))
    residual *= tokens**-0.5  # about as large as the attention, whose error it would else hide
    c_skip, c_out = (torch.full((1,), c, device=device) for c in (0.5, 0.5**0.5 / 2))
    attention = attention_oracle(q, k, v)
    quantized = kernels.quantize_qkv(q.flatten(2), k.flatten(2), v.flatten(2), heads=heads)

    @compiled
    def skip(residual, output, c_skip, c_out):
        return (c_skip * residual.float() + c_out * output).type_as(residual)

    return Contest(
        ours={"attention": lambda: kernels.attention_8bit(quantized, residual=residual, c_skip=c_skip, c_out=c_out)},
        rivals={SEPARATE_SKIP: lambda: skip(residual, kernels.attention_8bit(quantized), c_skip, c_out)},
        oracle=lambda rows: c_skip.double() * residual[:, rows].double() + c_out.double() * attention(rows),
        tokens=tokens,
        flops=4 * heads * tokens * tokens * head_dim,
        limit=lambda _: ATTENTION_ERROR,
    )


def _flash_attention_3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Contender]:
    """FlashAttention-3 in fp8 with unit scales, for q, k, v [1, S, H, D]; nothing where FlashInfer is not installed, or
    cannot compile it, which is said."""
    if q.device.type != "cuda" or importlib.util.find_spec("flashinfer") is None:
        return {}
    import flashinfer

    q8, k8, v8 = (x[0].to(FP8) for x in (q, k, v))
    one = torch.ones(q.shape[2], device=q.device)
    options = {"scale_q": one, "scale_k": one, "scale_v": one, "backend": "fa3", "o_dtype": torch.bfloat16}

    def run() -> torch.Tensor:
        return flashinfer.single_prefill_with_kv_cache(q8, k8, v8, **options)[None]

    try:
        run()
    except Exception as error:
        print(f"{FLASH_ATTENTION} does not run here: {type(error).__name__}: {error}")
        return {}
    return {FLASH_ATTENTION: run}


def norms_attention_8bit(heads: int, tokens: int, head_dim: int, device: torch.device, compiled: Callable) -> Contest:
    """RMSNorm and RoPE of q and k, quantising, and the attention; the rival is our own without quantising."""
    quantize, turn, turned, v = _norms(heads, tokens, head_dim, device)
    return Contest(
        ours={"quantize_qkv, attention": lambda: kernels.attention_8bit(quantize())},
        rivals={OURS_EXACT: lambda: kernels.attention(*turn(), v)},
        oracle=lambda rows: attention_oracle(*turned(), v)(rows),
        tokens=tokens,
        flops=4 * heads * tokens * tokens * head_dim,
        limit=lambda _: ATTENTION_ERROR,
    )


def norms_8bit(heads: int, tokens: int, head_dim: int, device: torch.device, compiled: Callable) -> Contest:
    """The same without the attention, so that its pre-pass has a time of its own; the rival's has no mean of k to take
    off, and leaves v as it is."""
    # A softmax's scale of 1, so that q weighs as much in the error as k and v.
    quantize, turn, turned, v = _norms(heads, tokens, head_dim, device, scale=1.0)

    def oracle(rows: torch.Tensor) -> torch.Tensor:
        q, k = turned()
        return torch.cat([x[:, rows].double() for x in (q, k - k.mean(1, keepdim=True), v)], dim=-1)

    return Contest(ours={"quantize_qkv": quantize}, rivals={}, partial={OURS_EXACT: turn}, oracle=oracle, tokens=tokens)


def _norms(heads: int, tokens: int, head_dim: int, device: torch.device, scale: float | None = None) -> tuple:
    """Of drawn q, k and v: what norms, rotates and quantises them, what only norms and rotates q and k, that in fp32,
    and v [1, S, H, D]."""
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
    """The same where our producer has quantised the input already, as in a block; the rival's cannot. None writes int8:
    in that format ours quantises too."""
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
        return gated_residual(residual, _scaled_mm(quantize(a), weight_8, bias), gate)

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
    """The feed-forward's first projection of an e4m3 input, its GELU, and the result in e4m3 for the second one; or of
    an int8 input, or with a result in bf16 (None)."""
    draw = Draws(device)
    a, weight, bias = draw(1, tokens, K), draw(C, K) * K**-0.5, draw(C)
    weight_8, a_8 = quantize_weight(weight, format), kernels.quantize_rows(a, format, with_norm=True)
    options = {} if result is None else {"result": result, "bias_bound": bias.float().abs().amax()}
    gelu = compiled(lambda x: _quantize(F.gelu(x, approximate="tanh")))

    def oracle(rows: torch.Tensor) -> torch.Tensor:
        return reference.linear_gelu(a[:, rows].double(), weight.double(), bias.double())

    return Contest(
        ours={"linear_gelu": lambda: kernels.linear_gelu(a_8, weight_8, bias, **options)},
        rivals={SCALED_MM: lambda: gelu(_scaled_mm(a_8, weight_8, bias))},
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
        return tuple(_scaled_mm(a_8, weight, bias) for weight, bias in zip(weights_8, biases, strict=True))

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


def linear_qkv_int8(tokens: int, C: int, K: int, device: torch.device, compiled: Callable) -> Contest:
    """The same of an int8 input, as a patched block runs it; the rival's is in e4m3."""
    contest = linear_qkv_8bit(tokens, C, K, device, compiled, format=INT8)
    return replace(contest, rivals=linear_qkv_8bit(tokens, C, K, device, compiled).rivals)


def linear_gelu_int8(tokens: int, C: int, K: int, device: torch.device, compiled: Callable) -> Contest:
    """`linear_gelu_8bit` of an int8 input, as a patched block runs it; the rival's is in e4m3."""
    contest = linear_gelu_8bit(tokens, C, K, device, compiled, format=INT8)
    return replace(contest, rivals=linear_gelu_8bit(tokens, C, K, device, compiled).rivals)


def linear_int8(tokens: int, C: int, K: int, device: torch.device, compiled: Callable) -> Contest:
    """A cross-attention's projection of the queries, of an int8 input; the rival's is in e4m3."""
    draw = Draws(device)
    a, weight, bias = draw(1, tokens, K), draw(C, K) * K**-0.5, draw(C)
    ours, e4m3 = ((kernels.quantize_rows(a, format), quantize_weight(weight, format)) for format in (INT8, FP8))
    return Contest(
        ours={"linear_8bit": lambda: kernels.linear_8bit(*ours, bias)},
        rivals={SCALED_MM: lambda: _scaled_mm(*e4m3, bias)},
        oracle=lambda rows: a[:, rows].double() @ weight.double().T + bias.double(),
        tokens=tokens,
        flops=2 * tokens * C * K,
    )


def _quantize(x: torch.Tensor) -> Quantized:
    """As a program without this package writes it, to be compiled."""
    scale = x.abs().amax(-1).float() / LARGEST[FP8]
    return Quantized((x.float() / scale[..., None]).to(FP8), scale)


def _scaled_mm(a: Quantized, weight: Quantized, bias: torch.Tensor) -> torch.Tensor:
    scales = {"scale_a": a.scale[0, :, None], "scale_b": weight.scale[None]}
    return torch._scaled_mm(a.values[0], weight.values.T, **scales, bias=bias, out_dtype=torch.bfloat16)[None]


def _case(contest: Callable, *sizes: int, least: float | None = None, **targets: float):
    names = {
        "scaled_mm": SCALED_MM,
        "flash_attention": FLASH_ATTENTION,
        "exact": OURS_EXACT,
        "separate": SEPARATE_SKIP,
    }
    targets = {names[key]: target for key, target in targets.items()}
    return op_case(contest, *sizes, tier=QUANTIZED, targets=targets, least=least)


LINEAR_SKIPS = (
    (7800, 1536, 1536, 1.05),
    (32760, 1536, 1536, 1.05),
    (32760, 1536, 8960, 1.05),
    (75600, 5120, 5120, 1.2),
    (75600, 5120, 13824, 1.05),
)
# Sizes as in ops_exact.py.
CASES = (
    _case(attention_8bit, 12, 32760, 128, flash_attention=1.02, least=ATTENTION_TERAFLOPS),
    _case(attention_8bit, 40, 75600, 128, flash_attention=1.02, least=ATTENTION_TERAFLOPS),
    _case(structured_attention_8bit, 12, 32760, 128, flash_attention=1.02, least=ATTENTION_TERAFLOPS),
    _case(attention_skip_8bit, 12, 32760, 128, separate=1.0, least=ATTENTION_TERAFLOPS),
    _case(norms_8bit, 12, 32760, 128),
    _case(norms_8bit, 40, 75600, 128),
    _case(norms_attention_8bit, 12, 32760, 128, exact=1.18),
    _case(norms_attention_8bit, 40, 75600, 128, exact=1.18),
    *(_case(linear_skip_8bit, *sizes, scaled_mm=target) for *sizes, target in LINEAR_SKIPS),
    *(_case(fed_linear_skip_8bit, *sizes, scaled_mm=target) for *sizes, target in LINEAR_SKIPS),
    _case(linear_gelu_8bit, 32760, 8960, 1536),
    _case(linear_gelu_8bit, 75600, 13824, 5120),
    _case(linear_qkv_8bit, 32760, 1536, 1536),
    _case(linear_qkv_8bit, 75600, 5120, 5120),
    _case(linear_qkv_int8, 32760, 1536, 1536),
    _case(linear_qkv_int8, 75600, 5120, 5120),
    _case(linear_int8, 32760, 1536, 1536),
    _case(linear_int8, 75600, 5120, 5120),
    _case(linear_gelu_int8, 32760, 8960, 1536),
    _case(linear_gelu_int8, 75600, 13824, 5120),
)
