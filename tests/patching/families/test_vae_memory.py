"""The frames that the encoder and the decoder take at a time, and their memory, at the real sizes on meta tensors."""

from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan, WanTransformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_wan import WanUpBlock

import turbo_rcm_patch as trp
from tests.patching.families.peak import as_on_a_gpu
from tests.tiny_vae import tiny_latents, tiny_vae
from turbo_rcm_patch.patching.families import CASES
from turbo_rcm_patch.patching.families.vae import chunks, forward, steps
from turbo_rcm_patch.patching.families.vae.chunks import (
    MOST_ELEMENTS,
    TILES_WORKING_SET,
    WORKING_SET,
    _alive_in_encoder,
    _alive_in_resnets,
    decoding_bytes,
    encoding_bytes,
    frames_at_once,
    frames_to_encode,
    free_for_decoding,
    output_shape,
    stages_of,
    unpatched_decoding_bytes,
    unpatched_encoding_bytes,
    weights_bytes,
)
from turbo_rcm_patch.patching.families.wan.cases import TI2V_5B_VAE

ROOT = Path(__file__).resolve().parents[3]

# The VAE's options and its latents [B, C, F, H, W].
WAN_480P = {}, (1, 16, 21, 60, 104)
WAN_720P = {}, (1, 16, 21, 90, 160)
TI2V_720P = TI2V_5B_VAE, (1, 48, 31, 44, 80)
FEW = 5  # latent frames, where each of them is decoded alone
SIZES = {"wan 2.1, 480p": WAN_480P, "wan 2.1, 720p": WAN_720P, "ti2v-5b, 720p": TI2V_720P}
# The largest model for each VAE, and the bytes of a weight with which it fits a card of 24 GB.
BESIDE = [("wan 2.1, 720p", "wan2.1-14b", 1), ("ti2v-5b, 720p", "wan2.2-5b", 2)]


IMAGE = "an image of qwen image's"


def real(size):
    options, shape = ({}, (1, 16, 1, 166, 166)) if size == IMAGE else SIZES[size]
    with torch.device("meta"):
        vae = (AutoencoderKLQwenImage if size == IMAGE else AutoencoderKLWan)(**options).to(torch.bfloat16).eval()
    return vae, torch.empty(shape, dtype=torch.bfloat16, device="meta")


def peak(vae, z):
    """Return the peak bytes of a decode as on a GPU."""
    with as_on_a_gpu(vae) as counted, each_shape_of_tiles_once(counted):
        vae.decode(z)
    return counted.bytes


@contextmanager
def each_shape_of_tiles_once(counted):
    """Decode only the first tile of each shape. The others take what it took, beside what lives then."""
    made, joined, shapes, taken = forward._parts, forward.joined, [], {}

    def parts(vae, z, *others):
        shapes.append(z.shape)
        return made(vae, z, *others)

    def join(parts, count, then=None):
        shape = shapes[-1]
        if shape not in taken:
            alive, before, counted.bytes = counted.alive, counted.bytes, 0
            frames = joined(parts, count, then)
            taken[shape] = counted.bytes - alive, frames.shape
            counted.bytes = max(before, counted.bytes)
            return frames
        size, frames = taken[shape]
        counted.take(size)
        return torch.empty(frames, dtype=torch.bfloat16, device="meta")

    with mock.patch.object(forward, "_parts", parts), mock.patch.object(forward, "joined", join):
        yield


def encoding_peak(vae, x):
    """Return the peak bytes of an encode as on a GPU, with the video."""
    with as_on_a_gpu(vae) as counted:
        vae.encode(x)
    return counted.bytes


@cache
def patched_peak(size, tiles=False):
    vae, z = real(size)
    if tiles:
        vae.enable_tiling()
    with trp.patch(vae):
        return peak(vae, z)


@pytest.mark.parametrize("size", ["wan 2.1, 480p", "ti2v-5b, 720p"])
def test_a_decode_takes_less_than_diffusers(size):
    vae, z = real(size)
    z = z[:, :, :FEW]
    unpatched = peak(vae, z)
    with trp.patch(vae):
        patched = peak(vae, z)
    with trp.patch(vae, trp.Exact(vae_chunk=1)):
        of_a_latent = peak(vae, z)
    with trp.patch(vae, trp.Exact(vae_chunk=4)):
        most = peak(vae, z)
    assert patched < of_a_latent < most
    assert patched < unpatched


