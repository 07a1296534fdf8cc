"""block_sparse_attention: softmax attention to the key blocks that are estimated to matter, for any model.

    out = (1 - Σ p_left) · softmax(q kᵀ / √D) v over the kept blocks + Σ p_left · (mean of v in the block)

q, k, v, out [B, S, H, D]; block_sparse_reference.py defines p and the kept blocks. Each head and block of queries keeps
as many blocks of keys as hold the share `mass` of the attention. There are no weights and no linear branch: this is not
sparse-linear attention (sparse_linear_attention.py), which models are trained with, though one kernel runs both.
One kernel pools q, k and v, one estimates p, one makes the lists (block_sparse_map.py), and one attends and adds the
estimate for the rest. In 8 bits on sm_90 the last is the dense kernel with lists (block_sparse_sm90.py), if it takes
the blocks. No gradient: under autograd the reference runs.
"""

from __future__ import annotations

from functools import partial

import torch

from ..attention_8bit.attention_8bit_reference import KEY_GROUP, output_scale, quantized_values
from ..attention_8bit.quantize_qkv import QuantizedQKV
from ..attention_8bit.spec import HEAD_DIMS, default_v_format
from ..choice.registry import GLUON, PORTABLE, REFERENCE, Kernel, Op, spec_of, why_not_ours, why_not_reference
from ..dispatch import kernel_op, kernels_op
from ..launch import recording
from ..quantized import FP8, INT8, Quantized
from ..sparse_linear import sparse_linear_8bit_portable as portable_8bit
from ..sparse_linear import sparse_linear_portable as portable
from ..sparse_linear.sparse_linear_attention import SparseSpec, why_not_fused
from . import block_sparse_reference as reference
from . import block_sparse_sm90 as sm90
from .block_sparse_map import choose_lists, pool_estimated, pool_parts
from .block_sparse_reference import LN_2, less_mean, part_size

BLOCKS = (128, 64)  # queries and keys of a block, if block_sparse_sm90 does not run


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mass: float,
    block_q: int = BLOCKS[0],
    block_k: int = BLOCKS[1],
    implementation: str = "auto",
) -> torch.Tensor:
    """Return block-sparse attention of q, k, v: [B, S, H, D] in their dtype.

    q, k, v: [B, S, H, D] of one dtype, with any strides.
    mass: the estimated share of the attention that the kept blocks hold, above 0 and at most 1. 1 is dense attention.
    block_q, block_k: tokens of a block of queries and of keys.
    implementation: "auto", "triton" or "torch" (see dispatch.py). The kernels take head_dims 64 and 128 and blocks of
        64 and 128 tokens.

    q, k and v have gradients, which the reference computes.
    Raises ValueError for shapes, dtypes, devices, blocks or a mass that do not fit together.
    """
    _check(q, k, v, mass, block_q, block_k)
    options = {"head_dim": q.shape[3], "block_q": block_q, "block_k": block_k}
    pick = BLOCK_SPARSE_ATTENTION.pick(spec_of(implementation, q, k, v, kind=SparseSpec, **options))
    return torch.empty_like(q) if q.numel() == 0 else pick.launch(q, k, v, mass, block_q, block_k)


def block_sparse_attention_8bit(
    qkv: QuantizedQKV,
    *,
    mass: float,
    block_q: int | None = None,
    block_k: int | None = None,
    result: torch.dtype | None = None,
    implementation: str = "auto",
) -> torch.Tensor | Quantized:
    """Return block-sparse attention of 8-bit q, k and v from quantize_qkv: [B, S, H, D] in their original dtype.

    mass: the estimated share of the attention that the kept blocks hold, above 0 and at most 1. On sm_90 attention is
        dense where nearly all blocks would be kept, which is faster there.
    block_q, block_k: tokens of a block of queries and of keys. Give both or neither. Without them the sizes are the
        fastest for this device (`block_sparse_sizes`). On sm_90 the kernels also take blocks of 192 queries and 128
        keys.
    result: float8_e4m3fn to return a Quantized [B, S, H·D] instead, with a scale per sample as `attention_8bit` has.
    implementation: "auto", "triton" or "torch" (see dispatch.py).
    """
    if result not in (None, FP8):
        raise ValueError(f"block_sparse_attention_8bit: result={result}; accepted are float8_e4m3fn and None.")
    if block_q is None and block_k is None:
        block_q, block_k = _fastest_8bit_sizes(qkv.q.device, qkv.dtype, qkv.v.dtype)
    _check_options(mass, block_q, block_k)
    spec = spec_of(
        implementation,
        *qkv[:6],
        kind=SparseSpec,
        eight_bits=(INT8, FP8) if qkv.v.dtype == FP8 else (INT8,),
        result=result or qkv.dtype,
        head_dim=qkv.q.shape[3],
        block_q=block_q,
        block_k=block_k,
        v_format=qkv.v.dtype,
    )
    pick = BLOCK_SPARSE_ATTENTION_8BIT.pick(spec)
    if qkv.q.numel() == 0:
        out = qkv.q.new_empty(qkv.q.shape, dtype=result or qkv.dtype)
        return out if result is None else quantized_values(out, qkv.v_scale.new_ones(len(out)))
    return pick.launch(qkv, mass, block_q, block_k, result or qkv.dtype)


