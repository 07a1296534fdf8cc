"""The memory of each stage, beside that of the tensors that live together in it."""

import math
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from diffusers import (
    AnyFlowTransformer3DModel,
    AutoencoderKLWan,
    HeliosTransformer3DModel,
    SkyReelsV2DiffusionForcingPipeline,
    SkyReelsV2DiffusionForcingVideoToVideoPipeline,
    SkyReelsV2Pipeline,
    SkyReelsV2Transformer3DModel,
    WanAnimateTransformer3DModel,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
    WanVideoToVideoPipeline,
)
from peft import LoraConfig

import turbo_rcm_patch as trp
from tests.patching.families.peak import NORM, PYTORCHS_CONVOLUTION, PYTORCHS_NORM, Peak, as_on_a_gpu
from tests.tiny_families import tiny_family_transformer
from tests.tiny_vae import tiny_vae
from tests.tiny_wan import tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch.kernels.dispatch import meta_is_gpu
from turbo_rcm_patch.latents import latent_size
from turbo_rcm_patch.memory.empty_models import cast_as_loaded
from turbo_rcm_patch.memory.needs import models_by_preset
from turbo_rcm_patch.memory.stages import (
    BESIDE_BLOCKS,
    Patched,
    Video,
    denoising_bytes,
    stages_of,
    tokens_of,
    unpatched_stages,
)
from turbo_rcm_patch.patching.families import CASES, anyflow, helios
from turbo_rcm_patch.patching.families.vae.chunks import decoding_bytes, encoding_bytes
from turbo_rcm_patch.patching.weights import quantize_linears
from turbo_rcm_patch.tiers import EXACT


@pytest.mark.parametrize("lora", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["wan2.1-1.3b", "wan2.1-14b", "wan2.2-5b"])
def test_the_unpatched_step_takes_what_diffusers_block_takes(name, lora):
    """Counted on tensors without values."""
    case, video = CASES[name], Video(480, 832, 81)
    with torch.device("meta"):
        model = cast_as_loaded(case.transformer_class(**{**case.transformer, "num_layers": 1}), torch.bfloat16)
        vae = cast_as_loaded(case.vae_class(**case.vae), torch.bfloat16)
    if lora is not None:
        model.add_adapter(LoraConfig(r=16, target_modules=["to_q", "to_out.0", "net.0.proj", "net.2"]))
        for path, matrix in model.named_parameters():
            matrix.data = matrix.data.to(lora) if "lora_" in path else matrix.data
    patched = Patched({"transformer": model, "vae": vae}, trp.Exact(), case.expand_timesteps)
    step, _ = unpatched_stages(patched, video)
    latents = model.config.in_channels, *latent_size(vae.config, *video)
    timesteps = (tokens_of("transformer", patched, video),) if case.expand_timesteps else ()
    shapes = latents, timesteps, (512, model.config.text_dim)
    inputs = [torch.empty(1, *shape, device="meta", dtype=torch.bfloat16) for shape in shapes]
    attention = mock.patch.object(F, "scaled_dot_product_attention", lambda query, *_, **__: torch.empty_like(query))
    with torch.no_grad(), attention, Peak(model) as counted:
        model(*inputs)
    assert 0.97 <= step.computing / counted.bytes <= 1.15


def test_a_timestep_for_each_token_makes_the_output_norm_the_peak():
    """An H200 measured 2.68 GB for TI2V-5B's 121 frames, whatever the tier, with scale_shift_table in bf16."""
    video = Video(704, 1280, 121)
    for _, patched in models_by_preset("wan2.2-5b"):
        in_blocks, after_blocks = denoising_bytes("transformer", patched, video)
        assert in_blocks < after_blocks
        width = 3072 * tokens_of("transformer", patched, video)
        assert math.isclose(after_blocks - 4 * width, 2.68e9, rel_tol=0.01)  # 4 more: a table in fp32, as loaded
        projections = 7 * 2 * width  # of the time, alive in the blocks too
        without = denoising_bytes("transformer", patched._replace(own_timesteps=False), video)
        assert without == (in_blocks - projections, 0)


