"""Contests of the exact tier: a block's ops in bf16, beside PyTorch's. Checked and timed as ops.py says."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import kernels
from ..kernels import reference
from .ops import COMPILED, EPS, SDPA, Contest, Draws, attention_oracle

FOLDED = "folded addmm"


def attention(heads: int, tokens: int, keys: int, head_dim: int, device: torch.device, compiled: Callable) -> Contest:
    """Self-attention (keys = tokens) or cross-attention. Keys share a direction, as in trained models."""
    draw = Draws(device)
    q = draw(1, tokens, heads, head_dim)
    k, v = draw(1, keys, heads, head_dim) + 2 * draw(1, 1, heads, head_dim), draw(1, keys, heads, head_dim)

    def sdpa() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if device.type == "cuda" else SDPBackend.MATH):
            return reference.attention(q, k, v, None, None, None, head_dim**-0.5)

    return Contest(
        ours={"attention": lambda: kernels.attention(q, k, v)},
        rivals={SDPA: sdpa},
        oracle=attention_oracle(q, k, v),
        tokens=tokens,
        fallback=lambda: kernels.attention(q, k, v, implementation="torch"),
        flops=4 * heads * tokens * keys * head_dim,
    )


def linear_skip(tokens: int, C: int, K: int, device: torch.device, compiled: Callable) -> Contest:
    """A projection and the gated residual after it. The rival with the gate folded into the weight has no bias."""
    draw = Draws(device)
    a, weight, bias, residual = draw(1, tokens, K), draw(C, K) * K**-0.5, draw(C), draw(1, tokens, C)
    gate = draw(1, 1, C).float()

    @compiled
    def gated_residual(residual, output, gate):
        return (residual.float() + output * gate).type_as(residual)

    def folded() -> torch.Tensor:
        gated = (gate.view(C, 1) * weight).to(weight.dtype)
        return torch.addmm(residual[0], a[0], gated.T)[None]

    def oracle(rows: torch.Tensor) -> torch.Tensor:
        linear = a[:, rows].double() @ weight.double().T + bias.double()
        return residual[:, rows].double() + gate.double() * linear

    return Contest(
        ours={"linear_skip": lambda: kernels.linear_skip(a, weight, bias, residual, c_out=gate)},
        rivals={COMPILED: lambda: gated_residual(residual, F.linear(a, weight, bias), gate)},
        partial={FOLDED: folded},
        oracle=oracle,
        tokens=tokens,
        fallback=lambda: kernels.skip(residual, F.linear(a, weight, bias), c_out=gate),
        flops=2 * tokens * C * K,
    )


def linear_gelu(tokens: int, C: int, K: int, device: torch.device, compiled: Callable) -> Contest:
    """The feed-forward's first projection and its GELU."""
    draw = Draws(device)
    a, weight, bias = draw(1, tokens, K), draw(C, K) * K**-0.5, draw(C)
    gelu = compiled(lambda x: F.gelu(x, approximate="tanh"))

    def oracle(rows: torch.Tensor) -> torch.Tensor:
        return reference.linear_gelu(a[:, rows].double(), weight.double(), bias.double())

    return Contest(
        ours={"linear_gelu": lambda: kernels.linear_gelu(a, weight, bias)},
        rivals={COMPILED: lambda: gelu(F.linear(a, weight, bias))},
        oracle=oracle,
        tokens=tokens,
        fallback=lambda: kernels.gelu(F.linear(a, weight, bias)),
        flops=2 * tokens * C * K,
    )


def linear_qkv(tokens: int, C: int, K: int, device: torch.device, compiled: Callable) -> Contest:
    """A self-attention's three projections."""
    draw = Draws(device)
    a = draw(1, tokens, K)
    weights, biases = [draw(C, K) * K**-0.5 for _ in range(3)], [draw(C) for _ in range(3)]
    three_linears = compiled(reference.linear_qkv)

    def oracle(rows: torch.Tensor) -> torch.Tensor:
        wide = ([tensor.double() for tensor in tensors] for tensors in (weights, biases))
        return torch.cat(reference.linear_qkv(a[:, rows].double(), *wide), dim=-1)

    return Contest(
        ours={"linear_qkv": lambda: kernels.linear_qkv(a, weights, biases)},
        rivals={COMPILED: lambda: three_linears(a, weights, biases)},
        oracle=oracle,
        tokens=tokens,
        fallback=lambda: reference.linear_qkv(a, weights, biases),
        flops=3 * 2 * tokens * C * K,
    )


def rms_norm_rope(tokens: int, heads: int, head_dim: int, device: torch.device, compiled: Callable) -> Contest:
    """The norm over all heads of q or k, and its rotation. Our kernel reads every second column of diffusers' tables,
    as in a block: these tables hold each pair's value twice. The rivals' tables hold it once."""
    draw = Draws(device)
    C = heads * head_dim
    x, weight = draw(1, tokens, C), 1 + 0.1 * draw(C)
    angles = torch.rand(tokens, head_dim // 2, device=device, generator=draw.generator) * 2 * math.pi
    cos, sin = angles.cos(), angles.sin()
    full_cos, full_sin = (table.repeat_interleave(2, dim=1) for table in (cos, sin))
    tables = {"cos": full_cos[:, 0::2], "sin": full_sin[:, 1::2]}

    @compiled
    def norm(x, weight, cos, sin):
        y = F.rms_norm(x.float(), x.shape[-1:], weight.float(), EPS).to(x.dtype).unflatten(2, (heads, -1))
        return reference.rotate(y, cos, sin)

    def oracle(rows: torch.Tensor) -> torch.Tensor:
        wide = cos[rows].double(), sin[rows].double()
        return reference.rms_norm_rope(x[:, rows].double(), weight.double(), *wide, heads, EPS)

    return Contest(
        ours={"rms_norm_rope": lambda: kernels.rms_norm_rope(x, weight, heads=heads, eps=EPS, **tables)},
        rivals={COMPILED: lambda: norm(x, weight, cos, sin)},
        oracle=oracle,
        tokens=tokens,
        bytes_moved=2 * x.nbytes + full_cos.nbytes + full_sin.nbytes,  # in whole sectors
    )