def block_sparse_sizes(device: torch.device, dtype: torch.dtype, *, quantized: bool) -> tuple[int, int]:
    """Return the fastest block sizes on a device for a result of this dtype: tokens of queries, and of keys."""
    return _fastest_8bit_sizes(device, dtype, default_v_format(device)) if quantized else BLOCKS


def _fastest_8bit_sizes(device: torch.device, dtype: torch.dtype, v_format: torch.dtype) -> tuple[int, int]:
    takes_sm90 = sm90.why_not(device, dtype, v_format, HEAD_DIMS[0], *sm90.BLOCKS) is None
    return sm90.BLOCKS if takes_sm90 else BLOCKS


def kept_share(
    q: torch.Tensor, k: torch.Tensor, *, mass: float, block_q: int = BLOCKS[0], block_k: int = BLOCKS[1]
) -> float:
    """Return the share of all pairs of blocks that block-sparse attention of q and k [B, S, H, D] keeps with these
    block sizes. In 8 bits the sizes may differ (`block_sparse_sizes`)."""
    counts = reference.lists(q, k, mass, block_q, block_k).counts
    return counts.double().mean().item() / -(-q.shape[1] // block_k)


def _check(q, k, v, mass, block_q, block_k):
    if q.dim() != 4:
        raise ValueError(f"block_sparse_attention: q has shape {list(q.shape)}; it takes [B, S, H, D].")
    for name, x in (("k", k), ("v", v)):
        if x.shape != q.shape or x.dtype != q.dtype:
            raise ValueError(
                f"block_sparse_attention: {name} is {x.dtype} {list(x.shape)}; it must be like q, {q.dtype} "
                f"{list(q.shape)}."
            )
    _check_options(mass, block_q, block_k)


def _check_options(mass, block_q, block_k):
    if not 0 < mass <= 1:
        raise ValueError(f"block_sparse_attention: mass={mass}; it is a share of the attention, in (0, 1].")
    if (block_q is None) != (block_k is None):
        raise ValueError("block_sparse_attention: give block_q and block_k together, or neither.")
    for name, block in (("block_q", block_q), ("block_k", block_k)):
        if block < 1:
            raise ValueError(f"block_sparse_attention: {name}={block}; a block has at least one token.")


def _fused(q, k, v, mass, block_q, block_k):
    tokens = q.shape[1]
    pooled_q = pool_estimated(q, block_q, q.dtype)
    pooled_k = less_mean(pool_estimated(k, block_k, torch.float32), tokens, part_size(block_k)).to(q.dtype)
    found = choose_lists(pooled_q, pooled_k, q.shape[3] ** -0.5, tokens, mass, block_q, block_k)
    left_value = found.left @ pool_parts(v, None, tokens, block_k, block_k, 1, torch.float32)
    lists = (found.block_map, found.counts, found.kept_share, left_value)
    return _block_sparse_attention(q, k, v, *lists, block_q, block_k)


def _with_result(attend, qkv, mass, block_q, block_k, result):
    """Attend in 8 bits. Return [B, S, H, D] in a dtype, or for e4m3 a Quantized [B, S, H·D].

    The scale of dense attention bounds this result too: the means of v have the shares that the softmax loses.
    """
    out_scale = output_scale(qkv.v_scale) if result == FP8 else None
    out = attend(qkv, mass, block_q, block_k, result, out_scale)
    return out if out_scale is None else quantized_values(out, out_scale)


def _fused_8bit(attend, qkv, mass, block_q, block_k, result, out_scale):
    """Run the kernels in 8 bits. attend: launches the last kernel."""
    q, q_scale, k, k_scale, v, v_scale, dtype = qkv
    tokens = q.shape[1]
    pooled_q = pool_estimated(q, block_q, dtype, q_scale)
    pooled_k = pool_estimated(k, block_k, dtype, k_scale.mT, KEY_GROUP)
    found = choose_lists(pooled_q, pooled_k, LN_2, tokens, mass, block_q, block_k)
    # An e4m3 v is [B, H, D, T], with every 32 tokens in another order, which does not change a mean.
    values = v.permute(0, 3, 1, 2) if v.dtype == FP8 else v
    means = pool_parts(values, None, tokens, block_k, block_k, 1, torch.float32)
    left_value = found.left @ (means * v_scale[:, :, None])
    lists = (found.block_map, found.counts, found.kept_share, left_value)
    return attend(*qkv[:6], *lists, block_q, block_k, result, out_scale, mass)


def _by_reference(q, k, v, mass, block_q, block_k):
    if recording():
        return torch.empty_like(q)  # the reference is slow, and has no kernel to compile
    return reference.block_sparse_attention(q, k, v, mass, block_q, block_k)


def _by_reference_8bit(qkv, mass, block_q, block_k, result, out_scale):
    if recording():
        return qkv.q.new_empty(qkv.q.shape, dtype=result)
    return reference.block_sparse_attention_8bit(*qkv, mass, block_q, block_k, out_scale)


@kernel_op("block_sparse_attention")
def _block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_map: torch.Tensor,
    counts: torch.Tensor,
    kept_share: torch.Tensor,
    left_value: torch.Tensor,
    block_q: int,
    block_k: int,
) -> torch.Tensor:
    out = q.new_empty(q.shape)
    blocks = portable.Blocks(block_map, block_q, block_k, counts, kept_share, left_value)
    portable.sparse_attention_forward(q, k, v, blocks, None, out)
    return out


