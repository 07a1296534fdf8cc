"""The Wan family: Wan 2.1 T2V and I2V, Wan 2.2 with two experts, TI2V-5B.

block.py: how a block is decided. sub_layers.py: its plan and how that runs. parts.py: what the general code asks.
measured.py: what `verify` measures. forward.py: the forwards of blocks.
modulation.py: timesteps of a sample or of its tokens. graph.py: the model's forward as a CUDA graph.
sizes.py, cases.py: sizes of tensors and checkpoints.
random_weights.py, inputs.py, image_free.py: for models with random weights.
names.py: the authors' names. from_files.py: the model that a file with these names is for.
repeatable.py: the modules that are safe to replay.
"""

from __future__ import annotations

from collections.abc import Sequence

from diffusers import (
    DiffusionPipeline,
    Wan22Image2VideoModularPipeline,
    WanImage2VideoModularPipeline,
    WanImageToVideoPipeline,
    WanModularPipeline,
    WanPipeline,
    WanVideoToVideoPipeline,
)
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel, WanTransformerBlock

from ....config import PatchConfig
from ....plain import hook_in_place_of_forward
from ...steps.context_parallel import only_shares_tokens
from ...steps.plan import Shared
from ..family import GRAPH, Binding, Family, Pipeline, Targets, graph_of
from ..graphs import TransformerGraphs
from .cases import CASES
from .from_files import from_files
from .graph import GRAPHED, WAN_BLOCK, transformer_forward
from .inputs import pipeline_inputs
from .modulation import embedder_forward
from .names import WAN_NAMES
from .parts import FIRST_LAYER, linears_in_loras, wan_blocks


def _more(transformer: WanTransformer3DModel, config: PatchConfig) -> Targets:
    embedder = ("condition_embedder", transformer.condition_embedder, embedder_forward)
    # Under a hook, such as model offloading, that holds the old forward, the model goes without graphs.
    if config.cuda_graph == "off" or (hook_in_place_of_forward(transformer) and not only_shares_tokens(transformer)):
        return [embedder]
    return [("", transformer, transformer_forward), embedder]


def _attributes(transformer: WanTransformer3DModel, shared: Shared, forwards: dict) -> Sequence[Binding]:
    return [(transformer, GRAPH, TransformerGraphs(GRAPHED, transformer, shared, forwards))]


def _frame_rate(pipe: DiffusionPipeline) -> int:
    return 24 if pipe.config.expand_timesteps else 16  # TI2V-5B, and all others


WAN = Family(
    WanTransformer3DModel,
    "Wan 2.1 T2V and I2V, Wan 2.2 A14B, TI2V-5B",
    (wan_blocks("blocks", WanTransformerBlock, WAN_BLOCK, can_be_sparse=True),),
    FIRST_LAYER,
    WAN_NAMES,
    more=_more,
    attributes=_attributes,
    notes=lambda transformer: [graph_of(transformer).note()],
    pipelines=(
        Pipeline(WanPipeline, "text", frame_rate=_frame_rate),
        Pipeline(WanImageToVideoPipeline, "image", frame_rate=_frame_rate),
        Pipeline(WanVideoToVideoPipeline, "video", adds_noise=True),
        Pipeline(WanImage2VideoModularPipeline, "image", is_modular=True),
        Pipeline(Wan22Image2VideoModularPipeline, "image", is_modular=True),
        Pipeline(WanModularPipeline, "text", is_modular=True),
    ),
    cases=CASES,
    inputs=pipeline_inputs,
    from_files=from_files,
    linears_in_loras=linears_in_loras,
)