def test_vace_encodes_a_masked_video_while_its_pipeline_holds_others():
    """The video, its mask, and the video masked the other way. The video stays. A step has one reference image."""
    vae, video = tiny_vae(dtype=torch.bfloat16), Video(32, 48, 5)
    plain, with_control = (
        {stage.name: stage.computing for stage in stages_of(Patched(models, trp.Exact()), video)}
        for models in (
            {"transformer": m, "vae": vae} for m in (tiny_wan_transformer(), tiny_family_transformer("vace"))
        )
    )
    assert "VAE encoding" not in plain
    values = 3 * 5 * 32 * 48
    of_token = (plain["denoising"] - BESIDE_BLOCKS) // 12
    of_token += (2 + 1) * 128 * 4  # hints of two layers, and the last states of the control blocks
    assert with_control["denoising"] == (12 + 6) * of_token + BESIDE_BLOCKS + 4 * values
    assert with_control["decoding"] == plain["decoding"] + 4 * values
    assert with_control["VAE encoding"] == encoding_bytes(vae, *video) + 2 * 4 * values + 3 * 2 * values


FROM_VIDEO = [("t2v", WanVideoToVideoPipeline), ("skyreels", SkyReelsV2DiffusionForcingVideoToVideoPipeline)]
ENCODED = {  # beside the video: arguments of prepare_latents
    "t2v": {"timestep": torch.empty(1, device="meta")},
    "skyreels": {
        "num_frames": 33,
        "overlap_history": 17,
        "overlap_history_latent_frames": 5,
        "base_latent_num_frames": 9,
        "causal_block_size": 1,
        "long_video_iter": 0,
    },
}


def video_to_video(model, kind, vae=None):
    parts = tiny_wan_pipeline().components
    if model != "t2v":
        parts["transformer"] = tiny_family_transformer(model)
    parts["vae"] = vae or parts["vae"]
    return kind(**{name: parts[name] for name in ("tokenizer", "text_encoder", "transformer", "vae", "scheduler")})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize(("model", "kind"), FROM_VIDEO)
def test_a_given_video_is_encoded_while_its_pipeline_holds_it(model, kind, tiles, dtype):
    """Counted on tensors without values."""
    with torch.device("meta"):
        vae = AutoencoderKLWan().to(dtype).eval()
    pipe, video = video_to_video(model, kind, vae), Video(480, 832, 33)
    pipe.scheduler = mock.Mock(add_noise=lambda latents, noise, _: latents + noise)
    given = torch.empty(1, 3, video.frames, *video[:2], device="meta")
    patched = Patched({"transformer": pipe.transformer, "vae": vae}, trp.Exact(), from_video=True)
    (stage,) = (one for one in stages_of(patched, video) if one.name == "VAE encoding")
    vae.use_tiling = tiles
    where = {"device": torch.device("meta"), "dtype": torch.float32}
    with trp.patch(vae), as_on_a_gpu(vae) as counted:
        pipe.prepare_latents(given, height=480, width=832, **where, **ENCODED[model])
    needed = counted.bytes + given.nbytes
    assert needed <= 1.02 * (stage.in_tiles if tiles else stage.computing) <= 1.1 * needed


@pytest.mark.parametrize(("model", "kind"), FROM_VIDEO)
def test_a_pipeline_from_video_to_video_keeps_the_given_video(model, kind, tmp_path):
    pipe, size = video_to_video(model, kind), {"height": 480, "width": 832, "num_frames": 81}
    plan = trp.fit(pipe, "16 GB", **size, device="cpu")
    plan.undo()
    pipe.save_pretrained(tmp_path)
    ((_, patched),) = models_by_preset(tmp_path, preset="exact")
    of, without = (
        {stage.name: stage.computing for stage in stages_of(one, Video(*size.values()))}
        for one in (patched, patched._replace(from_video=False))
    )
    assert list(of) == [*plan.peaks]
    values = 3 * 480 * 832 * 81
    for name in ("denoising", "decoding"):
        assert of[name] == without[name] + 4 * values
    # SkyReels' pipeline joins both videos in fp32. Alive are also the given one, and the new one, in bf16 and in fp32.
    assert of.get("joining") == (None if model == "t2v" else (2 * 4 + 4 + 2 + 4) * values)
    beside = [stage.name for stage in unpatched_stages(patched, Video(*size.values()))]
    assert beside == ["denoising, unpatched", "VAE encoding, unpatched", "decoding, unpatched"]


