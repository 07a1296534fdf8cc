"""use_distilled with a strength or a LoRA for each expert, and on VACE pipelines."""

import pytest
import torch
from diffusers import WanVACEPipeline, WanVACETransformer3DModel

import turbo_rcm_patch as trp
from tests import lora_files
from tests.patching.sampling.test_use_distilled import assert_untouched, save_lightning, state, videos
from tests.tiny_wan import TEXT_DIM, Z_DIM, seeded, tiny_wan_pipeline


def merged(files, scales):
    """Videos of another pipeline, with the LoRAs of these strengths in its weights."""
    pipe = tiny_wan_pipeline("wan22")
    pipe.transformer, pipe.transformer_2 = (file.merged(scale) for file, scale in zip(files, scales, strict=True))
    with trp.use_distilled(pipe, recipe="lightning"):
        return videos(pipe)


def test_a_strength_for_each_expert(tmp_path):
    pipe = tiny_wan_pipeline("wan22")
    files, paths = save_lightning(pipe, tmp_path / "lightning")
    expected = merged(files, (3.0, 1.5))
    videos(pipe)  # a call sets attributes of the pipeline
    before = state(pipe)
    with trp.use_distilled(pipe, paths, scale=(3.0, 1.5)) as handle:
        high, low = str(handle).splitlines()[1:]
        assert high.startswith("transformer: high_noise_model.safetensors")
        assert high.endswith("scale 3")
        assert low.startswith("transformer_2: low_noise_model.safetensors")
        assert low.endswith("scale 1.5")
        torch.testing.assert_close(videos(pipe), expected, rtol=2e-4, atol=2e-4)
    assert_untouched(pipe, before)


@pytest.mark.parametrize("given", ["high", "low"])
def test_a_lora_for_one_expert_only(given, tmp_path, caplog):
    pipe = tiny_wan_pipeline("wan22")
    files, (high, low) = save_lightning(pipe, tmp_path / "lightning")
    expected = merged(files, (1, 0) if given == "high" else (0, 1))
    videos(pipe)
    before = state(pipe)
    with trp.use_distilled(pipe, (high, None) if given == "high" else (None, low)) as handle:
        other = "transformer_2" if given == "high" else "transformer"
        assert f"{other}: no LoRA, so its steps are not distilled" in str(handle)
        assert "lightning (named lightning)" in str(handle)
        assert f"{other}: no LoRA" in caplog.text
        assert "is taken for" not in str(handle)
        torch.testing.assert_close(videos(pipe), expected, rtol=2e-4, atol=2e-4)
    assert_untouched(pipe, before)


def test_a_low_noise_file_in_the_high_noise_place_is_told(tmp_path):
    pipe = tiny_wan_pipeline("wan22")
    _, (_, low) = save_lightning(pipe, tmp_path / "lightning")
    with trp.use_distilled(pipe, (low, None)) as handle:
        assert "is taken for the high-noise expert: the order is (high, low)" in str(handle)


@pytest.mark.parametrize(
    ("variant", "options", "error", "message"),
    [
        ("wan22", {"scale": (1.0,)}, ValueError, r"scale=\(1\.0,\); give a finite number, .* or a pair \(high, low\)"),
        ("wan22", {"scale": (1.0, float("inf"))}, ValueError, r"scale=\(1\.0, inf\); give a finite"),
        ("wan22", {"scale": (1.0, None)}, TypeError, r"scale=\(1\.0, None\); give a number"),
        ("wan22", {"source": (None, None)}, ValueError, "source has no file; give the LoRA of one expert or of both"),
        ("t2v", {"scale": (1.0, 1.0)}, ValueError, r"give a finite number, 1 for the LoRA as it was trained\.$"),
        ("t2v", {"source": [None]}, ValueError, "source has no file"),
    ],
)
def test_errors_change_nothing(variant, options, error, message):
    pipe = tiny_wan_pipeline(variant)
    before = state(pipe)
    with pytest.raises(error, match=message):
        trp.use_distilled(pipe, recipe="lightning", **options)
    assert_untouched(pipe, before)


def tiny_vace_pipeline():
    sizes = {"num_attention_heads": 2, "attention_head_dim": 64, "ffn_dim": 48, "freq_dim": 256, "text_dim": TEXT_DIM}
    control = {"vace_layers": [0], "vace_in_channels": 2 * Z_DIM + 64}  # two encoded videos, and the mask of 8 x 8
    model = seeded(2, lambda: WanVACETransformer3DModel(num_layers=2, in_channels=Z_DIM, **sizes, **control))
    pipe = WanVACEPipeline(**{**tiny_wan_pipeline().components, "transformer": model})
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("preset", [None, "exact"])
def test_a_few_step_lora_on_vace(preset, tmp_path):
    pipe = tiny_vace_pipeline()
    file = lora_files.lightx2v(pipe.transformer)
    file.pair("diffusion_model.vace_blocks.0.self_attn.q", "vace_blocks.0.attn1.to_q", 64)
    file.difference("diffusion_model.vace_blocks.0.norm3.diff", "vace_blocks.0.norm2.weight")
    file.difference("diffusion_model.vace_blocks.0.diff_m", "vace_blocks.0.scale_shift_table")
    file.difference("diffusion_model.vace_blocks.0.after_proj.diff_b", "vace_blocks.0.proj_out.bias")
    source = file.save(tmp_path / "wan2.1_t2v_lora_rank64_lightx2v_4step.safetensors")
    merged = tiny_vace_pipeline()
    merged.transformer = file.merged()
    with trp.use_distilled(merged, recipe="lightx2v"):
        expected = videos(merged)
    videos(pipe)
    before = state(pipe)
    patch = None if preset is None else trp.patch(pipe, preset)
    with trp.use_distilled(pipe, source) as handle:
        assert handle.unused == {}
        found = videos(pipe)
        assert torch.equal(videos(pipe), found)  # by the call's generator alone
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)
    if patch is not None:
        patch.restore()
    assert_untouched(pipe, before)
