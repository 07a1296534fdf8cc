"""Changes that make the random weights of Wan's blocks more like trained ones. They are made in place."""

from __future__ import annotations

import torch
from torch import nn

from ..family import RandomWeights


def strengthen_gates(block: nn.Module) -> None:
    """Draw the modulation N(0, 0.5²): the block then changes its input about as much as it keeps of it.

    diffusers draws it N(0, 1/dim), and a block's output is then little more than its input; an error inside a block
    would hardly show.
    """
    nn.init.normal_(block.scale_shift_table, std=0.5)


def undo_outliers(block: nn.Module, channels: torch.Tensor, size: float) -> None:
    """Divide these channels of the normed hidden states by a size, as training would if they are so much larger."""
    block.scale_shift_table[0, 1::3, channels] = 1 / size - 1  # the scales
    block.norm2.weight[channels] = 1 / size


def sharpen_attention(block: nn.Module, gain: float) -> None:
    """Multiply the scores of all attentions."""
    for name, parameter in block.named_parameters():
        if name.endswith("norm_q.weight"):
            parameter.mul_(gain)


RANDOM_WEIGHTS = RandomWeights(strengthen_gates, undo_outliers, sharpen_attention)
