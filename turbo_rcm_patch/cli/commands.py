"""The commands. Each prints for people, writes files where asked, and returns the exit code."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from ..bench.compare import compare
from ..bench.environment import describe_environment
from ..bench.evaluate import VARIANTS, evaluate, label_of, videos_at_a_time
from ..bench.keep_out import find_keep_out
from ..bench.memory import checking_stages, evaluation_stages, searching_stages
from ..bench.report import (
    comparison_table,
    evaluation_table,
    keep_out_table,
    plot,
    timings_table,
    verification_table,
)
from ..bench.timing import timed_generation
from ..bench.verify import verify
from ..checkpoints.files import COMPONENTS
from ..config import PRESETS, Exact, PatchConfig, Sparse, without_originals
from ..memory import DoesNotFit, MemoryPlan, fit_with
from ..memory.components import blocks_of
from ..memory.stages import Video, unpatched_stages
from ..patching import Patch, patch
from ..patching.summary import in_one_line
from ..patching.weights.load import component_folders, empty_model, read_config
from ..patching.weights.quantize_linears import capability_of
from ..patching.weights.store import convert_model
from ..wording import counted
from .arguments import CONFIG_OPTIONS, LORAS, config_options
from .errors import CommandError, in_the_shell, user_errors
from .files import replacing, write_json, write_video
from .info import info
from .pipelines import (
    build_case,
    choose_config,
    choose_device,
    choose_dtype,
    frames_per_second,
    is_sparse,
    load_pipeline,
    load_sampler,
    sound_of,
    split_among,
    warn_of_size,
)
from .side_by_side import write_side_by_side
from .transformers import has_projections, makes_sound
from .tuning import tune


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen command. Raises CommandError for errors that a user can fix."""
    commands = {
        "generate": generate,
        "compare": _compare,
        "verify": _verify,
        "evaluate": _evaluate,
        "info": info,
        "convert": _convert,
        "demo": _demo,
        "tune": tune,
    }
    with user_errors():
        return commands[arguments.command](arguments)


def generate(arguments: argparse.Namespace) -> int:
    """Generate a video, which several processes do together with --gpus. The first one writes it."""
    pipe, call = load_pipeline(arguments)
    patched = None if arguments.no_patch else arguments.patched or patch(pipe, _config_of(arguments))
    if arguments.gpus > 1:
        split_among(pipe, call, arguments.gpus)
    if arguments.vram is not None:
        print(_fitted(arguments, pipe, call), end="\n\n")
    generator = torch.Generator(pipe._execution_device).manual_seed(arguments.seed)
    output_type = "pil" if arguments.is_first else "pt"  # what leaves the GPU while it decodes, and what stays there
    generation = timed_generation(pipe, **call, output_type=output_type, generator=generator)
    if not arguments.is_first:
        return 0
    images = generation.frames[0]
    begin = time.perf_counter()
    frames = (np.asarray(image)[None] for image in images)
    write_video(arguments.output, frames, arguments.fps, sound_of(pipe, generation.sound))
    writing = time.perf_counter() - begin
    size = "x".join(map(str, images[0].size))
    if patched is not None:
        print(patched.summary() if arguments.verbose else _patched_line(arguments, patched), end="\n\n")
    print(timings_table(generation.timings, writing))
    print(f"\nwrote {arguments.output}: {counted(len(images), 'frame')} of {size}, {arguments.fps} per second")
    return 0


def _patched_line(arguments: argparse.Namespace, patched: Patch) -> str:
    """Return a line on a patch, after the call of it, so that it is about this video's size."""
    fused = in_one_line(patched.rows(), patched.unknown)
    return f"patched ({arguments.preset}): {fused}; -v shows the kernels"


def _config_of(arguments: argparse.Namespace) -> PatchConfig:
    """Return the configuration of `generate`. With --vram the host does not keep the weights that 8 bits replace."""
    config = choose_config(arguments)
    return config if arguments.vram is None else without_originals(config)


def _fitted(
    arguments: argparse.Namespace,
    pipe: DiffusionPipeline,
    call: dict[str, object],
    config: PatchConfig | None = None,
    beside: Callable | None = None,
    both_ways: bool = False,
) -> MemoryPlan:
    """Fit a pipeline into --vram. config: what it will be patched with. beside, both_ways: as in `Patched`."""
    video = Video(call["height"], call["width"], call["num_frames"])
    try:
        return fit_with(pipe, arguments.vram, video, config, choose_device(arguments), beside, both_ways)
    except (DoesNotFit, ValueError) as error:
        raise CommandError(f"--vram {arguments.vram}: {error}") from error


