"""linear_qkv: the projections of one input by three weights of equal shape, ``a Wᵀ + b``.

a [..., K], W [N, K], b [N] of one dtype, or a and W in 8 bits (quantized.py) and b of any; results [..., N] in that
dtype, or where they have 8 bits in fp32, fp16 or bf16. On sm_90, in bf16, fp16 and 8 bits, one launch of the kernel in
gemm_sm90_kernel.py, which reads the weights where they are: its programs run out of tiles once instead of three
times. Everywhere else three linears: of torch.nn.functional, which cuBLAS does well, or three `linear_8bit`. No
gradient: under autograd the reference runs. Products of low rank may be added (low_rank.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import reference
from ..dispatch import kernel_op, use_triton
from ..quantized import Quantized, QuantizedWeight
from . import gemm_sm90
from .gemm_portable import check_dtype, check_linear, second_pair
from .linear import _linear_8bit, project_down
from .low_rank import LowRank, check_low_rank


def linear_qkv(
    a: torch.Tensor | Quantized,
    weights: Sequence[torch.Tensor | QuantizedWeight],
    biases: Sequence[torch.Tensor | None],
    *,
    low_rank: LowRank | None = None,
    dtype: torch.dtype | None = None,
    implementation: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``a Wᵀ + b`` for a [..., K], three weights [N, K] and three biases [N] or three None; returns three [..., N].

    a, weights: a Quantized and three QuantizedWeight of one format, or tensors all.
    low_rank: of other products that are added, of the three weights.
    dtype: of the results of a Quantized, fp32, fp16 or bf16; None: bf16. Other results have a's.
    implementation: "auto", "triton" or "torch" (see dispatch.py).
    Raises ValueError for shapes, dtypes or devices that do not fit together.
    """
    matrices = [weight.values if isinstance(weight, QuantizedWeight) else weight for weight in weights]
    if len(matrices) != 3 or any(weight.shape != matrices[0].shape for weight in matrices):
        raise ValueError(f"linear_qkv: weights have the shapes {_shapes(matrices)}; they must be three of one [N, K].")
    if len(biases) != 3 or len({bias is None for bias in biases}) > 1:
        raise ValueError(f"linear_qkv: biases have the shapes {_shapes(biases)}; they must be three of [N] or None.")
    for weight, bias in zip(weights, biases, strict=True):
        check_linear("linear_qkv", a, weight, bias)
    check_low_rank("linear_qkv", a, matrices[0].shape[0], low_rank, weights=3)
    dtype = check_dtype("linear_qkv", dtype, a)
    second = project_down(a, low_rank, implementation)
    if isinstance(a, Quantized):
        tensors = (a.values, *matrices, *biases, a.scale, *(weight.scale for weight in weights))
        fused = use_triton(implementation, *tensors, *second, has_gradient=False, formats=(a.values.dtype,))
    else:
        tensors = (a, *matrices, *biases, *(None,) * 4)
        fused = use_triton(implementation, *tensors, *second, has_gradient=False)
    if fused:
        return _linear_qkv(*tensors, dtype, *second)
    return reference.linear_qkv(a, weights, biases, dtype, *second)


def _shapes(tensors: Sequence[torch.Tensor | None]) -> str:
    return ", ".join("None" if tensor is None else str(list(tensor.shape)) for tensor in tensors)


@kernel_op("linear_qkv")
def _linear_qkv(
    a: torch.Tensor,
    weight_q: torch.Tensor,
    weight_k: torch.Tensor,
    weight_v: torch.Tensor,
    bias_q: torch.Tensor | None,
    bias_k: torch.Tensor | None,
    bias_v: torch.Tensor | None,
    a_scale: torch.Tensor | None,
    scale_q: torch.Tensor | None,
    scale_k: torch.Tensor | None,
    scale_v: torch.Tensor | None,
    dtype: torch.dtype,
    low: torch.Tensor | None = None,
    up: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # Arguments one by one: in a list, a KernelOp would not see those that need the custom op.
    weights, biases, scales = (weight_q, weight_k, weight_v), (bias_q, bias_k, bias_v), (scale_q, scale_k, scale_v)
    matrix, second = a.reshape(-1, a.shape[-1]), second_pair(low, up)
    if gemm_sm90.why_not(matrix, *weights, dtype=dtype, second=second) is not None:
        if a_scale is None:
            return reference.linear_qkv(a, weights, biases, None, low, up)
        each = zip(weights, biases, scales, reference.parts_of_weights(low, up, 3), strict=True)
        return tuple(_linear_8bit(a, weight, bias, a_scale, scale, dtype, *part) for weight, bias, scale, part in each)
    outs = tuple(a.new_empty(*a.shape[:-1], weight.shape[0], dtype=dtype) for weight in weights)
    biases = [None if bias is None else bias.contiguous() for bias in biases]
    if a_scale is not None:
        a_scale, *scales = (scale.reshape(-1).contiguous() for scale in (a_scale, *scales))
    results = [out.view(matrix.shape[0], -1) for out in outs]
    gemm_sm90.launch_three(matrix, weights, biases, results, (a_scale, *scales), second)
    return outs


@_linear_qkv.register_fake
def _(a, weight_q, *others):
    dtype = next(other for other in others if isinstance(other, torch.dtype))
    return tuple(a.new_empty(*a.shape[:-1], weight_q.shape[0], dtype=dtype) for _ in range(3))
