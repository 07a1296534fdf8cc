"""An mp4 written while its frames are decoded: which frames, when, and that no half file is left."""

import subprocess
import threading

import imageio.v3 as iio
import numpy as np
import pytest
import torch

import turbo_rcm_patch as trp
from tests.cli.running import CAPTION, TINY
from tests.tiny_vae import tiny_latents, tiny_vae
from turbo_rcm_patch.cli import commands, main, video_writer
from turbo_rcm_patch.cli.errors import CommandError
from turbo_rcm_patch.cli.files import write_video
from turbo_rcm_patch.cli.video_writer import VideoWriter
from turbo_rcm_patch.patching.families.vae import frames_sent_to

imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")


def grey(frames, level):
    return torch.full((frames, 3, 32, 48), level / 255)


def levels(path):
    return iio.imread(path).mean((1, 2, 3))


def test_frames_are_written_in_their_order(tmp_path):
    path = tmp_path / "grey.mp4"
    with VideoWriter(path, fps=8) as writer:
        for index, frames in enumerate((1, 3, 2)):
            writer.send(grey(frames, 80 * index))
        assert writer.finish(6)
    assert np.abs(levels(path) - [0, 80, 80, 80, 160, 160]).max() < 4
    assert [file.name for file in tmp_path.iterdir()] == ["grey.mp4"]


def test_a_piece_is_encoded_before_the_next_is_sent(tmp_path, monkeypatch):
    """Sending waits for the first piece's encoding. Without the thread it would wait for ever."""
    encoded = threading.Event()

    def write_video(path, pieces, fps):
        for _ in pieces:
            encoded.set()

    monkeypatch.setattr(video_writer, "write_video", write_video)
    with VideoWriter(tmp_path / "grey.mp4", fps=8) as writer:
        writer.send(grey(1, 0))
        assert encoded.wait(timeout=60)
        writer.send(grey(1, 80))
        assert writer.finish(2)


@pytest.mark.parametrize("sent", [0, 2])
def test_part_of_a_video_is_not_kept(tmp_path, sent):
    with VideoWriter(tmp_path / "grey.mp4", fps=8) as writer:
        for _ in range(sent):
            writer.send(grey(1, 80))
        assert not writer.finish(3)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_generation_leaves_no_file(tmp_path):
    def generate():
        with VideoWriter(tmp_path / "grey.mp4", fps=8) as writer:
            writer.send(grey(1, 80))
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        generate()
    assert list(tmp_path.iterdir()) == []
    assert not any("ThreadPoolExecutor" in thread.name for thread in threading.enumerate())


def test_what_cannot_be_written_is_an_error(tmp_path):
    with VideoWriter(tmp_path / "missing" / "grey.mp4", fps=8) as writer:
        writer.send(grey(1, 80))
        with pytest.raises(CommandError, match="cannot write"):
            writer.finish(1)


def test_a_disk_that_fills_after_the_last_frame_is_an_error(tmp_path, monkeypatch):
    """ffmpeg keeps these frames to itself until the pipe is closed; then the file is not allowed to grow."""
    out, limited = tmp_path / "out", tmp_path / "ffmpeg"
    out.mkdir()
    limited.write_text(f'#!/bin/bash\nulimit -f 1\ntrap "" XFSZ\nexec "{imageio_ffmpeg.get_ffmpeg_exe()}" "$@"\n')
    limited.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(limited))
    with VideoWriter(out / "noise.mp4", fps=8) as writer:
        writer.send(torch.rand(8, 3, 32, 48))
        with pytest.raises(CommandError, match=r"cannot write .*noise.mp4: ffmpeg wrote 0 of 8 frames"):
            writer.finish(8)
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("kind", ["wan 2.1", "residual"])
def test_a_patched_vae_gives_its_sample_in_parts(kind):
    vae, z, parts = tiny_vae(kind), tiny_latents(5), []
    with trp.patch(vae, trp.Exact(vae_chunk=2)), torch.no_grad():
        with frames_sent_to(parts.append, vae):
            sample = vae.decode(z).sample
        assert torch.equal(torch.cat(parts, 2), sample)
        assert parts[0].shape[2] < sample.shape[2]
        parts.clear()
        vae.decode(z)
        assert parts == []
        with frames_sent_to(parts.append, vae):
            vae.enable_tiling(16, 16, 16, 16)
            vae.decode(z)
        assert parts == []
    with frames_sent_to(parts.append, vae), torch.no_grad():
        vae.decode(z)
    assert parts == []


@pytest.mark.parametrize("patched", [True, False])
def test_generate_writes_the_same_video_while_it_is_decoded_and_after(tmp_path, monkeypatch, patched):
    written = {"while": [], "after": []}
    for when, module in (("while", video_writer), ("after", commands)):
        target = written[when]
        monkeypatch.setattr(module, "write_video", lambda _path, pieces, *_, to=target: to.extend(map(np.copy, pieces)))
    options = [] if patched else ["--no-patch"]
    assert main(["generate", CAPTION, "-o", str(tmp_path / "circle.mp4"), *TINY, "--seed", "7", *options]) == 0
    assert bool(written["while"]) == patched
    assert bool(written["after"]) != patched

    pipe = trp.load_embedded_pipeline()
    trp.use_rcm(pipe)
    if patched:
        trp.patch(pipe)
    size = {"height": 32, "width": 48, "num_frames": 5, "num_inference_steps": 2, "guidance_scale": 1.0}
    images = pipe(CAPTION, generator=torch.Generator().manual_seed(7), **size, output_type="pil").frames[0]
    assert np.array_equal(np.concatenate(written["while"] or written["after"]), np.stack(list(map(np.asarray, images))))


def test_no_python_runs_in_the_forked_encoder(tmp_path, monkeypatch):
    """Python between fork and exec has crashed a process with threads, such as the page's."""
    started, popen = [], subprocess.Popen

    def start(command, **options):
        started.append(options.get("preexec_fn"))
        return popen(command, **options)

    monkeypatch.delenv("IMAGEIO_FFMPEG_NO_PREVENT_SIGINT", raising=False)
    monkeypatch.setattr(subprocess, "Popen", start)
    write_video(tmp_path / "out.mp4", [np.zeros((2, 16, 16, 3), np.uint8)], 16)
    assert started
    assert set(started) == {None}
