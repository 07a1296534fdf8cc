"""A tiny VAE decodes as published, in place of a pipeline's own VAE, until it is taken off."""

import copy
import pickle
import re
from functools import partial

import pytest
import torch
from diffusers.video_processor import VideoProcessor

import turbo_rcm_patch as trp
from scripts.benchmarks.comparison import compare_checked
from tests.patching.tiny_vae.published import KINDS, WIDTHS, latents, published_sample, tiny_file, vae_for
from tests.tiny_vae import tiny_vae
from tests.tiny_wan import frames_of, tiny_call, tiny_wan_pipeline
from turbo_rcm_patch.bench.metrics import relative_l2
from turbo_rcm_patch.bench.verify import verify
from turbo_rcm_patch.patching.families.vae.finished import marks_of
from turbo_rcm_patch.patching.tiny_vae import network

ROUNDING = 1e-5  # of some sixty layers in fp32


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(network, "WIDTHS", WIDTHS)


@pytest.mark.parametrize("frames", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_frames_are_the_published_ones(tmp_path, monkeypatch, kind, frames):
    """All latent frames at once, and one at a time."""
    vae, file = vae_for(kind), tiny_file(tmp_path, kind)
    made, z = latents(vae, frames)
    expected = published_sample(file, kind, made)
    assert expected.shape[2] == 1 + 4 * (frames - 1)
    assert expected.std() > 0.2
    with trp.use_tiny_vae(vae, file):
        at_once = vae.decode(z).sample
        monkeypatch.setattr("turbo_rcm_patch.patching.tiny_vae.decoding.WORKING_SET", 0)
        (alone,) = vae.decode(z, return_dict=False)
    for sample in (at_once, alone):
        assert relative_l2(sample, expected) < ROUNDING


def test_the_frames_that_are_made_are_marked_before_later_ones(tmp_path, monkeypatch):
    """The first of two samples has all its frames at the first mark."""
    vae, file = vae_for("taew2_1"), tiny_file(tmp_path)
    made, z = latents(vae, 3)
    expected = published_sample(file, "taew2_1", made)
    assert len(z) == 2
    marks = []

    def mark(video, frames):
        assert relative_l2(video[:, :, :frames], expected[:, :, :frames]) < ROUNDING
        assert relative_l2(video[0], expected[0]) < ROUNDING
        marks.append((video, frames))

    monkeypatch.setattr("turbo_rcm_patch.patching.tiny_vae.decoding.mark_finished", mark)
    monkeypatch.setattr("turbo_rcm_patch.patching.tiny_vae.decoding.WORKING_SET", 0)
    with trp.use_tiny_vae(vae, file):
        sample = vae.decode(z).sample
    assert [frames for _, frames in marks] == [1, 5, 9] == [*range(1, sample.shape[2] + 1, 4)]
    assert all(video is sample for video, _ in marks)


def test_a_layer_that_makes_more_frames_gives_its_last_one(tmp_path):
    vae, file = vae_for("taew2_1"), tiny_file(tmp_path, wide=True)
    made, z = latents(vae)
    with trp.use_tiny_vae(vae, file):
        assert relative_l2(vae.decode(z).sample, published_sample(file, "taew2_1", made)) < ROUNDING


@pytest.mark.parametrize("first", ["patch", "tiny vae"])
def test_a_pipeline_with_a_patch_decodes_itself_after_both_are_undone(tmp_path, first):
    pipe, file = tiny_wan_pipeline(), tiny_file(tmp_path)
    generate = partial(frames_of, pipe, output_type="np")
    own, keys = generate(), set(pipe.vae.state_dict())
    handles = [trp.patch(pipe), trp.use_tiny_vae(pipe, file)]
    if first == "tiny vae":
        for handle in handles[::-1]:
            handle.restore()
        handles = [trp.use_tiny_vae(pipe, file), trp.patch(pipe)]
    tiny = generate()
    assert tiny.shape == own.shape
    assert abs(tiny - own).mean() > 0.05
    assert set(pipe.vae.state_dict()) == keys
    for handle in handles:
        handle.restore()
    assert (generate() == own).all()
    assert "decode" not in vars(pipe.vae)


def test_the_summary_says_who_decodes(tmp_path):
    pipe = tiny_wan_pipeline()
    patch = trp.patch(pipe)
    before = patch.summary()
    with trp.use_tiny_vae(pipe, tiny_file(tmp_path)):
        assert "a tiny VAE decodes, whole frames in every process" in patch.summary()
        assert "AutoencoderKLWan, decoder" not in patch.summary()
        assert "AutoencoderKLWan, encoder" in patch.summary()
        assert "decoder" not in {row.blocks for row in patch.rows()}
    assert patch.summary() == before


def test_an_image_of_qwens_vae(tmp_path):
    vae, file = tiny_vae("qwen image"), tiny_file(tmp_path)
    _, z = latents(vae, frames=1)
    with trp.use_tiny_vae(vae, file):
        assert vae.decode(z).sample.shape == (2, 3, 1, 24, 40)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda vae: pickle.loads(pickle.dumps(vae))], ids=["copy", "pickle"])
