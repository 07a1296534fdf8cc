"""Run everything that needs a GPU: the GPU tests, compute-sanitizer, verify, compare, evaluate, all benchmarks.

    python scripts/benchmarks/gpu_session.py --results results                    # all, into results/<the GPU>.json
    python scripts/benchmarks/gpu_session.py --results results --only tests ops   # the other runs in the file stay
    python scripts/benchmarks/gpu_session.py --results results --only wan2.1-1.3b-sparse    # one tier of wan2.1-1.3b
    python scripts/benchmarks/gpu_session.py --results results --only ops verify --together --seconds 600

Steps that need more GPUs than there are run only if you name them. With --together, steps run at the same time on GPUs
of their own. Steps that measure the host (host-time, first-step, first-video, small-cards, group-offload) and the
tests, which keep all cores busy, want a call of their own. Every measurement first checks its results. The exceptions
are first-step, first-video, host-time, wan2.1-14b-in-24-gb, compare's steps and timings of the sparse tiers; verify's
steps check these instead. A table of the steps that passed comes last.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path

import torch

from turbo_rcm_patch.bench.environment import COMMIT, describe_environment

ROOT = Path(__file__).resolve().parents[2]

CLI = ("-m", "turbo_rcm_patch.cli")
TRAFFIC = ("scripts/benchmarks/profile_hbm.py",)
END_TO_END = ("scripts/benchmarks/end_to_end.py", "--config")
VAE = ("scripts/benchmarks/vae.py", "--config")
THRICE = ("--repeats", "3")
DECODED = ("--layers", "1", "--steps", "1", "--decode", *THRICE)  # for the VAE's sake
PROMPT_TO_FRAMES = ("--prompt", "--decode", *THRICE)
WHOLE_VIDEO, WHOLE_5B = (
    (*END_TO_END, model, *PROMPT_TO_FRAMES, "--other-vaes") for model in ("wan2.1-1.3b", "wan2.2-5b")
)
AT_480P = ("--height", "480", "--width", "832")
SIZE_OF_LORA = ("--layers", "4", *AT_480P, "--repeats", "4")  # there and back twice
LORA = (*END_TO_END, "wan2.1-14b", *SIZE_OF_LORA, "--lora")
A14B = (*END_TO_END, "wan2.2-a14b", *AT_480P)
CARDS = ("scripts/benchmarks/small_cards.py", "--config")
RIVALS = ("--rivals", "blocks", "models", "leaves")  # by leaves A14B may exceed the host's memory, so it is last
ALL_TIERS = ("--presets", "exact", "quantized", "sparse")
AT_720P = ("--height", "720", "--width", "1280")
LARGE_5B = ("--height", "704", "--width", "1280", "--frames", "121")
LTX2_512P = ("--height", "512", "--width", "768", "--frames", "121")
GROUP_OFFLOAD = ("scripts/benchmarks/group_offload.py",)
EXCHANGE = ("scripts/benchmarks/exchange.py",)
LTX2, LTX2_IMAGE = (*END_TO_END, "ltx2-19b"), (*END_TO_END, "ltx2-19b-image")
EIGHT_LAYERS = ("--layers", "8", *THRICE)
AT_1024P = ("--height", "1024", "--width", "1792")
SANITIZERS = ("memcheck", "racecheck")
# The tiers of a step that times several, and the ends of their runs' names.
ENDINGS = {"exact": "", "quantized": "-quantized", "sparse": "-sparse", "block_sparse": "-block-sparse"}
QUANTIZED, SPARSE, BLOCK_SPARSE = (("--preset", preset) for preset in ("quantized", "sparse", "block_sparse"))
EVEN_ATTENTION = ("--unstructured", "--steps", "1", "--no-compile")  # which keeps nearly all blocks
EACH_TIER = (*THRICE, "--preset", *ENDINGS)


def _small_cards() -> dict[str, tuple[str, ...]]:
    """Return the steps of whole pipelines within a cap: our tiers, and apart from these diffusers' own offloading.

    LTX-2 with its text encoder has 34e9 weights, so it has one tier alone: no originals are kept for another one. The
    host then holds 41 GB of pinned weights, and 22 GB more while the plan is undone. One video is timed, which leaves
    the time to building, pinning and compiling.
    """
    in_8_bits = ("--text-encoder", "8bit")
    smallest = ("wan2.1-1.3b", "--vram", "6GB")
    pipelines = {
        "wan2.1-1.3b": (smallest, ALL_TIERS),
        "wan2.1-1.3b-text-encoder-in-8-bits": (smallest, in_8_bits),
        "wan2.2-5b": (("wan2.2-5b", "--vram", "8GB", *LARGE_5B), in_8_bits),
        "wan2.1-14b": (("wan2.1-14b", "--vram", "8GB"), ALL_TIERS),
        "wan2.1-14b-720p": (("wan2.1-14b", "--vram", "12GB", "8GB", *AT_720P, "--repeats", "1"), ()),
        "wan2.2-a14b": (("wan2.2-a14b", "--vram", "8GB"), ()),
        "wan2.1-i2v-14b": (("wan2.1-i2v-14b", "--vram", "12GB"), ()),
        "ltx2-19b": (("ltx2-19b", "--vram", "24GB", *LTX2_512P, "--repeats", "1"), ()),
    }
    # diffusers' encoder has no 8 bits, and its offloading by blocks does not run LTX-2's VAEs.
    ours_alone = ("wan2.1-1.3b-text-encoder-in-8-bits", "ltx2-19b")
    return {
        **{f"small-cards-{name}": (*CARDS, *pipeline, *tiers) for name, (pipeline, tiers) in pipelines.items()},
        **{
            f"small-cards-{name}-diffusers": (*CARDS, *pipeline, *RIVALS)
            for name, (pipeline, _) in pipelines.items()
            if name not in ours_alone
        },
    }


def _ltx2() -> dict[str, tuple[str, ...]]:
    """Return LTX-2's steps: a check of two layers in each tier, timings of eight at both sizes, and whole videos.

    The smaller size has 6144 tokens, for which block-sparse attention is dense by default. It is not timed there.
    The whole videos have all 48 layers, and frames and sound. They are repeated less: each time they are patched, 33 GB
    of weights move to the host and back.
    """
    verify = (*CLI, "verify", "--config", "ltx2-19b", "--layers", "2", "--preset")
    steps = {f"verify-ltx2-19b{ending}": (*verify, preset) for preset, ending in ENDINGS.items()}
    steps["verify-ltx2-19b-block-sparse"] += ("--min-tokens", "0")
    return {
        **steps,
        "ltx2-19b-8-layers": (*LTX2, *EIGHT_LAYERS, "--preset", "exact", "quantized", "sparse"),
        "ltx2-19b-8-layers-1024p": (*LTX2, *EIGHT_LAYERS, *AT_1024P, "--preset", *ENDINGS),
        "ltx2-19b-8-layers-image": (*LTX2_IMAGE, *EIGHT_LAYERS, "--preset", "exact", "quantized", "sparse"),
        "ltx2-19b-sound": ("scripts/benchmarks/sound.py", "--layers", "8"),
        "ltx2-19b-sparse": (*LTX2, "--decode", "--repeats", "2", *SPARSE),
        "ltx2-19b-1024p-sparse": (*LTX2, *AT_1024P, "--decode", "--repeats", "1", *SPARSE),
    }


def _on_several_gpus(gpus: int) -> dict[str, tuple[str, ...]]:
    """Return the steps with Ulysses. Whole videos are decoded in strips.

    TI2V-5B's, and those for the decoder's sake, run without torch.compile, which takes minutes to compile the decoder.
    """
    alone = (*DECODED, "--no-compile")
    steps = {
        "exchange-wan2.1-1.3b": (*EXCHANGE, "--heads", "12", "--tokens", "32760"),
        "exchange-wan2.1-14b-720p": (*EXCHANGE, "--heads", "40", "--tokens", "75600"),
        "wan2.1-14b-4-layers": (*END_TO_END, "wan2.1-14b", "--layers", "4", *EACH_TIER),
        "wan2.1-1.3b": (*END_TO_END, "wan2.1-1.3b", "--without-graphs", *EACH_TIER),
        "wan2.1-1.3b-decoded": (*END_TO_END, "wan2.1-1.3b", "--decode", *EACH_TIER),
        "wan2.2-5b-decoded": (*END_TO_END, "wan2.2-5b", "--decode", "--no-compile", *EACH_TIER),
        "wan2.1-14b-1-layer-decoded": (*END_TO_END, "wan2.1-14b", *alone),
        "wan2.2-5b-1-layer-decoded": (*END_TO_END, "wan2.2-5b", *alone),
    }
    return {f"{name}-{gpus}-gpus": (*command, "--ulysses", str(gpus)) for name, command in steps.items()}


ON_SEVERAL_GPUS = {gpus: _on_several_gpus(gpus) for gpus in (2, 4)}

# CHECKS pass or fail. The figures of the other steps go into the results file.
CHECKS = {
    # Neighbouring tests run in one process, where they share compiled kernels. The log names each as it ends, also in a
    # run that is cut off.
    "tests": ("-m", "pytest", "-m", "gpu", "-v", "-n", "auto", "--dist", "worksteal", "--durations", "40", "tests"),
    "info": (*CLI, "info"),
    **{tool: ("scripts/tools/sanitize_kernels.py", "--tool", tool) for tool in SANITIZERS},
}
MEASUREMENTS = {
    "verify": (*CLI, "verify"),
    "verify-wan2.1-1.3b": (*CLI, "verify", "--config", "wan2.1-1.3b"),
    "compare": (*CLI, "compare"),
    "evaluate": (*CLI, "evaluate", "--batch-size", "64", *QUANTIZED),  # beside the exact tier
    "ops": ("scripts/benchmarks/ops.py", "--tier", "exact"),
    "ops-quantized": ("scripts/benchmarks/ops.py", "--tier", "quantized"),
    "ops-sparse": ("scripts/benchmarks/ops.py", "--tier", "sparse", "block_sparse"),
    "implementations": ("scripts/benchmarks/compare_implementations.py",),
    "traffic-attention": (*TRAFFIC, "--batch", "32", "--seq", "2048", "--dim", "512"),
    "traffic-wan2.1-1.3b": (*TRAFFIC, "--wan-block", "1.3b"),
    "traffic-wan2.1-14b": (*TRAFFIC, "--wan-block", "14b"),
    "first-step": ("scripts/benchmarks/first_step.py",),
    "first-video": ("scripts/benchmarks/first_video.py",),
    "host-time": ("scripts/benchmarks/host_time.py",),
    "host-time-of-4-gpus": ("scripts/benchmarks/host_time.py", "--ulysses", "4"),  # which takes one GPU
    "host-time-ltx2-19b": ("scripts/benchmarks/host_time.py", "--config", "ltx2-19b", "--layers", "2"),
    "text-encoder": ("scripts/benchmarks/text_encoder.py",),
    "vae-wan2.1-480p": (*VAE, "wan2.1-1.3b", "--work", "decode"),
    "vae-wan2.1-480p-encode": (*VAE, "wan2.1-1.3b", "--work", "encode", "output"),
    "vae-wan2.1-720p": (*VAE, "wan2.1-14b"),
    "vae-wan2.2-5b": (*VAE, "wan2.2-5b"),
    "wan2.1-1.3b": (*END_TO_END, "wan2.1-1.3b", *EACH_TIER),
    "wan2.1-1.3b-block-sparse-mass-0.95": (*END_TO_END, "wan2.1-1.3b", *THRICE, *BLOCK_SPARSE, "--mass", "0.95"),
    "wan2.1-1.3b-block-sparse-unstructured": (*END_TO_END, "wan2.1-1.3b", *EVEN_ATTENTION, *BLOCK_SPARSE),
    "wan2.1-1.3b-decoded": (*WHOLE_VIDEO, "--preset", "exact", "quantized", "sparse"),
    "wan2.1-14b-1-layer-decoded": (*END_TO_END, "wan2.1-14b", *DECODED),
    "wan2.1-1.3b-1-layer-decoded-fp32-vae": (*END_TO_END, "wan2.1-1.3b", *DECODED, "--vae-dtype", "float32"),
    "wan2.2-5b-1-layer-decoded": (*END_TO_END, "wan2.2-5b", *DECODED),
    "wan2.1-1.3b-17-frames": (*END_TO_END, "wan2.1-1.3b", "--frames", "17"),
    "wan2.1-14b-4-layers": (*END_TO_END, "wan2.1-14b", "--layers", "4", *EACH_TIER),
    "wan2.2-5b-8-layers": (*END_TO_END, "wan2.2-5b", "--layers", "8", *EACH_TIER),
    "wan2.2-5b-8-layers-image": (*END_TO_END, "wan2.2-5b-image", "--layers", "8", *THRICE),
    "wan2.1-i2v-14b-4-layers": (*END_TO_END, "wan2.1-i2v-14b", "--layers", "4", *THRICE),
    "wan2.2-5b-decoded": (*WHOLE_5B, "--preset", "exact", "quantized"),
    # Repeated less, and without torch.compile: each time both experts are put in 8 bits, 56 GB of weights move to the
    # host and back.
    "wan2.2-a14b-decoded": (*A14B, "--prompt", "--decode", "--repeats", "1", "--no-compile", *QUANTIZED),
    "wan2.1-14b-4-layers-lora-64": (*LORA, "64"),
    # In a process of its own: torch.compile must not know the new scale yet.
    "wan2.1-14b-4-layers-lora-64-quantized": (*LORA, "64", *QUANTIZED),
    "wan2.1-14b-4-layers-lora-64-64": (*LORA, "64", "64"),
    "wan2.1-14b-4-layers-lora-128": (*LORA, "128"),
    "wan2.1-14b-4-layers-lora-64-17-frames": (*LORA, "64", "--frames", "17"),
    "verify-quantized": (*CLI, "verify", *QUANTIZED),
    "verify-wan2.1-1.3b-quantized": (*CLI, "verify", "--config", "wan2.1-1.3b", *QUANTIZED),
    "attention-error": ("scripts/benchmarks/measure_attention_error.py",),
    "compare-quantized": (*CLI, "compare", *QUANTIZED),
    "wan2.1-14b-in-24-gb": ("scripts/benchmarks/memory_cap.py",),
    **_small_cards(),
    "host-memory-wan2.1-14b": ("scripts/benchmarks/host_memory.py", "--config", "wan2.1-14b"),
    "host-memory-wan2.2-a14b": ("scripts/benchmarks/host_memory.py", "--config", "wan2.2-a14b"),
    "wan2.1-14b-group-offload": GROUP_OFFLOAD,
    "wan2.1-14b-group-offload-reused-memory": (*GROUP_OFFLOAD, "--reuse-host-memory"),
    "verify-sparse": (*CLI, "verify", *SPARSE),
    "verify-wan2.1-1.3b-sparse": (*CLI, "verify", "--config", "wan2.1-1.3b", "--layers", "2", *SPARSE),
    "compare-sparse": (*CLI, "compare", *SPARSE),
    "evaluate-sparse": (*CLI, "evaluate", "--batch-size", "64", *SPARSE),
    "verify-wan2.1-1.3b-block-sparse": (*CLI, "verify", "--config", "wan2.1-1.3b", *BLOCK_SPARSE),
    **_ltx2(),
    **ON_SEVERAL_GPUS[2],
    **ON_SEVERAL_GPUS[4],
}
# GPUs that a step needs, if more than one.
GPUS = {name: gpus for gpus, steps in ON_SEVERAL_GPUS.items() for name in steps}


def runs_of(step: str) -> dict[str, str]:
    """Return the names of a measurement's runs in the results file, by preset if it times several tiers."""
    command = MEASUREMENTS[step]
    presets = [part for part in command if part in ENDINGS] if "--preset" in command else []
    if len(presets) < 2:
        return {"": step}
    model, gpus = re.fullmatch(r"(.+?)(-\d-gpus)?", step).groups("")
    return {preset: f"{model}{ENDINGS[preset]}{gpus}" for preset in presets}


