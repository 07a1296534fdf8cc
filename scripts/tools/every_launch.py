"""Calls of every op that together launch every kernel that needs no `tune`, with every tile, dtype, kind of
coefficient and optional tensor.

The compile gate runs them with meta tensors, records what they launch, and compiles it without a GPU
(compile_without_gpu.py). Independent choices occur at least once each, and all choices that take registers occur
together. fp16 has the same launches as bf16. The rows of the matrices make the GEMM choose each of its tiles on a GPU
with compile_without_gpu.MULTIPROCESSORS.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import cycle, product
from unittest import mock

import torch

from turbo_rcm_patch.kernels.attention import attention_sm90
from turbo_rcm_patch.kernels.attention.attention import (
    ATTENTION,
    AttentionSpec,
    _attention_backward,
    _launch_gluon,
    _launch_portable,
    attention_to_e4m3,
)
from turbo_rcm_patch.kernels.attention_8bit.attention_8bit import attention_8bit
from turbo_rcm_patch.kernels.attention_8bit.quantize_qkv import QuantizedQKV, quantize_qkv
from turbo_rcm_patch.kernels.attention_8bit.spec import default_v_format
from turbo_rcm_patch.kernels.block_sparse.block_sparse_attention import (
    block_sparse_attention,
    block_sparse_attention_8bit,
)
from turbo_rcm_patch.kernels.choice.registry import GLUON, TRITON, Op, spec_of
from turbo_rcm_patch.kernels.coefficient import MAX_RUNS, Runs
from turbo_rcm_patch.kernels.conv import conv_sm90
from turbo_rcm_patch.kernels.conv.conv_8bit import CONV_8BIT
from turbo_rcm_patch.kernels.conv.conv_pairs import CONV_PAIRS
from turbo_rcm_patch.kernels.conv.conv_pairs_weight import pair_weight
from turbo_rcm_patch.kernels.conv.conv_skip import ConvSpec, conv_skip
from turbo_rcm_patch.kernels.conv.conv_weight import pack_weight
from turbo_rcm_patch.kernels.dispatch import KERNEL_DTYPES, why_not_triton_on
from turbo_rcm_patch.kernels.linear import gemm_sm90
from turbo_rcm_patch.kernels.linear.linear import linear_8bit, linear_low_rank
from turbo_rcm_patch.kernels.linear.linear_gelu import linear_gelu
from turbo_rcm_patch.kernels.linear.linear_qkv import linear_qkv
from turbo_rcm_patch.kernels.linear.linear_skip import linear_skip
from turbo_rcm_patch.kernels.linear.low_rank import LowRank
from turbo_rcm_patch.kernels.quantized import FP8, INT8, Quantized, QuantizedWeight
from turbo_rcm_patch.kernels.rows.gelu import gelu
from turbo_rcm_patch.kernels.rows.layer_norm_modulate import layer_norm_modulate
from turbo_rcm_patch.kernels.rows.quantize_rows import quantize_rows
from turbo_rcm_patch.kernels.rows.rms_norm_rope import rms_norm_rope
from turbo_rcm_patch.kernels.rows.rms_norm_silu import rms_norm_silu
from turbo_rcm_patch.kernels.rows.rms_norm_silu_8bit import MEASURE_NORM_SILU, QUANTIZE_NORM_SILU
from turbo_rcm_patch.kernels.rows.rms_norm_silu_pairs import RMS_NORM_SILU_PAIRS
from turbo_rcm_patch.kernels.rows.skip import skip
from turbo_rcm_patch.kernels.sizes import cdiv
from turbo_rcm_patch.kernels.sparse_linear.sparse_linear_attention import BLOCK_SIZES, sparse_linear_attention
from turbo_rcm_patch.kernels.sparse_linear.sparse_linear_map import choose_blocks

FP32, FP16, BF16 = KERNEL_DTYPES
DEVICE = torch.device("meta")  # of all operands; a test puts a GPU here
CHANNELS = 1536
ROWS = (4096, 1536, 768, 256)
RANK = 128
DEPTHS = (CHANNELS, CHANNELS - 1)  # a matrix that TMA and wide loads can read, and one that they cannot
MATRICES = (*product((FP32, BF16), ROWS, DEPTHS), *product((FP16,), ROWS[:1], DEPTHS))  # dtype, rows and depth
ODD_ROWS = ((FP32, 81), (BF16, 81), (BF16, 100), (BF16, 250))  # not a multiple of 16 bytes
ATTENTIONS = (*product((FP32, BF16), (64, 128, 256)), (BF16, 80), (FP16, 128), *ODD_ROWS)  # dtype and head_dim


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def quantized(*shape: int, format: torch.dtype) -> Quantized:
    return Quantized(meta(*shape, dtype=format), *(meta(*shape[:-1], dtype=FP32) for _ in range(2)))


def quantized_weight(depth: int, format: torch.dtype) -> QuantizedWeight:
    return QuantizedWeight(meta(CHANNELS, depth, dtype=format), meta(CHANNELS, dtype=FP32), meta(dtype=FP32))


def low_rank(*, format: torch.dtype | None = None, weights: int = 1) -> LowRank:
    """Return the factors of a LoRA on weights [CHANNELS, CHANNELS], in bf16 or a format."""
    down = meta(weights * RANK, CHANNELS, dtype=format or BF16)
    if format is not None:
        down = QuantizedWeight(down, meta(weights * RANK, dtype=FP32), meta(dtype=FP32))
    return LowRank(down, meta(weights * CHANNELS, RANK), meta(dtype=FP32))


def formats() -> tuple[torch.dtype, ...]:
    """Return the 8-bit formats that this GPU's kernels take."""
    return tuple(f for f in (INT8, FP8) if why_not_triton_on(DEVICE, f, (f,)) is None)


