"""Pipelines of Wan's relatives: the same video patched, with AnyFlow's own sampler, ChronoEdit's image and a LoRA."""

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
    UniPCMultistepScheduler,
)
from PIL import Image

import turbo_rcm_patch as trp
from tests import lora_files
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


def video_of(pipe, call):
    return torch.as_tensor(pipe(**call, generator=torch.Generator().manual_seed(0)).frames)


@pytest.mark.parametrize("name", ["anyflow", "chronoedit"])
def test_the_same_video(name):
    pipe, call = pipeline(name)
    expected = video_of(pipe, call)
    assert expected.std() > 0.05
    with trp.patch(pipe) as patch:
        assert relative_error(video_of(pipe, call), expected) <= 1e-5
        assert "PyTorch module" not in patch.summary()
        state = vae_state(pipe.vae)
        assert not state.eager
        assert not state.eager_encodes
    assert torch.equal(video_of(pipe, call), expected)


@pytest.mark.parametrize("first", ["LoRA", "patch"])
def test_chronoedit_with_a_lora_and_the_scheduler_of_its_distilled_one(first):
    """The settings are those that NVIDIA publishes for the LoRA of 8 steps."""
    (plain, call), (patched, _) = pipeline("chronoedit"), pipeline("chronoedit")
    call |= {"num_inference_steps": 8, "guidance_scale": 1.0}
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 2.0}
    lora = lora_files.diffusers(plain.transformer, ranks=(4,)).tensors
    for pipe in (plain, patched):
        pipe.scheduler = UniPCMultistepScheduler(**flow)
    base = video_of(plain, call)
    if first == "patch":
        patch = trp.patch(patched)
    for pipe in (plain, patched):
        pipe.load_lora_weights(dict(lora))
    if first == "LoRA":
        patch = trp.patch(patched)
    expected = video_of(plain, call)
    assert relative_error(expected, base) > 0.01
    assert relative_error(video_of(patched, call), expected) <= 1e-5
    assert "+ LoRA" in patch.summary()
    patch.restore()
    assert torch.equal(video_of(patched, call), expected)
