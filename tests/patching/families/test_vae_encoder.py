"""The patched encoder computes what diffusers' computes: images, videos in chunks of any size, tiles and slices."""

import copy
from collections import Counter

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import AvgDown3D

import turbo_rcm_patch as trp
from scripts.tools import compile_without_gpu
from tests.oracle import assert_no_worse, relative_error
from tests.tiny_vae import KINDS, decode, tiny_vae
from turbo_rcm_patch import kernels
from turbo_rcm_patch.kernels.dispatch import interpreting, meta_is_gpu
from turbo_rcm_patch.patching.families.vae import forward
from turbo_rcm_patch.patching.families.vae.encoder import _Encoder
from turbo_rcm_patch.patching.families.vae.forward import vae_state
from turbo_rcm_patch.patching.families.wan.cases import TI2V_5B_VAE
from turbo_rcm_patch.tiers import EXACT

FP32 = EXACT.limits.fp32
FEW_LEVELS = {"dim_mult": [1] * 3, "temperal_downsample": [True, False]}
GROWING = ["wan 2.1, growing", "residual, growing", "qwen image"]  # with channels enough for errors to average out


def tiny_video(frames=5, batch=2, height=32, width=48, dtype=torch.float32, *, seed=7):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, frames, height, width, generator=generator).to(dtype)


def encode(vae, x=None):
    """The latents' moments of a video, or of a tiny one, without gradients."""
    with torch.no_grad():
        return vae.encode(tiny_video() if x is None else x).latent_dist.parameters


def check(kind, x, off, set_up=lambda vae: None, **config):
    """Patched as unpatched; returns what is encoded."""
    vae = tiny_vae(kind)
    set_up(vae)
    expected = encode(vae, x)
    assert expected.std() > 0.1  # there is something to compare
    off()
    trp.patch(vae, trp.Exact(**config))
    actual = encode(vae, x)
    assert actual.shape == expected.shape
    assert actual.is_contiguous()
    assert relative_error(actual, expected) <= FP32
    return actual


@pytest.mark.parametrize("frames", [1, 14])
@pytest.mark.parametrize("kind", KINDS)
def test_an_image_and_a_video_in_chunks_of_any_size(kind, frames, diffusers_is_off):
    """diffusers encodes 13 of 14 frames: the first alone, then three groups of four."""
    vae, x = tiny_vae(kind), tiny_video(frames)
    expected = encode(vae, x)
    assert expected.shape[2] == 1 + (frames - 1) // 4
    diffusers_is_off()
    for chunk in (None, 1, 2) if frames > 1 else (None,):
        with trp.patch(vae, trp.Exact(vae_chunk=chunk)):
            assert relative_error(encode(vae, x), expected) <= FP32, chunk
            assert not vae_state(vae).eager_encodes


@pytest.mark.parametrize(
    ("kind", "tiles"),
    [
        ("residual", (16, 16, 8, 8)),  # of pixels that are patchified
        ("qwen image", (32, 40, 32, 24)),
        ("wan 2.1", (24, 32, 32, 24)),  # rows are left out
    ],
)
def test_tiles(kind, tiles, diffusers_is_off):
    x = tiny_video(5, 1, 64, 64)
    whole = encode(tiny_vae(kind), x)
    in_tiles = check(kind, x, diffusers_is_off, lambda vae: vae.enable_tiling(*tiles))
    assert in_tiles.shape != whole.shape or relative_error(in_tiles, whole) > 1e-3


def test_tiled_encode_alone():
    vae, x = tiny_vae("wan 2.1, growing"), tiny_video(5, 1, 40, 56)
    vae.enable_tiling(32, 32, 24, 24)
    with torch.no_grad():
        expected = vae.tiled_encode(x)
        with trp.patch(vae):
            assert relative_error(vae.tiled_encode(x), expected) <= FP32
    small = x[..., :32, :32]  # one tile: diffusers encodes it as a whole
    with trp.patch(vae):
        assert encode(vae, small).shape[-1] == 4


def test_slices_and_a_batch(diffusers_is_off):
    x = tiny_video(5, 3)
    sliced = check("qwen image", x, diffusers_is_off, lambda vae: vae.enable_slicing())
    vae = tiny_vae("qwen image")
    trp.patch(vae)
    assert relative_error(sliced, encode(vae, x)) <= FP32


def test_sizes_that_are_odd_and_memory_of_any_layout(diffusers_is_off):
    x = tiny_video(6, 2, 35, 50).transpose(3, 4).contiguous().transpose(3, 4)
    check("wan 2.1, growing", x, diffusers_is_off)


OTHERS = [{"temperal_downsample": [True, True, False]}, {"temperal_downsample": [False] * 3}, {"in_channels": 4}]


@pytest.mark.parametrize("options", OTHERS)
def test_other_encoders_of_the_class(options, diffusers_is_off):
    vae = AutoencoderKLWan(**{**KINDS["wan 2.1, growing"], **options}).eval()
    x = torch.randn(1, options.get("in_channels", 3), 9, 16, 24)
    expected = encode(vae, x)
    diffusers_is_off()
    trp.patch(vae)
    assert relative_error(encode(vae, x), expected) <= FP32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", GROWING)