def coefficients(batch: int, tokens: int, channels: int = CHANNELS) -> tuple[torch.Tensor | None, ...]:
    """Return one coefficient of each kind (coefficient.py): one, per sample, per channel, per token."""
    return None, *(meta(batch, *varies, dtype=FP32) for varies in ((1, 1), (1, channels), (tokens, channels)))


def pairs_of_kinds(*sizes: int) -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Return pairs of c_skip and c_out: both of every kind, and of different kinds."""
    one, *others = kinds = coefficients(*sizes)
    return list(zip(kinds, (*others, one), strict=True))


def runs(channels: int = CHANNELS) -> Runs:
    return Runs(meta(MAX_RUNS, channels, dtype=FP32), meta(MAX_RUNS + 1, dtype=torch.int32))


@contextlib.contextmanager
def without_gluon() -> Iterator[None]:
    """Behave as if Triton's Gluon could not be imported: the portable kernels run on sm_90 too."""
    with contextlib.ExitStack() as stack:
        for module in (attention_sm90, conv_sm90, gemm_sm90):
            stack.enter_context(mock.patch.object(module, "GLUON_ERROR", ""))
        yield


def launch_attention() -> None:
    for dtype, head_dim in ATTENTIONS:
        x = meta(2, 300, 3, head_dim, dtype=dtype)
        *_, per_token = coefficients(2, 300, 3 * head_dim)
        launch_one_attention(x, x, x, None, None, None, 1.0, False)
        launch_one_attention(x, x, x, x, per_token, per_token, 1.0, True)
    x, long = meta(2, 300, 3, 128), meta(2, 10_000, 3, 128)
    for c_skip, c_out in pairs_of_kinds(2, 300, 3 * 128):
        launch_one_attention(x, x, x, x, c_skip, c_out, 1.0, False)
    for keys, save_for_backward in product((x, long), (False, True)):  # sm_90 cuts the long ones into parts
        launch_one_attention(x, keys, keys, None, None, None, 1.0, save_for_backward)
    if FP8 in formats():
        for keys, (dtype, head_dim) in product((300, 10_000), ATTENTIONS):
            kv = meta(2, keys, 3, head_dim, dtype=dtype)
            attention_to_e4m3(meta(2, 300, 3, head_dim, dtype=dtype), kv, kv)


def launch_one_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, residual: torch.Tensor | None, *others):
    """Launch the kernel that is picked. others: c_skip, c_out, scale and save_for_backward. Returns out, F and lse."""
    options = {"head_dim": q.shape[3], "has_residual": residual is not None}
    is_gluon = ATTENTION.pick(spec_of("auto", q, k, v, kind=AttentionSpec, **options)).name == GLUON
    return (_launch_gluon if is_gluon else _launch_portable)(q, k, v, residual, *others)