@_block_sparse_attention.register_fake
def _(q, k, v, block_map, counts, kept_share, left_value, block_q, block_k):
    return q.new_empty(q.shape)


@kernels_op("block_sparse_attention_8bit")
def _block_sparse_attention_8bit(
    q8: torch.Tensor,
    q_scale: torch.Tensor,
    k8: torch.Tensor,
    k_scale: torch.Tensor,
    v8: torch.Tensor,
    v_scale: torch.Tensor,
    block_map: torch.Tensor,
    counts: torch.Tensor,
    kept_share: torch.Tensor,
    left_value: torch.Tensor,
    block_q: int,
    block_k: int,
    dtype: torch.dtype,
    out_scale: torch.Tensor | None,
    mass: float,
) -> torch.Tensor:
    return q8.new_empty(q8.shape, dtype=dtype)


def _launch_8bit(
    gluon,
    q8,
    q_scale,
    k8,
    k_scale,
    v8,
    v_scale,
    block_map,
    counts,
    kept_share,
    left_value,
    block_q,
    block_k,
    dtype,
    out_scale,
    mass,
):
    out = q8.new_empty(q8.shape, dtype=dtype)
    qkv = QuantizedQKV(q8, q_scale, k8, k_scale, v8, v_scale, dtype)
    blocks = portable.Blocks(block_map, block_q, block_k, counts, kept_share, left_value)
    if gluon:
        sm90.attention_forward(qkv, blocks, out, out_scale, mass)
    else:
        portable_8bit.sparse_attention_forward(qkv, None, blocks, None, out, out_scale)
    return out


def _why_not_gluon(spec: SparseSpec) -> str | None:
    return why_not_ours(spec) or sm90.why_not(spec.device, spec.result or spec.dtype, *spec.sizes)


def _why_not_portable_8bit(spec: SparseSpec) -> str | None:
    reason = why_not_fused(spec)
    if reason is None or (spec.block_q, spec.block_k) != sm90.BLOCKS:
        return reason
    return _why_not_gluon(spec) or reason  # only the sm_90 kernel takes these blocks, so its reason matters


BLOCK_SPARSE_ATTENTION = Op(
    "block_sparse_attention",
    (
        Kernel(PORTABLE, why_not_fused, _fused),
        Kernel(REFERENCE, why_not_reference, _by_reference, is_fused=False),
    ),
)
_gluon = _block_sparse_attention_8bit.launch(GLUON, partial(_launch_8bit, True))
_portable = _block_sparse_attention_8bit.launch(PORTABLE, partial(_launch_8bit, False))
BLOCK_SPARSE_ATTENTION_8BIT = Op(
    "block_sparse_attention",
    (
        Kernel(GLUON, _why_not_gluon, partial(_with_result, partial(_fused_8bit, _gluon))),
        Kernel(PORTABLE, _why_not_portable_8bit, partial(_with_result, partial(_fused_8bit, _portable))),
        Kernel(REFERENCE, why_not_reference, partial(_with_result, _by_reference_8bit), is_fused=False),
    ),
)
