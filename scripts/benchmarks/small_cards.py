"""Time whole pipelines, prompt to frames, within a cap on the GPU's memory, beside the same without a cap.

    python scripts/benchmarks/small_cards.py --config wan2.1-1.3b --vram 6GB --json cards.json
    python scripts/benchmarks/small_cards.py --config ltx2-19b --vram 24GB --height 512 --width 768 --frames 121

The weights are random, with the model's own encoders at their real sizes, and the prompt is random tokens. LTX-2 makes
sound too. `trp.fit` plans for the card; torch may then allocate no more than the card has, less what CUDA itself takes.
The predicted peaks of the plan stand beside the measured ones. With --rivals unpatched diffusers runs instead, with its
own offloading, in bf16; its VAE works in tiles where whole frames do not fit. With --presets too, both run. Exits with
1 if a tier does not fit.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as `generate --vram` does

import torch
from diffusers import DiffusionPipeline
from PIL import Image
from torch import nn
from transformers import CLIPImageProcessor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `scripts` can be imported

import turbo_rcm_patch as trp
from scripts.benchmarks.memory_cap import empty_cache, with_random_weights
from scripts.benchmarks.stand_ins import RandomTokens
from scripts.tools.pages.cards import cards_table
from turbo_rcm_patch.amounts import parse_amount
from turbo_rcm_patch.bench.cases import add_random_projections, needs_projections
from turbo_rcm_patch.bench.environment import describe_environment
from turbo_rcm_patch.cli.files import json_file, write_json
from turbo_rcm_patch.config import PRESETS, without_originals
from turbo_rcm_patch.memory.plan import CONTEXT
from turbo_rcm_patch.memory.streaming import stop_streaming
from turbo_rcm_patch.patching.families import CASES, PIPELINES, family_of, pipeline_of
from turbo_rcm_patch.patching.families.family import Case, Pipeline
from turbo_rcm_patch.patching.families.wan.cases import TEXT

STEPS = 4
LONG = 20  # seconds: a video that takes longer is timed once, not --repeats times
# The stages that end before a module's forward, and after it. The plan counts what a pipeline does with the hidden
# states of LTX-2's text encoder as text encoding.
BEFORE = {"connectors": "text encoding", "audio_vae.decoder": "decoding", "vocoder": "decoding the sound"}
AFTER = {
    "text_encoder": "text encoding",
    "image_encoder": "image encoding",
    "connectors": "connectors",
    "vocoder": "making the waveform",
}


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    device = torch.device("cuda")
    size = {"height": options.height, "width": options.width, "num_frames": options.frames}
    pipe = random_pipeline(options.config, device)
    install_sampler(pipe)
    pipe.set_progress_bar_config(disable=True)
    settings = {
        "config": options.config,
        "experts": CASES[options.config].experts,
        "sound": pipeline_of(pipe).has_sound,
        **size,
        "tokens": tokens_of(pipe),
        "steps": STEPS,
        "repeats": options.repeats,
        "bus_bytes_per_second": bus_speed(device),
    }
    rows = []
    figures = {"settings": settings, "environment": asdict(describe_environment(device)), "cards": rows}
    for row in all_rows(pipe, options, size, device):
        rows.append(row)
        print(f"{row['variant']}, {row['card'] or 'the whole GPU'}: {row['seconds']} s a video", flush=True)
        if options.json is not None:  # after each row, so that a run that is cut off leaves what it measured
            write_json(options.json, figures)
    print(cards_table([figures]))
    return 0 if all(row["seconds"] is not None for row in rows if row["variant"] in options.presets) else 1


def all_rows(pipe: DiffusionPipeline, options: argparse.Namespace, size: dict, device: torch.device) -> Iterator[dict]:
    """Yield the rows of diffusers' own offloading, and those of each tier."""
    if options.rivals:
        pipe.to("cpu")
    for card, rival in itertools.product(options.vram, options.rivals):
        row = rival_row(pipe, card, OFFLOADING[rival], size, options.repeats, device)
        yield {"variant": f"diffusers, offloading by {rival}", "card": card, **row}
    for preset in options.presets:
        pipe.to(device)
        last = preset == options.presets[-1]
        if preset == "sparse" and needs_projections(pipe):
            add_random_projections(pipe)
        patch = trp.patch(pipe, without_originals(PRESETS[preset]) if last else preset)
        for card in (None, *options.vram):
            yield {"variant": preset, "card": card, **row_of(pipe, card, size, options.repeats, device)}
        if last and options.text_encoder == "8bit":
            trp.patch_text_encoder(pipe, in_8_bits=True, restorable=False)
            name = f"{preset}, text encoder in 8 bits"
            for card in (None, *options.vram):
                yield {"variant": name, "card": card, **row_of(pipe, card, size, options.repeats, device)}
        if not last:
            patch.restore()


