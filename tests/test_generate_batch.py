"""examples/generate_batch.py: processes share prompts, one of them is killed, and videos are skipped or refused."""

import errno
import importlib.util
import json
import os
import signal
import subprocess
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path

import imageio.v3 as iio
import pytest
import torch
from accelerate.commands import launch

from tests.cli.test_ltx2 import sound_in
from tests.tiny_ltx2 import tiny_ltx2_pipeline_for_prompts
from tests.tiny_wan import tiny_wan_pipeline
from turbo_rcm_patch import patching
from turbo_rcm_patch.bench import timing
from turbo_rcm_patch.cli.errors import CommandError
from turbo_rcm_patch.embedded import SLA_BLOCKS

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples/generate_batch.py"
spec = importlib.util.spec_from_file_location("generate_batch", SCRIPT)
batch = importlib.util.module_from_spec(spec)
sys.modules["generate_batch"] = batch  # for its dataclass
spec.loader.exec_module(batch)

PROMPTS = ["a red circle moves right", "a blue square moves left", "", "a red circle moves right"]
SMALL = ["--height", "16", "--width", "16", "--frames", "5", "--steps", "1", "--device", "cpu"]


@pytest.fixture
def arguments(tmp_path):
    """The command's for four videos: two prompts twice."""
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    return [str(tmp_path / "prompts.txt"), "--out", str(tmp_path / "out"), "--seeds", "2", *SMALL]


