"""Time, memory and error of Wan's text encoder, UMT5-XXL with random weights, as transformers runs it and patched.

    python scripts/benchmarks/text_encoder.py --json text_encoder.json

Prompts of several lengths are padded to 512 tokens, as Wan's pipelines pad them. The error is that of the prompt's own
embeddings against the same weights in fp32. The last table rounds the weights to int8 with one scale for groups of
several sizes, or for each row. With --tails 5 the weights have Student's t distribution with 5 degrees of freedom.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict

import torch
from torch import nn
from transformers import UMT5EncoderModel

import turbo_rcm_patch as trp
from turbo_rcm_patch.amounts import in_gb
from turbo_rcm_patch.bench.environment import describe_environment
from turbo_rcm_patch.bench.metrics import relative_l2
from turbo_rcm_patch.cli.files import json_file, write_json
from turbo_rcm_patch.memory.streaming import stop_streaming, stream
from turbo_rcm_patch.patching.families.wan.cases import UMT5_XXL
from turbo_rcm_patch.tables import table

PADDED = 512
# The options of `patch_text_encoder`, None for transformers alone, and True if the layers stream from the host.
VARIANTS = {
    "transformers": (None, False),
    "patched": ({}, False),
    "patched, 8 bits": ({"in_8_bits": True}, False),
    "patched, CUDA graph": ({"cuda_graph": True}, False),
    "patched, 8 bits, CUDA graph": ({"in_8_bits": True, "cuda_graph": True}, False),
    "patched, the same prompt again": ({"keep_prompts": 1}, False),
    "transformers, streaming": (None, True),
    "patched, streaming": ({}, True),
    "patched, 8 bits, streaming": ({"in_8_bits": True}, True),
}
GROUPS = (None, 128, 32, 16)  # None: a row
HEADER = ("variant", "tokens", "ms", "weights, GB", "beside them, GB", "error", "of bf16's")


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    device = torch.device(options.device)
    encoder = random_encoder(device, options.tails)
    prompts = {count: random_prompt(count, device) for count in options.tokens}
    exact = {count: embeddings(encoder, *prompt)[:, :count] for count, prompt in prompts.items()}
    encoder.bfloat16()
    in_bf16 = dict(errors_of(encoder, prompts, exact))
    rows = list(all_rows(encoder, prompts, exact, in_bf16, options.repeats))
    rounding = list(errors_by_group(encoder, prompts, exact, in_bf16))
    print(table([HEADER, *map(cells, rows)]))
    print(table([("one scale for", "tokens", "error", "of bf16's"), *map(group_cells, rounding)]))
    if options.json is not None:
        settings = {"padded": PADDED, "repeats": options.repeats, "tails": options.tails}
        environment = asdict(describe_environment(device))
        write_json(options.json, {"settings": settings, "environment": environment, "rows": rows, "groups": rounding})
    return 0


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[24, 96, 512], help="the lengths of the prompts")
    parser.add_argument("--repeats", type=int, default=10, help="calls timed for each row")
    parser.add_argument("--tails", type=float, help="degrees of freedom of the weights' distribution, else normal")
    parser.add_argument("--device", default="cuda", help="the device that encodes")
    parser.add_argument("--json", type=json_file, help="write the figures to this file")
    return parser.parse_args(argv)


@torch.no_grad()
def random_encoder(device: torch.device, tails: float | None) -> UMT5EncoderModel:
    """Return an encoder in fp32 whose weights are bf16 numbers."""
    torch.manual_seed(0)
    with device:
        encoder = UMT5EncoderModel(copy.deepcopy(UMT5_XXL)).eval()
    for linear in linears_of(encoder) if tails is not None else ():
        deviation = linear.weight.std()
        normal, chi2 = torch.randn_like(linear.weight), torch._standard_gamma(torch.full_like(linear.weight, tails / 2))
        linear.weight.copy_(normal / (2 * chi2 / tails).sqrt())
        linear.weight.mul_(deviation / linear.weight.std())
    for parameter in encoder.parameters():
        parameter.copy_(parameter.bfloat16())
    return encoder


def linears_of(encoder: nn.Module) -> list[nn.Linear]:
    return [module for module in encoder.modules() if isinstance(module, nn.Linear)]


def random_prompt(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens [1, PADDED] of a prompt and its mask."""
    tokens = torch.randint(1, UMT5_XXL.vocab_size, (1, PADDED), generator=torch.Generator().manual_seed(count))
    mask = (torch.arange(PADDED) < count).long()[None]
    return (tokens * mask).to(device), mask.to(device)


