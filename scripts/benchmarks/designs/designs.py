"""Times designs of a step in turns. step_designs.py, lora_designs.py and ltx2_designs.py use it.

    --dry        tiny, on the CPU, with the reference implementation: all designs run, and what each changes
    --launches   real sizes without values, as if on an H200: the kernels that each design launches
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import inspect
import os
import signal
import statistics
import sys
import tempfile
import textwrap
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

BEGIN = time.monotonic()
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking for GPUs then leaves a process that can fork
sys.path[:0] = [os.getcwd(), os.path.dirname(os.path.abspath(__file__))]

import torch
from torch import nn

from turbo_rcm_patch.bench.cases import (
    add_random_projections,
    add_structure,
    build_pipeline,
    install_few_steps,
    needs_projections,
    random_inputs,
    structured_inputs,
)
from turbo_rcm_patch.bench.metrics import relative_l2
from turbo_rcm_patch.bench.oracle import first_call, tensors_of
from turbo_rcm_patch.bench.timing import in_turns
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.memory.empty_models import cast_as_loaded
from turbo_rcm_patch.patching import apply, patch
from turbo_rcm_patch.patching.families import CASES
from turbo_rcm_patch.patching.weights import linear_8bit, quantize_linears

same = lambda args, kwargs: (args, kwargs)  # noqa: E731


@dataclass
class Design:
    """config: None for a model that is not patched. during: a context, on while it is patched and while it runs.
    prepare: changes its copy of the model. arguments: changes those of the call. compared: False if its result is
    meant to be another one. compiled: True for torch.compile's blocks."""

    name: str
    config: PatchConfig | None
    during: Callable = contextlib.nullcontext
    prepare: Callable[[nn.Module], object] = lambda model: None
    arguments: Callable = same
    compared: bool = True
    compiled: bool = False


def say(*words: object) -> None:
    print(f"[{time.monotonic() - BEGIN:6.1f} s]", *words, flush=True)


def last_line(error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''} ({Path(place.filename).name}:{place.lineno})"


@contextlib.contextmanager
def all_of(*contexts):
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def setting(target, name, value) -> Callable:
    """A `during` that sets an attribute."""
    return lambda: mock.patch.object(target, name, value)


def rewriting(module, name: str, old: str, new: str) -> Callable:
    """A `during` in which a function of a module has other source text."""
    source = textwrap.dedent(inspect.getsource(getattr(module, name)))
    assert source.count(old) == 1, (name, old, source.count(old))
    names = dict(vars(module))
    exec(compile("from __future__ import annotations\n" + source.replace(old, new), f"<{name}>", "exec"), names)
    return setting(module, name, names[name])


def options_of(description: str, default_case: str, tiny_case: str, **defaults) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--launches", action="store_true")
    parser.add_argument("--compile-launches", action="store_true", help="also compile what the first design lacks")
    parser.add_argument("--only", nargs="+", help="parts of designs' names; the first design always runs")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--no-warm", action="store_true", help="compile the kernels one design after another")
    parser.add_argument("--at-once", type=int, default=16, help="designs that are compiled at the same time")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--forwards", type=int, default=3, help="timed forwards in a turn, after one that is not")
    parser.add_argument("--seconds", type=float, default=145, help="no turn begins later than this")
    for name, value in defaults.items():
        if any(name == action.dest for action in parser._actions):
            parser.set_defaults(**{name: value})
        else:
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = parser.parse_args()
    options.case = tiny_case if options.dry else default_case
    options.seconds = min(options.seconds, float(os.environ.get("SECONDS_LEFT", "inf")) - 8)
    return options


def pipeline(options, *, sparse: bool, lora: int = 0):
    """The pipeline as end_to_end.py builds it."""
    device = torch.device("cpu" if options.dry else "cuda")
    layers = None if options.dry or options.layers == 0 else options.layers
    dtype = torch.float32 if options.dry else torch.bfloat16
    pipe = build_pipeline(CASES[options.case], dtype, device, layers=layers)
    install_few_steps(pipe)
    pipe.set_progress_bar_config(disable=True)
    if sparse and needs_projections(pipe):
        add_random_projections(pipe)
    if sparse:
        add_structure(pipe)
    if lora:
        from scripts.benchmarks.lora import add_random_lora

        add_random_lora(pipe.transformer, [lora])
    return pipe