def _compare(arguments: argparse.Namespace) -> int:
    pipe, call = load_pipeline(arguments)
    config, with_compile = choose_config(arguments), False if arguments.no_compile else None
    if arguments.vram is not None:
        print(_fitted(arguments, pipe, call, config, unpatched_stages, both_ways=True), end="\n\n")
        if with_compile is None:
            print("torch.compile is left out: under it weights do not stream reliably\n")
            with_compile = False
    comparison = compare(
        pipe,
        call,
        seed=arguments.seed,
        config=config,
        with_compile=with_compile,
        repeats=arguments.repeats,
        settings=settings_of(arguments, pipe, call),
    )
    print(comparison.patch_summary, comparison_table(comparison), sep="\n\n")
    if arguments.json is not None:
        write_json(arguments.json, comparison.to_dict())
    if arguments.plot is not None:
        with replacing(arguments.plot) as temporary:
            plot(comparison, temporary)
    if arguments.video is not None:
        print("", write_side_by_side(arguments.video, comparison, frames_per_second(pipe)), sep="\n")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    pipe, call = load_pipeline(arguments) if arguments.config is None else build_case(arguments)
    config, found = choose_config(arguments), None
    if arguments.vram is not None:
        searches = arguments.keep_out is not None  # on weights that leave 8 bits and come back
        stages = searching_stages if searches else checking_stages
        print(_fitted(arguments, pipe, call, config, stages, both_ways=searches), end="\n\n")
    if arguments.keep_out is not None:
        found = find_keep_out(pipe, call, seed=arguments.seed, config=config)
        config = replace(config, keep=found.names)
    verification = verify(pipe, call, seed=arguments.seed, config=config)
    print(verification.patch_summary, verification_table(verification), sep="\n\n")
    facts = {
        "settings": {**settings_of(arguments, pipe, call), "seed": arguments.seed},
        "environment": asdict(describe_environment(pipe._execution_device)),
    }
    if arguments.json is not None:
        write_json(arguments.json, {**facts, **verification.to_dict()})
    if found is not None:
        print("", keep_out_table(found), sep="\n")
        _write_keep_out(arguments.keep_out, {**found.to_dict(), **facts}, ok=found.ok and verification.ok)
    return 0 if verification.ok and (found is None or found.ok) else 1


def _write_keep_out(path: Path, content: dict[str, object], *, ok: bool) -> None:
    """Write the list of `verify --keep-out`, if all checks pass with it."""
    if not ok:
        print(f"\n{path} is not written: with this list too, a check above fails")
        return
    write_json(path, content)
    print(f"\nwrote {path}; use it by --preset quantized --keep {shlex.quote(str(path))}")
    print(f"or in Python by trp.Quantized(keep={str(path)!r})")


def _evaluate(arguments: argparse.Namespace) -> int:
    pipe, call = load_sampler(arguments)
    warn_of_size(arguments, call["height"], call["width"], call["num_frames"])
    batch_size = arguments.batch_size or videos_at_a_time(call)
    *most, last = map(str, arguments.steps)
    steps = f"{', '.join(most)} and {last} steps" if most else counted(arguments.steps[0], "step")
    _report(f"{counted(arguments.n, 'caption')} in {steps}, {counted(batch_size, 'video')} at a time")
    tuned, plain, config = None, arguments, choose_config(arguments)
    if arguments.model is None and is_sparse(arguments):
        plain = argparse.Namespace(**{**vars(arguments), "preset": "exact"})
        tuned, pipe = pipe, load_sampler(plain)[0]
    in_fp32 = argparse.Namespace(**{**vars(plain), "dtype": "float32"})
    is_fp32 = choose_dtype(arguments, choose_device(arguments)) == torch.float32
    reference, placed = None if is_fp32 else load_sampler(in_fp32)[0], contextlib.nullcontext
    if arguments.vram is not None:
        placed = partial(_placed, arguments, call, config, batch_size)
        for one in filter(None, (pipe, reference, tuned)):  # first of all, so that what does not fit shows at once
            with placed(one) as plan:
                print(plan, end="\n\n")
    evaluation = evaluate(
        pipe,
        call,
        n=arguments.n,
        steps=arguments.steps,
        configs={label_of(config): config},
        seed=arguments.seed,
        batch_size=batch_size,
        reference=reference,
        tuned=tuned,
        settings={**settings_of(arguments, pipe, call), "sigma_max": pipe.scheduler.config.get("sigma_max")},
        report=_report,
        placed=placed,
    )
    print(evaluation_table(evaluation))
    if arguments.json is not None:
        write_json(arguments.json, evaluation.to_dict())
    return 0


