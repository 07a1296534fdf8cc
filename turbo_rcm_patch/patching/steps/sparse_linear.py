"""Sparse-linear attention (SLA) in a Wan block: the projection that weights trained with it bring, the processor that
makes diffusers' own forward attend so, and the step of a plan.

    attn1.proj_l          nn.Linear(D, D), in the state_dict as blocks.N.attn1.proj_l: diffusers' model has none
    attn1.processor       SparseAttnProcessor: what a call of the whole module runs

A block without proj_l attends to all keys, as always.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import nn

from ... import kernels
from ...checkpoints.whole import PROJ_L
from ...config import PatchConfig
from ...kernels.sparse_linear.sparse_linear_reference import linear_attention
from ...plain import is_autocast, why_not_plain
from ..journal import Journal
from .context_parallel import ulysses_attention, why_not_between_all_to_alls
from .plan import REFERENCE, Call, Step, Stream

BlockSizes = tuple[int, int]  # tokens of a block of queries and of a block of keys
NamedBlocks = Iterable[tuple[str, nn.Module]]  # a transformer's blocks with their paths in it


class SparseAttnProcessor:
    """WanAttnProcessor with sparse-linear attention in the place of attention, for a self-attention that has proj_l.

    The softmax runs in the inputs' dtype. original: the processor in whose place it is. topk, blocks, implementation:
    as of PatchConfig. quantized: whether the blocks that are published for 8-bit attention count, where blocks is None.

    Attributes:
        block_map: the key blocks to keep, as kernels.sparse_linear_attention takes them; None: the choice by topk. Set
            where two computations are compared that should not differ in a choice between near ties.
    """

    def __init__(
        self,
        original: WanAttnProcessor,
        topk: float,
        blocks: BlockSizes | None,
        implementation: str,
        quantized: bool = False,
    ):
        self.original, self.topk, self.blocks, self.implementation = original, topk, blocks, implementation
        self.quantized = quantized
        self.block_map: torch.Tensor | None = None

    # What diffusers sets on processors is the original's: it was there before, and stays when the patch goes.

    @property
    def _attention_backend(self) -> object:
        return self.original._attention_backend

    @_attention_backend.setter
    def _attention_backend(self, value: object) -> None:
        self.original._attention_backend = value  # for when the patch goes: no backend knows SLA

    @property
    def _parallel_config(self) -> object:
        return self.original._parallel_config

    @_parallel_config.setter
    def _parallel_config(self, value: object) -> None:
        self.original._parallel_config = value

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """hidden_states [B, S, C] to [B, S, C]. Raises ValueError with an attention mask or another sequence."""
        if attention_mask is not None or encoder_hidden_states is not None:
            raise ValueError("sparse-linear attention is a self-attention without a mask.")
        q, k, v = _project(attn, hidden_states)
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (attn.norm_q(q), attn.norm_k(k), v))
        if rotary_emb is not None:
            q, k = (_rotate(x, *rotary_emb) for x in (q, k))
        if is_autocast(q.device):  # as scaled_dot_product_attention under it
            q, k, v = (x.to(torch.get_autocast_dtype(x.device.type)) for x in (q, k, v))
        attended = attend(attn, False, self.implementation, q, k, v).flatten(2, 3).type_as(q)
        for layer in attn.to_out:
            attended = layer(attended)
        return attended


def _project(attn: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return attn.to_qkv(x).chunk(3, dim=-1) if attn.fused_projections else (attn.to_q(x), attn.to_k(x), attn.to_v(x))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of x [B, S, H, D] with diffusers' tables, each angle of a pair in both of its columns."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).type_as(x)


def add_projections(journal: Journal, blocks: NamedBlocks, proj_l: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Give the self-attentions of blocks, by their paths, a proj_l of these weights, {"weight", "bias"}."""
    for path, block in blocks:
        if path in proj_l:
            like = block.attn1.to_out[0].weight
            linear = nn.utils.skip_init(nn.Linear, *proj_l[path]["weight"].shape, device=like.device, dtype=like.dtype)
            with torch.no_grad():
                for name, tensor in proj_l[path].items():
                    getattr(linear, name).copy_(tensor)
            linear.requires_grad_(like.requires_grad).train(block.training)
            journal.set_module(block.attn1, PROJ_L, linear)


def is_projection(name: str) -> bool:
    """Whether a name is of SLA's projections, blocks.N.attn1.proj_l.weight or .bias."""
    return f".{PROJ_L}." in name


