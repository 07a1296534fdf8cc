"""Every kernel at small sizes, in parts that sanitize_kernels.py runs side by side."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import product
from unittest import mock

import torch

from scripts.tools.every_launch import launch_of, launch_one_attention
from turbo_rcm_patch.kernels.attention import attention_sm90
from turbo_rcm_patch.kernels.attention.attention import _attention_backward, attention_to_e4m3
from turbo_rcm_patch.kernels.attention_8bit import attention_8bit_sm90
from turbo_rcm_patch.kernels.attention_8bit.attention_8bit import attention_8bit
from turbo_rcm_patch.kernels.attention_8bit.quantize_qkv import quantize_qkv
from turbo_rcm_patch.kernels.block_sparse.block_sparse_attention import (
    block_sparse_attention,
    block_sparse_attention_8bit,
)
from turbo_rcm_patch.kernels.coefficient import Runs
from turbo_rcm_patch.kernels.conv import conv_pairs_sm90, conv_rows_sm90, conv_sm90
from turbo_rcm_patch.kernels.conv.conv_8bit import CONV_8BIT
from turbo_rcm_patch.kernels.conv.conv_pairs import CONV_PAIRS
from turbo_rcm_patch.kernels.conv.conv_pairs_weight import pair_weight
from turbo_rcm_patch.kernels.conv.conv_skip import ConvSpec, conv_skip
from turbo_rcm_patch.kernels.dispatch import KERNEL_DTYPES, SM90
from turbo_rcm_patch.kernels.linear import gemm_sm90
from turbo_rcm_patch.kernels.linear.linear import linear_8bit, linear_low_rank
from turbo_rcm_patch.kernels.linear.linear_gelu import linear_gelu
from turbo_rcm_patch.kernels.linear.linear_qkv import linear_qkv
from turbo_rcm_patch.kernels.linear.linear_skip import linear_skip
from turbo_rcm_patch.kernels.linear.low_rank import RANK_STEP, LowRank
from turbo_rcm_patch.kernels.quantized import FP8, INT8, QuantizedWeight
from turbo_rcm_patch.kernels.rows.gelu import gelu
from turbo_rcm_patch.kernels.rows.layer_norm_modulate import layer_norm_modulate
from turbo_rcm_patch.kernels.rows.quantize_rows import quantize_rows
from turbo_rcm_patch.kernels.rows.rms_norm_rope import rms_norm_rope
from turbo_rcm_patch.kernels.rows.rms_norm_silu import rms_norm_silu
from turbo_rcm_patch.kernels.rows.rms_norm_silu_8bit import MEASURE_NORM_SILU, QUANTIZE_NORM_SILU
from turbo_rcm_patch.kernels.rows.rms_norm_silu_pairs import RMS_NORM_SILU_PAIRS
from turbo_rcm_patch.kernels.rows.skip import skip
from turbo_rcm_patch.kernels.sparse_linear import sparse_linear_sm90
from turbo_rcm_patch.kernels.sparse_linear.sparse_linear_attention import sparse_linear_attention

FP32, FP16, BF16 = KERNEL_DTYPES


@contextlib.contextmanager
def few_multiprocessors() -> Iterator[None]:
    """Let small work fill the GPU in this context: each program of the sm_90 kernels walks over several tiles."""
    few = (SM90, 4)
    with (
        mock.patch.object(gemm_sm90, "device_properties", return_value=few),
        mock.patch.object(attention_sm90, "device_properties", return_value=few),
        mock.patch.object(attention_8bit_sm90, "device_properties", return_value=few),
        mock.patch.object(sparse_linear_sm90, "device_properties", return_value=few),
        mock.patch.object(conv_sm90, "device_properties", return_value=few),
        mock.patch.object(conv_rows_sm90, "device_properties", return_value=few),
        mock.patch.object(conv_pairs_sm90, "device_properties", return_value=few),
    ):
        yield


def values_on(device: torch.device) -> Callable[..., torch.Tensor]:
    """Return a function that draws a tensor of a shape and dtype, on the CPU: no other kernels run on the GPU."""
    return lambda *shape, dtype=BF16: torch.randn(shape).to(device, dtype)


def launch_linears(device: torch.device) -> None:
    values = values_on(device)
    batch, tokens, depth, channels = 2, 300, 392, 264
    runs, gate, modulation = coefficients_on(device, batch, tokens, channels)
    for dtype in KERNEL_DTYPES:
        a, weight, bias = (
            values(*shape, dtype=dtype) for shape in ((batch, tokens, depth), (channels, depth), (channels,))
        )
        residual = values(batch, tokens, channels, dtype=dtype)
        for c_out in (gate, modulation, runs[0]):
            linear_skip(a, weight, bias, residual, c_out=c_out)
        linear_skip(a, weight, bias, residual, c_skip=0.5, c_out=gate, dtype=FP16, result_scale=32.0)
        linear_gelu(a[0], weight, bias)
        linear_qkv(a, [weight] * 3, [bias] * 3)
        factors = LowRank(values(RANK_STEP, depth, dtype=dtype), values(channels, RANK_STEP, dtype=dtype))
        linear_skip(a, weight, bias, residual, c_out=gate, low_rank=factors)
        linear_low_rank(a, weight, bias, factors)


def launch_elementwise(device: torch.device) -> None:
    """Launch the skips, norms and GELU."""
    values = values_on(device)
    batch, tokens, channels, heads, head_dim = 2, 300, 264, 3, 80
    runs, gate, modulation = coefficients_on(device, batch, tokens, channels)
    for dtype in KERNEL_DTYPES:
        residual, bias = values(batch, tokens, channels, dtype=dtype), values(channels, dtype=dtype)
        for c_out in (gate, modulation, runs[0]):
            skip(residual, residual, c_out=c_out)
        skip(residual, residual, c_out=gate, dtype=FP16, result_scale=32.0)
        gelu(residual)
        layer_norm_modulate(residual, weight=bias, bias=bias)
        layer_norm_modulate(residual, scale=modulation, shift=modulation)
        layer_norm_modulate(residual, scale=runs[0], shift=runs[1])
        layer_norm_modulate(residual, scale=modulation, shift=modulation, centred=False)
        x, weight = values(batch, tokens, heads * head_dim, dtype=dtype), values(heads * head_dim, dtype=dtype)
        angles = values(tokens, head_dim, dtype=FP32)  # as diffusers' tables, with every value twice
        rms_norm_rope(x, weight, heads=heads, eps=1e-6)
        rms_norm_rope(x, weight, heads=heads, eps=1e-6, cos=angles[:, 0::2], sin=angles[:, 1::2])
        by_head = values(batch, tokens, heads, head_dim // 2, dtype=FP32)
        for halves in (False, True):
            rms_norm_rope(x, weight, heads=heads, eps=1e-6, cos=by_head, sin=by_head, halves=halves)
        frames, gain = values(batch, 3, 7, 11, 96, dtype=dtype), values(96, dtype=dtype)
        rms_norm_silu(frames, gain)
        rms_norm_silu(frames, gain, silu=False)


def coefficients_on(device: torch.device, batch: int, tokens: int, channels: int) -> tuple:
    """Return coefficients of runs, of a sample and of each token."""
    values = values_on(device)
    starts = torch.tensor([0, tokens // 3, tokens + 50, batch * tokens], dtype=torch.int32).to(device)
    runs = [Runs(values(3, channels, dtype=FP32), starts) for _ in range(2)]
    return runs, values(1, 1, channels, dtype=FP32), values(batch, tokens, channels, dtype=FP32)


def launch_attention(device: torch.device) -> None:
    values = values_on(device)
    tokens = 300
    for dtype, head_dim in ((FP32, 64), (FP16, 128), (BF16, 64), (BF16, 128)):
        q, k, v = (values(1, tokens, 3, head_dim, dtype=dtype) for _ in range(3))
        long = values(1, 4000, 3, head_dim, dtype=dtype)
        c_out = values(1, 1, 3 * head_dim, dtype=FP32)
        launch_one_attention(q, k, v, None, None, None, 0.1, False)
        launch_one_attention(q, k, v, q, None, c_out, 0.1, False)
        launch_one_attention(q, long, long, None, None, None, 0.1, False)  # in parts
        launch_one_attention(q, long, long, None, None, None, 0.1, True)
        for keys in (k, long):
            attention_to_e4m3(q, keys, keys, scale=0.1)
        out, raw_out, lse = launch_one_attention(q, k, v, None, None, None, 0.1, True)
        _attention_backward(out, q, k, v, raw_out, lse, 0.1, True, True)


def launch_convolutions(device: torch.device) -> None:
    values = values_on(device)
    for dtype, (channels, columns) in product(KERNEL_DTYPES, ((96, 96), (64, 192), (64, 256), (68, 3))):
        x, weight = values(1, 4, 13, 21, channels, dtype=dtype), values(columns, 3, 3, 3, channels, dtype=dtype)
        residual, bias = values(1, 2, 13, 21, columns, dtype=dtype), values(columns, dtype=dtype)
        conv_skip(x, weight, bias, residual)
        as_in_module = weight.permute(0, 4, 1, 2, 3).contiguous()
        conv_skip(x, as_in_module.permute(0, 2, 3, 4, 1), bias, residual)
        conv_skip(x[:, 2:], weight, bias, residual, front=x[:, :2])
        conv_skip(x, weight[:, :1], bias, upsample=True)
        conv_skip(x[:, :3], weight[:, :1], bias, residual, upsample=True)  # which counts twice in every dimension
        conv_skip(x, weight[:, :, :1, :1].repeat(2, 1, 1, 1, 1), None, interleave=2)


def launch_convolutions_of_pairs(device: torch.device) -> None:
    values = values_on(device)
    for dtype, (C, N) in product(KERNEL_DTYPES, ((64, 128), (64, 192), (128, 512))):
        x, front, weight = (
            values(1, 5, 13, 21, C, dtype=dtype),
            values(1, 2, 13, 21, C, dtype=dtype),
            values(C, dtype=dtype),
        )
        planes = launch_of(RMS_NORM_SILU_PAIRS)(x, weight, front)
        combined = pair_weight(values(N, 3, 3, 3, C, dtype=dtype))
        spec = ConvSpec(device=x.device, dtype=dtype, shape=x.shape, weight_shape=(N, 3, 3, 3, C))
        if CONV_PAIRS.why_not_fused(spec) is None:
            launch = CONV_PAIRS.pick(spec).launch
            launch(planes, combined, values(N, dtype=dtype), values(1, 5, 13, 21, N, dtype=dtype), 5, dtype)
            launch(planes, combined, None, None, 5, dtype)


def launch_convolutions_of_8_bits(device: torch.device) -> None:
    values = values_on(device)
    for dtype, (C, N) in product(KERNEL_DTYPES, ((96, 96), (64, 192), (128, 64))):
        x, gain = values(1, 4, 13, 21, C, dtype=dtype), values(C, dtype=dtype)
        divisor, before = values(C, dtype=FP32).abs() + 1, values(2, dtype=FP32).abs()
        bounds = before.clone()
        launch_of(MEASURE_NORM_SILU)(x, gain, divisor, bounds)
        of_result = values(N, dtype=FP32), values(N, dtype=torch.int32), values(N, dtype=dtype)
        residual = values(1, 4, 13, 21, N, dtype=dtype)
        for kt, front in ((3, values(1, 2, 15, 23, C, dtype=INT8)), (1, None)):
            q, combined = launch_of(QUANTIZE_NORM_SILU)(x, gain, divisor, before, bounds, front, *of_result)
            weight = values(N, kt, 3, 3, C, dtype=INT8)
            sizes = {"shape": (1, 4, 13, 21, C), "weight_shape": weight.shape}
            spec = ConvSpec(device=x.device, dtype=dtype, eight_bits=(INT8,), **sizes)
            CONV_8BIT.pick(spec).launch(q, combined, weight, dtype, None if front is None else residual, front)


def launch_linears_of_8_bits(device: torch.device) -> None:
    values = values_on(device)
    batch, tokens, depth, channels = 2, 300, 400, 272
    x, residual, bias = values(batch, tokens, depth), values(batch, tokens, channels), values(channels)
    gate = values(1, 1, channels, dtype=FP32)

    def weight_of(rows: int, format: torch.dtype) -> QuantizedWeight:
        row_norm, whole_norm = values(rows, dtype=FP32).abs() + 1, values(1, dtype=FP32).abs()[0] + 1
        return QuantizedWeight(quantize_rows(values(rows, depth), format).values, row_norm, whole_norm)

    for format in (INT8, FP8):
        a, normed = quantize_rows(x, format, with_norm=True), layer_norm_modulate(x, quantized=format)
        weight = weight_of(channels, format)
        linear_8bit(a, weight, bias)
        linear_skip(normed, weight, bias, residual, c_out=gate)
        linear_qkv(a, [weight] * 3, [bias] * 3)
        linear_gelu(a, weight, bias, result=FP8)
        factors = LowRank(weight_of(RANK_STEP, format), values(channels, RANK_STEP), values(1, dtype=FP32).abs()[0])
        linear_skip(normed, weight, bias, residual, c_out=gate, low_rank=factors)
        linear_gelu(a, weight, bias, result=FP8, low_rank=factors)


def launch_attention_of_8_bits(device: torch.device) -> None:
    """Launch dense and sparse attention in 8 bits, which read the same operands."""
    values = values_on(device)
    tokens = 300
    for head_dim in (64, 128):
        q, k, v = (values(1, tokens, 3 * head_dim) for _ in range(3))
        norm, angles = values(3 * head_dim), values(tokens, head_dim // 2, dtype=FP32)
        turned = {"norm_q": norm, "norm_k": norm, "cos": angles, "sin": angles}
        quantized = quantize_qkv(q, k, v, heads=3, **turned)
        attention_8bit(quantized)
        attention_8bit(quantized, result=FP8)
        attention_8bit(quantized, residual=values(1, tokens, 3, head_dim), c_skip=0.5)
        for block_q, block_k in ((128, 64), (64, 128), (192, 128)):
            for result in (None, FP8):
                block_sparse_attention_8bit(quantized, mass=0.5, block_q=block_q, block_k=block_k, result=result)


def launch_sparse_attention(device: torch.device) -> None:
    values = values_on(device)
    tokens = 300
    for head_dim, (block_q, block_k) in product((64, 128), ((128, 64), (64, 128))):
        q, k, v = (values(1, tokens, 3, head_dim) for _ in range(3))
        block_sparse_attention(q, k, v, mass=0.5, block_q=block_q, block_k=block_k)
        for eight_bits, result in ((False, None), (True, None), (True, FP8)):
            options = {"block_q": block_q, "block_k": block_k, "quantized": eight_bits, "result": result}
            for weight in (values(head_dim, head_dim), None):
                sparse_linear_attention(q, k, v, weight, topk=0.5, **options)


PARTS = {
    "linears": launch_linears,
    "elementwise": launch_elementwise,
    "attention": launch_attention,
    "convolutions": launch_convolutions,
    "convolutions-pairs": launch_convolutions_of_pairs,
    "convolutions-8-bit": launch_convolutions_of_8_bits,
    "linears-8-bit": launch_linears_of_8_bits,
    "attention-8-bit": launch_attention_of_8_bits,
    "sparse-attention": launch_sparse_attention,
}
