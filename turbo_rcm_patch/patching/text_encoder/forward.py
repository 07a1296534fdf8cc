"""The forward of transformers' UMT5EncoderModel on a prompt's real tokens, with a third of the launches.

transformers launches 60 kernels for each of 24 layers, and computes the positions' buckets in each. An H200 then waits
for its host: 45.6 ms for 512 tokens, of which its arithmetic takes 8.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import UMT5EncoderModel
from transformers.activations import NewGELUActivation
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.umt5.modeling_umt5 import (
    UMT5Attention,
    UMT5Block,
    UMT5DenseGatedActDense,
    UMT5LayerNorm,
    UMT5Stack,
)

from ...kernels.attention.sdpa import preferring
from ...plain import hook_on
from .graph import TOKENS, EncoderGraphs
from .lean import gives_more, why_not_lean
from .prompt_cache import PromptCache

KEPT = "_turbo_rcm_patch_kept"  # the attribute of an encoder that holds the results of its last prompts
GRAPHS = "_turbo_rcm_patch_graphs"  # the attribute of an encoder that holds its EncoderGraphs, or None


def encoder_forward(
    self: UMT5EncoderModel,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    inputs_embeds: torch.Tensor | None = None,
    **options: object,
) -> BaseModelOutput | tuple[torch.Tensor, ...]:
    """Encode tokens [B, T] without the padding after the longest prompt. Bound on instances.

    Wan's pipelines pad prompts to 512 tokens and drop the results after each prompt's own. Here those are 0.
    """
    as_usual = self.training or gives_more(self.config) or options or inputs_embeds is not None
    lengths = None if as_usual else lengths_of(input_ids, attention_mask)
    if lengths is None:
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        return type(self).forward(self, **given, **options)
    kept: PromptCache = vars(self)[KEPT]
    key = kept.key(self, input_ids, lengths)
    hidden = kept.get(key)
    if hidden is None:
        hidden = _encode(self, input_ids, attention_mask, max(lengths), is_even=min(lengths) == max(lengths))
        for row, length in enumerate(lengths):
            hidden[row, length:] = 0
        kept.put(key, hidden)
    return BaseModelOutput(last_hidden_state=F.pad(hidden, (0, 0, 0, input_ids.shape[1] - hidden.shape[1])))


def _encode(
    encoder: UMT5EncoderModel, input_ids: torch.Tensor, mask: torch.Tensor, longest: int, is_even: bool
) -> torch.Tensor:
    """Return the embeddings [B, longest, d_model] of tokens [B, T]. is_even: True if all prompts are as long."""
    graphs: EncoderGraphs | None = vars(encoder)[GRAPHS]
    if graphs is not None and graphs.takes(encoder, (input_ids, mask)):
        size = min(-(-longest // TOKENS) * TOKENS, input_ids.shape[1])
        return graphs.run(input_ids[:, :size], mask[:, :size])[:, :longest]
    mask = None if is_even else mask[:, :longest]
    return type(encoder).forward(encoder, input_ids=input_ids[:, :longest], attention_mask=mask)[0]


def lengths_of(input_ids: torch.Tensor | None, mask: torch.Tensor | None) -> list[int] | None:
    """Return the number of each prompt's tokens [B, T], or None unless its padding comes after them."""
    if input_ids is None or mask is None or mask.dim() != 2 or mask.shape != input_ids.shape:
        return None
    mask = mask.detach().cpu()  # one wait for the GPU
    lengths = (mask != 0).sum(1)
    first = torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]
    usable = len(lengths) > 0 and bool(lengths.min() > 0) and torch.equal(mask, first.to(mask.dtype))
    return lengths.tolist() if usable else None


def stack_forward(
    self: UMT5Stack,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    **options: object,
) -> BaseModelOutput | tuple[torch.Tensor, ...]:
    """Run the layers with `block_forward`, or as transformers does if it must. Bound on instances.

    input_ids [B, T]; attention_mask [B, T], 0 for padding, or None. The result is [B, T, d_model].
    """
    if not _is_tokens_alone(input_ids, attention_mask, options) or why_not_lean(self) is not None:
        return type(self).forward(self, input_ids=input_ids, attention_mask=attention_mask, **options)
    hidden = self.embed_tokens(input_ids)
    positions = torch.arange(hidden.shape[1], device=hidden.device)
    buckets = self.block[0].layer[0].SelfAttention._relative_position_bucket(positions - positions[:, None])
    hidden_keys = None
    if attention_mask is not None:
        lowest = torch.finfo(hidden.dtype).min
        hidden_keys = torch.zeros(attention_mask.shape, dtype=hidden.dtype, device=hidden.device)
        hidden_keys = hidden_keys.masked_fill(attention_mask.to(hidden.device) == 0, lowest)[:, None, None, :]
    with preferring("memory-efficient"):  # cuDNN would compile a kernel for each number of tokens
        for block in self.block:
            hidden = block(hidden, hidden_keys, buckets=buckets)
    return BaseModelOutput(last_hidden_state=_normalized(self.final_layer_norm, hidden))


def block_forward(
    self: UMT5Block,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *arguments: object,
    buckets: torch.Tensor | None = None,
    **options: object,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Compute a layer of the encoder. Bound on instances.

    hidden_states [B, T, d_model]. From `stack_forward`: buckets [T, T], those of the relative positions, and
    attention_mask [B, 1, 1, T], added to the scores, or None.
    """
    if buckets is None:
        return type(self).forward(self, hidden_states, attention_mask, *arguments, **options)
    attention, feed_forward = self.layer[0], self.layer[-1]
    normed = _normalized(attention.layer_norm, hidden_states)
    hidden_states = hidden_states + _attend(attention.SelfAttention, normed, attention_mask, buckets)
    dense, normed = feed_forward.DenseReluDense, _normalized(feed_forward.layer_norm, hidden_states)
    if type(dense) is UMT5DenseGatedActDense:
        return hidden_states + dense.wo(_activated(dense.act, dense.wi_0(normed)) * dense.wi_1(normed))
    return hidden_states + dense.wo(_activated(dense.act, dense.wi(normed)))


def _attend(
    attention: UMT5Attention, x: torch.Tensor, mask: torch.Tensor | None, buckets: torch.Tensor
) -> torch.Tensor:
    """Return the self-attention of x [B, T, d_model]; the bias of positions is added to the scores."""
    q, k, v = (
        linear(x).unflatten(-1, (attention.n_heads, attention.key_value_proj_dim)).transpose(1, 2)
        for linear in (attention.q, attention.k, attention.v)
    )
    table = attention.relative_attention_bias.weight.t()  # [H, buckets]
    bias = table.index_select(1, buckets.flatten()).unflatten(1, buckets.shape)[None]  # [1, H, T, T]
    bias = bias.expand(len(x), -1, -1, -1) if mask is None else bias + mask
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
    return attention.o(out.transpose(1, 2).flatten(2))


def _normalized(norm: UMT5LayerNorm, x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


def _activated(act: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return GELU's approximation by tanh in one kernel, or what another activation makes."""
    is_gelu = type(act) is NewGELUActivation and hook_on(act) is None
    return F.gelu(x, approximate="tanh") if is_gelu else act(x)


def _is_tokens_alone(ids: torch.Tensor | None, mask: torch.Tensor | None, options: dict[str, object]) -> bool:
    if ids is None or ids.dim() != 2 or any(value is not None for value in options.values()):
        return False
    return mask is None or mask.shape == ids.shape
