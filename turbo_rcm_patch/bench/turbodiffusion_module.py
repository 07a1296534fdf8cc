"""TurboDiffusion's own module of sparse-linear attention as a rival, where its package `SLA` can be imported.

`SLA` lies in the folder turbodiffusion of its repository (github.com/thu-ml/TurboDiffusion); in 8 bits it takes
SpargeAttn (github.com/thu-ml/SpargeAttn), which is compiled where it is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

import torch

from .ops import Contender

SHIPPED, COMPILED = "TurboDiffusion's module", "TurboDiffusion's module, compiled"


def turbodiffusion_module(
    inputs: Callable[[], tuple[torch.Tensor, ...]],
    weight: torch.Tensor,
    bias: torch.Tensor,
    topk: float,
    *,
    blocks: tuple[int, int] | None = None,
) -> dict[str, Contender]:
    """Its module as it ships and under torch.compile, on what inputs() gives: q, k and v [B, S, H, D]. Nothing where it
    is not installed or does not run, which is said.

    weight, bias: of proj_l. blocks: of queries and of keys, in bf16; None: in 8 bits, with those that it chooses.
    """
    if importlib.util.find_spec("SLA") is None:
        return {}
    try:
        module = _build(weight, bias, topk, blocks)
        contenders = {SHIPPED: _on(inputs, module), COMPILED: _on(inputs, torch.compile(module))}
        with torch.no_grad():
            for run in contenders.values():
                run()
    except Exception as error:  # of an import, an extension or a compiler that are not ours
        print(f"{SHIPPED} does not run here: {type(error).__name__}: {error}")
        return {}
    return contenders


def _build(weight: torch.Tensor, bias: torch.Tensor, topk: float, blocks: tuple[int, int] | None) -> torch.nn.Module:
    sla = importlib.import_module("SLA")
    if blocks is None:
        module = sla.SageSparseLinearAttention(weight.shape[0], topk)
    else:
        module = sla.SparseLinearAttention(weight.shape[0], topk, BLKQ=blocks[0], BLKK=blocks[1])
    module.proj_l.load_state_dict({"weight": weight, "bias": bias})
    return module.to(weight.device)


def _on(inputs: Callable[[], tuple[torch.Tensor, ...]], module: Callable) -> Contender:
    return lambda: module(*inputs())