def test_low_precision_is_no_less_accurate(kind, dtype):
    vae, x = tiny_vae(kind, dtype), tiny_video(5, 1, dtype=dtype)
    oracle = encode(tiny_vae(kind, dtype).double(), x.double())
    unpatched = encode(vae, x)
    trp.patch(vae)
    encoded = encode(vae, x)
    assert encoded.dtype == dtype
    assert_no_worse(encoded, unpatched, oracle)


@pytest.mark.skipif(not interpreting(), reason="needs Triton's CPU interpreter")
@pytest.mark.parametrize(("kind", "frames"), [("qwen image", 1), ("residual", 5)])
def test_through_the_kernels(kind, frames, diffusers_is_off):
    """Pixels have channels of zeros then, so that a kernel reads 16 bytes at a time."""
    vae, x = tiny_vae(kind, **FEW_LEVELS), tiny_video(frames, 1, 8, 8)
    expected = encode(vae, x)
    diffusers_is_off()
    trp.patch(vae, trp.Exact(implementation="triton"))
    assert relative_error(encode(vae, x), expected) <= FP32


@pytest.mark.parametrize(
    ("given", "made", "frames", "edge"),
    [(4, 4, 1, 2), (4, 8, 2, 2), (8, 4, 2, 2), (6, 3, 1, 2), (4, 4, 1, 1), (8, 4, 2, 1)],
)
def test_a_shortcut_averages_neighbours(given, made, frames, edge):
    """Frame 0 is averaged with zeros before it."""
    shortcut, run = AvgDown3D(given, made, frames, edge), _Encoder(None)
    for count in (1, 4):
        x = torch.randn(2, count, 4, 6, given)
        expected = shortcut(x.permute(0, 4, 1, 2, 3)).permute(0, 2, 3, 4, 1)
        assert torch.allclose(run.average(shortcut, x), expected, rtol=0, atol=1e-6)


def test_each_norm_and_each_convolution_is_one_launch():
    """The launches are recorded as for a GPU of sm_80, without one. Convolutions of stride 2 are PyTorch's."""
    vae = tiny_vae("qwen image")
    patch = trp.patch(vae)
    vae.to("meta")
    with meta_is_gpu((8, 0), compile_without_gpu.MULTIPROCESSORS):
        launches = compile_without_gpu.record_launches(lambda: encode(vae, tiny_video(1).to("meta")), (8, 0))
        rows = {row.step: row for row in patch.rows() if row.blocks == "encoder"}
    names = Counter(launch.kernel.fn.__name__ for launch in launches)
    assert names["_rms_norm_silu_kernel"] == rows["norm + SiLU"].count
    assert names["_conv_skip_kernel"] == rows["convolution"].count
    assert (rows["norm + SiLU"].kernel, rows["convolution"].kernel) == ("Triton", "portable Triton")
    downsampling = rows["downsampling"]
    assert downsampling.reasons == {"stride 2": downsampling.count}
    assert downsampling.count == 5  # three of images, two of frames
    assert rows["projection"].reasons == {"nothing to fuse": rows["projection"].count}


def test_the_first_encode_compiles_its_kernels_ahead(monkeypatch):
    vae, x, runs = tiny_vae(**FEW_LEVELS), tiny_video(1, 1, 8, 8), []
    expected = encode(vae, x)
    monkeypatch.setattr(forward, "_launches_kernels", lambda *_: True)
    monkeypatch.setattr(kernels, "compile_ahead", lambda run: (runs.append(run), run()))
    for _ in range(2):
        with trp.patch(vae):
            assert relative_error(encode(vae, x), expected) <= FP32
    assert len(runs) == 1
    with trp.patch(vae):
        decode(vae)
    assert len(runs) == 2


# diffusers' own encoder. test_vae_fallbacks.py has the reasons that the encoder shares with the decoder.


def _hook_after(vae):
    vae.quant_conv.register_forward_hook(lambda module, args, output: 1.5 * output)


def _other_padding(vae):
    vae.encoder.down_blocks[1].resample[0].padding = (1, 0, 1, 0)


def _circular_padding(vae):
    vae.encoder.down_blocks[1].resample[1].padding_mode = "circular"


def _engine(vae):
    run = vae.encoder.forward
    vae.encoder = torch.nn.Module()
    vae.encoder.forward = lambda x, **options: run(x, **options)


def _blending(vae):
    vae.enable_tiling(24, 24, 16, 16)
    vae.blend_v = lambda a, b, blend_extent: b


UNUSUAL = {
    "torch hook on quant_conv": _hook_after,
    "changed attributes on encoder.down_blocks.1.resample.0": _other_padding,
    "changed attributes on encoder.down_blocks.1.resample.1": _circular_padding,
    "torch Module layer on encoder": _engine,
    "replaced blend_v": _blending,
}


