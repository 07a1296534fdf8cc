"""Helios: its history, its pipelines with their samplers, and the options that published models do not have."""

import pytest
import torch
from diffusers import HeliosDMDScheduler, HeliosPipeline, HeliosPyramidPipeline, HeliosScheduler

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.pairs import output_of
from tests.tiny_families import BATCH, tiny_family_inputs, tiny_family_transformer
from tests.tiny_vae import Z_DIM, tiny_vae
from tests.tiny_wan import TEXT_DIM
from turbo_rcm_patch.patching.steps.plan import SHARED


def test_the_first_chunk_has_no_history():
    model = tiny_family_transformer("helios")
    history = [name for name in tiny_family_inputs("helios", model) if "history" in name]
    without = dict.fromkeys(history)
    expected = output_of("helios", model, **without)
    assert relative_error(output_of("helios", model), expected) > 1e-2
    with trp.patch(model):
        assert relative_error(output_of("helios", model, **without), expected) <= 1e-5
        assert vars(model)[SHARED].runs.starts.tolist() == [0, 18, 36]


@pytest.mark.parametrize("where", [3, 20])  # in the history and in the new frames
def test_a_token_with_modulation_of_its_own_is_in_no_run(where):
    """A hook may change the modulation of one token. The block then reads a row for each token."""

    def change(module, arguments):
        hidden_states, context, temb, *rest = arguments
        temb = temb.clone()
        temb[:, where] += 1
        return hidden_states, context, temb, *rest

    model = tiny_family_transformer("helios", layers=1)
    plain = output_of("helios", model)
    model.blocks[0].register_forward_pre_hook(change)
    expected = output_of("helios", model)
    assert relative_error(expected, plain) > 1e-3
    with trp.patch(model):
        assert relative_error(output_of("helios", model), expected) <= 1e-5
        assert vars(model)[SHARED].runs is None


def test_rope_tables_by_sample_call_the_self_attention_as_a_whole():
    model = tiny_family_transformer("helios", layers=1)
    inputs = tiny_family_inputs("helios", model)
    indices = {name: value.expand(BATCH, -1) for name, value in inputs.items() if name.startswith("indices")}
    expected = output_of("helios", model, **indices)
    with trp.patch(model) as patch:
        assert relative_error(output_of("helios", model, **indices), expected) <= 1e-5
        assert "RoPE tables by sample or head (1)" in patch.summary()


def test_an_amplified_history_is_left_to_diffusers():
    model = tiny_family_transformer("helios", layers=1, is_amplify_history=True)
    expected = output_of("helios", model)
    with trp.patch(model) as patch:
        assert relative_error(output_of("helios", model), expected) <= 1e-5
        assert "amplified history (1)" in patch.summary()
    with pytest.raises(trp.PatchError, match="cannot have sparse-linear attention"):
        trp.patch(model, "sparse")


def test_projections_of_an_image_are_not_used():
    """diffusers' processor ignores them."""
    model = tiny_family_transformer("helios", layers=1, added_kv_proj_dim=TEXT_DIM)
    expected = output_of("helios", model)
    with trp.patch(model):
        assert relative_error(output_of("helios", model), expected) <= 1e-5


def pipeline(kind):
    """A tiny pipeline of a published checkpoint's kind, its prompt, and the arguments of a call of two chunks."""
    parts = {"vae": tiny_vae(), "text_encoder": None, "tokenizer": None}
    transformer = tiny_family_transformer("helios", in_channels=Z_DIM, out_channels=Z_DIM)
    prompt = torch.randn(1, 7, TEXT_DIM, generator=torch.Generator().manual_seed(1))
    arguments = {"prompt_embeds": prompt, "num_frames": 9, "num_latent_frames_per_chunk": 2, "history_sizes": [4, 2, 1]}
    if kind == "base":
        pipe = HeliosPipeline(transformer=transformer, scheduler=HeliosScheduler(stages=1, stage_range=[0, 1]), **parts)
        arguments |= {"num_inference_steps": 2, "negative_prompt_embeds": -prompt, "height": 32, "width": 32}
    else:
        pipe = HeliosPyramidPipeline(
            transformer=transformer, scheduler=HeliosDMDScheduler(gamma=0.3), is_distilled=True, **parts
        )
        arguments |= {"pyramid_num_inference_steps_list": [2, 2, 2], "guidance_scale": 1.0, "height": 64, "width": 64}
    pipe.set_progress_bar_config(disable=True)
    return pipe, arguments


@pytest.mark.parametrize("kind", ["base", "distilled"])
def test_a_pipeline_with_its_own_sampler(kind):
    pipe, arguments = pipeline(kind)

    def video():
        return pipe(**arguments, generator=torch.Generator().manual_seed(0), output_type="pt").frames

    expected = video()
    assert expected.std() > 0.05
    with trp.patch(pipe) as patch:
        assert relative_error(video(), expected) <= 1e-4
        assert vars(pipe.transformer)[SHARED].runs.starts.numel() == 3  # history, new frames
        assert "PyTorch module" not in patch.summary()
        assert "vae: AutoencoderKLWan" in patch.summary()
    with pytest.raises(TypeError, match="use_distilled does not know HeliosP"):
        trp.use_distilled(pipe, recipe="rcm")
