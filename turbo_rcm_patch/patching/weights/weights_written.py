"""Weights in 8 bits whose originals were written to, found when the model is called.

A write to ``linear.weight`` is converted at once (read_only.py). Of one to a tensor of `state_dict`, or to a
parameter from before the patch, only PyTorch's count of writes tells, which is compared before the blocks run. What
torch.compile took compares in an op of its graph, which then refuses the call: other parts of the graph may have read
the old weights by then.
"""

from __future__ import annotations

import torch

from ...config import PatchConfig
from .linear_8bit import bring_all_up_to_date


def with_weights_up_to_date(timestep: torch.Tensor, config: PatchConfig) -> torch.Tensor:
    """The timestep for the embedder of a model that was patched so, which comes before the blocks."""
    if not torch.compiler.is_compiling():
        bring_all_up_to_date()
        return timestep
    # A sum, because a graph leaves out an op whose result it does not use; derivatives pass by the other term.
    return timestep + _refuse_old_weights(timestep.detach()) if config.in_8_bits("linears") else timestep


# It mutates nothing that a graph goes on with: a call of it that writes raises. In a CUDA graph it would not run again.
@torch.library.custom_op("turbo_rcm_patch::refuse_old_weights", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _refuse_old_weights(timestep: torch.Tensor) -> torch.Tensor:
    """A zero."""
    count = bring_all_up_to_date()
    if count > 0:
        raise RuntimeError(
            f"weights in 8 bits ({count}) were written to through tensors of state_dict() or parameters from before "
            "the patch, and a model that torch.compile took may have computed this call with the old ones. They are "
            "converted now: call it again. To be spared this error call model.load_state_dict(model.state_dict()) "
            "after such writes, or compile blocks only: model.compile_repeated_blocks()."
        )
    return timestep.new_zeros(())


@_refuse_old_weights.register_fake
def _zero(timestep: torch.Tensor) -> torch.Tensor:
    return timestep.new_zeros(())
