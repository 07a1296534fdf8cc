"""`fit` on LTX-2's pipelines: the same video and sound, all models in the plan, and what guidance costs."""

from contextlib import nullcontext

import pytest
import torch

import turbo_rcm_patch as trp
from tests.tiny_ltx2 import CHANNELS, FRAMES, HEIGHT, LTX2_PIPELINES, WIDTH, tiny_ltx2_call, tiny_ltx2_pipeline
from turbo_rcm_patch.memory import plan as plan_module
from turbo_rcm_patch.memory import sound
from turbo_rcm_patch.memory.checks import is_hooked
from turbo_rcm_patch.memory.empty_models import empty_models
from turbo_rcm_patch.memory.needs import models_by_preset, needs
from turbo_rcm_patch.memory.stages import BESIDE_BLOCKS, Patched, Video, stages_of, unpatched_stages

SIZE = {"height": HEIGHT, "width": WIDTH, "num_frames": FRAMES}
SMALL, SMALLER = Video(512, 1024, 121), Video(256, 512, 121)


def fit_on_the_cpu(pipe, **options):
    return trp.fit(pipe, "8 GB", **{**SIZE, "device": "cpu", **options})


def outputs_of(pipe, kind):
    return [torch.as_tensor(x) for x in pipe(**tiny_ltx2_call(kind, output_type="np"))]


