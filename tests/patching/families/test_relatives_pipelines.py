"""Pipelines of Wan's relatives: the same video patched, with AnyFlow's own sampler and ChronoEdit's image."""

import numpy as np
import pytest
import torch
from diffusers import (
    AnyFlowPipeline,
    AnyFlowTransformer3DModel,
    ChronoEditPipeline,
    ChronoEditTransformer3DModel,
    FlowMapEulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
)
from PIL import Image

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.tiny_families import HEAD_DIM, HEADS, SMALL
from tests.tiny_vae import Z_DIM, tiny_vae
from tests.tiny_wan import I2V_TEXT_TOKENS, IMAGE_DIM, TEXT_DIM, seeded, tiny_wan_pipeline
from turbo_rcm_patch.patching.families.vae.forward import vae_state

WITH_IMAGE = {"in_channels": 2 * Z_DIM + 4, "image_dim": IMAGE_DIM, "added_kv_proj_dim": HEADS * HEAD_DIM}
PICTURE = Image.fromarray(np.random.RandomState(0).randint(0, 255, (32, 32, 3), dtype=np.uint8))


def transformer(cls, **options):
    small = {**SMALL, "in_channels": Z_DIM, "out_channels": Z_DIM, "num_layers": 1}
    return seeded(3, lambda: cls(**{**small, **options}))


def pipeline(name):
    """A tiny pipeline, and the arguments of a call of it."""
    components = tiny_wan_pipeline("i2v").components
    parts = {"vae": tiny_vae(), "text_encoder": None, "tokenizer": None}
    if name == "anyflow":
        pipe = AnyFlowPipeline(
            transformer=transformer(AnyFlowTransformer3DModel), scheduler=FlowMapEulerDiscreteScheduler(), **parts
        )
        tokens, more = 7, {}
    else:
        parts |= {part: components[part] for part in ("image_encoder", "image_processor")}
        model = transformer(ChronoEditTransformer3DModel, **WITH_IMAGE)
        pipe = ChronoEditPipeline(transformer=model, scheduler=FlowMatchEulerDiscreteScheduler(), **parts)
        tokens, more = I2V_TEXT_TOKENS, {"image": PICTURE, "guidance_scale": 1.0}
    pipe.set_progress_bar_config(disable=True)
    more["prompt_embeds"] = torch.randn(1, tokens, TEXT_DIM, generator=torch.Generator().manual_seed(1))
    return pipe, {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2, **more, "output_type": "np"}


@pytest.mark.parametrize("name", ["anyflow", "chronoedit"])
def test_the_same_video(name):
    pipe, call = pipeline(name)

    def video():
        return torch.as_tensor(pipe(**call, generator=torch.Generator().manual_seed(0)).frames)

    expected = video()
    assert expected.std() > 0.05
    with trp.patch(pipe) as patch:
        assert relative_error(video(), expected) <= 1e-5
        assert "PyTorch module" not in patch.summary()
        state = vae_state(pipe.vae)
        assert not state.eager
        assert not state.eager_encodes
    assert torch.equal(video(), expected)
