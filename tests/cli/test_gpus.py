"""One video by several processes: `generate --gpus` and examples/parallel.py, on the CPU over gloo, and on two GPUs.

On the CPU, processes that already imported everything fork those of the command and of the example (tests/ranks.py).
"""

import contextlib
import importlib.util
import io
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import imageio.v3 as iio
import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from tqdm import tqdm
from tqdm.std import TqdmDefaultWriteLock

from tests.cli.running import CAPTION, error_of
from tests.ranks import start_on_cpu, use_one_thread
from tests.tiny_wan import tiny_wan_pipeline
from turbo_rcm_patch.cli import commands, gpus, main
from turbo_rcm_patch.cli.errors import CommandError
from turbo_rcm_patch.cli.pipelines import split_among

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/parallel.py"
TWO = ["--gpus", "2"]
MOVING = "a large red circle moves up slowly while a small blue square moves left, on white"  # as in the example
VIDEO = ["--height", "16", "--width", "32", "--frames", "5", "--steps", "1"]
LONGEST = 30  # seconds; gloo itself gives up after 30 minutes
spec = importlib.util.spec_from_file_location("parallel", EXAMPLE)
parallel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(parallel)


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        (0, "PyTorch finds 0 GPUs here; leave --gpus out"),
        (1, "PyTorch finds 1 GPU here; leave --gpus out"),
        (3, "PyTorch finds 3 GPUs here; give 3 or fewer"),
    ],
)
def test_more_gpus_than_there_are(tmp_path, capsys, monkeypatch, found, shown):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    error = error_of(capsys, "generate", CAPTION, "-o", tmp_path / "out.mp4", "--gpus", 4)
    assert error == f"turbo-rcm generate: --gpus 4: {shown}."


@pytest.mark.parametrize(
    ("count", "frames", "message"),
    [(3, 5, "the model has 2 attention heads; give one of 2"), (2, 9, "has 3 tokens, which do not divide by 2")],
)
def test_a_model_or_a_video_that_does_not_divide(count, frames, message):
    """For a model of the hub the command learns this when it is loaded."""
    with pytest.raises(CommandError, match=f"--gpus {count}: .*{message}"):
        split_among(tiny_wan_pipeline(), {"height": 16, "width": 16, "num_frames": frames}, count)


def test_progress_bars_take_no_semaphore(tmp_path, monkeypatch):
    """Else Python warns of a leak below the error of a process, when the others are killed."""
    taken = []
    monkeypatch.delattr(tqdm, "_lock", raising=False)
    monkeypatch.delattr(TqdmDefaultWriteLock, "mp_lock", raising=False)
    monkeypatch.setattr(multiprocessing, "RLock", lambda: taken.append("semaphore"))
    monkeypatch.setattr(commands, "generate", lambda arguments: list(tqdm(range(2))))
    gpus._one_process(0, Namespace(gpus=1, verbose=False), f"file://{tmp_path}/rendezvous")
    assert taken == []


# What the processes run


def run_all(rank, folder):
    """The command in one process and the example in another, each of which starts two."""
    use_one_thread()
    torch.set_num_threads = lambda count: None  # accelerate calls it, which torch 2.14 refuses in a fork of a fork
    # By default transformers loads weights in several threads. In a fork PyTorch first replaces its thread pool, and
    # threads that need it meanwhile raise "Invalid thread pool!" or hang. The command and torchrun do not fork.
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    gpus.START_METHOD = "fork"
    torch.cuda.device_count = torch.accelerator.device_count = lambda: 2
    outcomes = {}
    for name, change in {"made": None, "raises": raises, "refuses": refuses, "killed": killed}.items():
        if rank == 0 or name != "refuses":
            outcomes[name] = outcome(run_example if rank else run_command, folder, change)
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(outcomes))


def outcome(run, folder, change):
    """Return the result of a run or its error, the text that it printed, and its seconds."""
    printed, begin = io.StringIO(), time.monotonic()
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stderr(printed):
        try:
            result = run(monkeypatch, folder, change)
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
    return result, printed.getvalue(), time.monotonic() - begin


def run_command(monkeypatch, folder, change):
    if change is not None:
        monkeypatch.setattr(commands, "generate", lambda arguments: change())
    return main(["generate", CAPTION, "-o", str(folder / "command.mp4"), *VIDEO, *TWO])


