"""The sparse tiers: contests beside other implementations, a kernel alone, and the sizes of all contests."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from scripts.benchmarks.contests.quantized import structured_qkv
from scripts.benchmarks.rivals.sla_in_pytorch import sla_in_pytorch
from scripts.benchmarks.rivals.turbodiffusion_module import turbodiffusion_module
from turbo_rcm_patch import kernels
from turbo_rcm_patch.bench.ops import EPS, SDPA, Contender, Contest, Draws, OpCase, op_case
from turbo_rcm_patch.bench.ops_sparse import DENSE, block_sparse_attention, sla_options, sla_oracle, sla_projection
from turbo_rcm_patch.config import SLA_TOPK
from turbo_rcm_patch.kernels import reference
from turbo_rcm_patch.kernels.dispatch import is_sm90
from turbo_rcm_patch.kernels.quantized import FP8
from turbo_rcm_patch.kernels.sparse_linear.sparse_linear_attention import (
    _summarize_8bit,
    launch_gluon_8bit,
    launch_portable_8bit,
)
from turbo_rcm_patch.kernels.sparse_linear.sparse_linear_map import choose_blocks
from turbo_rcm_patch.tiers import BLOCK_SPARSE, SPARSE

DENSE_BF16 = "ours, dense in bf16"
IN_PYTORCH = "SLA in PyTorch: flex_attention, compiled"


def sparse_linear_attention_bf16(
    heads: int, tokens: int, head_dim: int, device: torch.device, compiled: Callable
) -> Contest:
    """Sparse-linear attention in bf16, of values like a model's, beside SLA in PyTorch and dense attention."""
    draw = Draws(device)
    q, k, v = structured_qkv(draw, heads, tokens, head_dim)
    weight, bias = sla_projection(draw, head_dim)
    options = sla_options(device, quantized=False)
    kept = kernels.kept_blocks(tokens, options["block_k"], options["topk"]).count
    in_pytorch = compiled(sla_in_pytorch)

    def ours() -> torch.Tensor:
        return kernels.sparse_linear_attention(q, k, v, weight, bias, **options)

    def rival() -> torch.Tensor:
        return in_pytorch(q, k, v, weight, bias, kept, options["block_q"], options["block_k"])

    def sdpa() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if device.type == "cuda" else SDPBackend.MATH):
            return reference.attention(q, k, v, None, None, None, head_dim**-0.5)

    blocks = options["block_q"], options["block_k"]
    published = turbodiffusion_module(lambda: (q, k, v), weight, bias, options["topk"], blocks=blocks)
    return Contest(
        ours={"sparse_linear_attention": ours},
        rivals=_those_that_run({IN_PYTORCH: rival}),
        partial={DENSE_BF16: lambda: kernels.attention(q, k, v), SDPA: sdpa, **_those_that_run(published)},
        oracle=sla_oracle(q, k, q, k, v, weight, quantized=False),
        tokens=tokens,
        kept=kept / -(-tokens // options["block_k"]),
    )


def _those_that_run(rivals: Mapping[str, Contender]) -> dict[str, Contender]:
    """Return the rivals that run here, and print each failure: PyTorch cannot compile it, or its package is broken."""
    running = {}
    for name, rival in rivals.items():
        try:
            with torch.no_grad():
                rival()
            running[name] = rival
        except Exception as error:  # of the compiler or the package
            print(f"{name} does not run here: {type(error).__name__}: {error}")
    return running


def norms_sparse_linear_attention(
    heads: int, tokens: int, head_dim: int, device: torch.device, compiled: Callable
) -> Contest:
    """RMSNorm and RoPE of q and k, and sparse-linear attention: everything between a block's projections.
    TurboDiffusion's module gets our norms and RoPE; it keeps other blocks near ties, so its error says nothing."""
    draw = Draws(device)
    C = heads * head_dim
    q, k, v = (draw(1, tokens, C) for _ in range(3))
    norm_q, norm_k = (1 + 0.1 * draw(C) for _ in range(2))
    weight, bias = sla_projection(draw, head_dim)
    angles = torch.rand(tokens, head_dim // 2, device=device, generator=draw.generator) * 2 * torch.pi
    options = {"heads": heads, "eps": EPS, "cos": angles.cos(), "sin": angles.sin()}
    values = v.unflatten(2, (heads, -1))

    def turned() -> list[torch.Tensor]:
        return [kernels.rms_norm_rope(x, norm, **options) for x, norm in ((q, norm_q), (k, norm_k))]

    def ours() -> torch.Tensor:
        return kernels.sparse_linear_attention(*turned(), values, weight, bias, **sla_options(device))

    def dense() -> torch.Tensor:
        return kernels.attention_8bit(kernels.quantize_qkv(q, k, v, norm_q=norm_q, norm_k=norm_k, **options))

    published = turbodiffusion_module(lambda: (*turned(), values), weight, bias, SLA_TOPK)

    def oracle(rows: torch.Tensor) -> torch.Tensor:
        wide = ((x.float(), norm.float()) for x, norm in ((q, norm_q), (k, norm_k)))
        wide = (kernels.rms_norm_rope(*pair, **options, implementation="torch") for pair in wide)
        return sla_oracle(*turned(), *wide, values, weight)(rows)

    return Contest(
        ours={"rms_norm_rope, sparse_linear_attention": ours},
        rivals={},
        partial={DENSE: dense, **_those_that_run(published)},
        oracle=oracle,
        tokens=tokens,
    )


def sparse_kernel(heads: int, tokens: int, head_dim: int, device: torch.device, compiled: Callable) -> Contest:
    """The last kernel of sparse-linear attention with both branches, beside the kernel of dense attention."""
    draw = Draws(device)
    q, k, v = (draw(1, tokens, heads, head_dim) for _ in range(3))
    weight, bias = sla_projection(draw, head_dim)
    block_q, block_k = kernels.sparse_block_sizes(device, quantized=True)
    pooled_q, pooled_k, key_weight, state, *qkv = _summarize_8bit(q, k, v, weight, block_q, block_k, FP8)
    kept = kernels.kept_blocks(tokens, block_k, SLA_TOPK).count
    block_map = choose_blocks(pooled_q, pooled_k, kept)
    quantized = kernels.QuantizedQKV(*qkv, q.dtype)

    launch = launch_gluon_8bit if is_sm90(device) else launch_portable_8bit

    def ours() -> torch.Tensor:
        return launch(*qkv, q, block_map, key_weight, state, bias, block_q, block_k, q.dtype, None)

    return Contest(
        ours={"sparse kernel": ours},
        rivals={},
        partial={DENSE: lambda: kernels.attention_8bit(quantized)},
        oracle=sla_oracle(q, k, q, k, v, weight),
        tokens=tokens,
    )


def _by_mass(mass: float, *sizes: int) -> OpCase:
    case = op_case(block_sparse_attention, *sizes, tier=BLOCK_SPARSE, targets={})
    return replace(
        case,
        key=case.key._replace(op=f"{case.key.op}(mass={mass})"),
        build=functools.partial(block_sparse_attention, *sizes, mass=mass),
    )


CASES = (
    op_case(norms_sparse_linear_attention, 12, 32760, 128, tier=SPARSE, targets={}, most=1.45),
    op_case(norms_sparse_linear_attention, 40, 75600, 128, tier=SPARSE, targets={}, most=17.5),
    op_case(sparse_kernel, 12, 32760, 128, tier=SPARSE, targets={}, most=0.78),
    op_case(sparse_kernel, 40, 75600, 128, tier=SPARSE, targets={}),
    op_case(sparse_linear_attention_bf16, 12, 32760, 128, tier=SPARSE, targets={}),
    *(_by_mass(mass, 12, 32760, 128) for mass in (0.6, 0.7, 0.9, 0.95, 0.98)),
)