def row_of(pipe: DiffusionPipeline, card: str | None, size: dict[str, int], repeats: int, device: torch.device) -> dict:
    """Measure a patched pipeline on a card, or on the whole GPU."""
    plan = trp.fit(pipe, card, **size, device=device)
    print(plan, flush=True)
    try:
        with cap(card, device):
            figures = measure(pipe, size, repeats)
    finally:
        plan.undo()
    return {**plan.to_dict(), **figures}


def rival_row(
    pipe: DiffusionPipeline,
    card: str,
    offloaded: Callable,
    size: dict[str, int],
    repeats: int,
    device: torch.device,
) -> dict:
    """Measure unpatched diffusers with its own offloading on a card."""
    with offloaded(pipe, device), cap(card, device):
        figures = measure(pipe, size, repeats)
        if tiles := figures["seconds"] is None and "denoising" in figures["allocated"]:
            pipe.vae.enable_tiling()
            figures = measure(pipe, size, repeats)
            pipe.vae.disable_tiling()
    return {"streaming": ["all"], "tiles": tiles, **figures}


def group_offloaded(offload_type: str) -> Callable:
    """diffusers' group offloading of all models, each group copied while the one before runs."""

    @contextmanager
    def offloaded(pipe: DiffusionPipeline, device: torch.device) -> Iterator[None]:
        groups = {"num_blocks_per_group": 1} if offload_type == "block_level" else {}
        pipe.enable_group_offload(device, offload_type=offload_type, use_stream=True, record_stream=True, **groups)
        yield
        for model in models_of(pipe):
            stop_streaming(model)
            model.to("cpu")

    return offloaded


@contextmanager
def model_offloaded(pipe: DiffusionPipeline, device: torch.device) -> Iterator[None]:
    """diffusers' offloading of whole models."""
    pipe.enable_model_cpu_offload(device=device)
    yield
    pipe.remove_all_hooks()
    pipe.to("cpu")


OFFLOADING = {
    "blocks": group_offloaded("block_level"),
    "leaves": group_offloaded("leaf_level"),
    "models": model_offloaded,
}


@contextmanager
def cap(card: str | None, device: torch.device) -> Iterator[None]:
    """Let torch allocate no more than a card has. None: the whole GPU."""
    total = torch.cuda.get_device_properties(device).total_memory
    empty_cache()
    if card is not None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, (parse_amount(card) - CONTEXT) / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        empty_cache()