def arguments_of_a_step(pipe, options, *, sparse: bool) -> tuple[tuple, dict]:
    case = CASES[options.case]
    size = {
        "height": case.height if options.dry else options.height or case.height,
        "width": case.width if options.dry else options.width or case.width,
        "num_frames": case.frames if options.dry else options.frames or case.frames,
    }
    inputs = structured_inputs(pipe, **size) if sparse else random_inputs(pipe)
    call = {**size, "num_inference_steps": 1, "guidance_scale": 1.0, "output_type": "latent", **inputs}
    generator = torch.Generator(pipe._execution_device).manual_seed(0)
    return first_call(pipe.transformer, lambda: pipe(**call, generator=generator))


@dataclass
class Ready:
    design: Design
    model: nn.Module
    patch: object
    call: Callable
    out: list
    kwargs: dict
    times: list


def made_ready(design: Design, base: nn.Module, args: tuple, kwargs: dict, calls: int = 3) -> Ready:
    """Patch a copy of the model, and run it until its kernels are compiled and its graph, if any, is recorded."""
    model = copy.deepcopy(base)
    design.prepare(model)
    args, kwargs = design.arguments(args, kwargs)
    call = lambda: model(*args, **kwargs)  # noqa: E731
    with design.during(), originals_left_behind(), torch.no_grad():
        applied = None if design.config is None else patch(model, design.config)
        if design.compiled:
            model.compile_repeated_blocks()
        for _ in range(calls):
            out = call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        out = tensors_of(out if isinstance(out, tuple) else out.to_tuple())
        out = [each.float().cpu() for each in out]
    return Ready(design, model, applied, call, out, kwargs, [])


def originals_left_behind():
    """Free the original weights at once: copying them to the host takes seconds, and no design needs them."""

    def emptied(original):
        return nn.Parameter(torch.empty_like(original, device="meta"), original.requires_grad)

    return mock.patch.object(linear_8bit, "_on_cpu", emptied)


def differs(ready: Ready, first: Ready) -> str:
    if not ready.design.compared:
        return "another"
    return " ".join(f"{relative_l2(a, b):.1e}" for a, b in zip(ready.out, first.out, strict=True))


def graph_line(ready: Ready) -> str:
    if ready.patch is None:
        return "not patched"
    lines = [line.strip() for line in ready.patch.summary().splitlines() if "CUDA graphs (" in line]
    return lines[0].replace("CUDA graphs ", "graphs ") if lines else "no graphs"


def timed(ready: Ready, forwards: int, device: torch.device) -> list[float]:
    """Milliseconds of each forward, after one that sets the clock."""
    with ready.design.during(), torch.no_grad():
        ready.call()
        if device.type == "cpu":
            start = time.perf_counter()
            ready.call()
            return [1e3 * (time.perf_counter() - start)]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(forwards + 1)]
        marks[0].record()
        for mark in marks[1:]:
            ready.call()
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in zip(marks, marks[1:])]


