"""linear_qkv: the projections of one input by three weights of equal shape, ``a Wᵀ + b``.

a [..., K], W [N, K], b [N] of one dtype; results [..., N] in that dtype. On sm_90, in bf16 and fp16, one launch of the
kernel in gemm_hopper_kernel.py, which reads the weights where they are: its programs run out of tiles once instead of
three times. Everywhere else three calls of torch.nn.functional.linear, which cuBLAS does well. No gradient: under
autograd the reference runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import gemm_hopper, reference
from .dispatch import kernel_op, use_triton
from .gemm import check_linear


def linear_qkv(
    a: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    *,
    implementation: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``a Wᵀ + b`` for a [..., K], three weights [N, K] and three biases [N] or three None; returns three [..., N].

    implementation: "auto", "triton" or "torch" (see dispatch.py).
    Raises ValueError for shapes, dtypes or devices that do not fit together.
    """
    if len(weights) != 3 or len({weight.shape for weight in weights}) > 1:
        raise ValueError(f"linear_qkv: weights have the shapes {_shapes(weights)}; they must be three of one [N, K].")
    if len(biases) != 3 or len({bias is None for bias in biases}) > 1:
        raise ValueError(f"linear_qkv: biases have the shapes {_shapes(biases)}; they must be three of [N] or None.")
    for weight, bias in zip(weights, biases, strict=True):
        check_linear("linear_qkv", a, weight, bias)
    if not use_triton(implementation, a, *weights, *biases, has_gradient=False):
        return reference.linear_qkv(a, weights, biases)
    return _linear_qkv(a, *weights, *biases)


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # Arguments one by one: in a list, a KernelOp would not see those that need the custom op.
    weights, biases = (weight_q, weight_k, weight_v), (bias_q, bias_k, bias_v)
    matrix = a.reshape(-1, a.shape[-1])
    if gemm_hopper.why_not(matrix, *weights) is not None:
        return reference.linear_qkv(a, weights, biases)
    outs = tuple(a.new_empty(*a.shape[:-1], len(weight)) for weight in weights)
    biases = [None if bias is None else bias.contiguous() for bias in biases]
    gemm_hopper.launch_three(matrix, weights, biases, [out.view(len(matrix), -1) for out in outs])
    return outs


@_linear_qkv.register_fake
def _(a, weight_q, *_):
    return tuple(a.new_empty(*a.shape[:-1], weight_q.shape[0]) for _ in range(3))