def measure(pipe: DiffusionPipeline, size: dict[str, int], repeats: int) -> dict:
    """Return the median time of a video and of a step, and torch's peaks in bytes. Times are None if it does not fit.

    The first call makes one step. It compiles kernels, and offloading learns the order of the blocks.
    """
    videos, steps = [], []
    try:
        for run in range(1 + repeats):
            empty_cache()
            retries = torch.cuda.memory_stats()["num_alloc_retries"]
            recorder = Recorder(1 if run == 0 else STEPS)
            start = time.perf_counter()
            with recorder.watching(pipe):
                made = pipe(**inputs_of(pipe, size), **call_options(pipe, recorder))
                outputs = [torch.as_tensor(made.frames).cpu()]
                if hasattr(made, "audio"):
                    outputs.append(made.audio.cpu())
            videos.append(time.perf_counter() - start)
            steps += [later - earlier for earlier, later in itertools.pairwise(recorder.ends)]
            assert all(math.isfinite(output.float().mean()) for output in outputs)
            del made, outputs
            if run > 0 and videos[-1] > LONG:
                break
    except torch.OutOfMemoryError as error:
        print(f"does not fit: {error}")
        if hasattr(pipe.vae, "clear_cache"):  # Wan's keeps frames, which would stay on the GPU beside what runs next
            pipe.vae.clear_cache()
        return {"seconds": None, "step_seconds": None, "allocated": recorder.peaks}
    return {
        "seconds": statistics.median(videos[1:]),
        "videos": len(videos) - 1,
        "step_seconds": statistics.median(steps),
        "allocated": recorder.peaks,
        "reserved": torch.cuda.max_memory_reserved(),
        # How often the allocator had to free memory first, for which the host waits for the GPU.
        "retries": torch.cuda.memory_stats()["num_alloc_retries"] - retries,
    }