def test_the_latents_of_a_sampler_grow_with_the_video():
    ((_, patched),) = models_by_preset("wan2.1-i2v-14b", preset="exact")
    for video, least in ((Video(480, 832, 81), 80e6), (Video(1088, 1920, 81), 367e6)):
        (step,) = (stage for stage in stages_of(patched, video) if stage.name == "denoising")
        in_blocks, _ = denoising_bytes("transformer", patched, video)
        assert least <= step.computing - in_blocks <= 1.3 * least


def test_diffusion_forcing_gives_each_token_its_own_timestep(tmp_path):
    parts = tiny_wan_pipeline().components | {"transformer": tiny_family_transformer("skyreels")}
    denoising = []
    for kind in (SkyReelsV2Pipeline, SkyReelsV2DiffusionForcingPipeline):
        pipe = kind(**{name: parts[name] for name in ("tokenizer", "text_encoder", "transformer", "vae", "scheduler")})
        plan = trp.fit(pipe, "8 GB", height=720, width=1280, num_frames=81, device="cpu")
        denoising.append(plan.peaks["denoising"])
        plan.undo()
        pipe.save_pretrained(tmp_path / kind.__name__)
        (found,) = models_by_preset(tmp_path / kind.__name__, preset="exact")
        assert found[1].own_timesteps == (kind is SkyReelsV2DiffusionForcingPipeline)
    assert denoising[1] > 1.2 * denoising[0]


LATENT, PIXELS, FACE = (25, 68, 120), (97, 544, 960), (97, 512, 512)  # frames, height, width of one video and a face
LATENT_BEHIND_IMAGE = 26, *LATENT[1:]
NONE = {}
WAN = {"hidden_states": (16, *LATENT), "timestep": ()}
FORCED = {**WAN, "timestep": (25,), "enable_diffusion_forcing": True}
CONTROLLED = {
    "hidden_states": (16, *LATENT_BEHIND_IMAGE),
    "timestep": (),
    "control_hidden_states": (96, *LATENT_BEHIND_IMAGE),
    "control_hidden_states_scale": (),
}
ANIMATED = {
    "hidden_states": (36, *LATENT_BEHIND_IMAGE),
    "timestep": (),
    "encoder_hidden_states_image": (257, 1280),
    "pose_hidden_states": (16, *LATENT),
    "face_pixel_values": (3, *FACE),
}
FLOW = {"hidden_states": (25, 16, *LATENT[1:]), "timestep": (25,), "r_timestep": (25,)}
FRAMES = {"hidden_states": 9, "latents_history_short": 2, "latents_history_mid": 2, "latents_history_long": 16}
CHUNK = {
    "timestep": (),
    **{name: (16, frames, *LATENT[1:]) for name, frames in FRAMES.items()},
    **{f"indices_{name}": (frames,) for name, frames in FRAMES.items()},
}
WITH_CONTROL = {"vace_layers": [0], "vace_in_channels": 96, "ffn_dim": 4160}  # in 14B's proportion to the width
WITH_FACE = {"inject_face_latents_blocks": 1, "motion_encoder_batch_size": 1, "added_kv_proj_dim": 1536}


def one_row(scale_shift_table, temb, x, shared):
    """The rows of modulation if all tokens have the same timestep, which tensors without values do not tell."""
    return [row.squeeze(2) for row in (scale_shift_table.unsqueeze(0) + temb[:, :1].float()).chunk(6, dim=2)]


@contextmanager
def without_values(capability=(9, 0)):
    """Let diffusers' modules and the families with a modulation of each token run without values as on a GPU."""
    with ExitStack() as stack:
        for family in (anyflow, helios):
            stack.enter_context(mock.patch.object(family, "modulation", one_row))
        stack.enter_context(mock.patch.object(F, "rms_norm", lambda x, *_, **__: torch.empty_like(x)))
        attention = mock.patch.object(
            F, "scaled_dot_product_attention", lambda query, *_, **__: torch.empty_like(query)
        )
        stack.enter_context(attention)
        stack.enter_context(mock.patch.object(torch, "autocast", return_value=nullcontext()))
        stack.enter_context(meta_is_gpu(capability, 132))
        stack.enter_context(torch.no_grad())
        yield


