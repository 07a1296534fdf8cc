"""LoKr and LoHa: a weight's change as a product of small matrices, under the names of LyCORIS and PEFT.

    LoKr   W += scale · kron(w1, w2)
    LoHa   W += scale · w1 * w2           element by element

Each of w1 and w2 is one matrix, or two, whose product it is: w1_a @ w1_b. scale is alpha/rank, as for a LoRA. A LoKr of
whole matrices has no rank; LyCORIS, and the trainers that write its format, then take 1, whatever alpha is.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ..wording import name_of_dtype

_PREFIXES = {"LoKr": "lokr", "LoHa": "hada"}
FACTORS = {  # the names of a kind's matrices
    kind: tuple(f"{prefix}_w{n}{end}" for n in (1, 2) for end in ("", "_a", "_b")) for kind, prefix in _PREFIXES.items()
}
_COMBINE = {"LoKr": torch.kron, "LoHa": operator.mul}


class Product(NamedTuple):
    """A change of a weight. left, right: the matrices of w1 and w2, one or two each."""

    kind: str  # "LoKr" or "LoHa"
    left: tuple[torch.Tensor, ...]
    right: tuple[torch.Tensor, ...]
    scale: float = 1.0

    @property
    def rank(self) -> int | None:
        """The rank that alpha is divided by, or None if both are whole matrices."""
        return next((len(factors[1]) for factors in (self.right, self.left) if len(factors) == 2), None)

    def dense(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the change as a matrix [out, in], in fp32. A convolution's inputs are flattened."""
        left, right = (
            functools.reduce(torch.matmul, [factor.to(device, torch.float32) for factor in factors])
            for factors in (self.left, self.right)
        )
        return self.scale * _COMBINE[self.kind](left, right)

    def why_not(self, outputs: int, inputs: int) -> str | None:
        """Return why this is no change of a weight [outputs, inputs], or None."""
        for factor in (*self.left, *self.right):
            if factor.dim() != 2 or not factor.numel():
                return f"has a matrix of shape {list(factor.shape)}"
            if not factor.is_floating_point():
                return f"holds {name_of_dtype(factor.dtype)}, not floating-point numbers"
        shapes = []
        for factors in (self.left, self.right):
            if factors[0].shape[1] != len(factors[-1]) and len(factors) == 2:
                return f"has matrices {list(factors[0].shape)} and {list(factors[1].shape)}, which have no product"
            shapes.append((len(factors[0]), factors[-1].shape[1]))
        (rows, columns), right = shapes
        if self.kind == "LoKr":
            rows, columns = rows * right[0], columns * right[1]
        elif right != (rows, columns):
            return f"multiplies [{rows}, {columns}] by {list(right)}"
        fits = (rows, columns) == (outputs, inputs)
        return None if fits else f"is [{rows}, {columns}], the model takes [{outputs}, {inputs}]"


def product_of(kind: str, parts: Mapping[str, torch.Tensor]) -> Product | None:
    """Return a module's product of a kind without its scale, or None if a matrix is missing or there are too many."""
    sides = []
    for n in (1, 2):
        whole, *pair = (parts.get(f"{_PREFIXES[kind]}_w{n}{end}") for end in ("", "_a", "_b"))
        given = tuple(_flat(matrix) for matrix in (whole, *pair) if matrix is not None)
        if len(given) != (2 if whole is None else 1):
            return None
        sides.append(given)
    return Product(kind, *sides)


def _flat(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix [out, in], where a convolution's has more dimensions of inputs."""
    return matrix.flatten(1) if matrix.dim() > 2 else matrix
