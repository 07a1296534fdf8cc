"""The patched decoder computes what diffusers' computes: frame by frame, in chunks, tiles and slices."""

import copy
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import DupUp3D

import turbo_rcm_patch as trp
from scripts.tools import compile_without_gpu
from tests.oracle import assert_no_worse, combined_weight, relative_error
from tests.tiny_vae import KINDS, decode, tiny_latents, tiny_vae
from turbo_rcm_patch import kernels
from turbo_rcm_patch.kernels.choice.registry import Kernel, Op
from turbo_rcm_patch.kernels.conv import conv_pairs_sm90
from turbo_rcm_patch.kernels.conv.conv_pairs import PAIRS, conv_pairs_reference
from turbo_rcm_patch.kernels.conv.conv_tiles import residual_repeats
from turbo_rcm_patch.kernels.dispatch import interpreting, meta_is_gpu
from turbo_rcm_patch.kernels.launch import recorded
from turbo_rcm_patch.kernels.reference import repeat_residual
from turbo_rcm_patch.kernels.rows.rms_norm_silu_pairs import rms_norm_silu_pairs_reference
from turbo_rcm_patch.patching.families.vae import steps
from turbo_rcm_patch.patching.families.vae.decoder import _Decoder
from turbo_rcm_patch.patching.families.vae.layers import with_last_frames
from turbo_rcm_patch.patching.families.vae.shown import network_steps
from turbo_rcm_patch.patching.families.wan.cases import TI2V_5B_VAE
from turbo_rcm_patch.tiers import EXACT

FP32 = EXACT.limits.fp32
BF16, FP16 = torch.bfloat16, torch.float16
# A smaller decoder with an upsampler of each kind, because the interpreter runs the kernels slowly.
FEW_LEVELS = {"dim_mult": [1] * 3, "temperal_downsample": [True, False]}
# One norm of these is over one channel: a sign, which any rounding of a value near 0 turns round.
WELL_CONDITIONED = [kind for kind in KINDS if kind != "wan 2.1"]


def check(kind, z, off, set_up=lambda vae: None, options=None, **config):
    """Patched as unpatched; returns what is decoded. options: other ones of the VAE than its kind's."""
    vae = tiny_vae(kind, **(options or {}))
    set_up(vae)
    expected = decode(vae, z)
    assert expected.std() > 0.3  # there is something to compare
    off()
    trp.patch(vae, trp.Exact(**config))
    actual = decode(vae, z)
    assert actual.shape == expected.shape
    assert actual.is_contiguous()
    assert relative_error(actual, expected) <= FP32
    return actual


