"""The optimizer Muon, for all matrices of one shape at a time, also in a CUDA graph.

torch.optim.Muon can do neither, and its two thousand launches took as long as the rest of a training step."""

from __future__ import annotations

from collections.abc import Iterable

import torch

# The coefficients of the polynomial that brings all singular values near 1 in five iterations, in bf16.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
# The RMS of an update at a learning rate of 1. It is AdamW's usual one, so that both optimizers' learning rates are
# similar (Liu et al. 2025, Muon is Scalable for LLM Training).
ROOT_MEAN_SQUARE = 0.2


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, made orthogonal, as the update of each matrix (Jordan et al. 2024, Muon).

    weights: matrices alone. lr: a 0-d tensor on the weights' device, so that schedules reach into a graph.
    """

    def __init__(self, weights: Iterable[torch.Tensor], lr: torch.Tensor, momentum: float, weight_decay: float):
        super().__init__(weights, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        """Update every weight once. All of them must have gradients."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.Tensor]] = {}
            for weight in group["params"]:
                by_shape.setdefault(weight.shape, []).append(weight)
            for weights in by_shape.values():
                self._update(weights, group["lr"], group["momentum"], group["weight_decay"])

    def _update(self, weights: list[torch.Tensor], lr: torch.Tensor, momentum: float, weight_decay: float) -> None:
        gradients = [weight.grad for weight in weights]
        moments = [self._moment(weight) for weight in weights]
        torch._foreach_lerp_(moments, gradients, 1 - momentum)
        ahead = torch.stack(torch._foreach_lerp(gradients, moments, momentum))
        scale = ROOT_MEAN_SQUARE * max(ahead.shape[1:]) ** 0.5
        torch._foreach_mul_(weights, 1 - lr * weight_decay)
        torch._foreach_sub_(weights, list((lr * scale * orthogonalize(ahead)).unbind()))

    def _moment(self, weight: torch.Tensor) -> torch.Tensor:
        state = self.state[weight]
        if "moment" not in state:
            state["moment"] = torch.zeros_like(weight)
        return state["moment"]


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices [N, R, C] with the same singular vectors and singular values near 1, in bf16."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
