"""Build runs of tokens for tests, and expand them in another way than the package."""

from itertools import accumulate

import torch

from turbo_rcm_patch.kernels import Runs

# By name, of 30 tokens: lengths of runs whose borders lie within tiles and between samples.
LENGTHS = {
    "one": [30],
    "a frame and the rest": [7, 23],
    "five": [1, 2, 15, 11, 1],
    "an empty one": [0, 12, 0, 18, 0],
    "32": [1] * 30 + [0, 0],
}


def runs_of(lengths, channels, device="cpu"):
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return Runs(torch.randn(len(lengths), channels, device=device), starts)


def expand(runs, batch):
    """The values for every token: [B, S, C]."""
    lengths = runs.starts.diff().long()
    return runs.values.repeat_interleave(lengths, 0).unflatten(0, (batch, -1))