@pytest.mark.parametrize("frames", [1, 2, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_frames_in_chunks_of_any_size(kind, frames, diffusers_is_off):
    vae, z = tiny_vae(kind), tiny_latents(frames)
    with torch.no_grad():
        expected = vae.decode(z).sample
    assert expected.shape[2] == 1 + 4 * (frames - 1)
    diffusers_is_off()
    for chunk in (None, 1, 4) if frames > 1 else (None, 2):
        with trp.patch(vae, trp.Exact(vae_chunk=chunk)):
            assert relative_error(decode(vae, z), expected) <= FP32, chunk


def test_the_first_decode_compiles_its_kernels_ahead_and_gives_the_same(monkeypatch):
    """It compiles once, in a run of the same decode that launches nothing. The next patch does not compile again.

    If autograd records, or the run is interrupted, it is left to the next decode.
    """
    from turbo_rcm_patch.patching.families.vae import forward

    vae, z, runs, real = tiny_vae(**FEW_LEVELS), tiny_latents(1, 1, 1, 1), [], kernels.compile_ahead
    expected = decode(vae, z)
    launched = []
    monkeypatch.setattr(forward, "_launches_kernels", forward._convolutions_are_ours)

    def interrupt(run):
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "compile_ahead", interrupt)
    with trp.patch(vae, trp.Exact(implementation="triton")), pytest.raises(KeyboardInterrupt):
        decode(vae, z)
    monkeypatch.setattr(kernels, "compile_ahead", lambda run: (runs.append(run), real(run)))
    with trp.patch(vae, trp.Exact(implementation="triton")):
        with torch.enable_grad():
            vae.decode(z.clone().requires_grad_())
        assert not runs
        assert relative_error(decode(vae, z), expected) <= FP32
        with recorded(launched.append), torch.no_grad():
            runs[0]()
        with without_kernels():
            decode(vae, z)
    with trp.patch(vae, trp.Exact(implementation="triton")), without_kernels():
        decode(vae, z)
    assert len(runs) == 1
    assert {launch.kernel.fn.__name__ for launch in launched} >= {"_conv_skip_kernel", "_rms_norm_silu_kernel"}
    trp.patch(vae, trp.Exact(implementation="torch"))
    decode(vae, z)
    assert len(runs) == 1


def without_kernels():
    return recorded(lambda launch: None)


@pytest.mark.parametrize("kind", ["wan 2.1", "residual, growing"])
def test_stages_may_take_any_numbers_of_frames(kind, monkeypatch):
    """If a stage takes fewer frames than the one before, each part passes all later stages before the next part."""
    from turbo_rcm_patch.patching.families.vae import forward

    vae, z = tiny_vae(kind), tiny_latents(5)
    expected = decode(vae, z)
    trp.patch(vae)
    for frames in ([5, 3, 2, 1, 1], [1, 2, 3, 4, 5], [2, 1, 7, 3, 2]):
        monkeypatch.setattr(forward, "frames_at_once", lambda *_, frames=frames, **options: frames)
        assert relative_error(decode(vae, z), expected) <= FP32, frames


@pytest.mark.parametrize(
    ("kind", "chunk", "tiles"),
    [
        ("residual", None, {}),
        ("wan 2.1", 2, {"tile_sample_min_height": 24, "tile_sample_stride_height": 20}),
        ("wan 2.1", None, {"tile_sample_min_width": 32, "tile_sample_stride_width": 48}),  # columns are left out
    ],
)
def test_tiles(kind, chunk, tiles, diffusers_is_off):
    ratio = 16 if kind == "residual" else 8
    size = {"tile_sample_min_height": 4 * ratio, "tile_sample_min_width": 4 * ratio}
    size |= {"tile_sample_stride_height": 3 * ratio, "tile_sample_stride_width": 2 * ratio, **tiles}
    z = tiny_latents(3, height=5, width=8)
    check(kind, z, diffusers_is_off, lambda vae: vae.enable_tiling(**size), vae_chunk=chunk)


@pytest.mark.parametrize("kind", ["residual", "qwen image"])
def test_tiled_decode_alone_and_switched_off(kind):
    vae, z = tiny_vae(kind), tiny_latents(2, height=5, width=6)
    ratio = vae.spatial_compression_ratio
    whole = decode(vae, z)
    vae.enable_tiling(3 * ratio, 3 * ratio, 2 * ratio, 2 * ratio)
    with torch.no_grad():
        expected = vae.tiled_decode(z, return_dict=False)[0]
        assert relative_error(expected, whole) > 1e-3
        assert (expected.abs().max() > 1) == (kind == "qwen image")  # whose tiles are not clamped
        trp.patch(vae)
        assert relative_error(vae.tiled_decode(z, return_dict=False)[0], expected) <= FP32
        assert relative_error(vae.tiled_decode(z).sample, expected) <= FP32
        assert relative_error(decode(vae, z), expected) <= FP32
    small = z[..., :3, :3]  # one tile: diffusers decodes it as a whole
    assert decode(vae, small).shape[-1] == 3 * ratio
    vae.disable_tiling()
    assert relative_error(decode(vae, z), whole) <= FP32


def test_tiles_are_blended_more_exactly_in_bf16():
    kind, z = "wan 2.1, growing", tiny_latents(2, 1, height=5, width=6)
    vae, low = tiny_vae(kind), tiny_vae(kind, torch.bfloat16)
    for each in (vae, low):
        each.enable_tiling(24, 24, 16, 16)
    vae.load_state_dict(low.state_dict())
    oracle = decode(vae.double(), z.bfloat16().double())
    unpatched = decode(low, z.bfloat16())
    trp.patch(low)
    assert_no_worse(decode(low, z.bfloat16()), unpatched, oracle)


def test_weights_in_channels_last_memory(diffusers_is_off):
    def set_up(vae):
        for module in vae.decoder.modules():
            if isinstance(module, (torch.nn.Conv2d, torch.nn.Conv3d)):
                last = torch.channels_last if module.weight.dim() == 4 else torch.channels_last_3d
                module.to(memory_format=last)

    check("wan 2.1, growing", tiny_latents(2), diffusers_is_off, set_up)


@pytest.mark.parametrize("kind", ["wan 2.1", "qwen image"])
def test_slices(kind, diffusers_is_off):
    z = tiny_latents(2, batch=3)
    sliced = check(kind, z, diffusers_is_off, lambda vae: vae.enable_slicing())
    vae = tiny_vae(kind)
    trp.patch(vae)
    assert relative_error(sliced, decode(vae, z)) <= FP32


def test_what_is_returned():
    vae, z = tiny_vae(), tiny_latents()
    before = vae.decode(z)
    trp.patch(vae)
    with torch.no_grad():
        output = vae.decode(z)
        assert type(output) is type(before)
        assert torch.equal(output.sample, vae.decode(z, return_dict=False)[0])
        assert torch.equal(vae._decode(z, return_dict=False)[0], vae._decode(z).sample)
        assert output.sample.abs().max() == 1  # clamped
        image = torch.rand(1, 3, 5, 16, 24)
        assert torch.allclose(vae(image).sample, tiny_vae()(image).sample, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "dtype"), [*zip(WELL_CONDITIONED, [torch.bfloat16, torch.float16] * 2, strict=True)])
