"""The epilogue of the GEMM for sm_90: scales, bias, GELU, gate and residual of a tile in registers, and its store.

The sums of a tile go through it one chunk of columns at a time. gemm_sm90_kernel.py has the rest of the kernel.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..gluon_releases import reinterpret, tma_store
from ..saturation import saturate
from .gemm_portable import bound_scale

_bound_scale = gluon.jit(bound_scale.fn)
_saturate = gluon.jit(saturate.fn)


@gluon.jit
def store_tile(
    acc, a_scale, to_result, sample, row, weight, column, M, N, staging, INDEX: gl.constexpr, epilogue,
    KIND: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    """Run the epilogue one chunk of columns at a time, and store from the staging buffers from INDEX on."""
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    CHUNK: gl.constexpr = staging.shape[3]
    if COLUMNS > CHUNK:
        HALF: gl.constexpr = COLUMNS // 2
        left, right = acc.reshape([ROWS, 2, HALF]).permute([0, 2, 1]).split()
        left = gl.convert_layout(left, part_of(acc.type.layout, HALF), assert_trivial=True)
        right = gl.convert_layout(right, part_of(acc.type.layout, HALF), assert_trivial=True)
        NEXT: gl.constexpr = INDEX + HALF // CHUNK
        store_tile(left, a_scale, to_result, sample, row, weight, column, M, N, staging, INDEX, epilogue, KIND, GELU)
        store_tile(
            right, a_scale, to_result, sample, row, weight, column + HALF, M, N, staging, NEXT, epilogue, KIND, GELU
        )
    else:
        columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, acc.type.layout))
        residual, outs = epilogue[0], epilogue[1]
        value = _apply_epilogue(acc, a_scale, sample, row, weight, columns, M, N, epilogue, KIND, GELU)
        if residual is not None:
            # Loaded only now: earlier it would take registers beside the gates.
            kept = chunk_as(staging, INDEX, residual.dtype).reshape([ROWS, COLUMNS]).load(acc.type.layout)
            value = _add_residual(value, kept, sample, epilogue[3])
        if to_result is not None:
            value *= to_result[:, None]
        if epilogue[4] is not None:
            rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, acc.type.layout))
            value = _saturate(value, rows < M, epilogue[4])
        buffer = chunk_as(staging, INDEX, outs[0].dtype)
        buffer.reshape([ROWS, COLUMNS]).store(value.to(outs[0].dtype))
        fence_async_shared()
        for i in gl.static_range(len(outs)):
            if len(outs) == 1 or weight == i:
                tma_store(outs[i], [sample, row, column], buffer)


@gluon.jit
def _apply_epilogue(acc, a_scale, sample, row, weight, columns, M, N, epilogue, KIND: gl.constexpr, GELU: gl.constexpr):
    """Return c_out ⊙ f(acc · scales + b)."""
    biases, coefficients, scales = epilogue[2], epilogue[3], epilogue[5]
    _, _, c_out, out_stride_b, out_stride_c, starts, runs, _, _ = coefficients
    mask = columns < N
    if a_scale is not None:
        w_scale = gl.load(_of_weight(scales[1], weight) + columns, mask=mask, other=0.0)
        acc = acc.to(gl.float32) * w_scale[None, :] * a_scale[:, None]
    if biases[0] is not None:
        acc += gl.load(_of_weight(biases, weight) + columns, mask=mask, other=0.0).to(gl.float32)[None, :]
    if GELU:
        acc = _gelu(acc)
    if KIND == 1:
        acc *= gl.load(c_out + sample.to(gl.int64) * out_stride_b).to(gl.float32)
    elif KIND == 2:
        gate = c_out + sample.to(gl.int64) * out_stride_b + columns * out_stride_c
        acc *= gl.load(gate, mask=mask, other=0.0).to(gl.float32)[None, :]
    elif KIND == 4:
        acc = _gate_by_run(acc, sample * M + row, c_out + columns * out_stride_c, out_stride_b, mask, starts, runs)
    return acc


@gluon.jit
def _of_weight(pointers, weight):
    """Return the pointer that belongs to the weight."""
    pointer = pointers[0]
    for i in gl.static_range(1, len(pointers)):
        pointer = gl.where(weight == i, pointers[i], pointer)
    return pointer


@gluon.jit
def _gate_by_run(acc, token, gates, stride, mask, starts, runs):
    """Return acc, whose rows are the tokens from `token` on, times the gates of each token's run.

    Taken run by run, the gates are one row in registers. Gathered by token they would take as many registers as acc.
    """
    ROWS: gl.constexpr = acc.shape[0]
    tokens = token + gl.arange(0, ROWS, gl.SliceLayout(1, acc.type.layout))
    for run in range(runs):
        begin = gl.load(starts + run)
        end = gl.load(starts + run + 1)
        if (begin < token + ROWS) & (end > token):
            gate = gl.load(gates + run * stride, mask=mask, other=0.0).to(gl.float32)
            within = (tokens >= begin) & (tokens < end)
            acc *= gl.where(within[:, None], gate[None, :], 1.0)
    return acc


@gluon.jit
def _add_residual(value, kept, sample, coefficients):
    c_skip, skip_stride_b, _, _, _, _, _, skip_factor, out_factor = coefficients
    kept = kept.to(gl.float32)
    if c_skip is not None:
        kept *= gl.load(c_skip + sample.to(gl.int64) * skip_stride_b).to(gl.float32)
    return value * out_factor + kept * skip_factor


@gluon.jit
def _gelu(x):
    """x / (1 + exp(-2u)) with u = √(2/π) (x + 0.044715 x³) as in linear_gelu, in few instructions: exp(-2u) is
    2 to the power x (c + d x²), and the division is a product with an approximate reciprocal."""
    e = gl.exp2(x * (-2.302208198144325 - 0.1029432395800185 * x * x))
    return x * gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1 + e], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def divide_by_bound(rows, mask, first, bound):
    """Return the factor for each row's results before they are rounded to 8 bits. The tile of the first columns stores
    its inverse, the row's scale."""
    a_norm, w_norm, bias_bound, result_scale = bound
    scale = _bound_scale(gl.load(a_norm + rows, mask=mask, other=0.0), gl.load(w_norm), gl.load(bias_bound))
    gl.store(result_scale + rows, scale, mask=mask & first)
    return 1 / scale


@gluon.jit
def chunk_as(staging, index, DTYPE: gl.constexpr):
    """Return a chunk of the staging buffer as DTYPE. Residual and result may have different 16-bit dtypes."""
    ROWS: gl.constexpr = staging.shape[2]
    CHUNK: gl.constexpr = staging.shape[3]
    return reinterpret(staging.index(index), DTYPE, [1, ROWS, CHUNK], staging.layout)


@gluon.constexpr_function
def sum_layout(columns, bits):
    """Return the layout of the sums for operands of this many bits. An instruction multiplies 32 bytes along K."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 256 // bits])


@gluon.constexpr_function
def part_of(layout, columns):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, layout.instr_shape[2]])