def chosen_by_name() -> dict[str, tuple[str, str]]:
    """Return what ``--only`` takes: each name's step, and the preset if it is the name of one of the step's runs.

    The name of a step means the whole step, and so does the run in the exact tier, which has the same name.
    """
    steps = {step: (step, "") for step in CHECKS | MEASUREMENTS}
    runs = {run: (step, preset) for step in MEASUREMENTS for preset, run in runs_of(step).items()}
    return steps | {run: chosen for run, chosen in runs.items() if run not in steps}


def command_of(step: str, preset: str) -> list[str]:
    """Return a step's command, with this preset alone if one is given."""
    return [part for part in (CHECKS | MEASUREMENTS)[step] if not preset or part not in ENDINGS or part == preset]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="folder of the results files, one per GPU")
    parser.add_argument("--logs", type=Path, default=ROOT / "runs/gpu-session", help="folder for the steps' output")
    parser.add_argument("--only", nargs="+", choices=tuple(chosen_by_name()), help="run these steps or runs alone")
    parser.add_argument("--together", action="store_true", help="run steps at the same time, each on GPUs of its own")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="cut off what still runs then")
    parser.add_argument("--commit", help="what is checked out, for a copy without its git history")
    options = parser.parse_args(argv)
    if options.commit is not None:
        os.environ[COMMIT] = options.commit
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA GPU, and every step needs one.")
    options.logs.mkdir(parents=True, exist_ok=True)
    options.results.mkdir(parents=True, exist_ok=True)
    results = ResultsFile(options.results, torch.cuda.get_device_name())
    steps = list(chosen_steps(options.only, torch.cuda.device_count()))
    rows = []
    for name, code, seconds in run_steps(steps, options.logs, options.together, time.monotonic() + options.seconds):
        result = "passed" if code == 0 else "cut off" if code is None else f"failed {code}"
        rows.append((name, result, seconds))
        log, figures = (options.logs / f"{name}.{kind}" for kind in ("log", "json"))
        print(f"\n== {name}: {result}\n{log.read_text()}", flush=True)
        if name not in CHECKS and figures.exists():
            results.keep_runs(name, json.loads(figures.read_text()))
        if name == "tests":
            results.keep_tests(code, log.read_text())
        if name in SANITIZERS:
            results.keep_sanitizer(name, code)
    width = max(4, *(len(name) for name in steps))
    print(f"\n{'step':{width}}  result    seconds")
    for name, result, seconds in rows:
        print(f"{name:{width}}  {result:8} {seconds:8.1f}")
    return int(len(rows) < len(steps) or any(result != "passed" for _, result, _ in rows))


