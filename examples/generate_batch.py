"""Make videos of many prompts, shared among the GPUs. A stopped run goes on where it was.

    accelerate launch examples/generate_batch.py prompts.txt --out videos
    accelerate launch examples/generate_batch.py prompts.txt --out videos --model PATH_OR_ID --preset quantized

The file has one prompt per line. accelerate starts a process for each GPU, which loads the model once. A video is named
after its prompt and seed, and is written whole or not at all. videos.jsonl gets a line for each: seed, seconds,
options, settings. Videos that have both are skipped, so that after an interruption the same command makes the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from turbo_rcm_patch.cli.arguments import add_distilled_options, add_frame_rate, add_generation_options, as_path
from turbo_rcm_patch.cli.errors import CommandError, exit_code, user_errors
from turbo_rcm_patch.cli.files import check_ffmpeg, write_video
from turbo_rcm_patch.cli.generation_checks import check_at_least_one, check_generation
from turbo_rcm_patch.cli.other_warnings import without_other_warnings

# PyTorch and diffusers are imported in functions, so that bad input is refused at once.

RECORD = "videos.jsonl"


@dataclass(frozen=True)
class Video:
    """A video to make, and its file's name."""

    prompt: str
    seed: int

    @property
    def name(self) -> str:
        words = re.sub(r"[^a-z0-9]+", "-", self.prompt.lower())[:60].strip("-")
        digest = hashlib.sha256(self.prompt.encode()).hexdigest()[:8]  # prompts may share their first words
        return "-".join(filter(None, [words, digest, f"seed{self.seed}.mp4"]))


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    return exit_code("generate_batch", lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Make this process's share of the videos."""
    rank, local_rank, processes = (int(os.environ.get(name, default)) for name, default in RANKS.items())
    videos = check(options)
    with without_other_warnings(options.verbose), user_errors():
        options.device = device_of(options.device, local_rank, processes)
        with writing_in(options.out):
            options.out.mkdir(parents=True, exist_ok=True)
        recorded = read_record(options.out)
        share = videos[rank::processes]
        missing = [video for video in share if video.name not in recorded or not (options.out / video.name).is_file()]
        bar = tqdm(total=len(share), initial=len(share) - len(missing), desc=f"process {rank}", position=local_rank)
        with bar, contextlib.redirect_stdout(sys.stdout if rank == 0 else None):  # all processes would print the same
            # With the options of all that is there the settings are the same too, and the model is not needed.
            is_the_same_run = all(line.get("options") == deciding(options) for line in recorded.values())
            for _ in generate(options, missing, recorded) if missing or not is_the_same_run else ():
                bar.update()
    return 0


RANKS = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}  # of this process, as accelerate's launcher sets them
# Which videos are made, and where; all other options decide what a prompt and a seed look like.
NOT_DECIDING = (
    *("prompts", "seed", "seeds", "out", "device", "offload", "verbose"),
    *("command", "prompt", "patched", "no_patch"),
)


def deciding(options: argparse.Namespace) -> dict[str, object]:
    """Return the options that decide what a video looks like, as JSON has them."""
    given = {name: value for name, value in vars(options).items() if name not in NOT_DECIDING}
    return json.loads(json.dumps(given, default=str))


def generate(options: argparse.Namespace, videos: list[Video], recorded: dict[str, dict]) -> Iterator[Video]:
    """Load the model once and make the videos in turn, each then recorded.

    Raises CommandError if the recorded videos have other settings.
    """
    from turbo_rcm_patch.cli.commands import settings_of
    from turbo_rcm_patch.cli.pipelines import choose_config, load_pipeline, warn_of_prompts
    from turbo_rcm_patch.patching import patch

    given = deciding(options)
    pipe, call = load_pipeline(options)
    del call["prompt"]
    warn_of_prompts(options, list(dict.fromkeys(video.prompt for video in videos)))
    pipe.set_progress_bar_config(disable=True)
    settings = {**settings_of(options, pipe, call), "sigma_max": pipe.scheduler.config.get("sigma_max")}
    settings = json.loads(json.dumps({**settings, "fps": options.fps}))
    check_same_settings(options.out, recorded, settings)
    print(options.patched or patch(pipe, choose_config(options)))
    for video in videos:
        line = make(options, pipe, call, video)
        with writing_in(options.out):
            append_line(options.out / RECORD, {**line, "options": given, "settings": settings})
        yield video


