"""Kernels are compiled ahead of a model's first call, in threads: one after the other they take a minute."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ... import kernels
from ...config import PatchConfig
from ..cuda_graphs import why_not_recorded
from ..steps.plan import Shared


def is_due(shared: Shared) -> bool:
    """True if a model's kernels are yet to be compiled ahead. torch.compile compiles its own."""
    return not torch.compiler.is_compiling() and shared.compiles_ahead


def compile_ahead(
    shared: Shared,
    block: nn.Module,
    run: Callable[[], object],
    inputs: Sequence[torch.Tensor],
    why_not_repeatable: Callable[[nn.Module, torch.device], str | None],
) -> None:
    """Compile the kernels of a block. Call this only where it `is_due`.

    Do nothing if the block launches no GPU kernels, if something around the call observes or records it, or if an extra
    run of the block has a visible effect. Each kernel is then compiled at its first launch.

    run: runs the block's plan. inputs: the tensors of the block's call, first the hidden states. why_not_repeatable:
    (module, device of the inputs) -> why the module may not run once more, or None.
    """
    device = inputs[0].device
    if not _launches_kernels(shared.config, inputs[0]) or why_not_recorded(inputs) is not None:
        return
    shared.compiles_ahead = False
    parts = (module for module in block.modules() if module is not block)
    if not any(why_not_repeatable(part, device) for part in parts):
        kernels.compile_ahead(run)


def _launches_kernels(config: PatchConfig, x: torch.Tensor) -> bool:
    return x.is_cuda and config.implementation != "torch" and kernels.why_not_triton_on(x.device, x.dtype) is None
