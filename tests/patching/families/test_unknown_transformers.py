"""Pipelines whose transformer no family knows: their VAE is patched, and the summary says what is not.

At the end are all pipelines of diffusers with a VAE that can be patched.
"""

import functools
import inspect
import typing
from unittest import mock

import diffusers
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaVideoPipeline,
    SanaVideoTransformer3DModel,
)
from diffusers.configuration_utils import FrozenDict

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.tiny_vae.published import WIDTHS, tiny_file
from tests.tiny_families import EACH_MODEL, tiny_family_transformer
from tests.tiny_vae import decode, tiny_latents, tiny_vae
from tests.tiny_wan import seeded, tiny_wan_pipeline
from turbo_rcm_patch.patching.families.vae.forward import vae_state
from turbo_rcm_patch.patching.tiny_vae import network

HEADS = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1}
CROSS = {"num_cross_attention_heads": 2, "cross_attention_head_dim": 12, "cross_attention_dim": 24}


def sana_pipeline(vae=None):
    options = {**HEADS, **CROSS, "caption_channels": 8, "qk_norm": "rms_norm_across_heads"}
    transformer = seeded(1, lambda: SanaVideoTransformer3DModel(**options))
    scheduler = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    parts = {"transformer": transformer, "vae": vae or tiny_vae("wan 2.1, growing"), "scheduler": scheduler}
    return SanaVideoPipeline(tokenizer=None, text_encoder=None, **parts)


def video_of(pipe):
    prompt = {"prompt_embeds": torch.ones(1, 4, 8), "prompt_attention_mask": torch.ones(1, 4, dtype=torch.long)}
    size = {"height": 32, "width": 32, "frames": 5, "use_resolution_binning": False}
    call = {"guidance_scale": 1.0, "num_inference_steps": 1, "output_type": "np", "negative_prompt": None}
    pipe.set_progress_bar_config(disable=True)
    frames = pipe(**prompt, **size, **call, generator=torch.Generator().manual_seed(0)).frames
    return torch.from_numpy(frames)


def test_the_vae_is_patched_and_the_transformer_named(caplog):
    pipe = sana_pipeline()
    expected, before = video_of(pipe), [set(vars(module)) for module in pipe.transformer.modules()]
    with trp.patch(pipe) as patch:
        line = (
            "transformer: SanaVideoTransformer3DModel, as without the patch: its class is unknown; only the VAE is "
            "patched"
        )
        assert patch.summary().startswith(f"{line}\n\nvae: AutoencoderKLWan, encoder, float32 on cpu")
        assert "video output: " in patch.summary()
        assert [r.message for r in caplog.records if r.name.startswith("turbo_rcm_patch")] == [line]
        assert {row.blocks for row in patch.rows()} == {"encoder", "decoder"}
        assert [set(vars(module)) for module in pipe.transformer.modules()] == before
        assert relative_error(video_of(pipe), expected) <= 1e-5
        assert not vae_state(pipe.vae).eager
    assert vae_state(pipe.vae) is None
    assert "postprocess_video" not in vars(pipe.video_processor)
    assert torch.equal(video_of(pipe), expected)


def test_an_image_pipeline():
    options = {"num_layers": 1, "attention_head_dim": 12, "num_attention_heads": 2, "joint_attention_dim": 8}
    transformer = seeded(1, lambda: QwenImageTransformer2DModel(**options, axes_dims_rope=(4, 4, 4)))
    parts = {"transformer": transformer, "vae": tiny_vae("qwen image"), "scheduler": FlowMatchEulerDiscreteScheduler()}
    pipe = QwenImagePipeline(tokenizer=None, text_encoder=None, **parts)
    pipe.set_progress_bar_config(disable=True)

    def image():
        prompt = {"prompt_embeds": torch.ones(1, 4, 8), "prompt_embeds_mask": torch.ones(1, 4, dtype=torch.long)}
        call = {"height": 32, "width": 48, "num_inference_steps": 1, "true_cfg_scale": 1.0, "output_type": "pt"}
        return pipe(**prompt, **call, generator=torch.Generator().manual_seed(0)).images

    expected = image()
    with trp.patch(pipe) as patch:
        assert patch.summary().startswith("transformer: QwenImageTransformer2DModel, as without the patch")
        assert "vae: AutoencoderKLQwenImage, encoder, float32 on cpu" in patch.summary()
        assert relative_error(image(), expected) <= 1e-5
        assert not vae_state(pipe.vae).eager
    assert torch.equal(image(), expected)


def test_restored_by_the_function_and_patched_once():
    pipe = sana_pipeline()
    trp.patch(pipe)
    with pytest.raises(trp.PatchError, match="vae is patched already; call restore"):
        trp.patch(pipe)
    trp.restore(pipe)
    assert vae_state(pipe.vae) is None
    with pytest.raises(trp.PatchError, match="nothing to restore"):
        trp.restore(pipe)
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    with trp.patch(pipe):
        assert vae_state(pipe.vae) is not None


def test_a_vae_of_a_patched_pipeline_stays_with_that_pipeline():
    known = tiny_wan_pipeline()
    pipe = sana_pipeline(known.vae)
    patch = trp.patch(pipe)
    trp.patch(known)
    with pytest.raises(trp.PatchError, match="nothing to restore"):
        patch.restore()
    assert vae_state(known.vae) is not None
    trp.restore(known)
    assert vae_state(known.vae) is None


UNKNOWN = "cannot patch: transformer is .*SanaVideoTransformer3DModel; supported: "