def test_an_image_takes_less_than_diffusers_and_what_is_estimated():
    """It keeps no frames for a next chunk."""
    vae, z = real(IMAGE)
    unpatched = peak(vae, z)
    with trp.patch(vae):
        patched = peak(vae, z)
    assert patched < unpatched
    assert 0.95 <= decoding_bytes(vae, *video_of(vae, z)) / patched <= 1.1
    vae, _ = real("wan 2.1, 480p")
    z = torch.empty(1, 16, 1, 32, 32, dtype=torch.bfloat16, device="meta")
    with trp.patch(vae):
        patched = peak(vae, z)
    assert 0.95 <= decoding_bytes(vae, *video_of(vae, z)) / patched <= 1.3  # weights are a large part


def test_decoding_takes_what_the_page_says():
    words = " ".join((ROOT / "docs/memory.md").read_text().split())
    wan_480p, wan_720p, ti2v, *tiled = [taken for tiles in (False, True) for taken in map(partial(gb, tiles), SIZES)]
    assert f"decoding, for 81 frames {wan_480p} GB at 480p and {wan_720p} GB at 720p, for TI2V-5B's 121" in words
    assert f"121 frames {ti2v} GB, for all of them {max(tiled)} GB with `pipe.vae.enable_tiling()`" in words


def test_encoding_takes_what_the_page_says():
    rows = [
        line for line in (ROOT / "docs/memory.md").read_text().splitlines() if line.startswith(("| 832x", "| 1280x"))
    ]
    for row, size in zip(rows, SIZES, strict=True):
        vae, z = real(size)
        height, width, frames = video_of(vae, z)
        beside = 2 * 3 * frames * height * width * z.itemsize  # the video, and a copy of it
        assert row.endswith(f"| {(encoding_bytes(vae, height, width, frames) - beside) / 1e9:.1f} GB |")


def gb(tiles, size):
    vae, z = real(size)
    return round(decoding_bytes(vae, *video_of(vae, z), in_tiles=tiles) / 1e9)


def test_tiles_take_less_than_diffusers():
    vae, z = real("wan 2.1, 480p")
    z = z[:, :, :3, :44, :44]  # four tiles
    vae.enable_tiling()
    unpatched = peak(vae, z)
    with trp.patch(vae) as patch:
        assert peak(vae, z) < unpatched
        assert "as many frames as 128 MiB hold at a time" in patch.summary()


def test_the_estimate_is_what_a_decode_takes():
    for size in reversed(SIZES):
        vae, z = real(size)
        assert 0.97 <= decoding_bytes(vae, *video_of(vae, z)) / patched_peak(size) <= 1.06
    video = video_of(vae, z)
    assert 0.95 <= decoding_bytes(vae, *video, in_tiles=True) / patched_peak(size, tiles=True) <= 1.15
    z = z[:, :, :FEW]
    assert 0.95 <= decoding_bytes(vae, *video_of(vae, z), free=0) / peak_with([1] * 5, vae, z) <= 1.1