def test_low_precision_is_no_less_accurate(kind, dtype):
    vae, z = tiny_vae(kind, dtype), tiny_latents(2, 1, dtype=dtype, height=5, width=6)
    oracle = decode(tiny_vae(kind, dtype).double(), z.double())
    unpatched = decode(vae, z)
    trp.patch(vae)
    decoded = decode(vae, z)
    assert decoded.dtype == dtype
    assert_no_worse(decoded, unpatched, oracle)


@pytest.mark.skipif(not interpreting(), reason="needs Triton's CPU interpreter")
@pytest.mark.parametrize("kind", ["wan 2.1", "residual"])
def test_through_the_kernels(kind, diffusers_is_off):
    z = tiny_latents(2, batch=1, height=1, width=2)
    check(kind, z, diffusers_is_off, options=FEW_LEVELS, implementation="triton", vae_chunk=1)


@pytest.mark.parametrize("kind", ["wan 2.1", "residual"])
def test_a_chunk_that_becomes_the_next_front(kind, monkeypatch):
    """With a convolution that takes a front, as kernels do. Stages take one frame, then two or four at a time."""
    vae, z = tiny_vae(kind), tiny_latents(4, 1)
    expected = decode(vae, z)
    op = replace(kernels.CONV_SKIP, kernels=(Kernel("with a front", lambda _: None, kernels.reference.conv_skip),))
    monkeypatch.setattr(steps.kernels, "CONV_SKIP", op)
    with trp.patch(vae, trp.Exact(vae_chunk=1)):
        assert relative_error(decode(vae, z), expected) <= FP32


