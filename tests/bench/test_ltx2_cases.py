"""LTX-2's case: inputs of the pipeline's shapes, and checks and comparisons that look at the video and the sound."""

import json
from dataclasses import replace

import pytest
import torch

from scripts.benchmarks import end_to_end
from scripts.benchmarks.comparison import compare_checked
from tests.bench.damage import damage_block
from turbo_rcm_patch.bench import variants as variants_module
from turbo_rcm_patch.bench import verify as verify_module
from turbo_rcm_patch.bench.cases import (
    OUTLIER_CHANNELS,
    add_structure,
    build_pipeline,
    install_few_steps,
    needs_projections,
    random_inputs,
    structured_inputs,
)
from turbo_rcm_patch.bench.oracle import first_call
from turbo_rcm_patch.bench.report import verification_table
from turbo_rcm_patch.bench.verify import verify
from turbo_rcm_patch.cli.sizes import size_rules
from turbo_rcm_patch.config import PRESETS
from turbo_rcm_patch.memory.empty_models import facts_of_source
from turbo_rcm_patch.patching.families import CASES

REAL, TINY, FROM_IMAGE = CASES["ltx2-19b"], CASES["tiny-ltx2"], CASES["tiny-ltx2-image"]
SIZE = {"height": TINY.height, "width": TINY.width, "num_frames": 49}  # 51 audio tokens


def tiny_pipeline(dtype=torch.float32, case=TINY):
    pipe = build_pipeline(case, dtype, torch.device("cpu"))
    add_structure(pipe)
    install_few_steps(pipe)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call(pipe, **size):
    size = {**SIZE, **size}
    return {**structured_inputs(pipe, **size), **size, "num_inference_steps": 1}


def test_the_real_case_has_the_published_sizes():
    pipe = build_pipeline(REAL, torch.bfloat16, torch.device("meta"), layers=1)
    (block,) = pipe.transformer.transformer_blocks
    assert block.attn1.to_q.weight.shape == (4096, 4096)
    assert block.audio_to_video_attn.to_q.weight.shape == (2048, 4096)
    assert block.audio_ff.net[2].weight.shape == (2048, 8192)
    assert REAL.transformer["num_layers"] == 48
    assert REAL.transformer["rope_type"] == block.attn1.rope_type == "split"
    layer, rest = (sum(p.numel() for p in m.parameters()) for m in (block, pipe.transformer))
    assert (rest - layer) + 48 * layer == pytest.approx(18.9e9, rel=0.01)
    audio = REAL.others["audio_vae"][0](**REAL.others["audio_vae"][1])
    assert (audio.config.sample_rate, audio.config.mel_bins) == (16000, 64)


