"""The step of block-sparse attention, and the reasons for dense attention instead.

Block-sparse attention needs no weights of its own and replaces every self-attention. A model that was trained with
another sparse attention is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from ... import kernels
from ...config import BlockSparse, PatchConfig
from ...kernels import FP8
from ...kernels.choice.registry import why_not_ours
from .context_parallel import ulysses_attention
from .in_8_bits import formats_label, tokens_after_exchange
from .plan import Call, Step, Stream
from .sparse_linear import SelfAttentions, has_projection

# From this many tokens per sample on, attention is dense if no kernel takes a config's blocks: the reference computes
# all scores.
TOO_MANY_FOR_REFERENCE = 8192


def why_trained_otherwise(name: str, attentions: SelfAttentions) -> str | None:
    """Return why a model with these self-attentions is not for block-sparse attention, as a sentence, or None."""
    if any(has_projection(attn) for _, attn, _ in attentions):
        return (
            f"{name} was trained with sparse-linear attention (it has proj_l), which block-sparse attention is not; "
            "take the preset 'sparse'."
        )
    return None


def layers_attended_exactly(config: PatchConfig, count: int) -> Mapping[int, str]:
    """Return the blocks that exact_layers names, as index -> reason. count: the number of blocks."""
    if not isinstance(config, BlockSparse) or config.exact_layers is None:
        return {}
    first, last = config.exact_layers
    return {i: f"exact_layers={(first, last)}" for i in range(count) if i < first or i >= count - last}


def why_dense(attn: nn.Module, stream: Stream, call: Call, *, quantized: bool) -> str | None:
    """Return the reason why a self-attention attends to all keys, or None if it is block-sparse.

    quantized: True if it gets q, k and v in 8 bits; the config alone does not decide this. attention.py decides about
    diffusers' dispatch and several GPUs.
    """
    config = call.config
    if not isinstance(config, BlockSparse):
        return f"{config.tier.name} tier"
    if call.exactly is not None or call.derivative is not None:
        return call.exactly or "autograd"
    tokens = _tokens(attn, stream)
    if tokens < config.min_tokens:
        return f"{tokens} tokens, fewer than min_tokens={config.min_tokens}"
    are_asked_for = config.blocks is not None and config.implementation == "auto"
    if why_not_ours(call.spec()) is not None or (are_asked_for and tokens < TOO_MANY_FOR_REFERENCE):
        return None
    op, fields = _op_and_fields(attn, call, quantized)
    return op.why_not_fused(call.spec(kernels.SparseSpec, **fields))


def _tokens(attn: nn.Module, stream: Stream) -> int:
    """Return the tokens of a sample on all GPUs."""
    parallel = attn.processor._parallel_config
    ranks = 1 if parallel is None else parallel.context_parallel_config.ulysses_degree
    return stream.tokens_per_sample * ranks


def _op_and_fields(
    attn: nn.Module, call: Call, quantized: bool, result: torch.dtype | None = None
) -> tuple[kernels.Op, dict[str, object]]:
    """The op, and the fields of its SparseSpec. result: the result's dtype if quantized, or None for the call's."""
    block_q, block_k = block_sizes(call, quantized=quantized)
    fields = {"head_dim": attn.inner_dim // attn.heads, "block_q": block_q, "block_k": block_k}
    if not quantized:
        return kernels.BLOCK_SPARSE_ATTENTION, fields
    v_format = kernels.default_v_format(call.device, call.config.implementation)
    return kernels.BLOCK_SPARSE_ATTENTION_8BIT, fields | {"v_format": v_format, "result": result or call.dtype}


def block_sizes(call: Call, *, quantized: bool) -> tuple[int, int]:
    """Return the tokens in a block of queries and in a block of keys."""
    return call.config.blocks or kernels.block_sparse_sizes(call.device, call.dtype, quantized=quantized)


def attention(attn: nn.Module, call: Call, *, quantized: bool, result: torch.dtype | None = None) -> Step:
    """Return block-sparse attention: (q, k, v [B, S, H, D]), or one QuantizedQKV if quantized, -> [B, S, H, D].

    On several GPUs q, k and v are this GPU's tokens, but a QuantizedQKV has the tokens of all.
    result: the format that the next step takes, or None. The step gives a Quantized [B, S, C] for e4m3 if quantized,
    and for any format if it exchanges tokens.
    """
    gives = FP8 if quantized and result == FP8 else None
    op, fields = _op_and_fields(attn, call, quantized, gives)
    pick = call.pick(op, kernels.SparseSpec, **fields)
    options = call.config.mass, fields["block_q"], fields["block_k"]
    if quantized:
        options += (fields["result"],)
    run = partial(_attend, pick.launch, options)
    kernel = formats_label(pick, fields["v_format"]) if quantized else pick.label
    kernel = f"{kernel}, block-sparse with mass {call.config.mass:g}"
    if attn.processor._parallel_config is not None and not quantized:
        gather, gives = tokens_after_exchange(result, call), result
        run = partial(ulysses_attention, attn.processor._parallel_config, run, gather=gather)
        kernel = f"{kernel} between all-to-alls"
    return Step(run, kernel, pick.reason, gives=gives)


def _attend(launch, options, *qkv):
    return launch(*qkv, *options)
