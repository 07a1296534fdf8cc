"""TurboDiffusion's own module of sparse-linear attention as a rival, if its package `SLA` can be imported.

`SLA` lies in the folder turbodiffusion of its repository (github.com/thu-ml/TurboDiffusion); in 8 bits it takes
SpargeAttn (github.com/thu-ml/SpargeAttn), which is compiled when it is installed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable

import torch

from turbo_rcm_patch.bench.ops import Contender, WithoutGraph

SHIPPED, COMPILED = "TurboDiffusion's module", "TurboDiffusion's module, compiled"


def turbodiffusion_module(
    inputs: Callable[[], tuple[torch.Tensor, ...]],
    weight: torch.Tensor,
    bias: torch.Tensor,
    topk: float,
    *,
    blocks: tuple[int, int] | None = None,
) -> dict[str, Contender]:
    """Return TurboDiffusion's module, as it ships and under torch.compile, or nothing if it is not installed.

    inputs: () -> q, k and v [B, S, H, D]. weight, bias: proj_l's. blocks: sizes of query and key blocks, in bf16. None:
    in 8 bits, with sizes that the module chooses. Each is built when it first runs; its package's errors appear then.
    """
    if importlib.util.find_spec("SLA") is None:
        return {}
    shipped = functools.cache(lambda: _build(weight, bias, topk, blocks))
    compiled = functools.cache(lambda: torch.compile(shipped()))
    # SpargeAttn launches its kernels on the legacy default stream.
    return {
        SHIPPED: WithoutGraph(lambda: shipped()(*inputs())),
        COMPILED: WithoutGraph(lambda: compiled()(*inputs())),
    }


def _build(weight: torch.Tensor, bias: torch.Tensor, topk: float, blocks: tuple[int, int] | None) -> torch.nn.Module:
    sla = importlib.import_module("SLA")
    if blocks is None:
        module = sla.SageSparseLinearAttention(weight.shape[0], topk)
    else:
        module = sla.SparseLinearAttention(weight.shape[0], topk, BLKQ=blocks[0], BLKK=blocks[1])
    module.proj_l.load_state_dict({"weight": weight, "bias": bias})
    return module.to(weight.device)