@pytest.mark.parametrize("reason", UNUSUAL)
def test_diffusers_own_encoder_runs_and_the_summary_says_why(reason):
    kind = "qwen image" if "changed" in reason or "quant_conv" in reason else "wan 2.1"
    vae, plain, x = tiny_vae(kind), tiny_vae(kind), tiny_video(5, 1)
    patch = trp.patch(vae)
    for each in (vae, plain):
        UNUSUAL[reason](each)
    assert torch.equal(encode(vae, x), encode(plain, x))
    assert vae_state(vae).eager_encodes == {reason: 1}
    (row,) = (row for row in patch.rows() if row.blocks == "encoder")
    assert (row.step, row.kernel, row.reasons) == ("encoder", "PyTorch module", {reason: 1})
    assert f"diffusers' own encoder ran: {reason} (1)" in patch.summary()
    decode(vae)
    assert bool(vae_state(vae).eager) == (reason == "replaced blend_v")


def test_a_hook_on_the_decoder_leaves_the_encoder_ours():
    vae = tiny_vae()
    trp.patch(vae)
    vae.decoder.conv_in.register_forward_hook(lambda module, args, output: 1.5 * output)
    encode(vae)
    decode(vae)
    assert not vae_state(vae).eager_encodes
    assert vae_state(vae).eager


def test_an_encoder_that_somebody_replaced_or_took_out_is_left_alone():
    vae = tiny_vae()
    vae._encode = users = lambda x: x
    with trp.patch(vae) as patch:
        assert vae._encode is users
        assert "tiled_encode" not in vars(vae)
        assert "its _encode was replaced" in patch.summary()
        decode(vae)
        assert not vae_state(vae).eager
    assert vae._encode is users
    vae = tiny_vae()
    vae.encoder = None
    expected = decode(vae)
    with trp.patch(vae) as patch:
        assert relative_error(decode(vae), expected) <= FP32
        assert "no encoder" in patch.summary()


def test_autograd_and_autocast():
    vae, plain = tiny_vae(), tiny_vae()
    trp.patch(vae)
    leaves = [tiny_video(5, 1).requires_grad_() for _ in range(2)]
    for each, x in zip((vae, plain), leaves, strict=True):
        each.encode(x).latent_dist.parameters.square().mean().backward()
    assert torch.equal(leaves[0].grad, leaves[1].grad)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(encode(vae), encode(plain))
    vae.enable_tiling(24, 24, 16, 16)
    vae.encode(leaves[0])
    assert vae_state(vae).eager_encodes == {"autograd": 2, "autocast": 1}


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("wan 2.1", (2, 3, 16, 16)),
        ("wan 2.1", (1, 4, 5, 16, 16)),
        ("wan 2.1", (1, 3, 5, 4, 16)),
        ("residual", (1, 3, 5, 24, 32)),
        ("residual", (1, 3, 5, 31, 32)),
    ],
)
def test_pixels_that_do_not_fit_raise_diffusers_errors(kind, shape):
    vae, plain = tiny_vae(kind), tiny_vae(kind)
    trp.patch(vae)
    messages = []
    for each in (vae, plain):
        with pytest.raises((RuntimeError, ValueError)) as error:
            encode(each, torch.zeros(shape))
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_frames_that_cannot_be_halved_so_often_raise_diffusers_error():
    vae = AutoencoderKLWan(**{**KINDS["wan 2.1"], "temperal_downsample": [True] * 3})
    trp.patch(vae)
    with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
        encode(vae)
    assert vae_state(vae).eager_encodes == {"input of another shape": 1}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("cls", "options", "frames"),
    [(AutoencoderKLWan, {}, 21), (AutoencoderKLWan, TI2V_5B_VAE, 21), (AutoencoderKLQwenImage, {}, 1)],
    ids=["wan 2.1", "ti2v-5b", "qwen image"],
)
def test_error_of_the_real_models_on_a_gpu(cls, options, frames, monkeypatch, diffusers_is_off):
    """Beside an encode in fp32, without TF32, whole and in tiles. A video that the patch takes in parts."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    low = cls(**options).eval().to("cuda", torch.bfloat16)
    wide = copy.deepcopy(low).float()
    x = torch.rand(1, 3, frames, 192, 320, device="cuda", dtype=torch.bfloat16) * 2 - 1
    runs = []
    for tiled in (False, True):
        for vae in (low, wide) if tiled else ():
            vae.enable_tiling(128, 128, 96, 96)
        runs.append((tiled, encode(wide, x.float()), encode(low, x)))
    diffusers_is_off()
    for tiled, oracle, unpatched in runs:
        low.use_tiling = tiled
        for chunk in (None, 2):
            with trp.patch(low, trp.Exact(vae_chunk=chunk)):
                assert_no_worse(encode(low, x), unpatched, oracle)


@pytest.mark.gpu
@pytest.mark.parametrize(("options", "video"), [({}, (81, 480, 832)), (TI2V_5B_VAE, (21, 704, 1280))])
def test_peak_memory_on_a_gpu(options, video):
    with torch.device("cuda"):
        vae = AutoencoderKLWan(**options).to(torch.bfloat16).eval()
        x = torch.randn(1, 3, *video, dtype=torch.bfloat16)
    peaks = []
    for patched in (False, True):
        if patched:
            trp.patch(vae)
        torch.cuda.reset_peak_memory_stats()
        encode(vae, x)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= peaks[0]
