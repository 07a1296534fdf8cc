"""Wan's transformer for a file of rCM, TurboDiffusion or Wan's authors, by the shapes of its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import init_empty_weights
from diffusers import WanTransformer3DModel

from ....checkpoints.lazy import Tensors
from ....checkpoints.names import without_prefix
from ....checkpoints.whole import refuse_without
from .names import WAN_NAMES


def from_files(source: Path, tensors: Tensors) -> WanTransformer3DModel:
    """Return the transformer that a file holds, on the meta device. Raises ValueError for a file of another model."""
    config = _config_of(source, tensors)
    with init_empty_weights():
        return WanTransformer3DModel(**config)


def _config_of(source: Path, tensors: Tensors) -> dict[str, object]:
    """Return the arguments of the transformer that a file is for, inferred from shapes.

    The rest is as in every Wan: heads of 128 channels (or proj_l's size), patches of (1, 2, 2), an epsilon of 1e-6.
    Raises ValueError for a file of another model, or with weights in a quantised format that is not known.
    """
    shapes = {without_prefix(name).replace(".int8_weight", ".weight"): tensor.shape for name, tensor in tensors.items()}

    def shape_of(*names: str) -> tuple[int, ...]:
        found = next((shapes[name] for name in names if name in shapes), None)
        if found is None:
            refuse_without(source, tensors, WAN_NAMES.title, names)
        return found

    embedder = "condition_embedder"
    dim, *patch = shape_of("patch_embedding.weight")
    numbers = {int(found[1]) for name in shapes if (found := re.match(r"blocks\.(\d+)\.", name))}
    config: dict[str, object] = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": dim // _head_dim(shapes),
        "attention_head_dim": _head_dim(shapes),
        "in_channels": torch.Size(patch).numel() // 4,
        "out_channels": shape_of("head.head.weight", "proj_out.weight")[0] // 4,
        "text_dim": shape_of("text_embedding.0.weight", f"{embedder}.text_embedder.linear_1.weight")[1],
        "freq_dim": shape_of("time_embedding.0.weight", f"{embedder}.time_embedder.linear_1.weight")[1],
        "ffn_dim": shape_of("blocks.0.ffn.0.weight", "blocks.0.ffn.net.0.proj.weight")[0],
        "num_layers": len(numbers),
        "cross_attn_norm": "blocks.0.norm3.weight" in shapes or "blocks.0.norm2.weight" in shapes,
        "qk_norm": "rms_norm_across_heads",
    }
    image = next(
        (shapes[n] for n in ("img_emb.proj.0.weight", f"{embedder}.image_embedder.norm1.weight") if n in shapes), None
    )
    if image is not None:
        position = shapes.get("img_emb.emb_pos", shapes.get(f"{embedder}.image_embedder.pos_embed"))
        config |= {"image_dim": image[0], "added_kv_proj_dim": dim, "pos_embed_seq_len": position and position[1]}
    return config


def _head_dim(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return next((shape[0] for name, shape in shapes.items() if WAN_NAMES.proj_l.match(name)), 128)