@pytest.mark.parametrize("has_front", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, None])
@pytest.mark.parametrize("kind", ["wan 2.1", "residual"])
def test_pairs_of_frames(kind, chunk, has_front, monkeypatch):
    """Some chunks are multiplied in pairs and others are not, and each goes on from the frames that the last one left.

    All sums are in fp32 here.
    """
    vae, z, counts = tiny_vae(kind), tiny_latents(6, 2), Counter()
    expected = decode(vae, z)

    def convolved(planes, weight, bias, residual, frames, dtype):
        counts["pairs"] += 1
        y = conv_pairs_reference(planes, weight, bias, residual, frames, dtype)
        return torch.cat((y, torch.full_like(y[:, :1], torch.nan)), 1)[:, :frames]  # as the kernel's, not packed

    def why_not(spec):
        counts["asked"] += 1
        return None if spec.shape[1] % 3 == 2 and spec.weight_shape[1:4] == (3, 3, 3) else "another number of frames"

    norm = Kernel("norm", lambda _: None, partial(rms_norm_silu_pairs_reference, dtype=torch.float32))
    monkeypatch.setattr(steps, "RMS_NORM_SILU_PAIRS", Op("rms_norm_silu_pairs", (norm,)))
    monkeypatch.setattr(steps, "CONV_PAIRS", Op("conv_pairs", (Kernel(PAIRS, why_not, convolved), NOTHING_FUSED)))
    monkeypatch.setattr(steps, "pair_weight", partial(combined_weight, dtype=torch.float32))
    if has_front:
        op = replace(kernels.CONV_SKIP, kernels=(Kernel("with a front", lambda _: None, kernels.reference.conv_skip),))
        monkeypatch.setattr(steps.kernels, "CONV_SKIP", op)
    with trp.patch(vae, trp.Exact(vae_chunk=chunk)):
        assert relative_error(decode(vae, z), expected) <= FP32
    assert counts["pairs"] > 0
    assert counts["pairs"] != counts["asked"]


NOTHING_FUSED = Kernel("reference", lambda _: None, None, is_fused=False)


@pytest.mark.parametrize(("small", "is_kept"), [(1 << 20, True), (0, False)])
def test_small_weights_of_pairs_are_kept_but_not_recorded_ones(small, is_kept, monkeypatch):
    conv, weights = torch.nn.Conv3d(2, 3, 3), steps.PackedWeights()
    monkeypatch.setattr(steps, "SMALL", small)
    monkeypatch.setattr(steps, "pair_weight", combined_weight)
    monkeypatch.setattr(steps, "recording", lambda: True)
    recorded_one = weights.of_pairs(conv)
    monkeypatch.setattr(steps, "recording", lambda: False)
    first, second = weights.of_pairs(conv), weights.of_pairs(conv)
    assert first is not recorded_one
    assert (first is second) == is_kept
    assert first.shape == (3, 4, 9, 2)


def test_an_image_has_no_pairs_of_frames(monkeypatch):
    monkeypatch.setattr(steps, "CONV_PAIRS", None)
    vae, z = tiny_vae("qwen image"), tiny_latents(1, 1)
    expected = decode(vae, z)
    with trp.patch(vae):
        assert relative_error(decode(vae, z), expected) <= FP32