def make(options: argparse.Namespace, pipe, call: dict[str, object], video: Video) -> dict[str, object]:
    """Generate and write a video. Return its line of the record. Its frames are freed before the next video."""
    import numpy as np
    import torch

    from turbo_rcm_patch.bench.timing import timed_generation
    from turbo_rcm_patch.cli.pipelines import sound_of

    generator = torch.Generator(pipe._execution_device).manual_seed(video.seed)
    made = timed_generation(pipe, **call, prompt=video.prompt, output_type="pil", generator=generator)
    begin = time.perf_counter()
    with writing_in(options.out):
        remove_leftovers(options.out, video)
    frames = (np.asarray(image)[None] for image in made.frames[0])
    write_video(options.out / video.name, frames, options.fps, sound_of(pipe, made.sound))
    seconds = {**asdict(made.timings), "writing": time.perf_counter() - begin}
    peak_memory = seconds.pop("peak_memory")
    line = {"file": video.name, "prompt": video.prompt, "seed": video.seed}
    return {**line, "seconds": seconds, "peak_memory": peak_memory}


@contextlib.contextmanager
def writing_in(folder: Path) -> Iterator[None]:
    """Turn errors of writing into a CommandError."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"--out {folder}: {error}; check the folder and the disk's free space.") from error


def remove_leftovers(folder: Path, video: Video) -> None:
    """Remove the unfinished video of a process that was killed."""
    for leftover in folder.glob(f".{Path(video.name).stem}.*.mp4"):
        leftover.unlink()


def check(options: argparse.Namespace) -> list[Video]:
    """Return the videos asked for. Raises CommandError for anything wrong with the options."""
    check_generation(options)
    check_at_least_one("--fps", options.fps)
    check_at_least_one("--seeds", options.seeds)
    check_ffmpeg()
    if not options.prompts.is_file():
        raise CommandError(f"{options.prompts}: no such file; give a text file with a prompt a line.")
    try:
        lines = options.prompts.read_text(encoding="utf-8-sig").splitlines()  # some editors begin it with a mark
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{options.prompts}: {error}; give a text file with a prompt a line.") from error
    prompts = dict.fromkeys(line.strip() for line in lines if line.strip())
    if not prompts:
        raise CommandError(f"{options.prompts} is empty; write a prompt a line.")
    if options.out.exists() and not options.out.is_dir():
        raise CommandError(f"--out {options.out} is a file; give a folder.")
    return [Video(prompt, options.seed + index) for prompt in prompts for index in range(options.seeds)]


def device_of(asked: str | None, local_rank: int, processes: int) -> str:
    """Return the device of this process: the GPU of its rank, or the CPU."""
    import torch

    if asked == "cpu" or (asked is None and not torch.cuda.is_available()):
        return "cpu"
    if asked not in (None, "cuda") and processes > 1:
        raise CommandError(f"--device {asked}: each process has a GPU of its own; leave it out, or give cpu.")
    return f"cuda:{local_rank}" if asked in (None, "cuda") else asked


def read_record(folder: Path) -> dict[str, dict]:
    """Return the latest line of every video in a folder's record."""
    lines = (folder / RECORD).read_text(encoding="utf-8").splitlines() if (folder / RECORD).exists() else []
    recorded = {}
    for line in lines:
        with contextlib.suppress(ValueError):  # a full disk cuts a line short; its video is made again
            video = json.loads(line)
            recorded[video["file"]] = video
    return recorded


def check_same_settings(folder: Path, recorded: dict[str, dict], settings: dict[str, object]) -> None:
    """Raise CommandError if the folder has videos of other settings, which skipping would mix with these."""
    for video in recorded.values():
        for name in settings.keys() | video["settings"].keys():
            before, now = video["settings"].get(name), settings.get(name)
            if before != now:
                raise CommandError(
                    f"--out {folder} has videos with {name} {before}, and this run has {now}; give another folder."
                )


def append_line(path: Path, content: dict[str, object]) -> None:
    """Append a line of JSON to a file that several processes write to."""
    with open(path, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        if file.read() not in (b"", b"\n"):
            file.write(b"\n")  # a full disk cut the last line short
        file.write(json.dumps(content).encode() + b"\n")


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=as_path, help="a text file with a prompt a line")
    parser.add_argument("--out", type=as_path, required=True, help="the folder to write the videos in")
    parser.add_argument("--seeds", type=int, default=1, help="videos of each prompt: --seed, and those after it")
    add_frame_rate(parser)
    add_distilled_options(parser)
    add_generation_options(parser)
    parser.set_defaults(command="generate", prompt=None, no_patch=False, patched=None)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
