"""linear_qkv: the projections of one input by three weights of equal shape, ``a Wᵀ + b``.

a [..., K], W [N, K], b [N] have one dtype, or a and W have 8 bits (quantized.py) and b any dtype. The results [..., N]
have the same dtype, or for 8-bit operands fp32, fp16 or bf16. On sm_90, in bf16, fp16 and 8 bits, the kernel in
gemm_sm90_kernel.py runs once for all three and reads each weight in place. Its programs then run out of tiles once
instead of three times. Elsewhere three linears run: torch.nn.functional's, which cuBLAS does well, or three
`linear_8bit`. No gradient: under autograd the reference runs. Products of low rank may be added (low_rank.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import reference
from ..choice.registry import GLUON, PORTABLE, REFERENCE, Kernel, Op, why_not_reference
from ..dispatch import kernels_op
from ..quantized import Quantized, QuantizedWeight
from . import gemm_sm90
from .gemm_portable import check_dtype, check_linear, second_pair
from .linear import launch_8bit, pick_and_project_down
from .low_rank import LowRank, check_low_rank
from .spec import LINEAR, NOT_FOR_16_BITS, LinearSpec, spec_of, why_not_gluon, why_not_portable, why_not_pytorch_alone


def linear_qkv(
    a: torch.Tensor | Quantized,
    weights: Sequence[torch.Tensor | QuantizedWeight],
    biases: Sequence[torch.Tensor | None],
    *,
    low_rank: LowRank | None = None,
    dtype: torch.dtype | None = None,
    implementation: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``a Wᵀ + b`` for three weights and biases: three tensors [..., N].

    a: [..., K]. weights: three [N, K]. biases: three [N], or three None.
    a, weights: a Quantized and three QuantizedWeight of one format, or all tensors.
    low_rank: the factors of the products that are added for the three weights, or None.
    dtype: the results' dtype for a Quantized a: fp32, fp16 or bf16; None: bf16. Other results have a's dtype.
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
    second = pick_and_project_down(a, low_rank, implementation)
    if isinstance(a, Quantized):
        tensors = (a.values, *matrices, *biases, a.scale, *(weight.scale for weight in weights))
    else:
        tensors = (a, *matrices, *biases, *(None,) * 4)
    spec = spec_of("linear_qkv", implementation, *tensors, result=dtype, second=second, weights=3)
    return LINEAR_QKV.pick(spec).launch(*tensors, dtype, *second)


def _shapes(tensors: Sequence[torch.Tensor | None]) -> str:
    return ", ".join("None" if tensor is None else str(list(tensor.shape)) for tensor in tensors)


@kernels_op("linear_qkv")
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
    # No lists: KernelLaunch does not look into a list for arguments that need the custom op.
    return tuple(a.new_empty(*a.shape[:-1], weight_q.shape[0], dtype=dtype) for _ in range(3))


def _launch_gluon(*arguments):
    """Launch the kernel for sm_90, or the next one if operands are not aligned. Takes the arguments of
    `_linear_qkv`."""
    a, weights, biases, scales, dtype, second = _grouped(*arguments)
    matrix, pair = a.reshape(-1, a.shape[-1]), second_pair(*second)
    if not gemm_sm90.fits_tma(matrix, *weights, *pair):
        return (_by_pytorch if scales[0] is None else _launch_portable)(*arguments)
    outs = tuple(a.new_empty(*a.shape[:-1], weight.shape[0], dtype=dtype) for weight in weights)
    biases = [None if bias is None else bias.contiguous() for bias in biases]
    if scales[0] is not None:
        scales = [scale.reshape(-1).contiguous() for scale in scales]
    results = [out.view(matrix.shape[0], -1) for out in outs]
    gemm_sm90.launch_three(matrix, weights, biases, results, scales, pair)
    return outs


def _launch_portable(*arguments):
    """Launch the portable linear_8bit three times."""
    a, weights, biases, (a_scale, *scales), dtype, second = _grouped(*arguments)
    each = zip(weights, biases, scales, reference.parts_of_weights(*second, 3), strict=True)
    return tuple(
        launch_8bit(False, a, weight, bias, a_scale, scale, dtype, *part) for weight, bias, scale, part in each
    )


def _by_pytorch(*arguments):
    a, weights, biases, _, _, second = _grouped(*arguments)
    return reference.linear_qkv(a, weights, biases, None, *second)


def _by_reference(*arguments):
    a, weights, biases, (a_scale, *scales), dtype, second = _grouped(*arguments)
    if a_scale is not None:
        a, weights = Quantized(a, a_scale), list(map(QuantizedWeight, weights, scales))
    return reference.linear_qkv(a, weights, biases, dtype, *second)


def _grouped(a, *others):
    """Return a, the weights, the biases, the scales, the results' dtype, and (low, up)."""
    weights, biases, scales, (dtype, *second) = others[:3], others[3:6], others[6:10], others[10:]
    return a, weights, biases, scales, dtype, second or (None, None)


def _why_not_portable(spec: LinearSpec) -> str | None:
    return why_not_portable(spec) if spec.eight_bits else NOT_FOR_16_BITS


LINEAR_QKV = Op(
    "linear_qkv",
    (
        Kernel(GLUON, why_not_gluon, _linear_qkv.launch(GLUON, _launch_gluon)),
        Kernel(PORTABLE, _why_not_portable, _linear_qkv.launch(PORTABLE, _launch_portable)),
        Kernel(LINEAR, why_not_pytorch_alone, _by_pytorch, is_fused=False),
        Kernel(REFERENCE, why_not_reference, _by_reference, is_fused=False),
    ),
    name_in_8_bits="linear_qkv_8bit",
)