def run_example(monkeypatch, folder, change):
    def noted(**options):
        (folder / f"degree.{dist.get_rank()}").write_text(str(options["ulysses_degree"]))
        return ContextParallelConfig(**options)

    monkeypatch.setattr(parallel, "ContextParallelConfig", noted)
    if change is not None:
        monkeypatch.setattr(parallel, "load_embedded_pipeline", lambda device: change())
    world = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, "monitor_interval": 0.05}
    where = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    launch = elastic_launch(LaunchConfig(**world, **where, max_restarts=0, start_method="fork"), parallel.main)
    try:
        return launch(["--output", str(folder / "example.mp4"), "--size", "16", "32", "5"])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return (
            rank,
            failure.message if isinstance(failure.message, str) else failure.message["message"],
            failure.exitcode,
        )


def raises():
    """The second process raises while the first waits for it."""
    if dist.get_rank() == 1:
        raise ZeroDivisionError("of the second process")
    dist.barrier()


def refuses():
    raise CommandError("a user can fix this")


def killed():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


# Checks of their results


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder, the outcomes of the command, and those of the example."""
    folder = tmp_path_factory.mktemp("gpus")
    start_on_cpu(run_all, folder)
    return folder, *(pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(2))


def test_the_command_writes_the_video_of_one_process(made, tmp_path, capsys):
    folder, command, _ = made
    assert command["made"][:2] == (0, "")
    assert main(["generate", CAPTION, "-o", str(tmp_path / "alone.mp4"), *VIDEO, "--device", "cpu"]) == 0
    together, alone = (iio.imread(path).astype(int) for path in (folder / "command.mp4", tmp_path / "alone.mp4"))
    assert together.shape == (5, 16, 32, 3)
    assert np.abs(together - alone).max() <= 2
    assert sorted(path.name for path in folder.iterdir() if path.suffix == ".mp4") == ["command.mp4", "example.mp4"]


def test_a_failure_of_the_command_ends_all_processes(made):
    _, command, _ = made
    result = command["raises"][0]
    assert result.startswith("ProcessRaisedException")
    assert "Process 1 terminated" in result
    assert "ZeroDivisionError: of the second process" in result
    assert command["refuses"][:2] == (2, "turbo-rcm generate: a user can fix this\n")
    assert command["killed"][0] == 2
    assert "the process of GPU 1 was killed by SIGKILL" in command["killed"][1]
    assert max(seconds for *_, seconds in command.values()) < LONGEST


def test_the_example_writes_a_video(made):
    folder, _, example = made
    result, _, _ = example["made"]
    assert result == {0: None, 1: None}
    assert iio.imread(folder / "example.mp4").shape == (5, 16, 32, 3)
    assert [(folder / f"degree.{rank}").read_text() for rank in range(2)] == ["2", "2"]


def test_a_failure_of_the_example_ends_all_processes(made):
    *_, example = made
    rank, message, code = example["raises"][0]
    assert (rank, code) == (1, 1)
    assert "ZeroDivisionError: of the second process" in message
    assert example["killed"][0][0] == 1
    assert example["killed"][0][2] == -signal.SIGKILL
    assert max(seconds for *_, seconds in example.values()) < LONGEST


def test_the_example_says_how_it_is_started(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match="torchrun --nproc-per-node 2"):
        parallel.main([])


# On two GPUs


ON_TWO_GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
CLOSE = 5  # of 255, on average: 8 bits alone leave 2.3, and the video of another seed differs by 17 or more


@pytest.fixture(scope="module")
def video_of_one_gpu(tmp_path_factory):
    pytest.importorskip("imageio_ffmpeg")
    path = tmp_path_factory.mktemp("alone") / "alone.mp4"
    assert main(["generate", MOVING, "-o", str(path), "--device", "cuda"]) == 0
    return iio.imread(path).astype(int)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["-m", "turbo_rcm_patch.cli", "generate", MOVING, *TWO, "-o"], marks=ON_TWO_GPUS, id="generate"),
        pytest.param(
            ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(EXAMPLE), "--output"],
            marks=ON_TWO_GPUS,
            id="the example",
        ),
    ],
)
def test_two_gpus_make_the_video_of_one(command, video_of_one_gpu, tmp_path):
    done = subprocess.run([sys.executable, *command, str(tmp_path / "two.mp4")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    together = iio.imread(tmp_path / "two.mp4").astype(int)
    assert together.shape == video_of_one_gpu.shape == (17, 160, 224, 3)
    assert np.abs(together - video_of_one_gpu).mean() <= CLOSE
