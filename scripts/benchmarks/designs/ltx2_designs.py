"""Designs of a sparse step of LTX-2 19B with 8 layers, 121 frames at 1024x1792, in turns, in ms a block.

--height 512 --width 768 for the smaller size.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from designs import Design, all_of, arguments_of_a_step, on_meta, options_of, pipeline, rewriting, run, say, setting

import statistics
from unittest import mock

import torch

from turbo_rcm_patch.config import Quantized, Sparse
from turbo_rcm_patch.kernels.linear import gemm_sm90
from turbo_rcm_patch.kernels.quantized import FP8
from turbo_rcm_patch.kernels.sparse_linear import sparse_linear_sm90
from turbo_rcm_patch.patching.families import ltx2
from turbo_rcm_patch.patching.families.ltx2 import attentions
from turbo_rcm_patch.patching.families.ltx2 import block as ltx2_block
from turbo_rcm_patch.patching.families.ltx2 import forward as ltx2_forward
from turbo_rcm_patch.patching.steps import layers
from turbo_rcm_patch.patching.weights import quantize_linears

SHIPS = Sparse(restorable=False)
KEPT_TOKENS = 128  # of a prompt that is trimmed
LONG = 1000  # tokens of a video; tables of the sound are small
TABLES = 8  # of a step: cos and sin of each stream's own attention and of those between the streams

own_tables, own_sparse, own_norm = ltx2_forward.tables_of, attentions.sparse_attention, attentions.norm_of


class HalfTables:
    """RoPE tables in fp16, made from diffusers' in fp32: in each step, or once if they are kept."""

    def __init__(self, kept: bool):
        self.kept, self.made = kept, {}

    def tables_of(self, rotary, attn):
        return own_tables(None if rotary is None else tuple(map(self.half, rotary, ("cos", "sin"))), attn)

    def half(self, table, name):
        is_kept = self.kept and table.shape[-2] > LONG
        key = (name, tuple(table.shape)) if is_kept else id(table)
        found = self.made.get(key)
        if found is None:
            if not is_kept and len(self.made) >= 2 * TABLES:  # those of the last steps, alive so that no id comes twice
                self.made = {key: found for key, found in self.made.items() if isinstance(key, tuple)}
            self.made[key] = found = table, table.half()
        return found[1]

    def during(self):
        return setting(ltx2_forward, "tables_of", self.tables_of)()


def result_in_bf16(attn, stream, call, result):
    return own_sparse(attn, stream, call, None)


def norms_apart(module, stored, call, asked):
    return lambda takes: own_norm(module, stored, call, asked)(None)


def norms_in_bf16():
    return all_of(setting(attentions, "norm_of", norms_apart)(), setting(ltx2_block, "norm_of", norms_apart)())


def gelu_apart(ffn, tokens, call, quantized=None):
    return layers.projection_with_gelu(ffn, tokens, call, None)


def queries_in_int8():
    return mock.patch.dict(ltx2.LINEARS, {"cross_attention": (*ltx2.LINEARS["cross_attention"], "attn2.to_q")})


def queries_in_e4m3():
    own = quantize_linears.convert_weights

    def convert(journal, linears, rows_known):
        queries = {path: linear for path, linear in linears.items() if path.endswith(".attn2.to_q")}
        own(journal, {path: linear for path, linear in linears.items() if path not in queries}, rows_known)
        own(journal, queries, ("no name",))

    from turbo_rcm_patch.patching import apply

    return all_of(queries_in_int8(), mock.patch.object(apply, "convert_weights", convert))


def always_e4m3(capability, *, rows_known):
    return FP8


def trimmed(args, kwargs):
    """The call with a prompt of fewer tokens."""
    cut = {
        name: value[:, :KEPT_TOKENS].contiguous()
        for name, value in kwargs.items()
        if name.removeprefix("audio_") in ("encoder_hidden_states", "encoder_attention_mask") and value is not None
    }
    return args, {**kwargs, **cut}


def no_gluon(*_):
    return "left out here"


own_gemm = gemm_sm90.why_not


def no_gluon_for_8_bits(spec):
    return "left out here" if spec.eight_bits else own_gemm(spec)