def test_a_copy_decodes_with_its_own_network_and_the_original_encodes(tmp_path, copied):
    vae = vae_for("taew2_1")
    _, z = latents(vae)
    video = torch.rand(1, 3, 5, 16, 16)
    own, moments = vae.decode(z).sample, vae.encode(video).latent_dist.parameters
    handle = trp.use_tiny_vae(vae, tiny_file(tmp_path))
    tiny, twin = vae.decode(z).sample, copied(vae)
    assert torch.equal(vae.encode(video).latent_dist.parameters, moments)
    handle.restore()
    assert torch.equal(twin.decode(z).sample, tiny)
    assert torch.equal(vae.decode(z).sample, own)
    assert str(handle) == "tiny VAE: restored"


@pytest.mark.parametrize("judge", [verify, compare_checked])
def test_its_frames_are_not_judged_by_the_pipelines_own_vae(tmp_path, judge):
    pipe = tiny_wan_pipeline()
    with trp.use_tiny_vae(pipe, tiny_file(tmp_path)), pytest.raises(ValueError, match="a tiny VAE decodes in this"):
        judge(pipe, tiny_call(output_type="np"))


@pytest.mark.parametrize("shape", [[2, 16, 3, 5], [2, 16, 0, 3, 5], [2, 48, 1, 3, 5]])
def test_latents_of_another_shape_are_refused(tmp_path, shape):
    vae, message = vae_for("taew2_1"), re.escape(f"{shape}; they must be [B, 16, F, h, w]")
    with trp.use_tiny_vae(vae, tiny_file(tmp_path)), pytest.raises(ValueError, match=message):
        vae.decode(torch.zeros(shape))


def test_it_computes_in_the_files_dtype_or_as_asked(tmp_path):
    vae, file = vae_for("taew2_1"), tiny_file(tmp_path, dtype=torch.float16)
    with trp.use_tiny_vae(vae, file) as handle:
        assert str(handle) == "tiny VAE: taew2_1.safetensors decodes, base layout, in float16"
    _, z = latents(vae)
    with trp.use_tiny_vae(vae, file, dtype=torch.float32) as handle:
        assert "float32" in str(handle)
        assert vae.decode(z.bfloat16()).sample.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("file", "error"),
    [
        (lambda folder: tiny_file(folder, name="taehv1_5.safetensors"), "for other latents than Wan's"),
        (
            lambda folder: tiny_file(folder, "taew2_2"),
            "latents of 48 channels, 16 pixels wide each; this VAE's have 16",
        ),
        (lambda folder: tiny_file(folder, channels=24), "latents of 24 channels"),
        (lambda folder: tiny_file(folder, decoder_22_weight=None), "no first or no last convolution"),
        (lambda folder: tiny_file(folder, decoder_4_conv_0_bias=None), "it lacks decoder.4.conv.0.bias"),
        (lambda folder: tiny_file(folder, decoder_23_weight=torch.ones(3)), "it has decoder.23.weight"),
        (lambda folder: tiny_file(folder, decoder_8_weight=torch.ones(2, 2)), "decoder.8.weight is (2, 2), not (6, 8"),
        (
            lambda folder: tiny_file(folder, decoder_7_conv_weight=torch.ones(())),
            "decoder.7.conv.weight is (), not (8, 8",
        ),
        (lambda folder: tiny_file(folder, decoder_7_conv_weight=torch.ones(0, 8, 1, 1)), "is (0, 8, 1, 1), not (8, 8"),
        (
            lambda folder: tiny_file(folder, decoder_7_conv_weight=torch.ones(16, 3, 1, 1)),
            "is (16, 3, 1, 1), not (8, 8",
        ),
        (lambda folder: tiny_file(folder, decoder_22_bias=torch.ones(3, dtype=torch.int8)), "holds weights in int8"),
        (lambda folder: tiny_file(folder, dtype=torch.float8_e4m3fn), "holds weights in float8_e4m3fn"),
        (lambda folder: folder / "no.safetensors", "no.safetensors"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_what_it_has(tmp_path, file, error):
    vae = vae_for("taew2_1")
    before = dict(vars(vae))
    with pytest.raises(ValueError, match=re.escape(error)):
        trp.use_tiny_vae(vae, file(tmp_path))
    assert vars(vae) == before


def test_the_folder_of_a_file_may_have_any_name(tmp_path):
    """TAEHV's repository has the name of a file for other latents."""
    vae, taehv, models = vae_for("taew2_1"), tmp_path / "taehv", tmp_path / "models"
    for folder, name in ((taehv, "taew2_1.safetensors"), (models, "taehv1_5.safetensors")):
        folder.mkdir()
        tiny_file(folder, name=name)
    trp.use_tiny_vae(vae, taehv).restore()
    with pytest.raises(ValueError, match=r"^taehv1_5\.safetensors is for other latents than Wan's"):
        trp.use_tiny_vae(vae, models)


def test_a_vae_of_images_with_transparency_is_refused(tmp_path):
    """Qwen-Image-Layered's: it would lose the transparency of its layers."""
    vae = tiny_vae("qwen image", input_channels=4)
    with pytest.raises(ValueError, match="makes images of 3 channels; this VAE's have 4"):
        trp.use_tiny_vae(vae, tiny_file(tmp_path))
    assert "decode" not in vars(vae)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, "float16"])