def test_inputs_have_the_shapes_that_the_pipeline_gives():
    """The step gets latents as tokens, a prompt with a mask and one timestep for all tokens. It has no guidance."""
    narrow = {"num_attention_heads": 2, "attention_head_dim": 64, "cross_attention_dim": 128, "num_layers": 1}
    narrow |= {"audio_attention_head_dim": 2, "audio_cross_attention_dim": 64}
    vae = {**TINY.vae, "latent_channels": 128, "spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
    case = replace(REAL, transformer={**REAL.transformer, **narrow}, vae=vae, others={**REAL.others})
    del case.others["vocoder"]
    pipe = tiny_pipeline(case=case)
    size = {"height": REAL.height, "width": REAL.width, "num_frames": REAL.frames}
    generate = lambda: pipe(**call(pipe, **size), output_type="latent")  # noqa: E731
    seen = []
    pipe.transformer.forward = lambda **kwargs: (
        seen.append(kwargs)
        or (
            torch.zeros_like(kwargs["hidden_states"]),
            torch.zeros_like(kwargs["audio_hidden_states"]),
        )
    )
    generate()
    (given,) = seen
    assert given["hidden_states"].shape == (1, 6144, 128)
    assert given["audio_hidden_states"].shape == (1, 126, 128)
    assert given["encoder_hidden_states"].shape == given["audio_encoder_hidden_states"].shape == (1, 1024, 3840)
    assert bool((given["encoder_attention_mask"] == 1).all())
    assert given["timestep"].shape == (1,)
    assert given["audio_hidden_states"].std() > 0.5


def test_structure_has_outlying_channels_that_modulation_divides():
    pipe = tiny_pipeline()
    _, kwargs = first_call(pipe.transformer.transformer_blocks[0], lambda: pipe(**call(pipe), output_type="latent"))
    size = kwargs["hidden_states"].square().mean(dim=(0, 1)).sqrt()
    assert (size > 4 * size.median()).sum() == OUTLIER_CHANNELS
    seen = {}
    pipe.transformer.transformer_blocks[0].attn1.to_q.register_forward_pre_hook(
        lambda _, args: seen.update(normed=args[0].square().mean(dim=(0, 1)).sqrt())
    )
    pipe(**call(pipe), output_type="latent")
    assert (seen["normed"] < 4 * seen["normed"].median()).all()


@pytest.mark.parametrize("inputs", [random_inputs, call])
def test_from_an_image_the_first_frame_has_a_timestep_of_its_own(inputs):
    """All but one frame are noise, and the tokens of a frame follow each other."""
    pipe = tiny_pipeline(case=FROM_IMAGE)
    given = {**inputs(pipe), **SIZE, "num_inference_steps": 1, "output_type": "latent"}
    _, kwargs = first_call(pipe.transformer, lambda: pipe(**given))
    batch, tokens, _ = kwargs["hidden_states"].shape
    in_a_frame = (SIZE["height"] // 16) * (SIZE["width"] // 16)
    assert kwargs["timestep"].shape == (batch, tokens)
    assert (kwargs["timestep"][:, :in_a_frame] == 0).all()
    assert (kwargs["timestep"][:, in_a_frame:] > 0).all()
    assert kwargs["audio_timestep"].shape == (batch,)


def test_a_plan_from_an_image_counts_its_encoding():
    facts = [facts_of_source(name) for name in ("ltx2-19b", "ltx2-19b-image")]
    assert [fact["own_timesteps"] for fact in facts] == [False, True]


@pytest.mark.parametrize("case", [TINY, FROM_IMAGE])
@pytest.mark.parametrize("preset", ["exact", "sparse"])  # test_verify_families.py verifies its blocks in every tier
def test_verify_passes(preset, case):
    pipe = tiny_pipeline(torch.bfloat16, case)
    assert not needs_projections(pipe)
    verification = verify(pipe, call(pipe), config=PRESETS[preset])
    assert verification.ok, verification_table(verification)
    assert len(verification.checks) == TINY.transformer["num_layers"]
    parts = {part.part for part in verification.parts}
    assert preset == "exact" or {"audio self_attention", "video-to-audio cross_attention"} <= parts


@pytest.mark.parametrize("stream", [0, 1])
def test_verify_finds_damage_in_either_stream(stream, monkeypatch):
    """Without damage it passes: the test above."""
    pipe = tiny_pipeline()

    def damage(output):
        return tuple(x + 1e-4 * x.roll(1, -1) if i == stream else x for i, x in enumerate(output))

    damage_block(monkeypatch, verify_module, "transformer.transformer_blocks.1", damage)
    assert {check.block for check in verify(pipe, call(pipe)).failed} == {"transformer.transformer_blocks.1"}


@pytest.mark.parametrize("stream", [0, 1])
def test_compare_judges_both_streams(stream, monkeypatch):
    pipe = tiny_pipeline()

    def damage(output):
        return tuple(x + 0.01 * x.roll(1, -1) if i == stream else x for i, x in enumerate(output))

    options = {"with_compile": False, "warmups": 0, "repeats": 1}
    given = {**call(pipe), "output_type": "latent"}
    if stream == 0:
        assert 0 < compare_checked(pipe, given, **options).variants[-1].step_error < 1e-5
    damage_block(monkeypatch, variants_module, "transformer.transformer_blocks.1", damage)
    with pytest.raises(RuntimeError, match="the patched transformer errs more than it may"):
        compare_checked(pipe, given, **options)


def test_end_to_end_runs_in_several_tiers(tmp_path, capsys):
    path, presets = tmp_path / "figures.json", ["quantized", "sparse", "block_sparse"]
    arguments = ["--config", "tiny-ltx2", "--preset", *presets, "--steps", "2", "--repeats", "1"]
    assert end_to_end.main([*arguments, "--no-compile", "--decode", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert [(run["settings"]["preset"], run["settings"].get("mass")) for run in figures.values()] == [
        ("quantized", None),
        ("sparse", None),
        ("block_sparse", 0.9),
    ]
    assert [run["variants"][-1]["step_error"] is None for run in figures.values()] == [False, True, True]
    printed = capsys.readouterr().out
    assert "audio-to-video cross_attention" in printed
    assert "frames: PSNR" in printed


def test_sizes_are_those_of_its_latents():
    rules = size_rules(REAL.vae, REAL.transformer)
    assert (rules.height, rules.width, rules.temporal, rules.positions) == (32, 32, 8, None)
    rules.check(1024, 1792, 121)