@pytest.mark.parametrize(("kind", "tier"), [("text", "exact"), ("image", "quantized")])
def test_streaming_changes_neither_video_nor_sound_and_is_undone(everything_streams, kind, tier):
    pipe = tiny_ltx2_pipeline(kind)
    with trp.patch(pipe, tier):
        expected = outputs_of(pipe, kind)
        plan = fit_on_the_cpu(pipe)
        assert "transformer" in plan.placement.streaming
        assert pipe.vae.use_tiling
        assert any(map(is_hooked, pipe.transformer.modules()))
        for ours, theirs in zip(outputs_of(pipe, kind), expected, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-6)
        plan.undo()
        assert not pipe.vae.use_tiling
        assert not any(map(is_hooked, pipe.transformer.modules()))
        for ours, theirs in zip(outputs_of(pipe, kind), expected, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("kind", LTX2_PIPELINES)
def test_every_model_has_its_place_and_its_stage(kind):
    plan = fit_on_the_cpu(tiny_ltx2_pipeline(kind))
    assert {c.name for c in plan.components} == {"vae", "audio_vae", "connectors", "transformer", "vocoder"}
    stages = ["connectors", "denoising", "decoding", "decoding the sound", "making the waveform"]
    assert list(plan.peaks) == [*stages[:1], *(["VAE encoding"] if kind != "text" else []), *stages[1:]]
    assert "making the waveform" in str(plan)


@pytest.mark.parametrize("kind", LTX2_PIPELINES)
def test_the_plan_from_configs_is_that_of_the_pipeline(kind, tmp_path):
    """Each token of a pipeline with given frames has its own timestep."""
    pipe = tiny_ltx2_pipeline(kind)
    pipe.save_pretrained(tmp_path)
    ((_, patched),) = models_by_preset(tmp_path, torch.float32, "exact")
    plan = fit_on_the_cpu(pipe)
    assert plan_module.plan_for(patched, plan.video, plan.budget).peaks == plan.peaks


def test_guidance_takes_two_samples_and_a_distilled_model_without_it_one():
    pipe = tiny_ltx2_pipeline()
    guided = {stage.name: stage.computing for stage in fit_on_the_cpu(pipe).stages}
    pipe = tiny_ltx2_pipeline()
    with trp.use_distilled(pipe, recipe="turbot2av", classifier_free_guidance=True):
        assert {stage.name: stage.computing for stage in fit_on_the_cpu(pipe).stages} == guided
    pipe = tiny_ltx2_pipeline()
    with trp.use_distilled(pipe, recipe="turbot2av"):
        distilled = {stage.name: stage.computing for stage in fit_on_the_cpu(pipe).stages}
    assert guided["connectors"] == 2 * distilled["connectors"]
    assert distilled["denoising"] > BESIDE_BLOCKS
    assert guided["denoising"] - BESIDE_BLOCKS > 2 * (distilled["denoising"] - BESIDE_BLOCKS)
    prompt = sound.prompt_bytes({"connectors": pipe.connectors})
    assert prompt == 1024 * 32 * 3 * 4
    assert guided["decoding"] == distilled["decoding"] + 2 * prompt  # which the pipeline keeps


@pytest.mark.parametrize(("name", "value"), [("height", HEIGHT + 8), ("num_frames", 0)])
def test_sizes_that_the_model_does_not_have(name, value):
    with pytest.raises(ValueError, match=name):
        fit_on_the_cpu(tiny_ltx2_pipeline(), **{name: value})


@pytest.fixture(scope="module")
def real_models():
    return empty_models("ltx2-19b")


def test_the_real_model_in_each_tier_and_on_a_card(real_models):
    exact, quantized = (
        needs(models_by_preset("ltx2-19b", preset=name), [SMALLER])[0] for name in ("exact", "quantized")
    )
    names = [component.name for component in exact.components]
    assert sorted(names) == ["audio_vae", "connectors", "text_encoder", "transformer", "vae", "vocoder"]
    transformer = exact.components[names.index("transformer")].weights
    assert transformer == pytest.approx(2 * 18.9e9, rel=0.01)
    assert quantized.components[names.index("transformer")].weights == pytest.approx(transformer / 2, rel=0.1)
    assert exact.least < 20e9 < 60e9 < exact.resident


def test_tiles_take_less_than_whole_frames(real_models):
    whole, in_tiles = (
        sound.video_decoding_bytes(real_models["vae"], *SMALL, in_tiles=tiles) for tiles in (False, True)
    )
    smaller = sound.video_decoding_bytes(real_models["vae"], *SMALLER)
    frames = 3 * 121 * 512 * 1024 * 2
    assert frames < in_tiles < 0.8 * whole
    assert whole == pytest.approx(4 * smaller, rel=0.1)  # as many times the pixels


def test_a_denoising_step_holds_the_tensors_of_a_block(real_models):
    """At least the residual, the normed video, and the feed-forward's wide tensor, for each of two samples."""
    stages = {s.name: s for s in stages_of(Patched(real_models, trp.Exact(), samples=2), SMALL)}
    least = 2 * 6144 * 2 * (2 * 4096 + 4 * 4096)
    assert least < stages["denoising"].computing < 10 * least
    unpatched = {s.name: s for s in unpatched_stages(Patched(real_models, trp.Exact(), samples=2), SMALL)}
    assert list(unpatched) == ["denoising, unpatched"]  # its VAE is not patched
    assert unpatched["denoising, unpatched"].computing > stages["denoising"].computing
    layers, cache, logits = 49 * 1024 * 3840 * 2, 48 * 2 * 8 * 256 * 1024 * 2, 1024 * 262208 * 2
    encoding = stages["text encoding"]
    assert encoding.after_blocks == layers + cache + 3 * layers + logits  # the other prompt's first
    assert encoding.computing > layers + cache + layers


@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (5, 4), (4, 7), (6, 6)])
def test_a_size_that_diffusers_cannot_decode_in_tiles_is_planned_whole(rows, columns):
    """Its decoder pads by reflection, for which a last tile of one row or column is too small."""
    vae = tiny_ltx2_pipeline().vae
    edge = vae.spatial_compression_ratio
    vae.enable_tiling(3 * edge, 3 * edge, tile_sample_stride_height=2 * edge, tile_sample_stride_width=2 * edge)
    latents = torch.zeros(1, CHANNELS, 2, rows, columns)
    works = rows % 2 == 0 and columns % 2 == 0
    with nullcontext() if works else pytest.raises(RuntimeError, match="Padding size"):
        vae.decode(latents, None)
    size = sound.video_decoding_bytes(vae, rows * edge, columns * edge, 3, in_tiles=True)
    assert (size is not None) == works


def test_480_pixels_of_ltx2_have_no_tiles(real_models):
    """They are 15 latents, and a tile begins with every 14th. One setting of the VAE serves both its ways."""
    from_image = Patched(real_models, trp.Exact(), own_timesteps=True)
    stages = {s.name: s for s in stages_of(from_image, Video(480, 512, 9))}
    assert (stages["decoding"].in_tiles, stages["VAE encoding"].in_tiles) == (None, None)
    assert stages["decoding"].computing > 0


def test_an_error_at_480_pixels_names_512(real_models):
    patched = Patched(real_models, trp.Quantized(restorable=False), samples=2)
    with pytest.raises(trp.DoesNotFit, match=r"It fits with height=512, width=832 \(which diffusers decodes in tiles"):
        plan_module.plan_for(patched, Video(480, 832, 121), 16 * 10**9)