def launch_attention_backward() -> None:
    for dtype, head_dim in ATTENTIONS:
        x = meta(2, 300, 3, head_dim, dtype=dtype)
        _attention_backward(x, x, x, x, x, meta(2, 3, 300, dtype=FP32), 1.0, True, True)


def launch_linear_skip() -> None:
    for dtype, rows, depth in MATRICES:
        a, residual = meta(1, rows, depth, dtype=dtype), meta(1, rows, CHANNELS, dtype=FP32)
        weight, bias = meta(CHANNELS, depth, dtype=dtype), meta(CHANNELS, dtype=dtype)
        *_, per_token = coefficients(1, rows)
        linear_skip(a, weight, bias, residual, c_skip=per_token, c_out=per_token)
    samples, weight = meta(2, ROWS[0] // 2, CHANNELS), meta(CHANNELS, CHANNELS)
    per_sample = coefficients(2, ROWS[0] // 2)[1]
    kinds = [*pairs_of_kinds(2, ROWS[0] // 2), (None, None), (per_sample, per_sample)]
    for (c_skip, c_out), (kept, result) in zip(cycle(kinds), product(KERNEL_DTYPES, repeat=2), strict=False):
        residual = meta(2, ROWS[0] // 2, CHANNELS, dtype=kept)
        linear_skip(samples, weight, None, residual, c_skip=c_skip, c_out=c_out, dtype=result)
    for rows in ROWS:  # a Wan block's
        a, residual, gate = meta(1, rows, CHANNELS), meta(1, rows, CHANNELS), meta(1, 1, CHANNELS, dtype=FP32)
        linear_skip(a, weight, meta(CHANNELS), residual, c_out=gate)
        linear_skip(a, weight, meta(CHANNELS), residual, c_out=runs())
        linear_skip(a, weight, meta(CHANNELS), residual, c_out=gate, low_rank=low_rank())
    linear_skip(meta(1, ROWS[0], CHANNELS), weight, None, meta(1, ROWS[0], CHANNELS), c_out=runs(), low_rank=low_rank())
    for c_skip, c_out in product((None, per_sample), (None, gate, runs())):  # of a residual kept in fp16
        for kept, result in ((BF16, FP16), (FP16, FP16), (FP16, BF16)):
            residual = meta(2, ROWS[0] // 2, CHANNELS, dtype=kept)
            options = {"dtype": result, "result_scale": 32.0 if result == FP16 else 1.0}
            linear_skip(samples, weight, meta(CHANNELS), residual, c_skip=c_skip, c_out=c_out, **options)
    for format in formats():
        _launch_8bit_linear_skip(format)


def _launch_8bit_linear_skip(format: torch.dtype) -> None:
    gate = meta(1, 1, CHANNELS, dtype=FP32)
    weight = quantized_weight(CHANNELS, format)
    for rows in ROWS:
        a = quantized(1, rows, CHANNELS, format=format)
        *_, per_token = coefficients(1, rows)
        linear_skip(a, weight, meta(CHANNELS), meta(1, rows, CHANNELS, dtype=FP32), c_skip=per_token, c_out=per_token)
        linear_skip(a, weight, meta(CHANNELS), meta(1, rows, CHANNELS), c_out=gate)
        factors = low_rank(format=format)
        linear_skip(a, weight, meta(CHANNELS), meta(1, rows, CHANNELS), c_out=gate, low_rank=factors)
    a = quantized(2, ROWS[0] // 2, CHANNELS, format=format)
    per_sample = coefficients(2, ROWS[0] // 2)[1]
    skips = product((None, per_sample), (None, per_sample, gate, runs()))
    cases = [(*skip, FP16, FP16) for skip in skips] + [(None, gate, BF16, FP16), (None, gate, FP16, BF16)]
    for c_skip, c_out, kept, result in cases:
        residual = meta(2, ROWS[0] // 2, CHANNELS, dtype=kept)
        options = {"dtype": result, "result_scale": 32.0 if result == FP16 else 1.0}
        linear_skip(a, weight, meta(CHANNELS), residual, c_skip=c_skip, c_out=c_out, **options)
    for c_out in (gate, runs()):  # of a residual kept in fp16
        residual, options = meta(2, ROWS[0] // 2, CHANNELS, dtype=FP16), {"low_rank": low_rank(format=format)}
        linear_skip(a, weight, meta(CHANNELS), residual, c_out=c_out, dtype=FP16, result_scale=32.0, **options)


def launch_linear_8bit() -> None:
    for format, rows in product(formats(), ROWS):
        a, weight = quantized(rows, CHANNELS, format=format), quantized_weight(CHANNELS, format)
        for bias, dtype in ((meta(CHANNELS), BF16), (None, FP16), (meta(CHANNELS, dtype=FP32), FP32)):
            linear_8bit(a, weight, bias, dtype=dtype)
        linear_8bit(a, weight, meta(CHANNELS), low_rank=low_rank(format=format))


def launch_linear_low_rank() -> None:
    for rows in ROWS:
        linear_low_rank(meta(rows, CHANNELS), meta(CHANNELS, CHANNELS), meta(CHANNELS), low_rank())


def launch_linear_gelu() -> None:
    for dtype, rows, depth in MATRICES:
        a, weight = meta(rows, depth, dtype=dtype), meta(CHANNELS, depth, dtype=dtype)
        linear_gelu(a, weight, meta(CHANNELS, dtype=dtype))
    linear_gelu(meta(ROWS[0], CHANNELS), meta(CHANNELS, CHANNELS), None)
    for rows in ROWS:
        linear_gelu(meta(rows, CHANNELS), meta(CHANNELS, CHANNELS), meta(CHANNELS), low_rank=low_rank())
    for format, rows in product(formats(), ROWS):
        a, weight = quantized(rows, CHANNELS, format=format), quantized_weight(CHANNELS, format)
        for result in (None, FP8) if FP8 in formats() else (None,):
            linear_gelu(a, weight, meta(CHANNELS), result=result)
        linear_gelu(a, weight, meta(CHANNELS), result=result, low_rank=low_rank(format=format))


def launch_gelu() -> None:
    for dtype in KERNEL_DTYPES:
        gelu(meta(300, CHANNELS, dtype=dtype))


def launch_linear_qkv() -> None:
    for dtype, bias in product(KERNEL_DTYPES, (True, False)):
        biases = [meta(CHANNELS, dtype=dtype) if bias else None] * 3
        linear_qkv(meta(ROWS[0], CHANNELS, dtype=dtype), [meta(CHANNELS, CHANNELS, dtype=dtype)] * 3, biases)
    for format, bias in product(formats(), (True, False)):
        a, weights = quantized(ROWS[0], CHANNELS, format=format), [quantized_weight(CHANNELS, format)] * 3
        linear_qkv(a, weights, [meta(CHANNELS) if bias else None] * 3)
        if bias:
            linear_qkv(a, weights, [meta(CHANNELS)] * 3, low_rank=low_rank(format=format, weights=3))
    matrices = [meta(CHANNELS, CHANNELS)] * 3
    linear_qkv(meta(ROWS[0], CHANNELS), matrices, [meta(CHANNELS)] * 3, low_rank=low_rank(weights=3))


def launch_layer_norm_modulate() -> None:
    for channels, (x, result) in zip(cycle((1536, 5120)), product(KERNEL_DTYPES, repeat=2), strict=False):
        rows, gain = meta(2, 300, channels, dtype=x), meta(channels, dtype=x)
        layer_norm_modulate(rows, weight=gain, bias=gain, dtype=result)
        for modulation in (meta(2, channels, dtype=FP32), meta(2, 300, channels, dtype=FP32)):
            layer_norm_modulate(rows, scale=modulation, shift=modulation, dtype=result)
    for channels, dtype in ((3072, BF16), (5120, BF16), (5120, FP16), (1536, FP32)):
        starts = runs().starts
        scale, shift = (Runs(runs(channels).values, starts) for _ in range(2))
        layer_norm_modulate(meta(2, 300, channels, dtype=dtype), scale=scale, shift=shift, dtype=BF16)
    for channels, dtype in product((2048, 4096), (FP32, BF16)):  # LTX-2's
        x, one = meta(2, 300, channels, dtype=dtype), meta(2, channels, dtype=FP32)
        for modulation in (None, one, meta(2, 300, channels, dtype=dtype)):
            layer_norm_modulate(x, scale=modulation, shift=modulation, centred=False)
            for format in formats():
                layer_norm_modulate(x, scale=modulation, shift=modulation, centred=False, quantized=format)
    modulation = meta(2, 16384, dtype=FP32)
    layer_norm_modulate(meta(2, 300, 16384, dtype=FP32), scale=modulation, shift=modulation)  # no rows in flight
    for format, dtype, channels in product(formats(), (BF16, FP16, FP32), (1536, 3072, 5120)):
        x, gain = meta(2, 300, channels, dtype=dtype), meta(channels, dtype=dtype)
        layer_norm_modulate(x, weight=gain, bias=gain, quantized=format)
        for modulation in (meta(2, channels, dtype=FP32), meta(2, 300, channels, dtype=FP32)):
            layer_norm_modulate(x, scale=modulation, shift=modulation, quantized=format)
        starts = runs().starts
        scale, shift = (Runs(runs(channels).values, starts) for _ in range(2))
        layer_norm_modulate(x, scale=scale, shift=shift, quantized=format)


def launch_quantize_rows() -> None:
    depths = (1536, 5120, 8960, 13824)
    for format, dtype, depth, with_norm in product(formats(), KERNEL_DTYPES, depths, (True, False)):
        quantize_rows(meta(300, depth, dtype=dtype), format, with_norm)
    for format, heads, ranks in product(formats(), (12, 24, 40), (2, 4)):  # as they arrive from other GPUs
        message = meta(ranks, 300, heads // ranks * 128, dtype=BF16)
        quantize_rows(message.transpose(0, 1), format, in_parts=True)


def launch_rms_norm_rope() -> None:
    sizes = ((12, 128), (40, 128), (128, 128), (3, 80))
    for dtype, (heads, head_dim) in (*product((FP32, BF16), sizes), (FP16, sizes[0])):
        x, weight = meta(2, 300, heads * head_dim, dtype=dtype), meta(heads * head_dim, dtype=dtype)
        for angles in (None, meta(300, head_dim // 2, dtype=FP32)):
            rms_norm_rope(x, weight, heads=heads, eps=1e-6, cos=angles, sin=angles)
        pairs = meta(300, head_dim, dtype=FP32)  # as diffusers' tables, with every value twice
        rms_norm_rope(x, weight, heads=heads, eps=1e-6, cos=pairs[:, 0::2], sin=pairs[:, 1::2])
    for dtype, (heads, head_dim), halves in product((FP32, BF16), ((32, 128), (32, 64), (3, 80)), (True, False)):
        x, weight = meta(2, 300, heads * head_dim, dtype=dtype), meta(heads * head_dim, dtype=dtype)
        for angles in (meta(300, head_dim // 2, dtype=FP32), meta(1, 300, heads, head_dim // 2, dtype=FP32)):
            rms_norm_rope(x, weight, heads=heads, eps=1e-6, cos=angles, sin=angles, halves=halves)


def launch_rms_norm_silu() -> None:
    widths = (96, 192, 256, 384, 512, 1024, 100, 3)  # both VAEs' sizes, and odd ones
    for dtype, channels in (*product((FP32, BF16), widths), (FP16, widths[0])):
        x, weight = meta(2, 3, 20, channels, dtype=dtype), meta(channels, dtype=dtype)
        for silu in (True, False):
            rms_norm_silu(x, weight, silu=silu)


def launch_skip() -> None:
    dtypes = zip(product(KERNEL_DTYPES, repeat=2), cycle(KERNEL_DTYPES), strict=False)
    for (c_skip, c_out), ((kept, result), added) in zip(cycle(pairs_of_kinds(2, 300)), dtypes, strict=False):
        residual, output = meta(2, 300, CHANNELS, dtype=kept), meta(2, 300, CHANNELS, dtype=added)
        skip(residual, output, c_skip=c_skip, c_out=c_out, dtype=result)
    residual, output = meta(2, 300, CHANNELS), meta(2, 300, CHANNELS)
    for result, scale in ((BF16, 1.0), (FP16, 32.0)):
        skip(residual, output, c_out=runs(), dtype=result, result_scale=scale)


def launch_conv_skip() -> None:
    frames = (3, 60, 104)
    # Each number of columns, with channels for steps of each depth, and with channels that TMA cannot read.
    for N, C in product((256, 192, 128, 96, 64, 32, 3), (128, 96, 16, 20)):
        launch_convolution(*frames, C, N, window=(3, 3))
    for N, C in ((12, 256), (12, 228), (3, 96), (3, 68)):  # the positions of the window as columns
        launch_convolution(4, *frames[1:], C, N, window=(3, 3))
    for dtype, N, C in (*product((FP32,), (96, 32, 3), (96, 20)), (FP32, 32, 384), (FP16, 192, 128)):
        launch_convolution(*frames, C, N, window=(3, 3), dtype=dtype)
    for N, C in product((192, 96, 3), (96, 20)):
        launch_convolution(*frames, C, N, window=(3, 3), front=False)
    for N, C in product((512, 384, 192, 96), (128, 20)):
        for repeats in ((1, 1, 1), (2, 2, 2), (1, 1, 2)):
            launch_convolution(3, 120, 208, C, N, window=(1, 3), upsample=True, repeats=repeats)
        launch_convolution(*frames, C, 2 * N, window=(3, 1), interleave=2, dense=False)
    for N, C in product((384, 192, 96), (192, 20)):
        launch_convolution(*frames, C, N, window=(1, 1), dense=False)
    for options in ({}, {"front": False}, {"dense": False}, {"dtype": FP16}):  # enough frames to load rows once
        launch_convolution(6, *frames[1:], 96, 96, window=(3, 3), **options)
    for dtype, taps in product(KERNEL_DTYPES, (27, 9, 3)):
        pack_weight(meta(192, 192, taps, 1, 1, dtype=dtype).permute(0, 2, 3, 4, 1))


def launch_convolution(
    T: int, H: int, W: int, C: int, N: int, *, window: tuple[int, int], dtype: torch.dtype = BF16,
    upsample: bool = False, interleave: int = 1, dense: bool = True, front: bool = True,
    repeats: tuple[int, int, int] = (1, 1, 1),
) -> None:  # fmt: skip
    """Launch a convolution.

    window: kt and kh. dense: with a bias and a residual. front: the frames before are a tensor of their own. repeats:
    of the residual's frames, rows and columns.
    """
    kt, kh = window
    weight = meta(N, kt, kh, kh, C, dtype=dtype)
    before, x = (meta(1, count, H, W, C, dtype=dtype) for count in (kt - 1, T if front else T + kt - 1))
    scale = 2 if upsample else 1
    sizes = map(cdiv, (T * interleave, H * scale, W * scale), repeats)
    residual = meta(1, *sizes, N // interleave, dtype=dtype) if dense else None
    bias = meta(N, dtype=dtype) if dense else None
    options = {"upsample": upsample, "interleave": interleave}
    conv_skip(x, weight, bias, residual, front=before if front else None, **options)


def launch_conv_pairs() -> None:
    """The norm and the weight's sums are launched where the convolution runs: on sm_90, in bf16."""
    sizes = ((64, 128), (192, 192), (384, 384), (256, 256), (512, 1024))  # all columns, with channels of a whole step
    for (C, N), has_residual in product(sizes, (True, False)):
        spec = ConvSpec(device=DEVICE, dtype=BF16, shape=(1, 4, 60, 104, C), weight_shape=(N, 3, 3, 3, C))
        if CONV_PAIRS.why_not_fused(spec) is None:
            planes = launch_of(RMS_NORM_SILU_PAIRS)(meta(1, 3, 60, 104, C), meta(C), meta(1, 2, 60, 104, C))
            weight = pair_weight(meta(N, C, 3, 3, 3).permute(0, 2, 3, 4, 1))
            residual, bias = (meta(1, 3, 60, 104, N), meta(N)) if has_residual else (None, None)
            CONV_PAIRS.pick(spec).launch(planes, weight, bias, residual, 3, BF16)


def launch_conv_8bit() -> None:
    sizes = ((96, 96), (192, 192), (192, 384), (384, 384), (256, 256), (512, 1024), (64, 64), (48, 16))
    for (C, N), has_front in product(sizes, (True, False)):
        launch_convolution_8bit(C, N, has_front)
    launch_convolution_8bit(96, 96, True, residual=False)
    launch_convolution_8bit(192, 192, True, dtype=FP16)
    bounds = meta(2, dtype=FP32)
    for dtype, C in product((BF16, FP32), (96, 192, 256, 384, 512, 1024, 48)):
        x, gain, divisor = meta(1, 3, 60, 104, C, dtype=dtype), meta(C, dtype=dtype), meta(C, dtype=FP32)
        launch_of(MEASURE_NORM_SILU)(x, gain, divisor, bounds)
        of_result = meta(C, dtype=FP32), meta(C, dtype=torch.int32), meta(C, dtype=dtype)
        for front in (meta(1, 2, 62, 106, C, dtype=torch.int8), None):
            launch_of(QUANTIZE_NORM_SILU)(x, gain, divisor, bounds, bounds, front, *of_result)


def launch_convolution_8bit(
    C: int, N: int, has_front: bool, *, dtype: torch.dtype = BF16, residual: bool = True
) -> None:
    """Launch a convolution of 3×3×3 in 8 bits, or of an image without the frames before."""
    kt = 3 if has_front else 1
    x, front = (meta(1, frames, 62, 106, C, dtype=torch.int8) for frames in (3, 2))
    shape, weight = (1, 3, 60, 104, C), meta(N, kt, 3, 3, C, dtype=torch.int8)
    spec = ConvSpec(device=x.device, dtype=dtype, eight_bits=(torch.int8,), shape=shape, weight_shape=weight.shape)
    old = meta(1, 3, 60, 104, N, dtype=dtype) if residual else None
    CONV_8BIT.pick(spec).launch(x, meta(2, N, dtype=FP32), weight, dtype, old, front if has_front else None)


def launch_of(op: Op) -> Callable:
    return op.named(TRITON).launch


def launch_quantize_qkv() -> None:
    sizes = ((12, 128), (40, 128), (24, 128), (3, 64))
    for dtype, (heads, head_dim) in (*product((FP32, BF16), sizes), (FP16, sizes[0])):
        x, weight = meta(2, 300, heads * head_dim, dtype=dtype), meta(heads * head_dim, dtype=dtype)
        angles = meta(300, head_dim, dtype=FP32)[:, 0::2]
        quantize_qkv(x, x, x, heads=heads)
        quantize_qkv(x, x, x, heads=heads, norm_q=weight, norm_k=weight, cos=angles, sin=angles)
        quantize_qkv(x, x, x, heads=heads, norm_q=weight, norm_k=weight, v_format=FP16)


def launch_attention_8bit() -> None:
    formats = {FP16, default_v_format(DEVICE)}
    for v_format, head_dim in product(sorted(formats, key=str), (64, 128)):
        qkv = quantized_qkv(v_format, head_dim)
        for result in (None, FP8) if v_format == FP8 else KERNEL_DTYPES:
            attention_8bit(qkv, result=result)
        for (c_skip, c_out), dtype in zip(pairs_of_kinds(2, 300, 3 * head_dim), cycle(KERNEL_DTYPES), strict=False):
            attention_8bit(qkv, residual=meta(2, 300, 3, head_dim, dtype=dtype), c_skip=c_skip, c_out=c_out)
        *_, per_token = coefficients(2, 300, 3 * head_dim)
        residual = meta(2, 300, 3, head_dim)
        attention_8bit(qkv, residual=residual, c_skip=per_token, c_out=per_token)


def launch_sparse_linear_attention() -> None:
    formats = sorted({None, FP16, default_v_format(DEVICE)}, key=str)
    cases = [(BF16, 128, sizes) for sizes in product(BLOCK_SIZES, repeat=2)]
    cases += [(BF16, 64, (128, 64)), (BF16, 64, (64, 128)), (FP32, 64, (128, 64)), (FP32, 128, (64, 128))]
    for (dtype, head_dim, (block_q, block_k)), v_format in product(cases, formats):
        x, weight, bias = (meta(*shape, dtype=dtype) for shape in ((2, 300, 3, head_dim), (head_dim,) * 2, (head_dim,)))
        options = {"block_q": block_q, "block_k": block_k, "quantized": v_format is not None, "v_format": v_format}
        for proj_l in ((weight, bias), (None, None)):
            sparse_linear_attention(x, x, x, *proj_l, topk=0.5, **options)
    x, weight = meta(2, 300, 3, 128, dtype=FP16), meta(128, 128, dtype=FP32)
    for quantized in (False, True):
        sparse_linear_attention(x, x, x, weight, None, topk=0.5, quantized=quantized)
    x, bias = meta(2, 300, 3, 128), meta(128, dtype=FP32)  # proj_l in fp32
    sparse_linear_attention(x, x, x, weight, bias, topk=0.5, quantized=True)
    if FP8 in formats:
        for head_dim, (block_q, block_k) in product((64, 128), ((64, 128), (128, 64))):
            x, weight, bias = (meta(*shape) for shape in ((2, 300, 3, head_dim), (head_dim,) * 2, (head_dim,)))
            options = {"block_q": block_q, "block_k": block_k, "quantized": True, "result": FP8}
            for proj_l in ((weight, bias), (None, None)):
                sparse_linear_attention(x, x, x, *proj_l, topk=0.5, **options)
    for blocks in (512, 1182, 4000):
        choose_blocks(meta(1, 1, 2, 128), meta(1, 1, blocks, 128), kept=2)


def launch_block_sparse_attention() -> None:
    formats = {FP16, default_v_format(DEVICE)}
    cases = [(BF16, head_dim, sizes) for head_dim, sizes in product((64, 128), ((128, 64), (64, 128)))]
    cases += [(BF16, 128, (64, 64)), (BF16, 128, (128, 128)), (FP32, 64, (128, 64)), (FP32, 128, (64, 128))]
    for dtype, head_dim, (block_q, block_k) in cases:
        x, options = meta(2, 300, 3, head_dim, dtype=dtype), {"mass": 0.5, "block_q": block_q, "block_k": block_k}
        block_sparse_attention(x, x, x, **options)
        for v_format in sorted(formats, key=str):
            block_sparse_attention_8bit(quantized_qkv(v_format, head_dim)._replace(dtype=dtype), **options)
    for head_dim, dtype in product((64, 128), (BF16, FP16)):  # with the fastest blocks
        qkv = quantized_qkv(default_v_format(DEVICE), head_dim)
        block_sparse_attention_8bit(qkv._replace(dtype=dtype), mass=0.5)
        # Dense attention may take over, and splits the last tiles of queries along the keys.
        qkv = quantized_qkv(default_v_format(DEVICE), head_dim, tokens=4000)
        block_sparse_attention_8bit(qkv._replace(dtype=dtype), mass=1)
    if default_v_format(DEVICE) == FP8:
        for head_dim, (block_q, block_k) in (
            (64, (None, None)),
            (128, (None, None)),
            (64, (128, 64)),
            (128, (64, 128)),
        ):
            qkv = quantized_qkv(FP8, head_dim)
            block_sparse_attention_8bit(qkv, mass=0.5, block_q=block_q, block_k=block_k, result=FP8)
    for dtype, tokens in ((FP16, 300), (BF16, 32760), (BF16, 75600)):
        x = meta(1, tokens, 3, 128, dtype=dtype)
        block_sparse_attention(x, x, x, mass=0.5)


def quantized_qkv(v_format: torch.dtype, head_dim: int, tokens: int = 300) -> QuantizedQKV:
    groups = cdiv(tokens, 128)
    x = meta(2, tokens, 3, head_dim, dtype=torch.int8)
    v = meta(2, 3, head_dim, 128 * groups, dtype=FP8) if v_format == FP8 else meta(*x.shape, dtype=v_format)
    q_scale, k_scale, v_scale = (meta(2, *shape, dtype=FP32) for shape in ((tokens, 3), (3, groups), (3, head_dim)))
    return QuantizedQKV(x, q_scale, x, k_scale, v, v_scale, BF16)


LAUNCHES = {
    "attention": launch_attention,
    "attention_backward": launch_attention_backward,
    "linear_skip": launch_linear_skip,
    "linear_8bit": launch_linear_8bit,
    "linear_low_rank": launch_linear_low_rank,
    "linear_gelu": launch_linear_gelu,
    "gelu": launch_gelu,
    "linear_qkv": launch_linear_qkv,
    "layer_norm_modulate": launch_layer_norm_modulate,
    "quantize_rows": launch_quantize_rows,
    "rms_norm_rope": launch_rms_norm_rope,
    "rms_norm_silu": launch_rms_norm_silu,
    "skip": launch_skip,
    "conv_skip": launch_conv_skip,
    "conv_pairs": launch_conv_pairs,
    "conv_8bit": launch_conv_8bit,
    "quantize_qkv": launch_quantize_qkv,
    "attention_8bit": launch_attention_8bit,
    "sparse_linear_attention": launch_sparse_linear_attention,
    "block_sparse_attention": launch_block_sparse_attention,
}
