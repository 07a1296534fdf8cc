"""LTX-2's transformer for a file in its authors' names, such as TurboT2AV's, by the shapes of its tensors."""

from __future__ import annotations

import re
from pathlib import Path

from accelerate import init_empty_weights
from diffusers import LTX2VideoTransformer3DModel

from ....checkpoints.lazy import Tensors
from ....checkpoints.names import without_prefix
from ....checkpoints.whole import refuse_without
from .cases import LTX2_19B
from .names import LTX2_NAMES

# Parts that LTX-2.0 does not have. A file does not tell the rest of such a model's config.
LATER = re.compile(r"\.to_gate_logits\.|(^|\.)prompt_scale_shift_table$|^(audio_)?prompt_adaln")


def from_files(source: Path, tensors: Tensors) -> LTX2VideoTransformer3DModel:
    """Return the transformer that a file holds, on the meta device. Raises ValueError for a file of another model."""
    with init_empty_weights():
        return LTX2VideoTransformer3DModel(**_config_of(source, tensors))


def _config_of(source: Path, tensors: Tensors) -> dict[str, object]:
    """Return the arguments of the transformer that a file is for.

    Widths and the number of layers are inferred from shapes. The rest, such as the number of heads, is LTX-2.0's.
    Raises ValueError for a file of another model, or with weights in a quantised format that is not known.
    """
    shapes = {without_prefix(name): tensor.shape for name, tensor in tensors.items()}
    if later := next(filter(LATER.search, shapes), None):
        raise ValueError(
            f"{source} holds LTX-2.3 or later (it has {later}), whose config is not known from a file; load it into a "
            "pipeline with trp.load_turbodiffusion."
        )

    def shape_of(name: str) -> tuple[int, ...]:
        official = LTX2_NAMES.official_parameter(name)
        found = shapes.get(name, shapes.get(official))
        if found is None:
            refuse_without(source, tensors, LTX2_NAMES.title, tuple(dict.fromkeys((official, name))))
        return found

    first = f"{LTX2_NAMES.blocks}.0"
    config = {
        **LTX2_19B,
        "num_layers": len({name.split(".")[1] for name in shapes if name.startswith(f"{LTX2_NAMES.blocks}.")}),
        "caption_channels": shape_of("caption_projection.linear_1.weight")[1],
    }
    for stream in ("", "audio_"):
        width, config[f"{stream}in_channels"] = shape_of(f"{stream}proj_in.weight")
        config[f"{stream}out_channels"] = shape_of(f"{stream}proj_out.weight")[0]
        config[f"{stream}attention_head_dim"] = width // config[f"{stream}num_attention_heads"]
        config[f"{stream}cross_attention_dim"] = shape_of(f"{first}.{stream}attn2.to_k.weight")[1]
    return config
