"""The optimizers of the stages, and their learning rates: tensors, so that schedules reach into a CUDA graph."""

from __future__ import annotations

import math

import torch

from .muon import Muon

WEIGHT_DECAY = 0.01


def muon_and_adamw(
    network: torch.nn.Module, muon_rate: float, adamw_rate: float, momentum: float, betas: tuple[float, float]
) -> dict[str, torch.optim.Optimizer]:
    """Muon for the matrices in the blocks, AdamW for all other weights.

    The rates are learning rates; momentum is Muon's, betas are AdamW's. results/designs.md has what Muon brings.
    """
    inside, outside = [], []
    for name, weight in network.named_parameters():
        (inside if is_block_matrix(name, weight) else outside).append(weight)
    rate = torch.tensor(muon_rate, device=inside[0].device)
    return {
        "muon": Muon(inside, rate, momentum=momentum, weight_decay=WEIGHT_DECAY),
        "adamw": adamw(outside, adamw_rate, betas=betas, weight_decay=WEIGHT_DECAY),
    }


def is_block_matrix(name: str, weight: torch.Tensor) -> bool:
    """Whether a parameter is the weight of a linear layer in the blocks of a transformer or a text encoder."""
    in_block = any(part in f".{name}" for part in (".blocks.", ".block."))
    return weight.dim() == 2 and in_block and "relative_attention_bias" not in name


def adamw(weights, learning_rate: float, betas: tuple[float, float], weight_decay: float) -> torch.optim.AdamW:
    """AdamW that can run in a CUDA graph: its learning rate is a tensor, so that schedules reach into the graph."""
    weights = list(weights)
    rate = torch.tensor(learning_rate, device=weights[0].device)
    return torch.optim.AdamW(weights, lr=rate, betas=betas, weight_decay=weight_decay, capturable=rate.is_cuda)


def warmup_and_cosine(optimizer, num_steps: int, warmup: int) -> torch.optim.lr_scheduler.LambdaLR:
    """The learning rate rises linearly over the warmup steps, then falls along a cosine to 1 % at the last step."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, num_steps - warmup)
        return 0.01 + 0.99 * (1 + math.cos(math.pi * min(1.0, progress))) / 2

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