def run(options, designs: list[Design], build: Callable[[], tuple[nn.Module, tuple, dict]], *, per: int = 1,
        unit: str = "a step", over: str | None = None, against: str | None = None, more: Callable | None = None) -> int:
    """Time the designs. per: what the milliseconds are divided by. over: the design that the ratios are over. against:
    the design whose result the others are compared with. Both are the first one if they are None."""
    if options.only:
        always = designs[0].name, over, against
        designs = [d for d in designs if d.name in always or any(part in d.name for part in options.only)]
    if options.list:
        print(*(f"{number:2} {design.name}" for number, design in enumerate(designs)), sep="\n")
        return 0
    if options.launches:
        return launches(options, designs, build)
    if not options.no_warm and (not options.dry or "WARM_DRY" in os.environ):
        say(f"{len(designs)} designs")
        warm(options, designs, build)
    device = torch.device("cpu" if options.dry else "cuda")
    base, args, kwargs = build()
    say(f"built {type(base).__name__}, {sum(p.numel() for p in base.parameters()) / 1e9:.2f}e9 weights")
    readies: list[Ready] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the table is printed
    for design in designs:
        start = time.monotonic()
        if start - BEGIN > 0.7 * options.seconds and len(readies) > 1:
            say(f"left out, because time is short: {design.name}")
            continue
        try:
            readies.append(made_ready(design, base, args, kwargs, calls=1 if options.dry else 3 if design.config is not None and design.config.cuda_graph == "on" else 2))
        except Exception as error:
            if os.environ.get("TRACE"):
                traceback.print_exc()
            say(f"FAILED to prepare {design.name}: {last_line(error)}")
            continue
        oracle = named(readies, against)
        say(f"ready: {design.name} ({time.monotonic() - start:.1f} s), differs by {differs(readies[-1], oracle)}; {graph_line(readies[-1])}")
        gc.collect()
    del base
    if not readies:
        return 1
    try:
        for turn, ready in in_turns(list(readies), 1 if options.dry else options.turns):
            if time.monotonic() - BEGIN > options.seconds:
                say(f"time is up in turn {turn + 1}")
                break
            if ready not in readies:
                continue
            try:
                ready.times.append(timed(ready, options.forwards, device))
            except Exception as error:
                say(f"FAILED to time {ready.design.name}: {last_line(error)}")
                readies.remove(ready)
                continue
            say(f"turn {turn + 1} {ready.design.name}: " + ", ".join(f"{each / per:.3f}" for each in ready.times[-1]))
    finally:
        table(readies, per, unit, over, against)
    if more is not None:
        try:
            more(readies)
        except Exception as error:
            say(f"FAILED after the table: {last_line(error)}")
    return 0


def named(readies: list[Ready], name: str | None) -> Ready:
    return next((ready for ready in readies if ready.design.name == name), readies[0])


def table(readies: list[Ready], per: int, unit: str, over: str | None, against: str | None) -> None:
    medians = {}
    for ready in readies:
        if ready.times:
            medians[ready.design.name] = statistics.median(each for turn in ready.times for each in turn) / per
    if not medians:
        return
    first = next(iter(medians))
    over = over if over in medians else first
    compiled = medians.get("torch.compile")
    print(f"\nmedians of {len(readies[0].times)} turns of {len(readies[0].times[0])} forwards, in turns; the ratio of a design is over: {over}")
    print(f"| design | ms {unit} | medians of turns | ratio | torch.compile over it | differs from: {named(readies, against).design.name} |")
    print("|---|---|---|---|---|---|")
    for ready in readies:
        name = ready.design.name
        if name in medians:
            turns = [statistics.median(turn) / per for turn in ready.times]
            speed = "" if compiled is None else f"{compiled / medians[name]:.3f}"
            print(f"| {name} | {medians[name]:.3f} | {min(turns):.3f} to {max(turns):.3f} | {medians[name] / medians[over]:.4f} | {speed} | {differs(ready, named(readies, against))} |")
    sys.stdout.flush()


# Compiling the kernels of all designs at the same time, in forks of this process, which has not used the GPU yet


def warm(options, designs: list[Design], build: Callable) -> None:
    """Compile each design's kernels into Triton's cache on disk, with one layer."""
    if torch.cuda.is_initialized():
        say("the GPU is in use already, so no kernels are compiled ahead")
        return
    end = time.monotonic() + min(float(os.environ.get("WARM_SECONDS", 70)), 0.5 * options.seconds)
    waiting, running = list(range(len(designs))), {}
    while (waiting or running) and time.monotonic() < end:
        while waiting and len(running) < options.at_once:
            number = waiting.pop(0)
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                _warm_one(options, designs[number], build, warm_log(number))
            running[child] = number
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == 0:
            time.sleep(0.1)
            continue
        number = running.pop(child)
        if status:
            lines = Path(warm_log(number)).read_text().strip().splitlines()
            say(f"compiling ahead of {designs[number].name} ended with {os.waitstatus_to_exitcode(status)}: {lines[-1][-300:] if lines else ''}")
    for child, number in running.items():
        say(f"compiling ahead of {designs[number].name} takes too long")
        os.kill(child, 9)
        os.waitpid(child, 0)
    say("kernels are compiled")


def warm_log(number: int) -> str:
    return f"{tempfile.gettempdir()}/warm-{os.path.basename(sys.argv[0])}-{number}.log"