def chosen_steps(only: list[str] | None, gpus: int) -> Iterator[str]:
    """Yield the names asked for in their order, else the steps that this many GPUs can run. Print the others."""
    for name in only or CHECKS | MEASUREMENTS:
        if only is None and GPUS.get(name, 1) > gpus:
            print(f"{name} is left out: it needs {GPUS[name]} GPUs")
        else:
            yield name


def run_steps(steps: list[str], logs: Path, together: bool, end: float) -> Iterator[tuple[str, int | None, float]]:
    """Run the steps, and yield the name, exit code and seconds of each as it ends. The code of a cut-off step is None.

    steps: names of `chosen_by_name`.
    together: steps run at the same time. Each waits until its GPUs are free, and none overtakes another.
    end: when steps are cut off and none begins any more, on the clock of time.monotonic.
    """
    steps, chosen = list(steps), chosen_by_name()
    free = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    count = len(free)
    running: dict[Future, tuple[str, list[str]]] = {}
    with ThreadPoolExecutor(count) as pool:
        while running or (steps and time.monotonic() < end):
            while steps and time.monotonic() < end:
                step, _ = chosen[steps[0]]
                needed = min(count, GPUS.get(step, 1)) if together else count
                if needed > len(free):
                    break
                name, gpus, free = steps.pop(0), free[:needed], free[needed:]
                print(f"== {name} begins on GPU {','.join(gpus)}", flush=True)
                running[pool.submit(run, name, logs, gpus, end)] = name, gpus
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                name, gpus = running.pop(future)
                free = [*gpus, *free]
                yield name, *future.result()
    if steps:
        print(f"Time was up before these began: {', '.join(steps)}")