@pytest.mark.parametrize("tier", ["exact", "quantized"])
@pytest.mark.parametrize(
    ("model_class", "options", "call", "videos"),
    [
        (WanTransformer3DModel, {}, WAN, ()),
        (SkyReelsV2Transformer3DModel, {}, WAN, ()),
        (SkyReelsV2Transformer3DModel, {}, FORCED, ()),
        (WanVACETransformer3DModel, WITH_CONTROL, CONTROLLED, (PIXELS,)),
        (WanAnimateTransformer3DModel, {"num_layers": 2, **WITH_FACE}, ANIMATED, (PIXELS, FACE)),
        (AnyFlowTransformer3DModel, {}, FLOW, ()),
        (HeliosTransformer3DModel, {}, CHUNK, ()),
        (HeliosTransformer3DModel, {"is_amplify_history": True}, CHUNK, ()),
    ],
    ids=["wan", "skyreels", "diffusion forcing", "vace", "animate", "anyflow", "helios", "amplified history"],
)
def test_a_patched_step_takes_what_its_blocks_take(model_class, options, call, videos, tier):
    """Counted on tensors without values, as on an H100. videos: those in fp32 that the pipeline keeps beside."""
    config = trp.Exact() if tier == "exact" else trp.Quantized(restorable=False)
    predicted, needed = predicted_and_counted(config, model_class, options, call)
    needed += sum(4 * 3 * math.prod(video) for video in videos)
    assert needed <= predicted <= 1.1 * needed