@pytest.mark.parametrize("frames", [1, 3])
def test_zeros_before_an_image_are_not_multiplied(frames, monkeypatch):
    """An image needs the last frame of a convolution's window alone, which is a third of the work."""
    vae, z, windows, convolve = tiny_vae("qwen image"), tiny_latents(frames, 1), [], steps.convolve
    expected = decode(vae, z)

    def watched(x, weight, *others):
        windows.append((weight.shape[1], x.shape[1]))
        return convolve(x, weight, *others)

    op = replace(kernels.CONV_SKIP, kernels=(Kernel("watched", lambda _: None, watched, is_fused=False),))
    monkeypatch.setattr(steps.kernels, "CONV_SKIP", op)
    monkeypatch.setattr(steps, "convolve", watched)
    with trp.patch(vae, trp.Exact(vae_chunk=1)):
        assert relative_error(decode(vae, z), expected) <= FP32
    assert {window for window, _ in windows} == ({1} if frames == 1 else {1, 3})


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("is_part", [False, True])
@pytest.mark.parametrize("frames", [1, 2, 3])
def test_a_convolution_is_given_the_last_frames_of_all_its_input(frames, is_part, inference):
    """A chunk shorter than its window needs frames from before it too. Only a whole tensor is kept as it is."""
    with torch.inference_mode(inference):
        front, x = (torch.randn(1, count, 1, 2, 3) for count in (2, frames + is_part))
        x = x[:, is_part:]
        expected = torch.cat((front, x), 1)[:, -2:].clone()
        kept = with_last_frames(front, x)
        assert torch.equal(kept, expected)
        assert kept is (x if frames == 2 and not is_part else front)


@pytest.mark.parametrize(("given", "made", "times", "size"), [(8, 8, 2, 1), (8, 4, 1, 1), (8, 8, 1, 1), (6, 9, 2, 3)])
def test_a_shortcut_is_laid_out_as_little_as_can_be(given, made, times, size):
    """So many times as large as its input, not 8, 2, 4 and 12 times; nothing is copied where channels stay as they are.
    Latent frame 0 becomes one frame."""
    x, shortcut, run = torch.randn(2, 3, 2, 4, given), DupUp3D(given, made, times, 2), _Decoder(None)
    for is_first in (True, False):
        expected = shortcut(x.permute(0, 4, 1, 2, 3), first_chunk=is_first).permute(0, 2, 3, 4, 1)
        actual = run.shortcut(shortcut, x)
        assert residual_repeats(actual.shape, expected.shape) is not None  # the kernels take it
        assert torch.equal(repeat_residual(actual, expected.shape), expected)
    assert actual.numel() == size * x.numel()
    assert (actual.data_ptr() == x.data_ptr()) == (given == made)


def test_a_decode_picks_its_kernels_once_for_each_shape(monkeypatch):
    vae, counts, pick = tiny_vae(), [], Op.pick
    with trp.patch(vae, trp.Exact(vae_chunk=1)):
        for frames in (3, 5):
            picked = []
            monkeypatch.setattr(Op, "pick", lambda op, spec, to=picked: to.append(op.name) or pick(op, spec))
            decode(vae, tiny_latents(frames, 1, 1, 1))
            counts.append(Counter(picked))
    assert counts[0] == counts[1]
    assert counts[0]["rms_norm_silu"] == 22


def test_each_norm_and_each_convolution_is_one_launch():
    """The launches are recorded as for a GPU of sm_80, without one."""
    vae = tiny_vae()
    patch = trp.patch(vae, trp.Exact(vae_chunk=1))
    vae.to("meta")
    with meta_is_gpu((8, 0), compile_without_gpu.MULTIPROCESSORS):
        launches = compile_without_gpu.record_launches(lambda: decode(vae, tiny_latents(1).to("meta")), (8, 0))
        rows = {row.step: row for row in patch.rows() if row.blocks == "decoder"}
    names = Counter(launch.kernel.fn.__name__ for launch in launches)
    assert names["_rms_norm_silu_kernel"] == rows["norm + SiLU"].count == 22
    time_convs = 2  # latent frame 0 skips them
    assert names["_conv_skip_kernel"] == rows["convolution"].count - time_convs == 25
    assert (rows["norm + SiLU"].kernel, rows["convolution"].kernel) == ("Triton", "portable Triton")
    projection = rows["projection"]
    assert (projection.kernel, projection.reasons) == ("PyTorch linear", {"nothing to fuse": projection.count})