@pytest.mark.parametrize("config", [trp.Exact(vae=False), "quantized", "sparse", "block_sparse"])
def test_what_is_about_the_transformer_is_refused(config):
    pipe = sana_pipeline()
    with pytest.raises(trp.PatchError, match=UNKNOWN):
        trp.patch(pipe, config)
    assert vae_state(pipe.vae) is None


def test_nothing_known_is_refused():
    pipe = sana_pipeline()
    pipe.vae._decode = lambda z, return_dict=True: (z,)
    with pytest.raises(trp.PatchError, match=UNKNOWN):
        trp.patch(pipe)
    for vae in (AutoencoderKL(block_out_channels=(4,), norm_num_groups=1), None):
        pipe.vae = vae
        with pytest.raises(trp.PatchError, match=UNKNOWN):
            trp.patch(pipe)
    with pytest.raises(trp.PatchError, match="SanaVideoTransformer3DModel; supported: "):
        trp.patch(sana_pipeline().transformer)


def test_a_known_transformer_that_cannot_be_patched_is_refused():
    """Leaving it alone would hide what its user has to change."""
    pipe = tiny_wan_pipeline("wan22")
    pipe.transformer_2 = sana_pipeline().transformer
    with pytest.raises(trp.PatchError, match=r"transformer_2 is .*SanaVideoTransformer3DModel; supported"):
        trp.patch(pipe)
    pipe = tiny_wan_pipeline()
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    with pytest.raises(trp.PatchError, match="patch the model before compiling it"):
        trp.patch(pipe)
    assert vae_state(pipe.vae) is None


VAES = {AutoencoderKLWan: "wan 2.1", AutoencoderKLQwenImage: "qwen image"}


def classes_of(pipeline, name):
    """The classes that a pipeline's component may have, by the annotation of its argument."""
    parameters = inspect.signature(pipeline).parameters
    return typing.get_args(parameters[name].annotation) or (parameters[name].annotation,) if name in parameters else ()


ALL = [getattr(diffusers, name) for name in dir(diffusers) if name.endswith("Pipeline")]
WITH_OUR_VAE = [pipeline for pipeline in ALL if VAES.keys() & set(classes_of(pipeline, "vae"))]


@functools.cache
def known_transformers():
    return {type(tiny_family_transformer(name)): name for name in ("wan", *EACH_MODEL)}


def tiny_pipeline(cls):
    """A pipeline with a tiny VAE, and a tiny transformer of a known family or one without any layers.

    Mocks stand for the other components.
    """
    transformer_class = next(each for each in classes_of(cls, "transformer") if each is not type(None))
    if transformer_class in known_transformers():
        transformer = tiny_family_transformer(known_transformers()[transformer_class])
    else:
        transformer = transformer_class.__new__(transformer_class)
        torch.nn.Module.__init__(transformer)
        transformer._internal_dict = FrozenDict(patch_size=(1, 2, 2), patch_size_t=1)
    vae = next(tiny_vae(VAES[each]) for each in classes_of(cls, "vae") if each in VAES)
    parameters = inspect.signature(cls).parameters.items()
    # Cosmos's own safety checker, the default, needs a package that pip does not install here.
    needed = [name for name, each in parameters if each.default is each.empty or name == "safety_checker"]
    parts = {name: mock.MagicMock() for name in needed}
    return cls(**{**parts, "transformer": transformer, "vae": vae, "scheduler": FlowMatchEulerDiscreteScheduler()})


@pytest.mark.parametrize("cls", WITH_OUR_VAE, ids=lambda cls: cls.__name__)
def test_every_pipeline_with_such_a_vae(cls, tmp_path, monkeypatch):
    """Its VAE is patched. A tiny VAE then decodes to the same shape, until it is taken off."""
    monkeypatch.setattr(network, "WIDTHS", WIDTHS)
    pipe, latents = tiny_pipeline(cls), tiny_latents(frames=2, batch=1)
    expected, before = decode(pipe.vae, latents), set(vars(pipe.vae))
    transformer = type(pipe.transformer)
    with trp.patch(pipe) as patch:
        line, _, rest = patch.summary().partition("\n")
        assert f"vae: {type(pipe.vae).__name__}, decoder, float32 on cpu" in rest
        if transformer in known_transformers():
            assert line.startswith(f"transformer: {transformer.__name__}, 2 blocks")
        else:
            unknown = "as without the patch: its class is unknown; only the VAE is patched"
            assert line == f"transformer: {transformer.__name__}, {unknown}"
        with trp.use_tiny_vae(pipe, tiny_file(tmp_path)):
            made = decode(pipe.vae, latents)
            assert (made.shape, made.dtype) == (expected.shape, expected.dtype)
            assert relative_error(made, expected) > 0.1
        assert relative_error(decode(pipe.vae, latents), expected) <= 1e-5
        assert not vae_state(pipe.vae).eager
    assert set(vars(pipe.vae)) == before
    assert torch.equal(decode(pipe.vae, latents), expected)


def test_pipelines_of_every_model_with_such_a_vae_are_found():
    names = "Wan SkyReelsV2 ChronoEdit AnyFlow Helios LucyEdit Cosmos2VideoToWorld Cosmos3Omni JoyImageEdit MotifVideo"
    names += " SanaVideo BriaFibo QwenImage Krea2 NucleusMoEImage"
    assert {f"{name}Pipeline" for name in names.split()} <= {cls.__name__ for cls in WITH_OUR_VAE}