@contextlib.contextmanager
def _placed(
    arguments: argparse.Namespace,
    call: dict[str, object],
    config: PatchConfig,
    batch_size: int,
    pipe: DiffusionPipeline,
) -> Iterator[MemoryPlan]:
    """A context in which one of the pipelines of `evaluate` is on the GPU, within --vram."""
    stages = partial(evaluation_stages, batch_size, VARIANTS)
    plan = _fitted(arguments, pipe, call, config, stages, both_ways=True)
    try:
        yield plan
    finally:
        plan.undo()


def _report(line: str) -> None:
    print(f"turbo-rcm evaluate: {line}", file=sys.stderr, flush=True)


def _convert(arguments: argparse.Namespace) -> int:
    device = choose_device(arguments)
    capability = (8, 0) if arguments.format == "int8" else capability_of(device)
    try:
        convert_model(
            arguments.source,
            arguments.target,
            replace(PRESETS[arguments.preset], **config_options(arguments)),
            capability=capability,
            dtype=getattr(torch, _stored_dtype(arguments)),
            device=device,
            report=print,
        )
    except ValueError as error:
        raise CommandError(in_the_shell(error)) from error
    except OSError as error:
        raise CommandError(f"cannot write {arguments.target}: {error}; check the disk's free space.") from error
    print(_how_to_use(arguments))
    return 0


def _stored_dtype(arguments: argparse.Namespace) -> str:
    """Return the dtype of what `convert` does not store in 8 bits."""
    return arguments.dtype or "bfloat16"


def _how_to_use(arguments: argparse.Namespace) -> str:
    """Return where a converted model is, and the lines to use it."""
    is_pipeline = (arguments.source / "model_index.json").is_file()
    line = [
        "turbo-rcm generate PROMPT -o out.mp4",
        "--model",
        shlex.quote(str(arguments.source)) if is_pipeline else "PIPELINE",
    ]
    target, preset = arguments.target, arguments.preset
    is_part = target.name in COMPONENTS and (target / "config.json").is_file()
    if is_part and not (target.parent / "config.json").exists():
        target = target.parent  # which has the other expert too, or will have it
    line += ["--transformer", shlex.quote(str(target))]
    folders = component_folders(target)
    is_exact = isinstance(PRESETS[preset], Exact)
    if is_exact and any(has_projections(folder, empty_model(folder)) for folder in folders.values()):
        preset = "sparse"
        line += ["--preset", preset]
        python = f"trp.load_turbodiffusion({str(target)!r}, pipe)"  # diffusers would drop proj_l
    elif is_exact:
        dtype = f"dtype=torch.{_stored_dtype(arguments)}"  # without it diffusers loads fp32
        python = "\n  ".join(
            f"pipe.{name or COMPONENTS[0]} = {read_config(folder)['_class_name']}"
            f".from_pretrained({str(folder)!r}, {dtype})"
            for name, folder in folders.items()
        )
    else:
        line += ["--preset", preset]
        config = repr(preset)
        if arguments.keep:  # the files do not say which attentions stay in the model's dtype
            line += [f"--keep {shlex.quote(name)}" for name in arguments.keep]
            keep = config_options(arguments)["keep"]
            config = f"trp.{type(PRESETS[preset]).__name__}(keep={keep!r})"
        python = f"trp.load_converted({str(target)!r}, pipe, {config})"
    if isinstance(PRESETS[preset], Sparse):
        classes = (read_config(folder)["_class_name"] for folder in folders.values())
        line += ["--recipe", "turbot2av" if any(map(makes_sound, classes)) else "turbowan"]
    return f"wrote {arguments.target}; use it by\n  {' '.join(line)}\nor in Python by\n  {python}"


def _demo(arguments: argparse.Namespace) -> NoReturn:
    from .demo_page import serve  # needs gradio, which the other commands do without

    serve(arguments)


def settings_of(arguments: argparse.Namespace, pipe, call: dict[str, object]) -> dict[str, object]:
    """Return the settings, except the seed, that are needed to reproduce a figure or a video."""
    config = getattr(arguments, "config", None)
    names = ("image", *COMPONENTS, *LORAS, "recipe", "sigma_max", *CONFIG_OPTIONS)
    return {
        **({"config": config, "layers": len(blocks_of(pipe.transformer))} if config else {}),
        "model": arguments.model or (None if config else "embedded"),
        "preset": arguments.preset,
        **{
            name: str(value) if isinstance(value, Path) else value
            for name in names
            if (value := getattr(arguments, name, None)) is not None
        },
        "dtype": str((pipe.transformer or pipe.transformer_2).dtype).removeprefix("torch."),
        **{name: value for name, value in call.items() if not isinstance(value, (torch.Tensor, Image.Image))},
    }
