"""Changes that make the random weights of LTX-2's blocks more like trained ones. They are made in place."""

from __future__ import annotations

import torch
from torch import nn

from ..family import RandomWeights
from ..wan import random_weights as of_wan


def strengthen_gates(block: nn.Module) -> None:
    """Draw all modulation N(0, 0.5²): the block then changes its inputs about as much as it keeps of them."""
    for name, table in block.named_parameters(recurse=False):
        if name.endswith("scale_shift_table"):
            nn.init.normal_(table, std=0.5)


def undo_outliers(block: nn.Module, channels: torch.Tensor, size: float) -> None:
    """Divide these channels of the normed video by a size, as training would if they are so much larger.

    The norm before the prompt's attention has neither weight nor modulation, so its projection divides them.
    """
    block.scale_shift_table[1::3, channels] = 1 / size - 1  # shift, scale, gate of each sub-layer
    block.video_a2v_cross_attn_scale_shift_table[0:4:2, channels] = 1 / size - 1  # scale, shift of both directions
    if not block.video_cross_attn_adaln:
        block.attn2.to_q.weight[:, channels] /= size


def sharpen_attention(block: nn.Module, gain: float) -> None:
    """Multiply the scores of all attentions by half as much as Wan's.

    LTX-2 has fewer tokens than Wan, and they are less alike: at the same gain they would attend to fewer keys.
    """
    of_wan.sharpen_attention(block, gain / 2)


RANDOM_WEIGHTS = RandomWeights(strengthen_gates, undo_outliers, sharpen_attention)
