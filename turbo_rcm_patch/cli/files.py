"""Outputs are checked before the work begins, then written beside the target and renamed: no half file is left."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import tempfile
import wave
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..wording import counted
from .errors import CommandError

if TYPE_CHECKING:
    import numpy as np


def check_output(option: str, path: Path | None, suffixes: Sequence[str]) -> None:
    """Raise CommandError for a path where no file with one of the suffixes can be made. None: no file is asked for."""
    if path is None:
        return
    if path.suffix.lower() not in suffixes:
        raise CommandError(f"{option} {path}: give a name ending in {' or '.join(suffixes)}.")
    if path.is_dir():
        raise CommandError(f"{option} {path} is a folder; give a file name in it.")
    if not path.parent.is_dir():
        raise CommandError(f"{option} {path}: the folder {path.parent} does not exist; create it first.")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise CommandError(
            f"{option} {path}: cannot write in {path.parent} ({error.strerror}); choose another folder."
        ) from error


def json_file(text: str) -> Path:
    """Return the path of a JSON file, as a type for argparse that runs check_output while the options are parsed."""
    try:
        check_output("the file", Path(text), (".json",))
    except CommandError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)


def check_ffmpeg() -> None:
    """Raise CommandError unless imageio finds an ffmpeg that runs, to write mp4 files with."""
    try:
        import imageio_ffmpeg

        executable = imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError):
        executable = None
    if executable is None or not _runs(executable):
        raise CommandError(
            "no ffmpeg found to write the mp4 with; install one with: pip install imageio-ffmpeg"
            " (or set IMAGEIO_FFMPEG_EXE to yours)."
        )


def _runs(executable: str) -> bool:
    try:
        return subprocess.run([executable, "-version"], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends well, and is removed otherwise."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error}; check the disk's free space and the folder.") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: dict) -> None:
    """Write a dictionary as indented JSON."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


class Sound(NamedTuple):
    """The sound of a video. samples: [channels, n] in [-1, 1]. rate: samples per second."""

    samples: np.ndarray
    rate: int


def write_video(path: Path, pieces: Iterable[np.ndarray], fps: int, sound: Sound | None = None) -> None:
    """Write frames, uint8 in pieces of [n, H, W, 3], as an mp4, with their sound if there is one.

    ffmpeg encodes a piece while the next one is made.
    """
    import imageio.v2 as imageio

    # imageio would run Python in the forked ffmpeg before it starts, which can crash in a process with threads.
    os.environ.setdefault("IMAGEIO_FFMPEG_NO_PREVENT_SIGINT", "1")
    frames = 0
    quality = 5  # as diffusers' export_to_video has it
    with replacing(path) as temporary, _wav_of(sound) as audio:
        # imageio's own context leaves ffmpeg running after an error, and ffmpeg then writes the file that was removed.
        with contextlib.closing(imageio.get_writer(temporary, fps=fps, quality=quality, **audio)) as writer:
            for piece in pieces:
                for frame in piece:
                    writer.append_data(frame)
                frames += len(piece)
        _check_frames(temporary, frames)


@contextlib.contextmanager
def _wav_of(sound: Sound | None) -> Iterator[dict[str, str]]:
    """Write a sound to a temporary file. Return imageio's options that put it into an mp4."""
    if sound is None:
        yield {}
        return
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        with wave.open(file, "wb") as wav:
            wav.setnchannels(len(sound.samples))
            wav.setsampwidth(2)
            wav.setframerate(sound.rate)
            wav.writeframes((sound.samples.clip(-1, 1) * 32767).round().astype("<i2").T.tobytes())
        file.flush()
        yield {"audio_path": file.name, "audio_codec": "aac"}


def _check_frames(path: Path, frames: int) -> None:
    """Raise OSError unless a video has this many frames. imageio reports no failure of ffmpeg after the last one."""
    import imageio_ffmpeg

    try:
        found, _ = imageio_ffmpeg.count_frames_and_secs(path)
    except RuntimeError:  # no video at all
        found = 0
    if found != frames:
        raise OSError(f"ffmpeg wrote {found} of {counted(frames, 'frame')}")
