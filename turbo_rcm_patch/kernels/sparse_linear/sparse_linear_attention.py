"""sparse_linear_attention: softmax attention to the key blocks that matter, and linear attention to all tokens.

    o_s = softmax(q kᵀ / √D) v                        over the key blocks that are kept for the query's block
    o_l = φ(q) Σ φ(k)ᵀ v / (1e-5 + φ(q) Σ φ(k)ᵀ)      φ: softmax over D; both sums over all tokens
    out = o_s + o_l Wᵀ + b                            proj_l: W [D, D] and b [D], the same for all heads
    out = o_s                                         without proj_l

q, k, v, out [B, S, H, D]; see sparse_linear_reference.py for the definition and its source. One kernel pools q, two
summarise k and v (sparse_linear_prepass.py). Two score the blocks by their means and list the chosen ones
(sparse_linear_map.py). One computes both branches and stores their sum.
With ``quantized`` the softmax takes q, k and v in 8 bits. The first kernels then also give the 8-bit q and the scale of
v, and one of quantize_qkv's kernels gives the 8-bit k and v. The last kernel may be the one for sm_90
(sparse_linear_sm90.py). No gradient: under autograd the reference runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ..attention.attention_tiles import readable
from ..attention_8bit.attention_8bit_reference import V_FORMATS, output_scale, quantized_values
from ..attention_8bit.quantize_qkv import QuantizedQKV, allocate_qkv, quantize_kv_tiles
from ..attention_8bit.spec import HEAD_DIMS, default_v_format, why_no_8bit_kernel
from ..choice.registry import GLUON, PORTABLE, REFERENCE, Kernel, Op, Spec, spec_of, why_not_ours, why_not_reference
from ..dispatch import SM90, device_capability, is_gpu, kernel_op, kernels_op
from ..launch import recording
from ..quantized import FP8, LARGEST, Quantized, quantize_reference
from . import sparse_linear_8bit_portable as portable_8bit
from . import sparse_linear_portable as portable
from . import sparse_linear_reference as reference
from . import sparse_linear_sm90 as sm90
from .sparse_linear_map import choose_blocks
from .sparse_linear_prepass import pool_queries, summarize_keys
from .sparse_linear_reference import kept_blocks

BLOCK_SIZES = (64, 128)  # tokens of a block that the kernels support


@dataclass(frozen=True, kw_only=True)
class SparseSpec(Spec):
    """Attention of q, k, v [B, S, H, head_dim] in which each block of queries attends to its kept blocks of keys.

    block_q, block_k: tokens of a block. v_format: v's format (FP8 or fp16) beside int8 q and k; None if q, k and v have
    the main dtype.
    """

    head_dim: int
    block_q: int
    block_k: int
    v_format: torch.dtype | None = None

    @property
    def sizes(self) -> tuple:
        """The last arguments of the sm_90 kernels' `why_not`."""
        return self.v_format, self.head_dim, self.block_q, self.block_k


