"""Designs of a LoRA in a step: Wan2.1-14B with 4 layers, 81 frames at 832x480, the exact tier, in turns.

Ratios are over the step without the LoRA, which takes turns with the others.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from designs import Design, all_of, arguments_of_a_step, on_meta, options_of, pipeline, run, setting

import torch
import torch.nn.functional as F

from turbo_rcm_patch.config import Exact
from turbo_rcm_patch.kernels import Quantized as Rows
from turbo_rcm_patch.kernels import reference
from turbo_rcm_patch.kernels.coefficient import values_and_starts
from turbo_rcm_patch.kernels.linear import linear as linear_module
from turbo_rcm_patch.kernels.linear.gemm_portable import NO_PAIR, PLAIN, SecondPair
from turbo_rcm_patch.kernels.linear.linear import LINEAR_LOW_RANK
from turbo_rcm_patch.kernels.rows.gelu import GELU_OVER_X
from turbo_rcm_patch.patching.families.wan import block as wan_block
from turbo_rcm_patch.patching.lora import inside_projections
from turbo_rcm_patch.patching.steps import layers
from turbo_rcm_patch.patching.steps.plan import Step

SHIPS = Exact()
WITHOUT = "without the LoRA"


def rows(x):
    return x.reshape(-1, x.shape[-1])


# A product that is added by a GEMM of its own, in place


def add(out, low, up):
    if out.is_contiguous():
        rows(out).addmm_(rows(low), up.T)
        return out
    return torch.addmm(rows(out), rows(low), up.T).view(out.shape)


def qkv_then_add(launch, read, x):
    weights = [linear.weight for linear in read.linears]
    outs = launch(x, *weights, *read.biases(), None, None, None, None, x.dtype)
    if not read.has_lora:
        return outs
    parts = reference.parts_of_weights(*read.second_pair(x), 3)
    return tuple(add(out, *part) for out, part in zip(outs, parts, strict=True))


def linear_then_add(launch, read, x):
    (bias,) = read.biases()
    out = launch(x, read.first.weight, bias, None, None)
    return add(out, *read.second_pair(x)) if read.has_lora else out


def skip_after_skip(launch, read, stored, result, a, residual, gate=None):
    """The low-rank product with its skip first, then the linear with its skip."""
    gate, starts = values_and_starts(gate)
    (bias,) = read.biases()
    if read.has_lora:
        low, up = read.second_pair(a)
        residual = launch(low, up, None, residual, None, gate, result.dtype, stored.scale, result.scale, starts)
        stored = result
    return launch(a, read.first.weight, bias, residual, None, gate, result.dtype, stored.scale, result.scale, starts)


own_gelu = layers.projection_with_gelu


def linear_then_add_then_gelu(ffn, tokens, call, quantized=None):
    step = own_gelu(ffn, tokens, call, quantized)
    read = call.read(ffn.net[0].proj)
    if not read.has_lora:
        return step
    pick = layers._pick(LINEAR_LOW_RANK, "linear_qkv", read, tokens, call)
    gelu = call.pick(GELU_OVER_X)

    def project(x):
        return gelu.launch(linear_then_add(pick.launch, read, x))

    return Step(project, f"{pick.label}, addmm, {gelu.label} GELU")


def separate():
    return all_of(
        setting(layers, "_qkv", qkv_then_add)(),
        setting(layers, "_linear_low_rank", linear_then_add)(),
        setting(layers, "_linear_skip", skip_after_skip)(),
        setting(wan_block, "projection_with_gelu", linear_then_add_then_gelu)(),
    )


# Other ways to the product x A


def three_downs(x, low_rank, launch=None):
    """The A of q, k and v one after the other, each of which reads x."""
    down, up, _ = low_rank
    if isinstance(x, Rows):
        return linear_module.project_down(x, low_rank, launch)
    count = down.shape[0] // up.shape[1]
    return SecondPair(torch.cat([F.linear(x, part) for part in down.chunk(count)], -1), up)


def by_our_gemm(gluon, x, low_rank, launch=None):
    down, up, _ = low_rank
    if isinstance(x, Rows) or x.device.type == "cpu":
        return linear_module.project_down(x, low_rank, launch)
    return SecondPair(linear_module._run(gluon, x, down, None, x.dtype, PLAIN, NO_PAIR), up)


def down_by(function):
    return setting(inside_projections, "project_down", function)


# PyTorch's linears with `addmm` for a part of a block


own_feed_forward, own_self, own_cross = wan_block._feed_forward, wan_block._self_attention, wan_block._cross_attention


def by_pytorch(call):
    return call._replace(config=replace(call.config, linears="torch"))


def feed_forward_by_pytorch(block, kind, stream, call, stored, result):
    return own_feed_forward(block, kind, stream, by_pytorch(call), stored, result)


def self_by_pytorch(block, kind, wan_call, stored, result):
    return own_self(block, kind, wan_call._replace(call=by_pytorch(wan_call.call)), stored, result)


def cross_by_pytorch(block, kind, wan_call, stored):
    return own_cross(block, kind, wan_call._replace(call=by_pytorch(wan_call.call)), stored)


def queries_by_pytorch(read, tokens, call):
    return Step(read.only, read.named(layers.LINEAR), "here")


def merge(model):
    model.fuse_lora()
    model.unload_lora()


DESIGNS = [
    Design(WITHOUT, SHIPS, prepare=lambda model: model.disable_lora(), compared=False),
    Design("as it ships", SHIPS),
    Design("merged into the weights", SHIPS, prepare=merge),
    Design("added by GEMMs of its own, in place", SHIPS, separate),
    Design("PyTorch's linears and addmm, as PEFT", replace(SHIPS, linears="torch")),
    Design("PEFT's layers, unpatched", None),
    Design("feed-forward: PyTorch's linears and addmm", SHIPS, setting(wan_block, "_feed_forward", feed_forward_by_pytorch)),
    Design("self-attention: PyTorch's linears and addmm", SHIPS, setting(wan_block, "_self_attention", self_by_pytorch)),
    Design("cross-attention: PyTorch's linears and addmm", SHIPS, setting(wan_block, "_cross_attention", cross_by_pytorch)),
    Design("cross-attention's queries: PyTorch's linear and addmm", SHIPS, setting(layers, "_projection_with_lora", queries_by_pytorch)),
    Design("x A of q, k and v one by one", SHIPS, down_by(three_downs)),
    Design("x A by the portable GEMM", SHIPS, down_by(partial(by_our_gemm, False))),
    Design("x A by the sm_90 GEMM", SHIPS, down_by(partial(by_our_gemm, True))),
    Design("always a CUDA graph", replace(SHIPS, cuda_graph="on")),
]
EXTRA = ("PEFT's layers, unpatched", "x A by the sm_90 GEMM", "cross-attention: PyTorch's linears and addmm")


def main() -> int:
    options = options_of(__doc__, "wan2.1-14b", "tiny", layers=4, frames=0, height=480, width=832, rank=64, extra=0, turns=6, forwards=3)
    designs = [design for design in DESIGNS if options.extra or options.dry or options.launches or options.only or design.name not in EXTRA]

    def build():
        if options.launches:
            transformer = on_meta("wan2.1-14b", 1)
            add_lora_on_meta(transformer, options.rank)
            meta = lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
            tensors = {"hidden_states": meta(1, 16, 21, 60, 104), "timestep": meta(1, dtype=torch.float32)}
            return transformer, (), {**tensors, "encoder_hidden_states": meta(1, 512, 4096), "return_dict": False}
        pipe = pipeline(options, sparse=False, lora=options.rank)
        return pipe.transformer, *arguments_of_a_step(pipe, options, sparse=False)

    return run(options, designs, build, over=WITHOUT, against="as it ships")


def add_lora_on_meta(transformer, rank: int) -> None:
    from peft import LoraConfig

    from scripts.benchmarks.lora import TARGETS

    with torch.device("meta"):
        transformer.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=list(TARGETS)), adapter_name="random_0")
    for name, parameter in transformer.named_parameters():
        if "lora_" in name:
            parameter.data = torch.empty_like(parameter, dtype=torch.bfloat16, device="meta")


if __name__ == "__main__":
    sys.exit(main())
