"""An mp4 is written whole or not at all, whatever fails, and a process with threads can write it."""

import subprocess

import numpy as np
import pytest

from turbo_rcm_patch.cli.errors import CommandError
from turbo_rcm_patch.cli.files import write_video

imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")


def test_a_failure_between_two_pieces_leaves_no_file(tmp_path):
    def pieces():
        yield np.zeros((1, 32, 48, 3), np.uint8)
        raise MemoryError

    with pytest.raises(MemoryError):
        write_video(tmp_path / "grey.mp4", pieces(), fps=8)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(CommandError, match="cannot write"):
        write_video(tmp_path / "missing" / "grey.mp4", [np.zeros((1, 32, 48, 3), np.uint8)], fps=8)


def test_a_disk_that_fills_after_the_last_frame_is_an_error(tmp_path, monkeypatch):
    """ffmpeg keeps these frames to itself until the pipe is closed; then the file is not allowed to grow."""
    out, limited = tmp_path / "out", tmp_path / "ffmpeg"
    out.mkdir()
    limited.write_text(f'#!/bin/bash\nulimit -f 1\ntrap "" XFSZ\nexec "{imageio_ffmpeg.get_ffmpeg_exe()}" "$@"\n')
    limited.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(limited))
    noise = np.random.default_rng(0).integers(0, 256, (8, 32, 48, 3), np.uint8)
    with pytest.raises(CommandError, match=r"cannot write .*noise.mp4: ffmpeg wrote 0 of 8 frames"):
        write_video(out / "noise.mp4", [noise], fps=8)
    assert list(out.iterdir()) == []


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