def pixels(size, frames):
    vae, z = real(size)
    height, width, _ = video_of(vae, z)
    return vae, torch.empty(1, 3, frames, height, width, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize(
    ("size", "frames"),
    [("wan 2.1, 480p", 9), ("ti2v-5b, 720p", 9), ("ti2v-5b, 720p", 1), (IMAGE, 1)],
)
def test_an_encode_takes_less_than_diffusers_and_what_is_estimated(size, frames):
    vae, x = pixels(size, frames)
    unpatched = encoding_peak(vae, x)
    with trp.patch(vae):
        patched = encoding_peak(vae, x)
    with trp.patch(vae, trp.Exact(vae_chunk=2)):
        more = encoding_peak(vae, x)
    assert patched < unpatched
    assert patched < more or frames == 1
    assert 0.95 <= (encoding_bytes(vae, *x.shape[-2:], frames) - x.numel() * x.itemsize) / patched <= 1.05


def test_an_encode_in_tiles_takes_less_than_diffusers():
    vae, x = pixels("wan 2.1, 480p", 5)
    x = x[..., :360, :360]  # four tiles
    vae.enable_tiling()
    unpatched = encoding_peak(vae, x)
    with trp.patch(vae):
        patched = encoding_peak(vae, x)
    assert patched < unpatched
    estimate = encoding_bytes(vae, *x.shape[-2:], 5, in_tiles=True) - x.numel() * x.itemsize
    assert 0.9 <= estimate / patched <= 1.1


@pytest.mark.parametrize("kind", ["wan 2.1, 480p", "ti2v-5b, 720p"])
def test_a_narrow_video_is_encoded_in_tiles_of_its_width(kind):
    vae, x = pixels(kind, 5)
    x = x[..., :512, :128]
    vae.enable_tiling()
    with trp.patch(vae):
        patched = encoding_peak(vae, x)
    estimate = encoding_bytes(vae, *x.shape[-2:], 5, in_tiles=True) - x.numel() * x.itemsize
    assert 0.9 <= estimate / patched <= 1.1


def test_small_videos_are_encoded_many_frames_at_a_time():
    vae, _ = real("wan 2.1, 480p")
    assert frames_to_encode(vae, 480 * 832, 2, None) == 4
    assert frames_to_encode(vae, 256 * 256, 2, None) == 28
    assert frames_to_encode(vae, 256 * 256, 2, None, free=1 << 28) == 4
    assert frames_to_encode(vae, 256 * 256, 2, 3, free=1 << 28) == 12  # who asks gets it
    huge = 540 * 960
    assert 12 * 288 * huge < MOST_ELEMENTS < 16 * 288 * huge  # convolutions count elements with 32 bits
    assert frames_to_encode(vae, huge, 2, 64) == 12


@pytest.mark.parametrize("size", SIZES)
def test_the_estimate_of_diffusers_own_decode_leaves_room_for_what_cudnn_lays_out_anew(size):
    vae, z = real(size)
    z = z[:, :, :FEW]
    assert 1.05 <= unpatched_decoding_bytes(vae, *video_of(vae, z)) / peak(vae, z) <= 1.15


def test_the_estimate_of_diffusers_own_decode_in_tiles():
    """It keeps all tiles until it joins them. In a decoder of few channels, as in long videos, that takes the most."""
    with torch.device("meta"):
        vae = AutoencoderKLWan(base_dim=8).to(torch.bfloat16).eval()
    z = torch.empty(1, 16, FEW, 60, 104, dtype=torch.bfloat16, device="meta")
    vae.enable_tiling(240, 416, 180, 312)
    assert 0.96 <= unpatched_decoding_bytes(vae, *video_of(vae, z), in_tiles=True) / peak(vae, z) <= 1.15


# What an H200 measured: height, width, frames, and the bytes of a decode, of one with a frame at a time, in tiles, and
# of an encode in diffusers' code. None: not measured. Only the first of them counts the packed weights, which a decode
# did not keep when the others were measured. TI2V-5B's first has convolutions of pairs of frames;
# its tiles were not measured with them.
MEASURED = [
    ({}, (480, 832, 81), 3_249_088_000, 2_505_248_768, 854_198_272, 3_436_656_128),
    ({}, (480, 832, 121), 3_400_570_368, 2_599_755_776, 991_922_176, 3_440_649_728),
    ({}, (256, 256, 33), 1_611_649_024, 392_173_568, 1_586_173_952, 564_968_960),
    ({}, (720, 1280, 81), 7_063_868_928, 5_763_794_944, 1_125_922_816, 7_925_345_792),
    (TI2V_5B_VAE, (704, 1280, 121), 6_418_683_904, 4_983_869_440, None, None),
]


@pytest.mark.parametrize(("options", "video", "whole", "one", "tiles", "encode"), MEASURED)
def test_the_estimate_is_what_a_gpu_measured(options, video, whole, one, tiles, encode):
    with torch.device("meta"):
        vae = AutoencoderKLWan(**options).to(torch.bfloat16)
    kept = weights_bytes(vae.decoder, False)
    assert 0.99 <= decoding_bytes(vae, *video) / whole <= 1.04
    assert 0.96 <= (decoding_bytes(vae, *video, free=0) - kept) / one <= 1.06
    if tiles is not None:
        assert 0.97 <= (decoding_bytes(vae, *video, in_tiles=True) - kept) / tiles <= 1.06
    if encode is not None:
        height, width, frames = video
        given = 2 * 3 * frames * height * width * 2
        assert 0.99 <= (unpatched_encoding_bytes(vae, *video) - given) / encode <= 1.01


def video_of(vae, z):
    """Return the height, width and frames that latents stand for."""
    ratio = vae.spatial_compression_ratio
    return z.shape[3] * ratio, z.shape[4] * ratio, 1 + 4 * (z.shape[2] - 1)


def sample_bytes(vae, z):
    ratio = vae.spatial_compression_ratio
    return 3 * (1 + 4 * (z.shape[2] - 1)) * z.shape[3] * ratio * z.shape[4] * ratio * z.itemsize


def test_small_frames_are_taken_many_at_a_time():
    vae, z = real("wan 2.1, 480p")
    frames = frames_at_once(vae, z, None)
    assert frames[0] >= 21  # all latent frames at once if there are few pixels
    assert frames[-2:] == [2, 2]  # as many as a convolution keeps, in full resolution
    tile = frames_at_once(vae, z[..., :32, :32], None)
    assert all(many > few for many, few in zip(tile, frames, strict=True))
    assert tile[-1] >= 16
    assert frames_at_once(vae, z.expand(2, -1, -1, -1, -1), None)[0] == frames[0] // 2


def test_no_convolution_gets_more_elements_than_32_bits_count():
    vae, z = real("wan 2.1, 480p")
    huge = z.new_empty(1, 16, 2, 540, 960)
    for frames, stage in zip(frames_at_once(vae, huge, 64), chunks.stages_of(vae.decoder), strict=True):
        assert frames == 1 or frames * stage.alive * 540 * 960 <= MOST_ELEMENTS


def test_the_config_says_how_much_is_taken_at_a_time():
    words = " ".join(trp.PatchConfig.__doc__.split())
    assert f"as many more as fit in {WORKING_SET >> 30} GiB ({TILES_WORKING_SET >> 20} MiB for a tile)" in words


def test_the_option_counts_latent_frames():
    vae = tiny_vae()
    assert frames_at_once(vae, tiny_latents(), 3) == [3, 3, 6, 12, 12]


@pytest.mark.parametrize(
    ("given", "made", "dtype", "alive"),
    [
        (128, 128, torch.bfloat16, 5 * 128),
        (96, 128, torch.bfloat16, 96 + 4 * 128),
        (512, 128, torch.bfloat16, 3 * 512 + 128),
        (128, 128, torch.float16, 4 * 128),
    ],
)
def test_planes_of_pairs_of_frames_count_twice(given, made, dtype, alive):
    with torch.device("meta"):
        block = WanUpBlock(given, made, num_res_blocks=1).to(dtype)
    assert _alive_in_resnets(block, ()) == alive
    assert _alive_in_resnets(block, set(block.modules())) == given + max(2 * given, 3 * made)


def test_an_image_has_no_planes():
    with torch.device("meta"):
        decoder = AutoencoderKLWan(**TI2V_5B_VAE).decoder.bfloat16()
    video, image = (stages_of(decoder, is_image=is_image)[-1] for is_image in (False, True))
    assert image.alive * (3 * 512 + 256) == video.alive * 3 * 512


def test_planes_count_in_an_encoder():
    """The second convolution's planes, its result and the shortcut's, beside the resnet's input."""
    with torch.device("meta"):
        vae = AutoencoderKLWan(base_dim=128, dim_mult=[2], num_res_blocks=1, temperal_downsample=[]).bfloat16()
    assert _alive_in_encoder(vae.encoder)[0] == 128 + 4 * 256


def test_small_weights_of_pairs_of_frames_count_too():
    """In Wan 2.1's decoder eight convolutions of 192 channels have them beside their own. An image has none."""
    with torch.device("meta"):
        decoder = AutoencoderKLWan().decoder.bfloat16()
    more = weights_bytes(decoder) - weights_bytes(decoder, is_image=True)
    assert more == 8 * 36 * 192 * 192 * 2
    assert weights_bytes(decoder, is_image=True) == weights_bytes(decoder.half())


@pytest.mark.parametrize(("free", "expected"), [(1 << 40, "all"), (3 << 30, "fewer"), (0, "one")])
def test_fewer_where_memory_is_short(free, expected):
    vae, z = real("wan 2.1, 480p")
    plenty, frames = frames_at_once(vae, z, None), frames_at_once(vae, z, None, free=free)
    if expected == "fewer":
        assert all(1 <= few <= many for few, many in zip(frames, plenty, strict=True))
        assert frames not in (plenty, [1] * 5)
    else:
        assert frames == (plenty if expected == "all" else [1] * 5)
    assert frames_at_once(vae, z, 2, free=free) == [2, 2, 4, 8, 8]  # who asks gets it


def test_short_memory_is_enough_where_a_frame_at_a_time_fits():
    vae, z = real("wan 2.1, 480p")
    z = z[:, :, :FEW]
    least = peak_with([1] * 5, vae, z)
    for free in (5 * least // 4, 7 * least // 4):
        frames = frames_at_once(vae, z, None, free=free - sample_bytes(vae, z))
        assert peak_with(frames, vae, z) <= free
    assert min(frames) > 1
    assert frames_at_once(vae, z, None, free=least - sample_bytes(vae, z)) == [1] * 5


def test_a_plan_limits_the_memory_of_a_decode(monkeypatch):
    vae, gpu = real("wan 2.1, 480p")[0], torch.device("cuda")
    monkeypatch.setattr(chunks, "free_memory", lambda device: 10)
    assert free_for_decoding(vae, gpu) == 10
    for limit, expected in ((7, 7), (12, 10)):
        setattr(vae, chunks.LIMIT, limit)
        assert free_for_decoding(vae, gpu) == expected
        assert free_for_decoding(vae, torch.device("cpu")) == limit


def peak_with(frames, vae, z):
    with mock.patch.object(forward, "frames_at_once", return_value=frames), trp.patch(vae):
        return peak(vae, z)


@pytest.mark.parametrize(("size", "model", "weight_bytes"), BESIDE)
def test_a_24_gb_card_has_room_beside_the_model(size, model, weight_bytes):
    """Beside its transformer and the VAE itself; the text encoder is done by then. With the frames that it chooses."""
    vae, z = real(size)
    with torch.device("meta"):
        transformer = WanTransformer3DModel.from_config(CASES[model].transformer)
    weights = weight_bytes * count_weights(transformer) + vae.dtype.itemsize * count_weights(vae)
    free = 24 * 10**9 - weights
    frames = frames_at_once(vae, z, None, free=free - sample_bytes(vae, z))
    assert peak_with(frames, vae, z) <= free


def count_weights(model):
    return sum(weight.numel() for weight in model.parameters())


def test_the_sample_and_graphs_are_beside_the_activations(monkeypatch):
    vae, z, asked = *real("wan 2.1, 480p"), []
    transformer = torch.nn.Module()
    monkeypatch.setattr(forward, "frames_at_once", lambda *args, **options: asked.append(options) or [4] * 5)
    setattr(vae, chunks.LIMIT, 1 << 40)
    with trp.patch(vae):
        forward.vae_state(vae).users.add(transformer)
        monkeypatch.setattr(forward, "graph_of", lambda model: mock.Mock(reserved_bytes=7))
        peak(vae, z)
    held = sample_bytes(vae, z) + weights_bytes(vae.decoder, False) + 7
    assert asked == [{"free": (1 << 40) - held, "shares": None, "in_8_bits": False}]
    assert output_shape(vae, z) == (1, 3, 81, 480, 832)


@pytest.mark.parametrize(("small", "times"), [(1 << 40, 1), (0, 0)])
def test_small_weights_are_packed_once_in_a_decode(small, times, monkeypatch):
    vae, z = real("wan 2.1, 480p")
    packed = []
    monkeypatch.setattr(steps, "SMALL", small)
    monkeypatch.setattr(steps, "pack_weight", lambda weight: packed.append(weight) or weight)
    monkeypatch.setattr(steps.PackedWeights, "of", counted := mock.Mock(wraps=steps.PackedWeights().of))
    with trp.patch(vae):
        peak(vae, z[:, :, :FEW])
    convolutions = {(call.args[0], call.args[1]) for call in counted.call_args_list}
    assert len(counted.call_args_list) > 3 * len(convolutions)
    assert len(packed) == times * len(convolutions)


@pytest.mark.gpu
def test_free_memory_counts_what_the_allocator_holds():
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    before = chunks.free_memory(device)
    held = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    assert chunks.free_memory(device) <= before - (1 << 30)
    del held
    assert chunks.free_memory(device) >= before - (64 << 20)


@pytest.mark.gpu
@pytest.mark.parametrize("size", ["wan 2.1, 480p"])
def test_peak_memory_on_a_gpu(size):
    options, shape = SIZES[size]
    with torch.device("cuda"):
        vae, z = AutoencoderKLWan(**options).to(torch.bfloat16).eval(), torch.randn(shape).to(torch.bfloat16)
    peaks = []
    with torch.no_grad():
        for patched in (False, True):
            if patched:
                trp.patch(vae)
            torch.cuda.reset_peak_memory_stats()
            vae.decode(z)
            peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= peaks[0]