DESIGNS = [
    Design("as it ships", SHIPS),
    Design("RoPE tables in fp16, made in each step", SHIPS, HalfTables(False).during),
    Design("RoPE tables in fp16, kept", SHIPS, HalfTables(True).during),
    Design("sparse attention's result in bf16, then e4m3", SHIPS, setting(attentions, "sparse_attention", result_in_bf16)),
    Design(
        "an e4m3 result with fewer queries than keys too", SHIPS,
        rewriting(attentions, "_cross_attention", "gates is None and stream.tokens > source.tokens else None", "gates is None else None"),
    ),
    Design("queries of the prompt in int8", SHIPS, queries_in_int8),
    Design("queries of the prompt in e4m3", SHIPS, queries_in_e4m3),
    Design(f"a prompt of {KEPT_TOKENS} tokens", SHIPS, arguments=trimmed, compared=False),
    Design("the norms' results in bf16, then 8 bits", SHIPS, norms_in_bf16),
    Design("GELU's result in bf16, then e4m3", SHIPS, setting(ltx2_block, "projection_with_gelu", gelu_apart)),
    Design("all linears in e4m3", SHIPS, setting(quantize_linears, "format_for", always_e4m3)),
    Design("residual in bf16", replace(SHIPS, residual="same")),
    Design("always a CUDA graph", replace(SHIPS, cuda_graph="on")),
    Design("never a CUDA graph", replace(SHIPS, cuda_graph="off")),
    Design("sparse attention by the portable kernel", SHIPS, setting(sparse_linear_sm90, "why_not", no_gluon)),
    Design("sparse attention in blocks of 128 and 64", replace(SHIPS, blocks=(128, 64)), compared=False),
    Design("GEMM with three stages", SHIPS, setting(gemm_sm90, "STAGES", 3)),
    Design("linears by the portable kernels", SHIPS, setting(gemm_sm90, "why_not", no_gluon_for_8_bits)),
    Design("topk 0.2", replace(SHIPS, topk=0.2), compared=False),
    Design("dense, in 8 bits", Quantized(restorable=False), compared=False),
    Design("torch.compile", None, compiled=True, compared=False),
]
EXTRA = {
    "queries of the prompt in e4m3", "never a CUDA graph", "sparse attention by the portable kernel",
    "linears by the portable kernels", "GELU's result in bf16, then e4m3", "dense, in 8 bits", "torch.compile",
    "sparse attention in blocks of 128 and 64", "GEMM with three stages",
}


def main() -> int:
    options = options_of(__doc__.partition("\n")[0], "ltx2-19b", "tiny-ltx2", layers=8, frames=121, height=1024, width=1792, extra=0, turns=6, forwards=4, at_once=8)
    designs = [d for d in DESIGNS if options.extra or options.dry or options.launches or options.only or d.name not in EXTRA]
    if options.dry:
        designs = [design for design in designs if not design.compiled]

    def build():
        if options.launches:
            transformer = on_meta("ltx2-19b", 1)
            return transformer, (), arguments_on_meta(options)
        pipe = pipeline(options, sparse=True)
        return pipe.transformer, *arguments_of_a_step(pipe, options, sparse=True)

    return run(options, designs, build, per=1 if options.dry else options.layers, unit="a block", more=tables_alone)


def arguments_on_meta(options) -> dict:
    meta = lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
    frames, height, width = (options.frames - 1) // 8 + 1, options.height // 32, options.width // 32
    tokens, wide = frames * height * width, torch.float32
    return {
        "hidden_states": meta(1, tokens, 128),
        "audio_hidden_states": meta(1, 126, 128),
        "encoder_hidden_states": meta(1, 1024, 3840),
        "audio_encoder_hidden_states": meta(1, 1024, 3840),
        "timestep": meta(1, dtype=wide),
        "sigma": meta(1, dtype=wide),
        "num_frames": frames, "height": height, "width": width, "fps": 24.0, "audio_num_frames": 126,
        "video_coords": meta(1, 3, tokens, 2, dtype=wide),
        "audio_coords": meta(1, 1, 126, 2, dtype=wide),
        "use_cross_timestep": False,
        "return_dict": False,
    }


def tables_alone(readies) -> None:
    """Print how long diffusers takes for the RoPE tables of a step, which are in every design's time."""
    model = readies[0].model
    seen = []
    modules = (model.rope, model.audio_rope, model.cross_attn_rope, model.cross_attn_audio_rope)
    own = type(model.rope).forward

    def noted(self, *args, **kwargs):
        seen.append((self, args, kwargs))
        return own(self, *args, **kwargs)

    with torch.no_grad(), mock.patch.object(type(model.rope), "forward", noted):
        type(model).forward(model, **readies[0].kwargs)  # the class's own: a graph would not call the modules
    if not torch.cuda.is_available():
        say(f"RoPE tables of {len(seen)} of {len(modules)} modules")
        return
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for module, args, kwargs in seen:
            own(module, *args, **kwargs)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    say(f"RoPE tables of a step alone: {statistics.median(times):.3f} ms a step")


if __name__ == "__main__":
    sys.exit(main())
