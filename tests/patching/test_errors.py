"""Models that cannot be patched are refused by name, before anything is changed."""

import pytest
import torch
from diffusers import (
    CogVideoXTransformer3DModel,
    CogView4Transformer2DModel,
    DDPMPipeline,
    DDPMScheduler,
    UNet2DModel,
)

import turbo_rcm_patch as trp
from tests.patching.pairs import attributes_of, blocks_of
from tests.tiny_families import tiny_family_transformer
from tests.tiny_wan import tiny_wan_transformer

SMALL = {"num_attention_heads": 2, "num_layers": 1}
OTHERS = {
    "CogVideoXTransformer3DModel": lambda: CogVideoXTransformer3DModel(**SMALL, attention_head_dim=16),
    "CogView4Transformer2DModel": lambda: _without_init(CogView4Transformer2DModel),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_are_named(name):
    with pytest.raises(trp.PatchError, match=f"{name}; supported: WanTransformer3DModel.*VACE.*SkyReels.*Animate"):
        trp.patch(OTHERS[name]())


def _without_init(cls):
    model = cls.__new__(cls)
    torch.nn.Module.__init__(model)
    return model


def test_a_same_named_block_of_another_family_is_refused():
    class WanTransformerBlock(torch.nn.Module):
        pass

    model = tiny_wan_transformer()
    model.blocks[1] = WanTransformerBlock()
    with pytest.raises(trp.PatchError, match=r"blocks\.1 is a .*WanTransformerBlock, not diffusers'"):
        trp.patch(model)
    assert "forward" not in model.blocks[0].__dict__


FOREIGN = r"is a torch\.nn\.modules\.linear\.Identity; replace it with"


@pytest.mark.parametrize(
    ("family", "part", "other", "message"),
    [
        ("wan", "attn2", torch.nn.Identity(), f"0.attn2 {FOREIGN} diffusers' WanAttention or a subclass of it, then"),
        ("wan", "attn2", None, "0 has no attn2; give it diffusers' WanAttention or a subclass of it, then patch"),
        ("wan", "ffn", None, "0 has no ffn; give it a module, then patch"),
        ("ltx2", "audio_to_video_attn", torch.nn.Identity(), f"0.audio_to_video_attn {FOREIGN} diffusers' LTX2Atten"),
    ],
)
def test_a_part_of_a_block_that_is_foreign_or_missing_is_named(family, part, other, message):
    model = tiny_family_transformer(family)
    blocks = blocks_of(model)
    setattr(blocks[0], part, other)
    before = attributes_of(model)
    with pytest.raises(trp.PatchError, match=rf"blocks\.{message}") as raised:
        trp.patch(model)
    assert str(raised.value).count("blocks.") == 1  # the block as a whole is not blamed too
    assert attributes_of(model) == before


def test_targets_without_a_transformer():
    unet = UNet2DModel(
        sample_size=8, block_out_channels=(32,), down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",)
    )
    with pytest.raises(trp.PatchError, match=r"a DDPMPipeline has no transformer.*give a diffusers pipeline"):
        trp.patch(DDPMPipeline(unet, DDPMScheduler()))
    with pytest.raises(trp.PatchError, match="a str has no transformer"):
        trp.patch("Wan-AI/Wan2.1-T2V-1.3B-Diffusers")


def test_a_compiled_model_is_refused():
    with pytest.raises(trp.PatchError, match="patch the model before compiling it"):
        trp.patch(torch.compile(tiny_wan_transformer()))


def test_unknown_options():
    model = tiny_wan_transformer()
    with pytest.raises(ValueError, match="preset 'fast' is unknown; accepted are exact"):
        trp.patch(model, "fast")
    with pytest.raises(TypeError, match=r"config=\{\}; give a configuration"):
        trp.patch(model, {})
    with pytest.raises(ValueError, match="residual='fp32' is unknown; accepted are fp16, same"):
        trp.Exact(residual="fp32")
    with pytest.raises(ValueError, match="fuse='attn' is unknown; accepted are self_attention"):
        trp.Exact(fuse=["attn"])
    with pytest.raises(ValueError, match="is a string"):
        trp.Exact(fuse="self_attention")
    with pytest.raises(ValueError, match="attention='flash'"):
        trp.Exact(attention="flash")
    with pytest.raises(ValueError, match="implementation='cuda'"):
        trp.Exact(implementation="cuda")
    assert "forward" not in model.blocks[0].__dict__
