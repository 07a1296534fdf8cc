"""Checks that an encoder has the layers of transformers, so that they can run without calling each of their modules."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.models.umt5.modeling_umt5 import (
    UMT5Attention,
    UMT5DenseActDense,
    UMT5DenseGatedActDense,
    UMT5LayerFF,
    UMT5LayerNorm,
    UMT5LayerSelfAttention,
    UMT5Stack,
)

from ...plain import hook_on, is_autocast

_DTYPES = (torch.bfloat16, torch.float32)  # transformers clamps infinities of fp16
# Classes of modules that are not called: their parts are called, or their weights read.
ENTERED = (
    UMT5LayerSelfAttention,
    UMT5Attention,
    UMT5LayerFF,
    UMT5DenseActDense,
    UMT5DenseGatedActDense,
    UMT5LayerNorm,
    nn.Embedding,
)


def gives_more(config: PretrainedConfig) -> bool:
    """True if a model's configuration asks for more than the last hidden state, or for tuples."""
    return config.output_attentions or config.output_hidden_states or not config.return_dict


def why_not_lean(stack: UMT5Stack) -> str | None:
    """Return the reason why the layers must run as transformers runs them, or None.

    Linears, blocks and the token embeddings are called as modules, so hooks on them do not count.
    """
    embeddings = stack.embed_tokens
    if stack.training or stack.is_decoder:
        return "training" if stack.training else "a decoder"
    if gives_more(stack.config):
        return "other outputs"
    dtype = embeddings.weight.dtype
    if dtype not in _DTYPES or is_autocast(embeddings.weight.device):
        return "fp16 or autocast"
    entered, read = [], [stack.final_layer_norm]
    for block in stack.block:
        attention, feed_forward = block.layer[0], block.layer[-1]
        entered += [attention, attention.SelfAttention, feed_forward, feed_forward.DenseReluDense]
        read += [attention.layer_norm, attention.SelfAttention.relative_attention_bias, feed_forward.layer_norm]
    for module in (*entered, *read):
        if type(module) not in ENTERED or (reason := hook_on(module)):
            return f"a {type(module).__name__}" if type(module) not in ENTERED else reason
    outputs = [block.layer[-1].DenseReluDense.wo.weight for block in stack.block]
    # transformers casts the input of a wo that it keeps in fp32, but not of one in int8 or with a method `weight`.
    cast = any(isinstance(w, torch.Tensor) and w.dtype not in (dtype, torch.int8) for w in outputs)
    return "weights of several dtypes" if cast or any(m.weight.dtype != dtype for m in read) else None
