"""Try the kernels that only `turbo-rcm tune` may choose, each beside the kernel that an op usually takes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from ..kernels.attention.attention import ATTENTION
from ..kernels.attention_8bit.attention_8bit import ATTENTION_8BIT
from ..kernels.block_sparse.block_sparse_attention import BLOCK_SPARSE_ATTENTION_8BIT
from ..kernels.choice.registry import Kernel, Op
from ..kernels.conv.conv_skip import CONV_SKIP
from ..kernels.linear.linear_gelu import LINEAR_GELU, LINEAR_GELU_QUANTIZED
from ..kernels.linear.linear_qkv import LINEAR_QKV
from ..kernels.linear.linear_skip import LINEAR_SKIP
from ..kernels.sparse_linear.sparse_linear_attention import SPARSE_LINEAR_ATTENTION
from ..tiers import EXACT, Tier
from .ops import Contender, Contest, OpCase, op_case

# The lists of kernels that an op's contest picks from, by the op's name in the rows of tune.
LISTS: dict[str, tuple[Op, ...]] = {
    "attention": (ATTENTION,),
    "linear_skip": (LINEAR_SKIP,),
    "linear_gelu": (LINEAR_GELU,),
    "linear_qkv": (LINEAR_QKV,),
    "conv_skip": (CONV_SKIP,),
    "attention_8bit": (ATTENTION_8BIT,),
    "linear_skip_8bit": (LINEAR_SKIP,),
    "linear_gelu_8bit": (LINEAR_GELU, LINEAR_GELU_QUANTIZED),
    "linear_qkv_8bit": (LINEAR_QKV,),
    "sparse_linear_attention": (SPARSE_LINEAR_ATTENTION,),
    "block_sparse_attention": (BLOCK_SPARSE_ATTENTION_8BIT,),
}


def kernels_by_tune(op: str) -> list[tuple[Op, Kernel]]:
    """Return the kernels that only `turbo-rcm tune` may choose in an op's contest, each with its list."""
    return [(one, kernel) for one in LISTS[op] for kernel in one.kernels if kernel.by_tune]


def case_with_trials(
    contest: Callable[..., Contest], *sizes: int, tier: Tier = EXACT, change: Callable[[Contest], Contest]
) -> OpCase:
    """Return the case of a changed contest at some sizes, with those kernels that can run as further alternatives."""
    case = op_case(contest, *sizes, tier=tier, targets={})
    return replace(case, build=lambda *arguments: _with_trials(case.key.op, change(case.build(*arguments))))


def _with_trials(op: str, contest: Contest) -> Contest:
    (ours,) = contest.ours.values()
    trials = ((kernel.name, functools.partial(_trying, one, kernel, ours)) for one, kernel in kernels_by_tune(op))
    return replace(contest, alternatives=contest.alternatives | {name: run for name, run in trials if can_run(run)})


def times_of_trials(op: str, timings: Mapping[str, Mapping[str, object]]) -> dict[str, float]:
    """Return the milliseconds of an op's kernels `by_tune`, by name. Refused kernels are left out."""
    found = {kernel.name: timings.get(kernel.name, {}).get("milliseconds") for _, kernel in kernels_by_tune(op)}
    return {name: round(time, 4) for name, time in found.items() if time}


def can_run(run: Contender) -> bool:
    """True if a backend or kernel accepts these tensors. Errors after which the GPU cannot go on are raised."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns of why a backend cannot run
            run()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception:  # Triton raises many kinds for a GPU that it does not know
        return False
    return True


def _trying(op: Op, kernel: Kernel, run: Contender) -> object:
    with op.trying(kernel) as picked:
        result = run()
    if not picked:
        raise ValueError(f"this contest does not pick from the kernels of {op.name}.")
    return result
