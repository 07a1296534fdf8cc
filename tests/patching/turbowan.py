"""Small weights in TurboDiffusion's naming, and its equations, for tests."""

import torch

from tests import literal_wan
from tests.official_names import official_state_dict, with_proj_l
from tests.tiny_wan import tiny_transformer_inputs, tiny_wan_transformer
from turbo_rcm_patch.patching.steps.sparse_linear import SparseAttnProcessor

BLOCKS, TOPK = (5, 4), 0.7  # 12 tokens: two of three key blocks
SLA = {"attention": "sla", "topk": TOPK, "blocks": BLOCKS}
SAGE = {**SLA, "attention": "sagesla"}


def turbo_weights(model, *, seed=9, prefix="", flat_patches=True):
    """Return the weights of another model of the same sizes, in TurboWan's naming."""
    other = tiny_wan_transformer(seed=seed, **sizes_of(model))
    return with_proj_l(official_state_dict(other, prefix=prefix, flat_patches=flat_patches), other, prefix=prefix)


def sizes_of(model):
    config = model.config
    return {
        "heads": config.num_attention_heads,
        "head_dim": config.attention_head_dim,
        "layers": config.num_layers,
        "in_channels": config.in_channels,
    }


def run(model, **options):
    with torch.no_grad():
        return model(**tiny_transformer_inputs(model, **options))[0]


def literal(state_dict, model, sla=(TOPK, *BLOCKS), dtype=torch.float64):
    weights = {name: tensor.to(dtype) for name, tensor in state_dict.items()}
    inputs = tiny_transformer_inputs(model)
    each = zip(inputs["hidden_states"], inputs["timestep"], inputs["encoder_hidden_states"], strict=True)
    heads = model.config.num_attention_heads
    return torch.stack(
        [literal_wan.wan(weights, x.to(dtype), t.to(dtype), c.to(dtype), heads=heads, sla=sla) for x, t, c in each]
    )


def is_sparse(model):
    return all(type(block.attn1.processor) is SparseAttnProcessor for block in model.blocks)