def predicted_and_counted(
    config,
    model_class=WanTransformer3DModel,
    options=NONE,
    call=WAN,
    capability=(9, 0),
    dtype=torch.bfloat16,
    lora=None,
):
    """The bytes of a step by its plan, and those of the tensors that live together in it, on tensors without values."""
    with torch.device("meta"):
        model = model_class(**{"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 1, **options})
    model = cast_as_loaded(model, dtype)
    if lora is not None:
        model.add_adapter(LoraConfig(r=16, target_modules=["to_q", "to_k", "to_v"]))
        for path, matrix in model.named_parameters():
            matrix.data = matrix.data.to(lora) if "lora_" in path else matrix.data
    if config.tier != EXACT:  # weights in 8 bits are made of some values; random ones take longer
        model.to_empty(device="cpu").apply(lambda module: [p.data.fill_(1) for p in module.parameters(recurse=False)])
    patched = Patched({"transformer": model}, config, own_timesteps="enable_diffusion_forcing" in call)
    patched = patched._replace(capability=capability if capability >= (8, 0) else (0, 0))
    (step,) = stages_of(patched, Video(544, 960, 97))
    shapes = {"encoder_hidden_states": (512, model.config.text_dim), **call}
    given = {
        name: torch.empty(1, *value, dtype=dtype, device="meta") if isinstance(value, tuple) else value
        for name, value in shapes.items()
    }
    with mock.patch.object(quantize_linears, "capability_of", return_value=capability):
        trp.patch(model, config)
    with without_values(capability), Peak(model.to("meta")) as counted:
        model(**given)
    needed = sum(value.nbytes for value in given.values() if isinstance(value, torch.Tensor)) + counted.bytes
    return max(step.computing, step.after_blocks), needed


IMAGE = {"added_kv_proj_dim": 1536, "image_dim": 1280}
WITH_IMAGE = {**WAN, "encoder_hidden_states_image": (257, 1280)}
IN_FP32 = {"dtype": torch.float32}
WIDE = {"options": {"num_attention_heads": 40, "ffn_dim": 13824}}
IN_8_BITS = partial(trp.Quantized, restorable=False)


@pytest.mark.parametrize(
    ("config", "most", "more"),
    [
        (trp.Exact(linears="torch"), 1.1, {}),  # which consumer cards take by themselves
        (trp.Exact(fuse=()), 1.15, {}),
        (trp.Exact(implementation="torch"), 1.2, {}),
        (trp.Exact(), 1.2, {"capability": (7, 5)}),
        (IN_8_BITS(), 1.1, {"capability": (8, 6)}),
        (IN_8_BITS(), 1.1, {"capability": (8, 9)}),
        (IN_8_BITS(), 1.1, {"options": IMAGE, "call": WITH_IMAGE}),
        (IN_8_BITS(keep=["*.ffn.net.0.proj"]), 1.1, {}),
        (IN_8_BITS(keep=["*.ffn.net.2"]), 1.1, {}),
        (IN_8_BITS(keep=["blocks.0"]), 1.1, {}),
        (IN_8_BITS(keep=["*.attn1.*", "*.attn2.*"]), 1.1, {}),
        (IN_8_BITS(keep=["*.attn1.*"]), 1.1, {"options": IMAGE, "call": WITH_IMAGE}),
        (IN_8_BITS(keep=["*.attn1.processor"]), 1.1, {}),
        (IN_8_BITS(keep=["*.attn1.processor"]), 1.2, {"options": IMAGE, "call": WITH_IMAGE}),
        (IN_8_BITS(quantize=["attention"]), 1.1, {}),
        (IN_8_BITS(quantize=["linears"]), 1.1, {}),
        (IN_8_BITS(quantize=["linears"]), 1.1, IN_FP32),
        (IN_8_BITS(keep=["*.attn1.processor"]), 1.1, IN_FP32),
        (IN_8_BITS(keep=["*.attn1.to_k"]), 1.2, IN_FP32 | WIDE),
        (IN_8_BITS(keep=["*.ffn.net.0.proj"]), 1.1, IN_FP32),
        (IN_8_BITS(keep=["*.attn1.to_q", "*.attn1.to_v"]), 1.2, {"lora": torch.bfloat16} | WIDE),
        (IN_8_BITS(keep=["*.attn1.to_q", "*.attn1.to_v"]), 1.1, {"lora": torch.float32} | WIDE),
    ],
)
def test_options_and_other_cards_take_no_more_than_is_planned(config, most, more):
    predicted, needed = predicted_and_counted(config, **more)
    assert needed <= predicted <= most * needed


@pytest.mark.parametrize("work", ["decode", "encode"])
def test_latent_frames_at_a_time_count(work):
    with torch.device("meta"):
        vae = AutoencoderKLWan().to(torch.bfloat16).eval()
    video = Video(240, 416, 33)
    frames, *size = latent_size(vae.config, *video)
    given = {"decode": (16, frames, *size), "encode": (3, video.frames, *video[:2])}[work]
    x = torch.empty(1, *given, dtype=torch.bfloat16, device="meta")
    size_of = {"decode": decoding_bytes, "encode": encoding_bytes}[work]
    with trp.patch(vae, trp.Exact(vae_chunk=4)), as_on_a_gpu(vae) as counted:
        getattr(vae, work)(x)
    needed = counted.bytes + (x.nbytes if work == "encode" else 0)
    assert 0.95 * needed <= size_of(vae, *video, latents=4) <= 1.1 * needed


@pytest.mark.parametrize("options", [{}, CASES["wan2.2-5b"].vae], ids=["wan 2.1", "ti2v-5b"])
@pytest.mark.parametrize(
    ("dtype", "capability", "norm"),
    [
        (torch.float32, (9, 0), NORM),
        (torch.bfloat16, (8, 9), NORM),
        (torch.bfloat16, (0, 0), PYTORCHS_NORM),
    ],
)
def test_a_vae_by_pytorchs_operations_takes_what_is_planned(dtype, capability, norm, options):
    """Counted on tensors without values. In fp32, and on other cards, convolutions are PyTorch's."""
    with torch.device("meta"):
        vae = AutoencoderKLWan(**options).to(dtype).eval()
    video, reads_image = Video(480, 832, 81), tiny_wan_transformer(in_channels=36)
    patched = Patched({"transformer": reads_image, "vae": vae}, trp.Exact(), capability=capability)
    planned = {stage.name: stage.computing for stage in stages_of(patched, video)}
    x = torch.empty(1, 3, video.frames, *video[:2], dtype=dtype, device="meta")
    z = torch.empty(1, vae.config.z_dim, *latent_size(vae.config, *video), dtype=dtype, device="meta")
    with trp.patch(vae):
        with as_on_a_gpu(vae, PYTORCHS_CONVOLUTION, norm) as counted:
            vae.encode(x)
        assert counted.bytes + x.nbytes <= planned["VAE encoding"] <= 1.15 * (counted.bytes + x.nbytes)
        with as_on_a_gpu(vae, PYTORCHS_CONVOLUTION, norm) as counted:
            vae.decode(z)
        assert counted.bytes <= planned["decoding"] <= 1.1 * counted.bytes
