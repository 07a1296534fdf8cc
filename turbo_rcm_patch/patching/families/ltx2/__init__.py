"""The LTX-2 family: video with sound. Two streams go through every block, and attend to each other.

call.py: kinds of calls. block.py, attentions.py: how the steps of a block are decided. sub_layers.py: its plan and how
that runs. forward.py: the forwards of blocks.
modulation.py: what the timestep changes. rope.py: RoPE tables of both layouts. masks.py: masks of prompts.
graph.py: the model's forward as a CUDA graph. repeatable.py: the modules that it may replay.
measured.py: what `verify` measures. sizes.py, cases.py: sizes of tensors and checkpoints.
names.py: the authors' names. from_files.py: the model that a file with these names is for.
random_weights.py, connector_free.py: for models with random weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from diffusers import LTX2ImageToVideoPipeline, LTX2Pipeline
from diffusers.models.transformers.transformer_ltx2 import (
    LTX2AdaLayerNormSingle,
    LTX2Attention,
    LTX2AudioVideoAttnProcessor,
    LTX2VideoTransformer3DModel,
    LTX2VideoTransformerBlock,
)
from torch import nn

from ....config import PatchConfig
from ....plain import hook_in_place_of_forward
from ...journal import slot_below_hooks
from ...steps.context_parallel import only_shares_tokens
from ...steps.plan import Shared
from ...steps.sparse_linear import SparseForm
from ..family import GRAPH, Binding, Blocks, Family, Measured, Pipeline, Targets, graph_of
from ..graphs import TransformerGraphs
from .block import decide
from .call import FRAME_RATE, TOPK, usual_call
from .cases import CASES
from .connector_free import pipeline_inputs
from .forward import block_forward, block_inputs
from .from_files import from_files
from .graph import GRAPHED, transformer_forward
from .masks import MASKS, SeenMasks
from .measured import MODULES, self_attention_qkv, sub_layer_terms
from .modulation import EMBEDDERS, embedder_forward
from .names import LTX2_NAMES
from .random_weights import RANDOM_WEIGHTS
from .rope import rotate
from .sizes import SIZES

ATTENTIONS = {
    "self_attention": ("attn1", "audio_attn1"),
    "cross_attention": ("attn2", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn"),
}
# The queries of a prompt's attention come from a norm that has no weight and, in LTX-2.0, no modulation. So nothing
# divides hidden channels that are far above the others. Rows with these lose too much in int8, and e4m3's own error is
# too large here (docs/designs.md).
NOT_IN_8_BITS = ("attn2.to_q", "audio_attn2.to_q")
LINEARS = {
    group: tuple(
        f"{attn}.{name}"
        for attn in attentions
        for name in ("to_q", "to_k", "to_v", "to_out.0")
        if f"{attn}.{name}" not in NOT_IN_8_BITS
    )
    for group, attentions in ATTENTIONS.items()
}
LINEARS["feed_forward"] = tuple(f"{ff}.{name}" for ff in ("ff", "audio_ff") for name in ("net.0.proj", "net.2"))


def _more(transformer: LTX2VideoTransformer3DModel, config: PatchConfig) -> Targets:
    embedders = ((path, transformer.get_submodule(path)) for path in EMBEDDERS)
    embedders = [(path, embedder, embedder_forward) for path, embedder in embedders if _takes_forward(embedder)]
    # Under a hook, such as model offloading, that holds the old forward, masks are not left out, and the model goes
    # without graphs.
    if hook_in_place_of_forward(transformer) and not only_shares_tokens(transformer):
        return embedders
    return [("", transformer, transformer_forward), *embedders]


def _takes_forward(embedder: nn.Module) -> bool:
    """True if an embedder is diffusers' own, and no hook holds its old forward. Others run as they are."""
    is_free = not hook_in_place_of_forward(embedder) or slot_below_hooks(embedder) is not None
    return type(embedder) is LTX2AdaLayerNormSingle and is_free


def _attributes(transformer: LTX2VideoTransformer3DModel, shared: Shared, forwards: dict) -> Sequence[Binding]:
    graphs = TransformerGraphs(GRAPHED, transformer, shared, forwards)
    return [(transformer, MASKS, SeenMasks()), (transformer, GRAPH, graphs)]


LTX2 = Family(
    LTX2VideoTransformer3DModel,
    "LTX-2 and 2.3",
    (
        Blocks(
            name="transformer_blocks",
            block_class=LTX2VideoTransformerBlock,
            forward=block_forward,
            parts={path: nn.Module if path.endswith("ff") else LTX2Attention for path in MODULES.values()},
            decide=decide,
            usual_call=usual_call,
            linears=LINEARS,
            self_attention="attn1",
            measured=Measured(block_inputs, sub_layer_terms, self_attention_qkv),
            sizes=SIZES,
            sparse=SparseForm(LTX2AudioVideoAttnProcessor, rotate, topk=TOPK, needs_projection=False),
            random_weights=RANDOM_WEIGHTS,
        ),
    ),
    "proj_in",
    LTX2_NAMES,
    pipelines=(
        Pipeline(LTX2Pipeline, "text", has_sound=True, frames=121, frame_rate=lambda _: FRAME_RATE),
        Pipeline(LTX2ImageToVideoPipeline, "image", has_sound=True, frames=121, frame_rate=lambda _: FRAME_RATE),
    ),
    cases=CASES,
    from_files=from_files,
    inputs=pipeline_inputs,
    more=_more,
    attributes=_attributes,
    notes=lambda transformer: [
        graph_of(transformer).note(),
        "not fused: time and prompt embeddings, RoPE tables, the output norms",
        "a pipeline's connectors, VAE of the sound and vocoder are as without the patch",
    ],
)
