"""Designs of a quantized step of Wan2.1-1.3B, 81 frames at 832x480, timed in turns beside torch.compile's step."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from designs import Design, arguments_of_a_step, on_meta, options_of, pipeline, run, setting

import torch
from torch import nn

import turbo_rcm_patch.kernels as kernels
from turbo_rcm_patch.config import Exact, Quantized
from turbo_rcm_patch.kernels.attention import attention_sm90
from turbo_rcm_patch.kernels.attention_8bit import attention_8bit_sm90
from turbo_rcm_patch.kernels.launch import recording
from turbo_rcm_patch.kernels.linear import gemm_sm90
from turbo_rcm_patch.kernels.quantized import FP8, INT8
from turbo_rcm_patch.patching.families.wan import block as wan_block
from turbo_rcm_patch.patching.families.wan import sub_layers
from turbo_rcm_patch.patching.steps import in_8_bits, layers
from turbo_rcm_patch.patching.steps.plan import Step
from turbo_rcm_patch.patching.weights import quantize_linears

SHIPS = Quantized(restorable=False)


def norm_apart(norm, stored, call, quantized=None, *rest, **named):
    return layers.layer_norm(norm, stored, call, None, *rest, **named)


def gelu_apart(ffn, tokens, call, quantized=None):
    return layers.projection_with_gelu(ffn, tokens, call, None)


def attention_apart(attn, stream, call, result):
    return own_attention(attn, stream, call, None)


own_attention = wan_block.quantized_attention


def three_projections(read, by_modules, tokens, call):
    return in_8_bits._each_step(in_8_bits._each_linear, read, tokens, call)


def norms_then_quantize(attn, call):
    """QK-norm with RoPE in launches of their own, then the rounding to 8 bits, as LTX-2 has it."""
    norm_q, norm_k = (layers.head_norm(norm, nn.RMSNorm, attn.heads, call) for norm in (attn.norm_q, attn.norm_k))
    quantize = in_8_bits.quantize_heads(attn, call)

    def run_all(q, k, v, tables):
        return quantize.run(norm_q.run(q, tables), norm_k.run(k, tables), v)

    return Step(run_all, f"{norm_q.kernel}, {quantize.kernel}")


class KeptText:
    """Cross-attention whose K and V of the text are kept from the first step. The text is one in all steps."""

    def __init__(self):
        self.kept = {}

    def run(self, plan, x, context):
        if (found := self.kept.get(id(plan))) is None:
            k, v = plan.kv.run(context)
            found = plan, plan.norm_k.run(k), v.unflatten(2, (plan.heads, -1))
            if not recording():  # then nothing is computed: kernels are only compiled ahead
                self.kept[id(plan)] = found
        _, k, v = found
        q = plan.norm_q.run(plan.q.run(plan.norm.run(x)))
        attended = plan.attention.run(q, k, v)
        del q
        return plan.out.run(attended if plan.attention.gives else attended.flatten(2), x)

    def during(self):
        kept = self

        def run_kept(plan, x, context):
            return kept.run(plan, x, context)

        return setting(sub_layers.CrossAttention, "run", run_kept)()


def always(format):
    def format_for(capability, *, rows_known):
        return format

    return setting(quantize_linears, "format_for", format_for)


def unsplit(tiles, key_tiles, multiprocessors):
    return attention_sm90.Schedule(tiles, tiles, 1)


def no_gluon_for_8_bits(spec):
    return "left out here" if spec.eight_bits else own_why_not(spec)


own_why_not = gemm_sm90.why_not


def of_fp16_values(device, implementation="auto"):
    return torch.float16


def portable_attention(*_):
    return "left out here"


DESIGNS = [
    Design("as it ships", SHIPS),
    Design("torch.compile", None, compiled=True, compared=True),
    Design("always a CUDA graph", replace(SHIPS, cuda_graph="on")),
    Design("all linears in e4m3", SHIPS, always(FP8)),
    Design("all linears in int8", SHIPS, always(INT8)),
    Design("attention by the portable kernel", SHIPS, setting(attention_8bit_sm90, "why_not", portable_attention)),
    Design("v in fp16 (portable kernel)", SHIPS, setting(kernels, "default_v_format", of_fp16_values)),
    Design("attention without splitting the last tiles", SHIPS, setting(attention_8bit_sm90, "make_schedule", unsplit)),
    Design("QK-norm and RoPE in launches of their own", SHIPS, setting(in_8_bits, "quantize_qkv", norms_then_quantize)),
    Design("the attention's result in bf16, then e4m3", SHIPS, setting(wan_block, "quantized_attention", attention_apart)),
    Design("GELU's result in bf16, then e4m3", SHIPS, setting(wan_block, "projection_with_gelu", gelu_apart)),
    Design("the norms' results in bf16, then int8", SHIPS, setting(wan_block, "layer_norm", norm_apart)),
    Design("q, k and v in three launches", SHIPS, setting(in_8_bits, "qkv_projection", three_projections)),
    Design("linears by the portable kernels", SHIPS, setting(gemm_sm90, "why_not", no_gluon_for_8_bits)),
    Design("GEMM with three stages", SHIPS, setting(gemm_sm90, "STAGES", 3)),
    Design("residual in bf16", replace(SHIPS, residual="same")),
    Design("cross-attention's linears in bf16", replace(SHIPS, keep=("blocks.*.attn2",))),
    Design("cross-attention by SDPA (cuDNN)", replace(SHIPS, attention="sdpa")),
    Design("cross-attention as diffusers writes it", replace(SHIPS, fuse=("self_attention", "feed_forward"))),
    Design("K and V of the text kept", SHIPS, KeptText().during),
    Design("attention in bf16", replace(SHIPS, quantize=("linears",))),
    Design("linears in bf16", replace(SHIPS, quantize=("attention",))),
    Design("exact tier", Exact()),
]
EXTRA = {
    "v in fp16 (portable kernel)", "cross-attention as diffusers writes it", "attention in bf16", "linears in bf16",
    "exact tier",
}


def main() -> int:
    options = options_of(
        __doc__, "wan2.1-1.3b", "tiny", layers=0, frames=0, height=0, width=0, extra=0, turns=4, forwards=2
    )
    everything = options.extra or options.dry or options.launches or options.only
    designs = [design for design in DESIGNS if everything or design.name not in EXTRA]
    if options.dry:  # no torch.compile on the CPU, which takes long
        designs = [design for design in designs if not design.compiled]

    def build():
        if options.launches:
            transformer = on_meta("wan2.1-1.3b", options.layers or 2)
            meta = lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
            tensors = {"hidden_states": meta(1, 16, 21, 60, 104), "timestep": meta(1, dtype=torch.float32)}
            return transformer, (), {**tensors, "encoder_hidden_states": meta(1, 512, 4096), "return_dict": False}
        pipe = pipeline(options, sparse=False)
        return pipe.transformer, *arguments_of_a_step(pipe, options, sparse=False)

    return run(options, designs, build)


if __name__ == "__main__":
    sys.exit(main())
