"""Run one denoising step of a real size in 8 bits within a cap on the GPU's memory, with random weights.

    python scripts/benchmarks/memory_cap.py --config wan2.1-14b --cap-gb 24 --json cap.json

The model is made on the CPU in bf16, patched there, and only then moved: its bf16 weights would not fit.
Exits with 1 if the step does not fit.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

import torch
from accelerate import init_empty_weights
from diffusers import WanTransformer3DModel
from torch import nn

import turbo_rcm_patch as trp
from turbo_rcm_patch.bench.environment import describe_environment
from turbo_rcm_patch.cli.files import json_file, write_json
from turbo_rcm_patch.patching.families.wan.cases import CASES
from turbo_rcm_patch.patching.families.wan.sub_layers import TEXT_TOKENS

GB = 10**9
POOL = 1 << 26  # random values that all weights are cut from: drawing each anew takes minutes


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    device, case = torch.device("cuda"), CASES[options.config]
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, options.cap_gb * GB / total))
    model = random_model(case.transformer)
    bf16_bytes = sum(parameter.numel() for parameter in model.parameters()) * torch.bfloat16.itemsize
    start = time.perf_counter()
    patch = trp.patch(model, trp.Quantized(restorable=False))
    model.to(device)
    torch.cuda.synchronize()
    patching = time.perf_counter() - start
    weights = torch.cuda.memory_allocated(device)
    figures = {
        "settings": {"config": options.config, "height": options.height, "width": options.width, "frames": case.frames},
        "environment": asdict(describe_environment(device)),
        "cap_bytes": int(options.cap_gb * GB),
        "bf16_weight_bytes": bf16_bytes,
        "weight_bytes": weights,
        "patching_seconds": patching,
    }
    print(f"weights: {bf16_bytes / GB:.1f} GB in bf16, {weights / GB:.1f} GB patched, after {patching:.0f} s")
    inputs = random_latents(model, case.frames, options.height, options.width, device)
    try:
        for _ in range(2):  # the first one compiles
            start = time.perf_counter()
            with torch.no_grad():
                sample = model(*inputs, return_dict=False)[0]
            finite = bool(sample.isfinite().all())
            seconds = time.perf_counter() - start
    except torch.OutOfMemoryError as error:
        print(f"a step does not fit {options.cap_gb} GB: {error}")
        if options.json is not None:
            write_json(options.json, {**figures, "step_seconds": None, "peak_bytes": None, "finite": False})
        return 1
    peak = torch.cuda.max_memory_reserved(device)
    print(f"a step: {seconds:.2f} s, peak {peak / GB:.1f} GB of {options.cap_gb} GB, finite: {finite}")
    print(patch.summary())
    if options.json is not None:
        write_json(options.json, {**figures, "step_seconds": seconds, "peak_bytes": peak, "finite": finite})
    return 0 if finite else 1


def random_model(config: dict[str, object]) -> WanTransformer3DModel:
    """Return the transformer on the CPU in bf16, with random weights."""
    return with_random_weights(lambda: WanTransformer3DModel(**config))


def with_random_weights(make: Callable[[], nn.Module], device: torch.device | str = "cpu") -> nn.Module:
    """Return the model that a function makes, on a device, all of it in bf16, with matrices scaled by their depth."""
    with init_empty_weights(include_buffers=False):
        model = make().eval()
    pool = torch.randn(POOL, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(_values(parameter, name, pool), requires_grad=False)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    return model.to(device)  # its buffers


def _values(parameter: torch.Tensor, name: str, pool: torch.Tensor) -> torch.Tensor:
    """Return ones for a norm's weight, zeros for a bias, and random values for a matrix."""
    if parameter.numel() == len(parameter):
        ones = torch.ones(parameter.shape, dtype=pool.dtype, device=pool.device)
        return ones if name in ("weight", "gamma") else torch.zeros_like(ones)
    depth = math.prod(parameter.shape[1:])
    repeats = -(-parameter.numel() // len(pool))
    return pool.repeat(repeats)[: parameter.numel()].view(parameter.shape) * depth**-0.5


def random_latents(model, frames: int, height: int, width: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return latents, a timestep and a prompt."""
    shape = ((frames - 1) // 4 + 1, height // 8, width // 8)
    latents = torch.randn(1, model.config.in_channels, *shape, device=device, dtype=torch.bfloat16)
    prompt = torch.randn(1, TEXT_TOKENS, model.config.text_dim, device=device, dtype=torch.bfloat16)
    return latents, torch.tensor([500], device=device), prompt


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=CASES, default="wan2.1-14b", help="also the size of Wan 2.2's experts")
    parser.add_argument("--cap-gb", type=float, default=24.0, help="GPU memory to use, GB of 10^9 bytes (default 24)")
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--json", type=json_file, help="write all figures with the GPU and versions")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA GPU, whose memory this is about.")
    return options


def empty_cache() -> None:
    """Free the memory that PyTorch keeps for new tensors, on the GPU and in pinned memory."""
    gc.collect()
    torch.cuda.empty_cache()
    # PyTorch 2.11 has no public name for the second.
    (getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache)()


if __name__ == "__main__":
    sys.exit(main())