def lines_of(folder):
    path = folder / batch.RECORD
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def as_rank(rank, processes=2):
    """Return the environment variables of one process of several."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}


def test_accelerate_starts_a_process_for_every_rank(tmp_path, monkeypatch):
    """The launcher sets the variables that the script reads. It starts several processes for GPUs alone, or if told."""
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT")  # which it sets
    script = tmp_path / "script.py"
    names = tuple(batch.RANKS)
    script.write_text(
        "import json, os, pathlib, sys\n"
        f"ranks = {{name: os.environ[name] for name in {names}}}\n"
        "pathlib.Path(sys.argv[1], ranks['RANK'] + '.json').write_text(json.dumps(ranks))\n"
    )
    two = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port", "0"]
    given = [*two, "--mixed_precision", "no", "--dynamo_backend", "no", str(script), str(tmp_path)]
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        launch.launch_command(launch.launch_command_parser().parse_args(given))
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, handlers[number])
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [as_rank(0), as_rank(1)]


class Killed(BaseException):
    """The process is killed. The script catches it nowhere."""


def test_what_a_killed_process_did_not_make_is_made_by_the_next_run(tmp_path, arguments, monkeypatch):
    """Two processes have half of the videos each. The second is killed when it has made one of its two."""
    out, append_line = tmp_path / "out", batch.append_line

    def append_and_end(*line):
        append_line(*line)
        raise Killed

    for rank, append in enumerate((append_line, append_and_end)):
        with monkeypatch.context() as process, pytest.raises(Killed) if rank else nullcontext():
            process.setattr(batch, "append_line", append)
            for name, value in as_rank(rank).items():
                process.setenv(name, value)
            assert batch.main(arguments) == 0
    recorded = {line["file"] for line in lines_of(out)}
    made = {path.name: path.stat().st_mtime_ns for path in out.glob("[!.]*.mp4")}
    videos = [batch.Video(prompt, seed).name for prompt in PROMPTS[:2] for seed in range(2)]
    assert {videos[0], videos[2]} < recorded < set(videos)
    (out / f".{videos[3].removesuffix('.mp4')}.123.mp4").write_bytes(b"half")  # as of a process killed while writing

    assert batch.main(arguments) == 0
    assert sorted(path.name for path in out.iterdir()) == sorted([*videos, batch.RECORD])
    assert all((out / name).stat().st_mtime_ns == made[name] for name in recorded)
    assert sorted(line["file"] for line in lines_of(out)) == sorted(videos)  # each once
    assert all(iio.imread(out / name).shape == (5, 16, 16, 3) for name in videos)


def test_a_line_a_video_and_what_has_both_is_skipped(tmp_path, arguments, capsys):
    (tmp_path / "prompts.txt").write_text(PROMPTS[0])
    assert batch.main(arguments) == 0
    out = tmp_path / "out"
    lines = lines_of(out)
    assert [(line["prompt"], line["seed"]) for line in lines] == [(PROMPTS[0], 0), (PROMPTS[0], 1)]
    for line in lines:
        assert line["seconds"]["total"] >= sum(line["seconds"]["steps"]) > 0
        assert line["settings"]["height"] == 16
        assert (out / line["file"]).is_file()
    capsys.readouterr()
    assert batch.main([*arguments, "-v"]) == 0
    assert "WanTransformer3DModel" not in capsys.readouterr().out  # no model was loaded
    assert lines_of(out) == lines

    (out / lines[0]["file"]).unlink()
    record = out / batch.RECORD
    record.write_text(record.read_text().splitlines()[0] + '\n{"file": "cut sh\n')  # so that the second has no line
    assert batch.main(arguments) == 0
    assert {line["file"] for line in lines} == set(batch.read_record(out)) == {path.name for path in out.glob("*.mp4")}
    assert len(record.read_text().splitlines()) == 4  # the first, what was cut short, and both anew


def test_a_line_after_one_that_was_cut_short_can_be_read(tmp_path):
    batch.append_line(tmp_path / batch.RECORD, {"file": "a.mp4"})
    with open(tmp_path / batch.RECORD, "a") as record:
        record.write('{"file": "b.m')
    batch.append_line(tmp_path / batch.RECORD, {"file": "c.mp4"})
    batch.append_line(tmp_path / batch.RECORD, {"file": "d.mp4"})
    assert set(batch.read_record(tmp_path)) == {"a.mp4", "c.mp4", "d.mp4"}
    assert len((tmp_path / batch.RECORD).read_text().splitlines()) == 4


def test_a_disk_without_space_for_a_line_is_one_line(arguments, capsys, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(batch, "append_line", full)
    assert batch.main(arguments) == 2
    assert "No space left on device" in capsys.readouterr().err.splitlines()[-1]


def test_no_frames_are_kept_while_the_next_are_made(arguments, monkeypatch):
    made, alive = [], []

    def timed_generation(*args, **kwargs):
        alive.append(any(frames() is not None for frames in made))
        generation = original(*args, **kwargs)
        made.append(weakref.ref(generation.frames[0][0]))
        return generation

    original = timing.timed_generation
    monkeypatch.setattr(timing, "timed_generation", timed_generation)
    assert batch.main(arguments) == 0
    assert alive == [False] * 4


def test_other_settings_are_refused_where_nothing_is_missing_too(tmp_path, arguments, capsys):
    (tmp_path / "prompts.txt").write_text(PROMPTS[0])
    assert batch.main(arguments) == 0
    for change, difference in (
        (["--fps", "8"], "fps 16, and this run has 8"),
        (["--frames", "9"], "num_frames 5, and this run has 9"),
        (["--dtype", "bfloat16"], "dtype float32, and this run has bfloat16"),
    ):
        capsys.readouterr()
        assert batch.main([*arguments, *change]) == 2
        assert difference in capsys.readouterr().err
    without_steps = [argument for argument in arguments if argument not in ("--steps", "1")]
    assert batch.main(without_steps) == 2
    assert "num_inference_steps 1, and this run has 4" in capsys.readouterr().err
    made = lines_of(tmp_path / "out")
    assert batch.main([*arguments, "--fps", "16", "--sigma-max", str(made[0]["settings"]["sigma_max"])]) == 0
    assert lines_of(tmp_path / "out") == made


def test_the_sound_and_the_rate_are_the_models(tmp_path, arguments):
    (tmp_path / "prompts.txt").write_text(PROMPTS[0])
    tiny_ltx2_pipeline_for_prompts().save_pretrained(tmp_path / "ltx2")
    options = ["--seeds", "1", "--height", "64", "--width", "96", "--model", str(tmp_path / "ltx2")]
    assert batch.main([*arguments, *options]) == 0
    (line,) = lines_of(tmp_path / "out")
    video = tmp_path / "out" / line["file"]
    assert iio.immeta(video)["fps"] == line["settings"]["fps"] == line["settings"]["frame_rate"] == 24
    assert sound_in(video, tmp_path)[0].any()


def test_the_home_folder_is_found_where_the_shell_left_its_sign(monkeypatch):
    monkeypatch.setenv("HOME", "/home/fox")
    options = batch.parse_options(["~/prompts.txt", "--out=~/videos"])
    assert (options.prompts, options.out) == (Path("/home/fox/prompts.txt"), Path("/home/fox/videos"))


def test_videos_of_another_transformer_are_refused_in_a_folder(tmp_path, arguments, capsys):
    model = tmp_path / "model"
    tiny_wan_pipeline().save_pretrained(model)
    assert batch.main([*arguments, "--model", str(model)]) == 0
    assert batch.main([*arguments, "--model", str(model), "--transformer", str(model / "transformer")]) == 2
    assert f"videos with transformer None, and this run has {model / 'transformer'}" in capsys.readouterr().err


def test_a_folder_has_videos_of_the_same_settings():
    recorded = {"x.mp4": {"settings": {"preset": "exact", "fps": 16}}}
    batch.check_same_settings(Path("videos"), recorded, {"preset": "exact", "fps": 16})
    with pytest.raises(CommandError, match="--out videos has videos with fps 16, and this run has 8; give another"):
        batch.check_same_settings(Path("videos"), recorded, {"preset": "exact", "fps": 8})
    with pytest.raises(CommandError, match="has videos with recipe None, and this run has rcm"):
        batch.check_same_settings(Path("videos"), recorded, {"preset": "exact", "fps": 16, "recipe": "rcm"})


def test_the_patch_is_the_one_of_all_options(arguments, monkeypatch):
    patched_with = []
    monkeypatch.setattr(patching, "patch", lambda pipe, config: patched_with.append(config))
    assert batch.main([*arguments, "--preset", "sparse", "--topk", "0.5"]) == 0
    (config,) = patched_with
    assert (config.topk, config.blocks) == (0.5, SLA_BLOCKS)


def test_prompts_that_the_model_has_not_learned_are_counted(tmp_path, arguments, capsys):
    (tmp_path / "prompts.txt").write_text("\n".join([PROMPTS[0], "a fox", *map("fox {}".format, range(4))]))
    assert batch.main([*arguments, "--seeds", "1"]) == 0
    assert "unlike 'a fox' and 4 more" in capsys.readouterr().err


def test_names_tell_prompts_apart():
    names = [
        batch.Video(prompt, 3).name for prompt in ("A cat; " * 20 + "on snow", "A cat; " * 20 + "on ice", "猫", "犬")
    ]
    assert len(set(names)) == 4
    assert all(name.isascii() and len(name) < 90 and "/" not in name and name.endswith("-seed3.mp4") for name in names)
    assert not names[2].startswith("-")


def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path, arguments):
    (tmp_path / "prompts.txt").write_text("\r\n".join([PROMPTS[1], *PROMPTS]), encoding="utf-8-sig")
    videos = batch.check(batch.parse_options(arguments))
    assert [video.prompt for video in videos[::2]] == [PROMPTS[1], PROMPTS[0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": "missing.txt"}, "no such file; give a text file"),
        ({"prompts": "blank.txt"}, "is empty; write a prompt a line"),
        ({"out": "blank.txt"}, "is a file; give a folder"),
        ({"out": "blank.txt/out"}, "Not a directory"),
        ({"more": ["--seeds", "0"]}, "--seeds 0: give 1 or more"),
        ({"more": ["--preset", "quick"]}, "preset 'quick' is unknown"),
        ({"more": ["--device", "cuda:1"], "processes": 2}, "each process has a GPU of its own"),
    ],
)
def test_bad_input_is_one_line(tmp_path, arguments, capsys, monkeypatch, change, message):
    (tmp_path / "blank.txt").write_text("\n \n")
    prompts, _, out, *rest = arguments
    prompts, out = (
        str(tmp_path / change[name]) if name in change else old for name, old in (("prompts", prompts), ("out", out))
    )
    monkeypatch.setenv("WORLD_SIZE", str(change.get("processes", 1)))
    assert batch.main([prompts, "--out", out, *rest, *change.get("more", [])]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("generate_batch: ")
    assert message in line
    assert not (tmp_path / "out").exists()


def test_bad_input_is_refused_before_pytorch_is_imported():
    code = (
        "import runpy, sys; sys.argv = ['generate_batch', 'nofile.txt', '--out', 'out']\n"
        f"try: runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "except SystemExit as ended: assert ended.code == 2\n"
        "assert not {'torch', 'diffusers', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "generate_batch: nofile.txt: no such file; give a text file with a prompt a line.\n"


@pytest.mark.parametrize("option", [[], ["-v"]])
def test_verbose_hides_nothing(arguments, monkeypatch, option):
    seen = []
    monkeypatch.setattr(batch, "without_other_warnings", lambda verbose=False: nullcontext(seen.append(verbose)))
    monkeypatch.setattr(batch, "generate", lambda *_: ())
    assert batch.main([*arguments, *option]) == 0
    assert seen == [bool(option)]


def test_each_process_has_its_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [batch.device_of(None, rank, 2) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert [batch.device_of(asked, 1, 2) for asked in ("cuda", "cpu")] == ["cuda:1", "cpu"]
    assert batch.device_of("cuda:3", 0, 1) == "cuda:3"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert batch.device_of(None, 1, 2) == "cpu"
