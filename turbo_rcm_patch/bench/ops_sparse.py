"""The contests of the sparse tiers' attention, in 8 bits as their presets have it, and in bf16. The limits are the
tiers'."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import kernels
from ..config import PRESETS
from ..kernels import reference
from ..kernels.quantized import FP8
from ..kernels.sparse_linear.sparse_linear_attention import _sparse_linear_attention_8bit, _summarize_8bit
from ..kernels.sparse_linear.sparse_linear_map import choose_blocks
from ..kernels.sparse_linear.sparse_linear_reference import linear_attention
from ..tiers import BLOCK_SPARSE, SPARSE
from .ops import EPS, SDPA, Contender, Contest, Draws, OpCase, attention_oracle, op_case
from .ops_quantized import autoregressive, structured_qkv
from .sla_in_pytorch import sla_in_pytorch
from .turbodiffusion_module import turbodiffusion_module

DENSE, DENSE_BF16 = "ours, dense in 8 bits", "ours, dense in bf16"
IN_PYTORCH = "SLA in PyTorch: flex_attention, compiled"


def sparse_linear_attention(
    heads: int, tokens: int, head_dim: int, device: torch.device, compiled: Callable
) -> Contest:
    """Sparse-linear attention to the default share of key blocks."""
    draw = Draws(device)
    q, k, v = (draw(1, tokens, heads, head_dim) for _ in range(3))
    weight, bias = _projection(draw, head_dim)

    def ours() -> torch.Tensor:
        return kernels.sparse_linear_attention(q, k, v, weight, bias, **_options(device))

    return Contest(
        ours={"sparse_linear_attention": ours}, rivals={}, oracle=_oracle(q, k, q, k, v, weight), tokens=tokens
    )


def sparse_linear_attention_bf16(
    heads: int, tokens: int, head_dim: int, device: torch.device, compiled: Callable
) -> Contest:
    """The same in bf16, of values that are like a model's, beside SLA in PyTorch and dense attention."""
    draw = Draws(device)
    q, k, v = structured_qkv(draw, heads, tokens, head_dim)
    weight, bias = _projection(draw, head_dim)
    options = _options(device, quantized=False)
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
        oracle=_oracle(q, k, q, k, v, weight, quantized=False),
        tokens=tokens,
        kept=kept / -(-tokens // options["block_k"]),
    )