@pytest.mark.parametrize(
    ("kind", "frames", "dtype", "capability", "count"),
    [
        (AutoencoderKLWan, 3, BF16, (9, 0), 22),
        (AutoencoderKLWan, 3, FP16, (9, 0), 0),
        (AutoencoderKLWan, 3, BF16, (12, 0), 0),
        (AutoencoderKLQwenImage, 1, BF16, (9, 0), 0),
    ],
)
def test_the_summary_and_the_launches_have_pairs_of_frames(kind, frames, dtype, capability, count, monkeypatch):
    """In Wan 2.1's decoder all resnets but those of 96 channels have them, on sm_90. An image has none."""
    monkeypatch.setattr(conv_pairs_sm90, "HAS_WIDE", True)
    with torch.device("meta"):
        vae = kind().to(dtype).eval()
        z = torch.empty(1, 16, frames, 60, 104, dtype=dtype)
    with trp.patch(vae) as patch, torch.no_grad():
        with meta_is_gpu(capability, 132):
            steps_of_decoder = dict(network_steps(vae, "decoder"))["convolution"]
            rows = {row.step: row for row in patch.rows() if row.blocks == "decoder"}
        launched = []
        with meta_is_gpu(capability, 132), recorded(launched.append):
            vae.decode(z)
    assert sum(step.kernel == PAIRS for step in steps_of_decoder) == count
    assert (PAIRS in rows["convolution"].kernel) == (count > 0)
    names = Counter(launch.kernel.fn.__name__ for launch in launched)
    assert (names["conv_pairs_kernel"] > 0) == (names["_rms_norm_silu_pairs_kernel"] > 0) == (count > 0)


def test_other_decoders_of_the_class(diffusers_is_off):
    """Decoders with two temporal upsamplers at other places, and with none."""
    for temporal in ([True, True, False], [False, False, False], [True, True, True]):
        options = {**KINDS["wan 2.1"], "temperal_downsample": temporal}
        vae = AutoencoderKLWan(**options).eval()
        z = tiny_latents(4)
        expected = decode(vae, z)
        with trp.patch(vae, trp.Exact(vae_chunk=2)):
            assert relative_error(decode(vae, z), expected) <= FP32, temporal


@pytest.mark.gpu
@pytest.mark.parametrize("kind", WELL_CONDITIONED)
def test_on_a_gpu(kind, diffusers_is_off):
    """Against fp64, in bf16, whole and in tiles; also as memory allows it."""
    vae, z = tiny_vae(kind, torch.bfloat16).cuda(), tiny_latents(5, dtype=torch.bfloat16, height=12, width=20).cuda()
    oracle = decode(tiny_vae(kind, torch.bfloat16).double(), z.cpu().double())
    unpatched = decode(vae, z).cpu()
    diffusers_is_off()
    for chunk in (None, 1, 3):
        with trp.patch(vae, trp.Exact(vae_chunk=chunk)) as patch:
            assert_no_worse(decode(vae, z).cpu(), unpatched, oracle)
            assert "norm + SiLU  Triton" in patch.summary()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("cls", "options", "frames"),
    [(AutoencoderKLWan, {}, 6), (AutoencoderKLWan, TI2V_5B_VAE, 6), (AutoencoderKLQwenImage, {}, 1)],
    ids=["wan 2.1", "ti2v-5b", "qwen image"],
)
def test_error_of_the_real_models_on_a_gpu(cls, options, frames, monkeypatch):
    """Beside a decode in fp32, without TF32, whole and in tiles."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    low = cls(**options).eval().to("cuda", torch.bfloat16)
    wide = copy.deepcopy(low).float()
    z = torch.randn(1, low.config.z_dim, frames, 24, 32, device="cuda", dtype=torch.bfloat16)
    for tiled in (False, True):
        for vae in (low, wide) if tiled else ():
            vae.enable_tiling()
        oracle, unpatched = decode(wide, z.float()), decode(low, z)
        with trp.patch(low):
            assert_no_worse(decode(low, z), unpatched, oracle)