@torch.no_grad()
def embeddings(encoder: nn.Module, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return encoder(tokens, mask).last_hidden_state


def errors_of(encoder: nn.Module, prompts: dict, exact: dict) -> Iterator[tuple[int, float]]:
    """Yield the length of each prompt and the error of its embeddings."""
    for count, prompt in prompts.items():
        yield count, relative_l2(embeddings(encoder, *prompt)[:, :count], exact[count])


def all_rows(encoder: UMT5EncoderModel, prompts: dict, exact: dict, in_bf16: dict, repeats: int) -> Iterator[dict]:
    """Yield the figures of each variant and prompt. in_bf16: the errors of bf16, by the prompt's length."""
    for name, (patched, streams) in VARIANTS.items():
        device = encoder.device
        with ExitStack() as stack:
            if patched is not None:
                stack.enter_context(trp.patch_text_encoder(encoder, **patched))
            if streams:
                stack.callback(encoder.to, device)
                stack.callback(stop_streaming, encoder)
                stream(encoder, device)
            for count, prompt in prompts.items():
                row = measure(encoder, prompt, count, exact[count], repeats)
                yield {"variant": name, "tokens": count, **row, "of_bf16": row["error"] / in_bf16[count]}


def measure(encoder: nn.Module, prompt: tuple, count: int, exact: torch.Tensor, repeats: int) -> dict:
    """Return the time of a call, the memory of the weights and beside them on the GPU, and the error."""
    device = exact.device
    for _ in range(3):  # a graph is recorded in the second call
        found = embeddings(encoder, *prompt)
    tensors = {id(t): t for t in (*encoder.parameters(), *encoder.buffers()) if t.device == device}
    synchronize(device)
    before, seconds = None, []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    for _ in range(repeats):
        start = time.perf_counter()
        embeddings(encoder, *prompt)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": statistics.median(seconds),
        "weights": sum(tensor.nbytes for tensor in tensors.values()),
        "beside": None if before is None else torch.cuda.max_memory_allocated(device) - before,
        "error": relative_l2(found[:, :count], exact),
    }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def errors_by_group(encoder: UMT5EncoderModel, prompts: dict, exact: dict, in_bf16: dict) -> Iterator[dict]:
    """Yield the errors with all linears' weights rounded to int8, with one scale for groups of several sizes."""
    linears = linears_of(encoder)
    originals = [linear.weight.clone() for linear in linears]
    for group in GROUPS:
        for linear, original in zip(linears, originals, strict=True):
            linear.weight.copy_(rounded(original, group))
        for count, error in errors_of(encoder, prompts, exact):
            yield {"group": group, "tokens": count, "error": error, "of_bf16": error / in_bf16[count]}
    for linear, original in zip(linears, originals, strict=True):
        linear.weight.copy_(original)


def rounded(weight: torch.Tensor, group: int | None) -> torch.Tensor:
    """Return a weight [N, K] rounded to int8, with one scale for a group of a row's values, or for the row."""
    wide = weight.float().unflatten(1, (-1, group or weight.shape[1]))
    scale = wide.abs().amax(-1, keepdim=True) / 127
    return ((wide / scale).round() * scale).flatten(1)


def cells(row: dict) -> tuple[str, ...]:
    beside = "" if row["beside"] is None else in_gb(row["beside"])
    figures = (f"{row['seconds'] * 1e3:.1f}", in_gb(row["weights"]), beside)
    return row["variant"], str(row["tokens"]), *figures, f"{row['error']:.2%}", f"{row['of_bf16']:.2f}"


def group_cells(row: dict) -> tuple[str, ...]:
    name = "a row" if row["group"] is None else f"{row['group']} values"
    return name, str(row["tokens"]), f"{row['error']:.2%}", f"{row['of_bf16']:.2f}"


if __name__ == "__main__":
    raise SystemExit(main())