def run(name: str, logs: Path, gpus: list[str], end: float) -> tuple[int | None, float]:
    """Run one step or run of a step on these GPUs, with its output in a log of its name.

    Return the exit code, None if cut off, and the seconds.
    """
    log, figures = (logs / f"{name}.{kind}" for kind in ("log", "json"))
    figures.unlink(missing_ok=True)
    command = [sys.executable, *command_of(*chosen_by_name()[name])]
    if name not in CHECKS:
        command += ["--json", str(figures.resolve())]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    start = time.monotonic()
    with open(log, "w") as file:
        try:
            timeout = None if end == float("inf") else max(0, end - start)
            code = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=timeout
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    return code, time.monotonic() - start


class ResultsFile:
    """The results file of one kind of GPU: its runs by name, its tests by versions, and compute-sanitizer's reports."""

    def __init__(self, folder: Path, gpu: str):
        self._path = folder / f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"
        self._empty = {"gpu": gpu, "tests": [], "runs": {}}

    def keep_runs(self, name: str, figures: dict) -> None:
        """Replace the older runs of a measurement, or its run of this name.

        figures: of one run, or by preset for a step of several. If it failed in a later tier, the earlier ones have
            figures.
        """
        step, preset = chosen_by_name()[name]
        names, results = runs_of(step), self._read()
        is_one = preset or len(names) == 1
        new = {name: figures} if is_one else {names[preset]: run for preset, run in figures.items()}
        runs = {**results["runs"], **new}
        known = [name for step in MEASUREMENTS for name in runs_of(step).values()]
        self._write({**results, "runs": {name: runs[name] for name in known if name in runs}})

    def keep_tests(self, code: int, log: str) -> None:
        """Replace older counts of pytest with the same versions of torch and triton.

        Beside a failed run the last run that passed stays.
        """
        environment = asdict(describe_environment("cuda"))
        counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", log)}
        entry = {"ok": code == 0, **counts, "environment": environment}
        others = [
            other
            for other in self._read()["tests"]
            if _versions(other) != _versions(entry) or (other["ok"] and not entry["ok"])
        ]
        self._write({**self._read(), "tests": [*others, entry]})

    def keep_sanitizer(self, tool: str, code: int) -> None:
        """Replace the earlier report of a tool of compute-sanitizer."""
        results = self._read()
        entry = {"ok": code == 0, "environment": asdict(describe_environment("cuda"))}
        self._write({**results, "sanitizers": {**results.get("sanitizers", {}), tool: entry}})

    def _read(self) -> dict:
        return {**self._empty, **(json.loads(self._path.read_text()) if self._path.exists() else {})}

    def _write(self, results: dict) -> None:
        self._path.write_text(json.dumps(results, indent=1) + "\n")


def _versions(entry: dict) -> tuple[str, str]:
    return entry["environment"]["torch"], entry["environment"]["triton"]


if __name__ == "__main__":
    sys.exit(main())