def _those_that_run(rivals: Mapping[str, Contender]) -> dict[str, Contender]:
    """The rivals but for those that fail here, which is said: PyTorch cannot compile them, or a package is broken."""
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
    """RMSNorm and RoPE of q and k, and sparse-linear attention: all that lies between a block's projections.
    TurboDiffusion's module gets our norms and RoPE; it keeps other blocks near ties, so its error says nothing."""
    draw = Draws(device)
    C = heads * head_dim
    q, k, v = (draw(1, tokens, C) for _ in range(3))
    norm_q, norm_k = (1 + 0.1 * draw(C) for _ in range(2))
    weight, bias = _projection(draw, head_dim)
    angles = torch.rand(tokens, head_dim // 2, device=device, generator=draw.generator) * 2 * torch.pi
    options = {"heads": heads, "eps": EPS, "cos": angles.cos(), "sin": angles.sin()}
    values = v.unflatten(2, (heads, -1))

    def turned() -> list[torch.Tensor]:
        return [kernels.rms_norm_rope(x, norm, **options) for x, norm in ((q, norm_q), (k, norm_k))]

    def ours() -> torch.Tensor:
        return kernels.sparse_linear_attention(*turned(), values, weight, bias, **_options(device))

    def dense() -> torch.Tensor:
        return kernels.attention_8bit(kernels.quantize_qkv(q, k, v, norm_q=norm_q, norm_k=norm_k, **options))

    published = turbodiffusion_module(lambda: (*turned(), values), weight, bias, PRESETS["sparse"].topk)

    def oracle(rows: torch.Tensor) -> torch.Tensor:
        wide = ((x.float(), norm.float()) for x, norm in ((q, norm_q), (k, norm_k)))
        wide = (kernels.rms_norm_rope(*pair, **options, implementation="torch") for pair in wide)
        return _oracle(*turned(), *wide, values, weight)(rows)

    return Contest(
        ours={"rms_norm_rope, sparse_linear_attention": ours},
        rivals={},
        partial={DENSE: dense, **_those_that_run(published)},
        oracle=oracle,
        tokens=tokens,
    )


def sparse_kernel(heads: int, tokens: int, head_dim: int, device: torch.device, compiled: Callable) -> Contest:
    """Of sparse-linear attention the last kernel alone, both branches in it, and of dense attention its own."""
    draw = Draws(device)
    q, k, v = (draw(1, tokens, heads, head_dim) for _ in range(3))
    weight, bias = _projection(draw, head_dim)
    block_q, block_k = kernels.sparse_block_sizes(device, quantized=True)
    pooled_q, pooled_k, key_weight, state, *qkv = _summarize_8bit(q, k, v, weight, block_q, block_k, FP8)
    kept = kernels.kept_blocks(tokens, block_k, PRESETS["sparse"].topk).count
    block_map = choose_blocks(pooled_q, pooled_k, kept)
    quantized = kernels.QuantizedQKV(*qkv, q.dtype)

    def ours() -> torch.Tensor:
        return _sparse_linear_attention_8bit(*qkv, q, block_map, key_weight, state, bias, block_q, block_k)

    return Contest(
        ours={"sparse kernel": ours},
        rivals={},
        partial={DENSE: lambda: kernels.attention_8bit(quantized)},
        oracle=_oracle(q, k, q, k, v, weight),
        tokens=tokens,
    )


def _projection(draw: Draws, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight and bias of a proj_l."""
    weight = draw(head_dim, head_dim) * head_dim**-0.5
    return weight, torch.zeros_like(weight[0])


def _options(device: torch.device, *, quantized: bool = True) -> dict[str, object]:
    block_q, block_k = kernels.sparse_block_sizes(device, quantized=quantized)
    return {"topk": PRESETS["sparse"].topk, "block_q": block_q, "block_k": block_k, "quantized": quantized}


def _oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    wide_q: torch.Tensor,
    wide_k: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    *,
    quantized: bool = True,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """In fp64, of wide_q, wide_k, v [1, S, H, D]. It keeps the blocks that ours chooses of q and k: which they are
    among near ties says nothing of what errs."""
    _, tokens, heads, head_dim = v.shape
    block_q, block_k = kernels.sparse_block_sizes(v.device, quantized=quantized)
    kept = kernels.kept_blocks(tokens, block_k, PRESETS["sparse"].topk).count

    def on_rows(rows: torch.Tensor) -> torch.Tensor:
        of_rows = kernels.chosen_key_blocks(q, k, kept, block_q, block_k)[0][:, rows // block_q].long()
        is_kept = torch.zeros(*of_rows.shape[:2], -(-tokens // block_k), dtype=torch.bool, device=v.device)
        is_kept = is_kept.scatter(2, of_rows, True).repeat_interleave(block_k, 2)[..., :tokens]
        parts = []
        for head in range(heads):
            queries, keys, values = (x[:, :, [head]].double() for x in (wide_q[:, rows], wide_k, v))
            scores = queries[0, :, 0] @ keys[0, :, 0].T * head_dim**-0.5
            softmax = scores.masked_fill(~is_kept[head], -math.inf).softmax(1) @ values[0, :, 0]
            parts.append(softmax + linear_attention(queries, keys, values)[0, :, 0] @ weight.double().T)
        return torch.stack(parts, 1)[None]

    return on_rows


def block_sparse_attention(
    heads: int,
    tokens: int,
    head_dim: int,
    device: torch.device,
    compiled: Callable,
    mass: float = PRESETS["block_sparse"].mass,
) -> Contest:
    """Block-sparse attention. How fast it is depends on what a mass keeps: the default one of these values, whose
    neighbouring tokens are alike, half of the blocks with an error of about 7 %; of the tiny model's own 8 %."""
    draw = Draws(device)
    q, k, v = (alike_values(draw, tokens, heads, head_dim) for _ in range(3))
    q = 2 * q
    block_q, block_k = kernels.block_sparse_sizes(device, q.dtype, quantized=True)

    def quantized() -> kernels.QuantizedQKV:
        return kernels.quantize_qkv(*(x.flatten(2) for x in (q, k, v)), heads=heads)

    def ours() -> torch.Tensor:
        return kernels.block_sparse_attention_8bit(quantized(), mass=mass, block_q=block_q, block_k=block_k)

    return Contest(
        ours={"block_sparse_attention": ours},
        rivals={},
        partial={DENSE: lambda: kernels.attention_8bit(quantized())},
        oracle=attention_oracle(q, k, v),
        tokens=tokens,
        kept=kernels.kept_share(q, k, mass=mass, block_q=block_q, block_k=block_k),
    )


def alike_values(draw: Draws, tokens: int, heads: int, head_dim: int) -> torch.Tensor:
    """[1, S, H, D], packed, whose neighbouring tokens are alike."""
    one_by_one = (autoregressive(draw(1, tokens, 1, head_dim).float(), 0.99) for _ in range(heads))  # little memory
    return torch.cat([head.bfloat16() for head in one_by_one], 2).contiguous()  # cat lays the tokens out last


def _by_mass(mass: float, *sizes: int) -> OpCase:
    case = op_case(block_sparse_attention, *sizes, tier=BLOCK_SPARSE, targets={})
    return replace(
        case,
        name=case.name.replace(" ", f"(mass={mass}) "),
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