def test_a_dtype_that_no_convolution_has_is_refused(tmp_path, dtype):
    vae = vae_for("taew2_1")
    with pytest.raises(ValueError, match=rf"dtype={dtype!r}; give one of torch\.float16, torch\.bfloat16"):
        trp.use_tiny_vae(vae, tiny_file(tmp_path), dtype=dtype)
    assert "decode" not in vars(vae)


def test_a_handle_takes_only_its_own_tiny_vae_off(tmp_path):
    vae, file = vae_for("taew2_1"), tiny_file(tmp_path)
    first = trp.use_tiny_vae(vae, file)
    first.restore()
    second = trp.use_tiny_vae(vae, file)
    assert (first.active, second.active) == (False, True)
    with pytest.raises(trp.PatchError, match="nothing to restore"):
        first.restore()
    second.restore()


def test_what_has_no_such_vae_or_has_a_tiny_one_is_refused(tmp_path):
    pipe, file = tiny_wan_pipeline(), tiny_file(tmp_path)
    with pytest.raises(trp.PatchError, match="there is a WanTransformer3DModel"):
        trp.use_tiny_vae(pipe.transformer, file)
    handle = trp.use_tiny_vae(pipe, file)
    with pytest.raises(trp.PatchError, match="a tiny VAE decodes already"):
        trp.use_tiny_vae(pipe, file)
    tiny = pipe.vae.decode
    pipe.vae.decode = lambda z: tiny(z)
    with pytest.raises(trp.PatchError, match="was replaced after use_tiny_vae"):
        handle.restore()
    pipe.vae.decode = tiny
    handle.restore()
    with pytest.raises(trp.PatchError, match="nothing to restore"):
        handle.restore()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_gives_the_published_frames_in_half_precision(tmp_path, monkeypatch, kind):
    """At the real widths, with channels last."""
    monkeypatch.setattr(network, "WIDTHS", {"base": (256, 128, 64, 64), "super": (512, 256, 128, 64)})
    vae, file = vae_for(kind).to("cuda"), tiny_file(tmp_path, kind, dtype=torch.float16)
    made, z = latents(vae.to("cpu"))
    expected = published_sample(file, kind, made.half().cuda())  # in fp64 a CPU takes minutes
    with trp.use_tiny_vae(vae, file):
        sample = vae.decode(z.cuda()).sample
    assert relative_l2(sample, expected) < 0.01


@pytest.mark.gpu
def test_on_a_gpu_the_first_frames_may_leave_early(tmp_path, monkeypatch):
    """One latent frame is decoded at a time, and one frame is copied at a time."""
    monkeypatch.setattr("turbo_rcm_patch.patching.tiny_vae.decoding.WORKING_SET", 0)
    monkeypatch.setattr("turbo_rcm_patch.patching.families.vae.video_output.PIECE_BYTES", 1)
    pipe = tiny_wan_pipeline()
    _, z = latents(pipe.vae, batch=1)
    with trp.patch(pipe), trp.use_tiny_vae(pipe, tiny_file(tmp_path)):
        sample = pipe.vae.decode(z.cuda()).sample
        assert [mark.frames for mark in marks_of(sample)] == [1, 5, 9]
        expected = VideoProcessor.postprocess_video(pipe.video_processor, sample, "np")
        assert (pipe.video_processor.postprocess_video(pipe.vae.decode(z.cuda()).sample, "np") == expected).all()