def sparse_linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    proj_weight: torch.Tensor | None,
    proj_bias: torch.Tensor | None = None,
    *,
    topk: float | None = None,
    block_map: torch.Tensor | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
    quantized: bool = False,
    v_format: torch.dtype | None = None,
    result: torch.dtype | None = None,
    implementation: str = "auto",
) -> torch.Tensor | Quantized:
    """Return sparse-linear attention of q, k, v: [B, S, H, D] in their dtype.

    q, k, v: [B, S, H, D] of one dtype, with any strides.
    proj_weight, proj_bias: proj_l, [D, D] and [D] or None, in q's dtype or fp32. With neither there is no linear part.
    topk: the share of key blocks that each block of queries keeps, above 0 and at most 1. It is rounded down to whole
        blocks, but to one at least (`kept_blocks` tells if the published rule would keep none).
    block_map: instead of topk, the key blocks to keep, [B, H, ⌈S / block_q⌉, kept] int32 or int64. A list names
        blocks from 0 to ⌈S / block_k⌉ - 1, each once. This is checked on the CPU only, because on a GPU the check would
        wait for the GPU. There a list that breaks the rule gives wrong results, or reads memory outside k and v.
    block_q, block_k: the tokens of a block of queries and of keys that a checkpoint was trained with. Give both or
        neither. Without them the sizes are those published for this device (`sparse_block_sizes`).
    quantized: True for a softmax with q, k and v in 8 bits.
    v_format: v's format in 8 bits, float8_e4m3fn (the default from sm_89 on, and on the CPU) or float16.
    result: float8_e4m3fn, with quantized=True, to return a Quantized [B, S, H·D] instead. Its kernels give it one scale
        per sample, expanded to [B, S], from a bound that v and the linear branch give; the reference one per row.
    implementation: "auto", "triton" or "torch" (see dispatch.py). The kernels take head_dims 64 and 128 and blocks of
        64 and 128 tokens.

    q, k, v and proj_l have gradients, which the reference computes. Gradients pass through the rounding to 8 bits
    unchanged. Raises ValueError for shapes, dtypes, devices, blocks or a share that do not fit together.
    """
    _check(q, k, v, proj_weight, proj_bias, topk, block_map, block_q, block_k, quantized, v_format, result)
    if block_q is None:
        block_q, block_k = sparse_block_sizes(q.device, quantized=quantized)
    if block_map is not None:
        _check_block_map(block_map, q, block_q, block_k)
        block_map = block_map.sort(-1).values.int()
        _check_blocks(block_map, -(-q.shape[1] // block_k))
    if quantized:
        v_format = v_format or default_v_format(q.device)
    options = {"head_dim": q.shape[3], "block_q": block_q, "block_k": block_k, "v_format": v_format, "result": result}
    spec = spec_of(implementation, q, k, v, proj_weight, proj_bias, kind=SparseSpec, **options)
    pick = SPARSE_LINEAR_ATTENTION.pick(spec)
    if q.numel() == 0:
        return torch.empty_like(q) if result is None else quantize_reference(q.flatten(2), FP8)
    return pick.launch(q, k, v, proj_weight, proj_bias, block_map, topk, block_q, block_k, v_format, result)


def chosen_key_blocks(
    q: torch.Tensor, k: torch.Tensor, kept: int, block_q: int, block_k: int, implementation: str = "auto"
) -> torch.Tensor:
    """Return the key blocks that `sparse_linear_attention` keeps for q and k [B, S, H, D] if it keeps `kept` per list:
    [B, H, ⌈S / block_q⌉, kept] int32, ascending. Only comparisons of two computations need this."""
    sizes = {"head_dim": q.shape[3], "block_q": block_q, "block_k": block_k}
    spec = spec_of(implementation, q, k, kind=SparseSpec, **sizes)
    if why_not_fused(spec) is not None or implementation == "torch":
        return reference.sparse_block_map(q, k, kept, block_q, block_k)
    pooled_k = _summarize_keys(k, k, None, block_k)[0]
    return choose_blocks(_pool_queries(q, block_q), pooled_k, kept)


def sparse_block_sizes(device: torch.device, *, quantized: bool) -> tuple[int, int]:
    """Return the tokens of a block of queries and of a block of keys, as TurboDiffusion publishes them for a device."""
    on_sm90 = is_gpu(device) and device_capability(device) == SM90
    return (64, 128) if quantized and on_sm90 else (128, 64)


def _check(q, k, v, proj_weight, proj_bias, topk, block_map, block_q, block_k, quantized, v_format, result):
    if q.dim() != 4:
        raise ValueError(f"sparse_linear_attention: q has shape {list(q.shape)}; it takes [B, S, H, D].")
    for name, x in (("k", k), ("v", v)):
        if x.shape != q.shape or x.dtype != q.dtype:
            raise ValueError(
                f"sparse_linear_attention: {name} is {x.dtype} {list(x.shape)}; it must be like q, {q.dtype} "
                f"{list(q.shape)}."
            )
    head_dim = q.shape[3]
    for name, x, shape in (("proj_weight", proj_weight, [head_dim] * 2), ("proj_bias", proj_bias, [head_dim])):
        if x is not None and (list(x.shape) != shape or x.dtype not in (q.dtype, torch.float32)):
            raise ValueError(
                f"sparse_linear_attention: {name} is {x.dtype} {list(x.shape)}; it must be {shape}, D = {head_dim} "
                f"being q's head_dim, in q's dtype, {q.dtype}, or float32."
            )
    if proj_weight is None and proj_bias is not None:
        raise ValueError("sparse_linear_attention: give proj_weight with proj_bias, or neither.")
    if (topk is None) == (block_map is None):
        raise ValueError("sparse_linear_attention: give either topk or block_map.")
    check_sparsity(topk, block_q, block_k)
    if v_format is not None and (not quantized or v_format not in V_FORMATS):
        raise ValueError(
            f"sparse_linear_attention: v_format={v_format} with quantized={quantized}; accepted are float8_e4m3fn, "
            "float16 and None with quantized=True, else None."
        )
    if result is not None and (not quantized or result != FP8):
        raise ValueError(
            f"sparse_linear_attention: result={result} with quantized={quantized}; accepted are float8_e4m3fn with "
            "quantized=True, and None."
        )


def check_sparsity(topk: float | None, block_q: int | None, block_k: int | None) -> None:
    """Raise ValueError for an invalid share or invalid block sizes. None means not given."""
    if topk is not None and not 0 < topk <= 1:
        raise ValueError(f"sparse_linear_attention: topk={topk}; it is a share of the key blocks, in (0, 1].")
    if (block_q is None) != (block_k is None):
        raise ValueError("sparse_linear_attention: give block_q and block_k together, or neither.")
    for name, block in (("block_q", block_q), ("block_k", block_k)):
        if block is not None and block < 1:
            raise ValueError(f"sparse_linear_attention: {name}={block}; a block has at least one token.")


def _check_block_map(block_map, q, block_q, block_k):
    batch, tokens, heads, _ = q.shape
    lists, blocks = [batch, heads, -(-tokens // block_q)], -(-tokens // block_k)
    right = block_map.dtype in (torch.int32, torch.int64) and block_map.device == q.device
    if not right or list(block_map.shape[:-1]) != lists or not 0 < block_map.shape[-1] <= max(1, blocks):
        raise ValueError(
            f"sparse_linear_attention: block_map is {block_map.dtype} {list(block_map.shape)} on {block_map.device}; "
            f"with blocks of {block_q} queries and {block_k} keys it must be int32 or int64 {[*lists, 'kept']} on "
            f"{q.device}, with 1 to {blocks} blocks kept."
        )


def _check_blocks(block_map: torch.Tensor, blocks: int) -> None:
    """Raise ValueError unless ascending lists name blocks that exist, each once. Does nothing on a GPU or in a
    trace."""
    if not block_map.is_cpu or torch.compiler.is_compiling() or type(block_map) is not torch.Tensor:
        return
    if block_map.numel() == 0:
        return
    first, last = block_map.min().item(), block_map.max().item()
    if first < 0 or last >= blocks:
        raise ValueError(
            f"sparse_linear_attention: block_map names the blocks {first} to {last}; there are the blocks 0 to "
            f"{blocks - 1}."
        )
    if (block_map[..., 1:] == block_map[..., :-1]).any():
        raise ValueError("sparse_linear_attention: block_map names a block twice in a list.")


def why_not_fused(spec: SparseSpec) -> str | None:
    """Return the reason why the portable kernels cannot run for a spec, or None if they can."""
    reason = why_not_ours(spec)
    if reason is not None:
        return reason
    if spec.head_dim not in HEAD_DIMS:
        return f"head_dim {spec.head_dim}"
    if not {spec.block_q, spec.block_k} <= set(BLOCK_SIZES):
        return f"blocks of {spec.block_q} queries and {spec.block_k} keys"
    return None if spec.v_format is None else why_no_8bit_kernel(spec.device, spec.v_format, spec.head_dim)


def _why_not_gluon(spec: SparseSpec) -> str | None:
    reason = why_not_fused(spec) or ("not for 16 bits" if spec.v_format is None else None)
    return reason or sm90.why_not(spec.device, spec.dtype, *spec.sizes)


def _by_reference(*arguments):
    """Run the reference, with the arguments of `_fused`."""
    *arguments, result = arguments
    out = _wide_by_reference(*arguments)
    return out if result is None else quantize_reference(out.flatten(2), result)


def _wide_by_reference(q, k, v, proj_weight, proj_bias, block_map, topk, block_q, block_k, v_format):
    if recording():
        return torch.empty_like(q)  # the reference is slow, and has no kernel to compile
    if block_map is None:
        block_map = reference.sparse_block_map(q, k, kept_blocks(q.shape[1], block_k, topk).count, block_q, block_k)
    arguments = (q, k, v, proj_weight, proj_bias, block_map, block_q, block_k)
    if v_format is None:
        return reference.sparse_linear_attention(*arguments)
    return reference.sparse_linear_attention_8bit(*arguments, v_format)


def _fused(attend_8bit, q, k, v, proj_weight, proj_bias, block_map, topk, block_q, block_k, v_format, result):
    """Run the kernels for q, k, v [B, S, H, D].

    attend_8bit: launches the last kernel if v_format is given, for a softmax in 8 bits. topk: the share of key blocks
    to keep if block_map is None. result: e4m3 for a Quantized [B, S, H·D], or None.
    """
    kept = None if block_map is not None else kept_blocks(q.shape[1], block_k, topk).count
    if v_format is not None:
        pooled_q, pooled_k, key_weight, state, *qkv = _summarize_8bit(q, k, v, proj_weight, block_q, block_k, v_format)
        block_map = choose_blocks(pooled_q, pooled_k, kept) if block_map is None else block_map
        branch = (None, None) if proj_weight is None else (key_weight, state)
        out_scale = None if result is None else _output_scale(qkv[5], branch[1], proj_bias)
        out = attend_8bit(*qkv, q, block_map, *branch, proj_bias, block_q, block_k, result or q.dtype, out_scale)
        return out if result is None else quantized_values(out, out_scale)
    branch = (None, None)
    if proj_weight is not None or block_map is None:
        pooled_k, key_weight, state = _summarize_keys(k, v, proj_weight, block_k)
        block_map = choose_blocks(_pool_queries(q, block_q), pooled_k, kept) if block_map is None else block_map
        branch = branch if proj_weight is None else (key_weight, state)
    return _sparse_linear_attention(q, k, v, block_map, *branch, proj_bias, block_q, block_k)


def _output_scale(v_scale: torch.Tensor, state: torch.Tensor | None, proj_bias: torch.Tensor | None) -> torch.Tensor:
    """Return the scale [B] with which every possible result fits e4m3.

    v_scale: [B, H, D]. state: [B, H, D, D], or None without a linear branch. The branch is a sum of the state's rows
    whose weights add up to at most one, so in no channel it exceeds the largest value of the rows.
    """
    if state is None:
        return output_scale(v_scale)
    largest = torch.linalg.vector_norm(state, torch.inf, dim=2, dtype=torch.float32)
    if proj_bias is not None:
        largest = largest + proj_bias.abs()
    return output_scale(torch.add(v_scale, largest, alpha=1 / LARGEST[FP8]))


@kernel_op("pool_queries")
def _pool_queries(q: torch.Tensor, block: int) -> torch.Tensor:
    """Return the mean of each block of tokens of q [B, S, H, D]: [B, H, blocks, D]."""
    pooled = _allocate_pooled(q, block)
    pool_queries(q, block, pooled)
    return pooled


@_pool_queries.register_fake
def _allocate_pooled(q, block):
    batch, tokens, heads, head_dim = q.shape
    return q.new_empty((batch, heads, (tokens + block - 1) // block, head_dim))


@kernel_op("summarize_keys")
def _summarize_keys(
    k: torch.Tensor, v: torch.Tensor, proj_weight: torch.Tensor | None, block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the pre-pass's pooled_k [B, H, blocks, D], key_weight [B, H, D] fp32 and state [B, H, D, D]. The last two
    are empty without proj_weight."""
    out = _allocate_summaries(k, v, proj_weight, block)
    summarize_keys(k, v, proj_weight, block, *out)
    return out


@_summarize_keys.register_fake
def _allocate_summaries(k, v, proj_weight, block):
    batch, _, heads, head_dim = k.shape
    if proj_weight is None:
        return _allocate_pooled(k, block), k.new_empty(0, dtype=torch.float32), k.new_empty(0)
    key_weight = k.new_empty((batch, heads, head_dim), dtype=torch.float32)
    return _allocate_pooled(k, block), key_weight, k.new_empty((batch, heads, head_dim, head_dim))


@kernel_op("summarize_8bit")
def _summarize_8bit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    proj_weight: torch.Tensor | None,
    block_q: int,
    block_k: int,
    v_format: torch.dtype,
) -> tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
]:
    """Return pooled_q, pooled_k, key_weight, state, and the tensors of a QuantizedQKV."""
    out = _allocate_8bit(q, k, v, proj_weight, block_q, block_k, v_format)
    pooled_q, pooled_k, key_weight, state, q8, q_scale, k8, k_scale, v8, v_scale = out
    pool_queries(q, block_q, pooled_q, q8, q_scale)
    k_mean = summarize_keys(k, v, proj_weight, block_k, pooled_k, key_weight, state, v_scale)
    k, v = (readable(x).flatten(2) for x in (k, v))
    quantize_kv_tiles(k, v, None, None, None, q.shape[2], None, k_mean, v_scale, k8, k_scale, v8)
    return out


@_summarize_8bit.register_fake
def _allocate_8bit(q, k, v, proj_weight, block_q, block_k, v_format):
    qkv = allocate_qkv(*(x.flatten(2) for x in (q, k, v)), None, None, None, None, q.shape[2], 0.0, 0.0, v_format)
    return (_allocate_pooled(q, block_q), *_allocate_summaries(k, v, proj_weight, block_k), *qkv)


@kernel_op("sparse_linear_attention")
def _sparse_linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_map: torch.Tensor,
    key_weight: torch.Tensor | None,
    state: torch.Tensor | None,
    proj_bias: torch.Tensor | None,
    block_q: int,
    block_k: int,
) -> torch.Tensor:
    out = q.new_empty(q.shape)
    branch = None if state is None else portable.LinearBranch(key_weight, state, proj_bias)
    portable.sparse_attention_forward(q, k, v, portable.Blocks(block_map, block_q, block_k), branch, out)
    return out


@_sparse_linear_attention.register_fake
def _(q, k, v, block_map, key_weight, state, proj_bias, block_q, block_k):
    return q.new_empty(q.shape)


@kernels_op("sparse_linear_attention_8bit")
def _sparse_linear_attention_8bit(
    q8: torch.Tensor,
    q_scale: torch.Tensor,
    k8: torch.Tensor,
    k_scale: torch.Tensor,
    v8: torch.Tensor,
    v_scale: torch.Tensor,
    q: torch.Tensor,
    block_map: torch.Tensor,
    key_weight: torch.Tensor | None,
    state: torch.Tensor | None,
    proj_bias: torch.Tensor | None,
    block_q: int,
    block_k: int,
    dtype: torch.dtype,
    out_scale: torch.Tensor | None,
) -> torch.Tensor:
    return q.new_empty(q.shape, dtype=dtype)


def _launch_8bit(
    kernel,
    q8,
    q_scale,
    k8,
    k_scale,
    v8,
    v_scale,
    q,
    block_map,
    key_weight,
    state,
    proj_bias,
    block_q,
    block_k,
    dtype,
    out_scale,
):
    out = q.new_empty(q.shape, dtype=dtype)
    qkv = QuantizedQKV(q8, q_scale, k8, k_scale, v8, v_scale, q.dtype)
    branch = None if state is None else portable.LinearBranch(key_weight, state, proj_bias)
    kernel.sparse_attention_forward(qkv, q, portable.Blocks(block_map, block_q, block_k), branch, out, out_scale)
    return out


launch_gluon_8bit, launch_portable_8bit = (
    _sparse_linear_attention_8bit.launch(name, partial(_launch_8bit, kernel))
    for name, kernel in ((GLUON, sm90), (PORTABLE, portable_8bit))
)
SPARSE_LINEAR_ATTENTION = Op(
    "sparse_linear_attention",
    (
        Kernel(GLUON, _why_not_gluon, partial(_fused, launch_gluon_8bit)),
        Kernel(PORTABLE, why_not_fused, partial(_fused, launch_portable_8bit)),
        Kernel(REFERENCE, why_not_reference, _by_reference, is_fused=False),
    ),
)