def by_block(projections: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """SLA's projections by the paths of their blocks."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in projections.items():
        path, _, part = name.partition(f".attn1.{PROJ_L}.")
        found.setdefault(path, {})[part] = tensor
    return found


def use_processors(journal: Journal, blocks: NamedBlocks, config: PatchConfig) -> None:
    """Let the self-attentions that have a proj_l be sparse."""
    for _, block in blocks:
        if has_projection(block.attn1):
            options = (config.topk, config.blocks, config.implementation, config.in_8_bits("attention"))
            journal.set(block.attn1, "processor", SparseAttnProcessor(block.attn1.processor, *options))


def why_not_sparse(name: str, blocks: NamedBlocks) -> str | None:
    """Why a model of these blocks cannot have sparse-linear attention, as a sentence; None when it can."""
    blocks = list(blocks)
    if reason := why_not_wan_attention(name, blocks):
        return reason  # such a model has no use for weights with a proj_l
    if any(has_projection(block.attn1) for _, block in blocks):
        return None
    return (
        f"{name} has no proj_l, which weights that were trained with sparse-linear attention (SLA) bring; load them "
        "with trp.load_turbodiffusion, take attention='block_sparse' (the preset 'block_sparse'), which needs no "
        "training, or the preset 'exact' or 'quantized'."
    )


def why_not_wan_attention(name: str, blocks: NamedBlocks) -> str | None:
    """Why sparse-linear attention cannot take the place of the attention in blocks, as a sentence; None when it can."""
    others = {type(block.attn1.processor) for _, block in blocks} - {WanAttnProcessor}
    if not others:
        return None
    # With their modules: Wan-Animate's has the same name.
    named = ", ".join(sorted(f"{other.__module__}.{other.__qualname__}" for other in others))
    return (
        f"{name} cannot have sparse-linear attention (SLA), which takes the place of a "
        f"{WanAttnProcessor.__module__}.{WanAttnProcessor.__qualname__}; its self-attentions have a {named}. Take "
        "another preset: 'exact', 'quantized' or 'block_sparse'."
    )


def has_projection(attn: nn.Module) -> bool:
    """Whether a self-attention has the projection of SLA's linear branch."""
    return isinstance(getattr(attn, PROJ_L, None), nn.Module)


def is_sparse(attn: nn.Module) -> bool:
    """Whether a self-attention is sparse-linear."""
    return type(attn.processor) is SparseAttnProcessor and has_projection(attn)


def attention(attn: nn.Module, stream: Stream, call: Call) -> Step:
    """Sparse-linear attention: (q, k, v [B, S, H, D]) -> [B, S, H, D]."""
    quantized = call.config.in_8_bits("attention") and call.derivative is None
    implementation, reason = call.choose()
    blocks = block_sizes(attn.processor, call.device)
    kernel = REFERENCE
    if reason is None:
        head_dim = attn.inner_dim // attn.heads
        kernel, reason = kernels.sparse_attention_kernel(call.device, call.dtype, head_dim, blocks, quantized=quantized)
    run = partial(attend, attn, quantized, implementation)
    return Step(run, f"{kernel}, {_share(attn.processor, stream, blocks[1])}", reason)


def _share(processor: SparseAttnProcessor, stream: Stream, block_k: int) -> str:
    tokens = stream.tokens_per_sample
    if processor._parallel_config is not None:
        tokens *= processor._parallel_config.context_parallel_config.ulysses_degree
    kept = kernels.kept_blocks(tokens, block_k, processor.topk)
    total = -(-tokens // block_k)
    return f"SLA {kept.count}/{total} blocks" + (", where the published rule keeps none" if kept.raised else "")


def block_sizes(processor: SparseAttnProcessor, device: torch.device) -> BlockSizes:
    """Tokens of a block of queries and of a block of keys: the same whether a call's softmax is in 8 bits or not."""
    return processor.blocks or kernels.sparse_block_sizes(device, quantized=processor.quantized)


def attend(attn: nn.Module, quantized: bool, implementation: str, q, k, v) -> torch.Tensor:
    """Sparse-linear attention of an attention's q, k, v [B, S, H, D], with the processor and proj_l that it has now."""
    parallel_config = attn.processor._parallel_config
    run = partial(_attend_whole, attn, quantized, implementation)
    if parallel_config is None:
        return run(q, k, v)
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    reason = why_not_between_all_to_alls(parallel_config, attn.heads, differentiated=differentiated)
    if reason is not None:
        raise ValueError(f"sparse-linear attention does not run under {reason}; take Ulysses, without gradients.")
    return ulysses_attention(parallel_config, run, q, k, v)


def _attend_whole(attn, quantized, implementation, q, k, v):
    block_q, block_k = block_sizes(attn.processor, q.device)
    block_map = attn.processor.block_map
    options = {"topk": attn.processor.topk} if block_map is None else {"block_map": block_map}
    options |= {"block_q": block_q, "block_k": block_k, "quantized": quantized, "implementation": implementation}
    proj_l = attn.proj_l
    if why_not_plain(proj_l, nn.Linear) is None:
        # It is small: where offloading knows nothing of it, it comes from wherever it rests.
        weight, bias = (x if x is None else x.to(q.device, q.dtype) for x in (proj_l.weight, proj_l.bias))
        return kernels.sparse_linear_attention(q, k, v, weight, bias, **options)
    # Something on the module counts: a LoRA, a hook. Its own call projects the linear branch.
    sparse = kernels.sparse_linear_attention(q, k, v, q.new_zeros(q.shape[-1], q.shape[-1]), **options)
    return sparse + proj_l(linear_attention(q, k, v))