class Recorder:
    """A pipeline's callback, which keeps the time at the end of each step, and the peak of torch's memory by stage."""

    def __init__(self, steps: int):
        self.steps, self.ends = steps, []
        self.peaks: dict[str, int] = {}
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def mark(self, stage: str) -> None:
        """Keep the peak since the last mark as that of a stage."""
        torch.cuda.synchronize()
        self.peaks[stage] = max(self.peaks.get(stage, 0), torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()

    def __call__(self, *_: object) -> dict:
        self.mark("denoising")
        self.ends.append(time.perf_counter())
        return {}

    @contextmanager
    def watching(self, pipe: DiffusionPipeline) -> Iterator[None]:
        """A context in which a pipeline's models mark the ends of their stages. Its end is that of the last one."""

        def before_steps(*_: object) -> None:
            if not self.ends:
                self.mark("VAE encoding")

        hooks = []
        if "image" in family_of(pipe.transformer).inputs(pipe).more:  # a hook on the transformer keeps it from graphs
            hooks.append(pipe.transformer.register_forward_pre_hook(before_steps))
        for stages, register in ((BEFORE, "register_forward_pre_hook"), (AFTER, "register_forward_hook")):
            for path, stage in stages.items():
                if (module := _module_at(pipe, path)) is not None:
                    hooks.append(getattr(module, register)(lambda *_, stage=stage: self.mark(stage)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.mark("making the waveform" if pipeline_of(pipe).has_sound else "decoding")


def _module_at(pipe: DiffusionPipeline, path: str) -> nn.Module | None:
    """Return the module at a path in a pipeline, or None if the pipeline does not have this model."""
    name, _, rest = path.partition(".")
    model = getattr(pipe, name, None)
    return None if model is None else model.get_submodule(rest)


def install_sampler(pipe: DiffusionPipeline) -> None:
    """Let a pipeline sample in few steps, without guidance."""
    if pipeline_of(pipe).has_sound:
        trp.use_distilled(pipe, recipe="turbot2av")
    else:
        trp.use_rcm(pipe)


def call_options(pipe: DiffusionPipeline, recorder: Recorder) -> dict[str, object]:
    return {
        "num_inference_steps": recorder.steps,
        "max_sequence_length": tokens_of(pipe),
        # A plan counts the frames on the GPU while the sound is decoded, where "pt" leaves them.
        "output_type": "pt" if pipeline_of(pipe).has_sound else "np",
        "generator": torch.Generator("cpu").manual_seed(0),
        "callback_on_step_end": recorder,
    }


def inputs_of(pipe: DiffusionPipeline, size: dict[str, int]) -> dict[str, object]:
    """Return a prompt, an image if the pipeline takes one, the size of the video, and what turns guidance off."""
    inputs = {"guidance_scale": 1.0, **family_of(pipe.transformer).inputs(pipe).more, "prompt": "a prompt", **size}
    inputs.pop("prompt_attention_mask", None)  # it goes with embeddings
    if "image" in inputs:
        inputs["image"] = Image.new("RGB", (size["width"], size["height"]), (200, 30, 30))
    return inputs


def tokens_of(pipe: DiffusionPipeline) -> int:
    """Return the tokens of a prompt."""
    return family_of(pipe.transformer).inputs(pipe).prompt[0]


def random_pipeline(config: str, device: torch.device | str = "cpu") -> DiffusionPipeline:
    """Return a case's pipeline in bf16, with its encoders and all other models that it runs."""
    case = CASES[config]

    def make(model_class: Callable[..., nn.Module], *args: object, **options: object) -> nn.Module:
        return with_random_weights(lambda: model_class(*args, **options), device)

    transformers = {name: make(case.transformer_class, **case.transformer) for name in case.transformer_names}
    kinds = case.encoders or TEXT
    encoders = {name: make(model_class, settings) for name, (model_class, settings) in kinds.items()}
    others = {name: make(model_class, **options) for name, (model_class, options) in case.others.items()}
    vocabulary = encoders["text_encoder"].get_input_embeddings().num_embeddings
    return stated_pipeline(case).pipeline_class(
        tokenizer=RandomTokens(vocabulary),
        vae=make(case.vae_class, **case.vae),
        scheduler=case.scheduler(),
        **transformers,
        **encoders,
        **others,
        **({"image_processor": CLIPImageProcessor()} if "image_encoder" in encoders else {}),
        **case.pipeline_options,
    )


def stated_pipeline(case: Case) -> Pipeline:
    """Return what a case's family states about its pipeline, which in the case may be a subclass without encoders."""
    return next(pipeline for pipeline in PIPELINES if issubclass(case.pipeline_class, pipeline.pipeline_class))


def bus_speed(device: torch.device) -> float:
    """Return the bytes per second that go from pinned memory to the GPU."""
    there = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    here = torch.empty_like(there, device=device)
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        here.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return here.numel() / statistics.median(seconds)


def models_of(pipe: DiffusionPipeline) -> list[nn.Module]:
    return [model for model in pipe.components.values() if isinstance(model, nn.Module)]


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=CASES, default="wan2.1-1.3b")
    parser.add_argument(
        "--presets",
        nargs="+",
        choices=("exact", "quantized", "sparse"),
        help="tiers, sparse last; without it quantized, or none beside --rivals",
    )
    parser.add_argument("--text-encoder", choices=("8bit",), help="run the last tier with it in 8 bits too")
    parser.add_argument("--rivals", nargs="+", choices=OFFLOADING, default=[], help="diffusers' own offloading")
    parser.add_argument("--vram", nargs="+", default=["8 GB"], help="cards, such as 8GB")
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=json_file, help="write all figures with the GPU and versions")
    options = parser.parse_args(argv)
    if options.presets is None:
        options.presets = [] if options.rivals else ["quantized"]
    if options.text_encoder and not options.presets:
        parser.error("--text-encoder is of a tier; give --presets beside --rivals.")
    if stated_pipeline(CASES[options.config]).has_sound:
        # Offloading by blocks leaves these VAEs on the CPU: diffusers brings their blocks in forward alone, not in
        # decode. By models the transformer must fit alone, with 38 GB. By leaves 67 GB of LTX-2 would be pinned.
        for option, is_given in {"--rivals": options.rivals, "--text-encoder": options.text_encoder}.items():
            if is_given:
                parser.error(f"{option} is for Wan's models; --config is {options.config}.")
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA GPU, whose memory this is about.")
    return options


if __name__ == "__main__":
    sys.exit(main())
