"""The optimizers of the stages, and their learning rates: tensors, so that schedules reach into a CUDA graph."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .muon import Muon
from .progress import Run

WEIGHT_DECAY = 0.01


class Rates(NamedTuple):
    """The learning rates of Muon and of AdamW."""

    muon: float
    adamw: float


class Learner:
    """A network's optimizers and their learning rates.

    Muon learns the matrices in the blocks and AdamW all other weights; docs/designs.md has what Muon brings.
    momentum: Muon's. betas: AdamW's. warmup: steps until the rates are whole. clip: the gradient's largest norm.
    """

    def __init__(
        self,
        run: Run,
        network: torch.nn.Module,
        rates: Rates,
        num_steps: int,
        *,
        warmup: int,
        momentum: float,
        betas: tuple[float, float],
        clip: float,
    ):
        self._run, self._network, self._clip = run, network, clip
        inside, outside = [], []
        for name, weight in network.named_parameters():
            (inside if is_block_matrix(name, weight) else outside).append(weight)
        rate = torch.tensor(rates.muon, device=inside[0].device)
        self.muon = Muon(inside, rate, momentum=momentum, weight_decay=WEIGHT_DECAY)
        self.adamw = adamw(outside, rates.adamw, betas=betas, weight_decay=WEIGHT_DECAY)
        self._optimizers = self.muon, self.adamw
        self._schedules = tuple(warmup_and_cosine(one, num_steps, warmup) for one in self._optimizers)

    def learn(self, loss: torch.Tensor) -> None:
        """Take one step down the loss's gradient."""
        self._run.accelerator.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._network.parameters(), self._clip)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def advance(self) -> None:
        """Move the learning rates on. This is not part of `learn`, because a graph replays that."""
        for schedule in self._schedules:
            schedule.step()

    def state_dict(self) -> dict:
        return {"parts": [part.state_dict() for part in (*self._optimizers, *self._schedules)]}

    def load_state_dict(self, state: dict) -> None:
        for part, saved in zip((*self._optimizers, *self._schedules), state["parts"], strict=True):
            part.load_state_dict(saved)


def is_block_matrix(name: str, weight: torch.Tensor) -> bool:
    """True if a parameter is the weight of a linear layer in the blocks of a transformer or a text encoder."""
    in_block = any(part in f".{name}" for part in (".blocks.", ".block."))
    return weight.dim() == 2 and in_block and "relative_attention_bias" not in name


def adamw(weights, learning_rate: float, betas: tuple[float, float], weight_decay: float) -> torch.optim.AdamW:
    """Return AdamW for use in a CUDA graph: its learning rate is a tensor, so that schedules reach into the graph."""
    weights = list(weights)
    rate = torch.tensor(learning_rate, device=weights[0].device)
    return torch.optim.AdamW(weights, lr=rate, betas=betas, weight_decay=weight_decay, capturable=rate.is_cuda)


def warmup_and_cosine(optimizer, num_steps: int, warmup: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a schedule that rises linearly over the warmup steps, then falls along a cosine to 1 %."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, num_steps - warmup)
        return 0.01 + 0.99 * (1 + math.cos(math.pi * min(1.0, progress))) / 2

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
