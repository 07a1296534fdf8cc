"""use_rcm and use_distilled on diffusers' modular pipelines, against the ordinary ones."""

import copy

import diffusers
import pytest
import torch

import turbo_rcm_patch as trp
from tests import lora_files
from tests.patching.sampled_videos import record_calls, seeded
from tests.tiny_wan import tiny_call, tiny_wan_pipeline

PARTS = ("tokenizer", "text_encoder", "transformer", "transformer_2", "vae", "scheduler")
CLASSES = {"t2v": ("WanModularPipeline", "WanBlocks"), "wan22": ("Wan22ModularPipeline", "Wan22Blocks")}


def modular(pipe, variant="t2v"):
    """A modular pipeline with the same components, but guiders of its own: encoding fails with one that is off."""
    pipeline_class, blocks = (getattr(diffusers, name) for name in CLASSES[variant])
    twin = pipeline_class(blocks=blocks())
    twin.update_components(**{name: part for name, part in pipe.components.items() if name in PARTS})
    twin.set_progress_bar_config(disable=True)
    return twin


def video(pipe, steps=4, seed=1, **options):
    call = tiny_call(num_inference_steps=steps, generator=seeded(seed), **options)
    if isinstance(pipe, diffusers.ModularPipeline):
        return pipe(**{name: value for name, value in call.items() if name != "output_type"}, output="latents")
    return pipe(**call, guidance_scale=1.0).frames


@pytest.mark.parametrize(
    ("variant", "recipe"), [("t2v", "rcm"), ("t2v", "fastwan"), ("t2v", "lightx2v"), ("wan22", "lightning")]
)
def test_equals_the_ordinary_pipeline(variant, recipe):
    pipe = tiny_wan_pipeline(variant)
    other = modular(pipe, variant)
    with trp.use_distilled(pipe, recipe=recipe):
        steps = len(pipe.scheduler.timesteps)
        expected = video(pipe, steps)
    calls = record_calls(other.transformer)
    with trp.use_distilled(other, recipe=recipe):
        for each in (other, copy.copy(other), copy.deepcopy(other)):
            found = video(each, steps)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert not torch.equal(video(other, steps, seed=2), found)
    assert len(calls) <= 4 * steps  # the guiders are off


def test_restore_leaves_nothing_and_a_lora_is_loaded(tmp_path):
    pipe = tiny_wan_pipeline()
    source = lora_files.lightx2v(pipe.transformer).save(tmp_path / "lightx2v.safetensors")
    with trp.use_distilled(pipe, source):
        expected = video(pipe)
    other = modular(pipe)
    attributes, parts, before = set(vars(other)), other.components, video(other)
    with trp.use_distilled(other, source):
        torch.testing.assert_close(video(other), expected)
    assert set(vars(other)) == attributes
    assert all(other.components[name] is part for name, part in parts.items())
    assert other.guider.get_state()["enabled"]
    assert torch.equal(video(other), before)
    calls = record_calls(other.transformer)
    with trp.use_rcm(other, classifier_free_guidance=True):
        video(other)
    assert len(calls) == 8


def test_another_modular_pipeline_with_the_same_parts_is_refused():
    other = modular(tiny_wan_pipeline())
    with trp.use_rcm(other):
        with pytest.raises(RuntimeError, match="another one, on which use_rcm was called"):
            video(modular(other))
        with pytest.raises(RuntimeError, match="use_rcm is active on this pipeline"):
            trp.use_rcm(other)


def test_pipelines_that_share_blocks_are_apart():
    pipe = tiny_wan_pipeline()
    one, other = modular(pipe), modular(pipe)
    other._blocks = one._blocks
    shared = one._blocks
    first = trp.use_rcm(one)
    with trp.use_rcm(other):
        expected = video(other)
        first.restore()
        assert torch.equal(video(other), expected)
    assert one._blocks is other._blocks is shared
    assert not any("prepare_latents" in vars(block) for block in shared.sub_blocks["denoise"].sub_blocks.values())
