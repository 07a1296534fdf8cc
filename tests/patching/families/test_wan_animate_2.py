"""Wan-Animate-2: both passes over a model, videos that are smaller than the full one, and calls as a whole."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache
from diffusers.modular_pipelines import WanAnimate2DistilledBlocks, WanAnimate2DistilledModularPipeline
from PIL import Image
from torch.nn.attention.flex_attention import create_block_mask
from transformers import CLIPVisionConfig, CLIPVisionModel

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.pairs import output_of
from tests.tiny_families import BATCH, CLIP_DIM, HEIGHT, WIDTH, tiny_family_inputs, tiny_family_transformer
from tests.tiny_vae import Z_DIM, tiny_vae
from tests.tiny_wan import tiny_wan_pipeline
from turbo_rcm_patch.patching.steps.plan import state_of
from turbo_rcm_patch.patching.weights.quantize_linears import quantized_linears

NEW, DRIVING = "animate 2", "animate 2, driving video"


def test_a_pass_over_each_video():
    """The second pass reads what the first one kept, with and without the patch."""
    model = tiny_family_transformer(NEW, layers=2)
    given = {**tiny_family_inputs(DRIVING, model), "encoder_hidden_states_image": torch.randn(BATCH, 5, CLIP_DIM)}

    def both():
        cache = WanAnimate2KVCache(len(model.blocks))
        first = torch.stack(model(**{**given, "kv_cache": cache})[0])
        kept = [torch.stack([layer.key, layer.value]) for layer in cache.layer_caches]
        return [first, output_of(NEW, model, kv_cache=cache), *kept]

    with torch.no_grad():
        expected = both()
        assert relative_error(expected[1], output_of(NEW, model)) > 1e-2  # with another cache
        with trp.patch(model) as patch:
            assert all(relative_error(*pair) <= 1e-5 for pair in zip(both(), expected, strict=True))
            assert "PyTorch module" not in patch.summary()


@pytest.mark.parametrize(
    ("full", "driving_frames"),
    [({"origin_len": 12}, 2), ({"origin_area": [64, 64]}, 2), ({"origin_len": 8, "origin_area": [48, 64]}, 1)],
)
def test_a_part_of_the_full_video(full, driving_frames):
    """The frames and tokens that are not there count as keys of zeros, as in diffusers."""
    model = tiny_family_transformer(NEW, layers=1)
    grid = torch.tensor([[driving_frames, HEIGHT // 2, WIDTH // 2]] * BATCH)
    full = {**full, "reference_grid_sizes": grid}
    expected = output_of(NEW, model, **full)
    assert relative_error(expected, output_of(NEW, model)) > 1e-4
    with trp.patch(model) as patch:
        assert relative_error(output_of(NEW, model, **full), expected) <= 1e-5
        assert "PyTorch module" not in patch.summary()


def _everything(b, h, q, k):
    return q >= 0


def test_another_mask_is_left_to_diffusers():
    model = tiny_family_transformer(NEW, layers=1)
    output_of(NEW, model)
    (size,) = model.block_masks
    own = model.block_masks[size]
    model.block_masks[size] = create_block_mask(_everything, None, None, *own.seq_lengths, device="cpu")
    expected = output_of(NEW, model)
    with trp.patch(model) as patch:
        assert relative_error(output_of(NEW, model), expected) <= 1e-5
        assert "attention mask (1)" in patch.summary()
        model.block_masks[size] = own
        assert relative_error(output_of(NEW, model), expected) > 1e-4


def test_autograd_and_samples_of_several_sizes_are_left_to_diffusers():
    model = tiny_family_transformer(DRIVING, layers=1)
    given = tiny_family_inputs(DRIVING, model)
    sizes = [(2, HEIGHT, WIDTH), (2, WIDTH, HEIGHT)]
    latents = [torch.randn(4, *size) for size in sizes]
    given = {**given, "hidden_states": latents, "condition_latents": latents}
    with torch.no_grad():
        expected = model(**given)[0]
    with trp.patch(model) as patch:
        with torch.no_grad():
            assert all(relative_error(*pair) <= 1e-5 for pair in zip(model(**given)[0], expected, strict=True))
        assert "RoPE tables by sample or head (1)" in patch.summary()
        model(**tiny_family_inputs(DRIVING, model))
        assert state_of(model.blocks[0]).plans.ran.self_attention.module.reason == "autograd"


def test_a_mode_that_is_unknown_is_diffusers_error():
    model = tiny_family_transformer(DRIVING, layers=1)
    with trp.patch(model):
        for patched in (model.blocks[0], tiny_family_transformer(DRIVING, layers=1).blocks[0]):
            with pytest.raises(ValueError, match="kv_cache_mode"):
                patched(torch.randn(1, 12, 128), torch.randn(1, 6, 128), *_arguments(model, "another"))


def _arguments(model, mode):
    freqs, grid = model._rope_freqs((0, 0, 0), torch.device("cpu")), torch.tensor([[2, 2, 3]])
    return torch.randn(1, 8, 128), WanAnimate2KVCache(1).get(0), mode, freqs, grid


def test_attention_is_in_the_models_dtype_in_every_tier():
    model = tiny_family_transformer(NEW, torch.bfloat16)
    for tier in ("quantized", "block_sparse"):
        with trp.patch(model, tier) as patch:
            output_of(NEW, model)
            assert "keys of a driving video (2)" in patch.summary()
            assert quantized_linears(model)


def test_fit_does_not_know_its_memory():
    pipe = SimpleNamespace(
        config={}, components={"transformer": tiny_family_transformer(NEW), "vae": torch.nn.Identity()}
    )
    with pytest.raises(ValueError, match="has a WanAnimate2Transformer3DModel, whose memory is not known"):
        trp.fit(pipe, height=32, width=48, num_frames=5)


def distilled_pipeline():
    """The modular pipeline with tiny models."""
    clip = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "patch_size": 32}
    pipe = WanAnimate2DistilledModularPipeline(blocks=WanAnimate2DistilledBlocks())
    channels = {"in_dim": 2 * Z_DIM + 4, "out_dim": Z_DIM}
    pipe.update_components(
        transformer=tiny_family_transformer(NEW, layers=1, text_len=16, **channels),
        vae=tiny_vae(),
        image_encoder=CLIPVisionModel(CLIPVisionConfig(hidden_size=CLIP_DIM, **clip)).eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        **{name: tiny_wan_pipeline().components[name] for name in ("text_encoder", "tokenizer")},
    )
    return pipe


def test_its_pipeline_with_few_steps():
    """A video in two segments, the second of which goes on from the first."""
    pipe, random = distilled_pipeline(), np.random.RandomState(0)
    pictures = [Image.fromarray(random.randint(0, 255, (48, 32, 3), dtype=np.uint8)) for _ in range(10)]
    sizes = {"height": 48, "width": 32, "segment_frame_length": 5, "max_sequence_length": 16}

    def video():
        given = {"prompt": "a fox", "image": pictures[0], "driving_video": pictures[1:], "num_inference_steps": 2}
        return pipe(**given, **sizes, generator=torch.Generator().manual_seed(0), output_type="pt", output="videos")

    expected = video()
    assert expected.shape[1] == 9
    assert expected.std() > 0.05
    with trp.patch(pipe) as patch:
        assert relative_error(video(), expected) <= 1e-5
        assert "PyTorch module" not in patch.summary()