def _warm_one(options, design: Design, build: Callable, log: str) -> None:
    code = 1
    try:
        file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        options.layers = 1
        made_ready(design, *build(), calls=1)
        code = 0
    except BaseException as error:
        traceback.print_exc()
        print(last_line(error), flush=True)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# Without a GPU: what each design launches


def on_meta(case_name: str, layers: int | None) -> nn.Module:
    case = CASES[case_name]
    config = dict(case.transformer) if not layers else {**case.transformer, "num_layers": layers}
    with torch.device("meta"):
        return cast_as_loaded(case.transformer_class(**config).eval(), torch.bfloat16)


def launches(options, designs: list[Design], build_on_meta: Callable) -> int:
    """Print what each design launches, as the difference to the first one, in all its layers."""
    from turbo_rcm_patch.kernels.dispatch import meta_is_gpu
    from turbo_rcm_patch.kernels.launch import recorded

    first, compiled_before = None, set()
    for design in designs:
        if design.compiled:
            continue
        found = []
        try:
            base, args, kwargs = build_on_meta()
            design.prepare(base)
            args, kwargs = design.arguments(args, kwargs)
            with (
                meta_is_gpu((9, 0), 132), design.during(), originals_left_behind(), torch.no_grad(),
                mock.patch.object(apply, "convert_weights", convert_on_meta),
                recorded(found.append),
            ):
                applied = None if design.config is None else patch(base, design.config)
                base(*args, **kwargs)
                if os.environ.get("SUMMARY"):
                    print(applied)
        except Exception as error:
            if os.environ.get("TRACE"):
                traceback.print_exc()
            print(f"== {design.name}: FAILED: {last_line(error)}", flush=True)
            continue
        kinds = Counter(map(kind_of, found))
        print(f"== {design.name}: {len(found)} launches")
        if first is None:
            first = kinds
            print(*(f"   {count:4} {kind}" for kind, count in kinds.items()), sep="\n")
        else:
            for kind in sorted(set(kinds) | set(first)):
                if kinds[kind] != first[kind]:
                    print(f"   {kinds[kind] - first[kind]:+4} {kind}")
        if options.compile_launches:
            compile_new(found, compiled_before)
        sys.stdout.flush()
    return 0


def kind_of(launch) -> str:
    from scripts.tools.compile_without_gpu import describe

    text = describe(launch)
    return text if os.environ.get("FULL") else short(launch)


def short(launch) -> str:
    """A launch's kernel with the dtypes of its tensors."""
    named = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False)) | launch.options
    parts = []
    for name, value in named.items():
        tensor = getattr(value, "base", value)
        if isinstance(tensor, torch.Tensor):
            parts.append(f"{name}={str(tensor.dtype).removeprefix('torch.').replace('float', 'f').replace('8_e4m3fn', '8')}")
        elif name in ("STAGES", "GELU", "KIND", "K", "N", "ROWS", "COLUMNS", "parts"):
            parts.append(f"{name}={value}")
    return f"{launch.kernel.fn.__name__}({', '.join(parts)})"


def compile_new(found: list, before: set) -> None:
    from scripts.tools.compile_without_gpu import inspect as inspect_launch
    from scripts.tools.compile_without_gpu import shared_memory_limit

    for launch in found:
        kind = short(launch)
        if kind in before:
            continue
        before.add(kind)
        try:
            report = inspect_launch(launch, (9, 0))
            if report is not None:
                fits = report.shared <= shared_memory_limit((9, 0))
                print(f"   compiled {kind[:90]}: {report.registers} registers, {report.spills} bytes spilled, {report.shared} shared{'' if fits else ' TOO MUCH'}", flush=True)
        except Exception as error:
            print(f"   NOT COMPILED {kind}: {last_line(error)}", flush=True)


def convert_on_meta(journal, linears, rows_known) -> None:
    for path, linear in linears.items():
        format = quantize_linears.format_for((9, 0), rows_known=path.endswith(rows_known))
        rows = linear.weight.shape[0]
        empty = lambda *shape, dtype: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
        weight = quantize_linears.QuantizedWeight(
            empty(*linear.weight.shape, dtype=format), empty(rows, dtype=torch.float32), empty(dtype=torch.float32)
        )
        quantize_linears.put_in_8_bits(journal, linear, weight)
