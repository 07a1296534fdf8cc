"""The quantized tier: contests that need a rival of their own, and the sizes at which its ops are timed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace

import torch

from turbo_rcm_patch import kernels
from turbo_rcm_patch.bench.ops import Contender, Contest, Draws, attention_oracle, op_case
from turbo_rcm_patch.bench.ops_quantized import (
    ATTENTION_ERROR,
    OURS_EXACT,
    SCALED_MM,
    autoregressive,
    drawn_norms,
    fed_linear_skip_8bit,
    linear_gelu_8bit,
    linear_qkv_8bit,
    linear_skip_8bit,
    norms_attention_8bit,
    scaled_mm_linear,
)
from turbo_rcm_patch.kernels.quantized import FP8, INT8, quantize_weight
from turbo_rcm_patch.tiers import QUANTIZED

FLASH_ATTENTION = "FlashAttention-3 fp8"
SEPARATE_SKIP = "ours, then a compiled skip"
UNIT_SCALES_ERROR = 5.1e-2  # FlashAttention-3's in fp8 on structured values, as measured on an H200
ATTENTION_TERAFLOPS = 860  # per second, that the attention's kernel alone is to reach on an H200


def attention_8bit(heads: int, tokens: int, head_dim: int, device: torch.device, compiled: Callable) -> Contest:
    """Self-attention of normal values that are in 8 bits already."""
    draw = Draws(device)
    return _attention(*(draw(1, tokens, heads, head_dim) for _ in range(3)), limit=lambda _: ATTENTION_ERROR)


def structured_attention_8bit(
    heads: int, tokens: int, head_dim: int, device: torch.device, compiled: Callable
) -> Contest:
    """Self-attention of values like a model's (see `structured_qkv`), with at most half of the rival's error."""
    qkv = structured_qkv(Draws(device), heads, tokens, head_dim)
    return _attention(*qkv, limit=lambda errors: errors.get(FLASH_ATTENTION, UNIT_SCALES_ERROR) / 2)


def structured_qkv(draw: Draws, heads: int, tokens: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    """Return q, k, v [1, S, H, D] with structure.

    Neighbouring tokens are alike: AR(1) with ρ = 0.95. Each channel of the keys has its own mean, 3 · N(0, 1). Four
    channels of the keys are five times as large. Two channels of the values are eight times as large.
    """
    q, k, v = (autoregressive(draw(1, tokens, heads, head_dim).float(), 0.95) for _ in range(3))
    k = k + 3 * draw(1, 1, heads, head_dim)
    k[..., :4] *= 5
    v[..., :2] *= 8
    return tuple(x.bfloat16().contiguous() for x in (q, k, v))


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
    """Self-attention with a consistency block's skip (t = 0.5, σ_d = 0.5) in its epilogue, and as a pass of its own."""
    draw = Draws(device)
    q, k, v, residual = (draw(1, tokens, heads, head_dim) for _ in range(4))
    residual *= tokens**-0.5  # about as large as the attention; a larger one would hide its error
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
    """Return FlashAttention-3 in fp8 with unit scales, for q, k, v [1, S, H, D].

    Return nothing if FlashInfer is not installed, or if it cannot compile the kernel, which is printed.
    """
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


def norms_8bit(heads: int, tokens: int, head_dim: int, device: torch.device, compiled: Callable) -> Contest:
    """Return the same contest without the attention, to time its pre-pass alone.

    The rival's pre-pass does not subtract k's mean, and leaves v unchanged.
    """
    # The softmax's scale is 1, so that q weighs as much in the error as k and v.
    quantize, turn, turned, v = drawn_norms(heads, tokens, head_dim, device, scale=1.0)

    def oracle(rows: torch.Tensor) -> torch.Tensor:
        q, k = turned()
        return torch.cat([x[:, rows].double() for x in (q, k - k.mean(1, keepdim=True), v)], dim=-1)

    return Contest(ours={"quantize_qkv": quantize}, rivals={}, partial={OURS_EXACT: turn}, oracle=oracle, tokens=tokens)


def linear_qkv_int8(tokens: int, C: int, K: int, device: torch.device, compiled: Callable) -> Contest:
    """A self-attention's three projections of an int8 input, as a patched block runs them; the rival's is in e4m3."""
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
        rivals={SCALED_MM: lambda: scaled_mm_linear(*e4m3, bias)},
        oracle=lambda rows: a[:, rows].double() @ weight.double().T + bias.double(),
        tokens=tokens,
        flops=2 * tokens * C * K,
    )


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
