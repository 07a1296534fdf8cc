"""DRAM traffic of an attention module and of a Wan block in each implementation.

The implementations run one after the other under Nsight Compute (dram.py), each checked before. A pass is the bytes of
one [tokens, dim] tensor in bf16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import ClassVar

import torch
from torch import nn

from turbo_rcm_patch.bench.cases import build_pipeline, random_prompt
from turbo_rcm_patch.bench.environment import Environment
from turbo_rcm_patch.bench.metrics import relative_l2
from turbo_rcm_patch.bench.oracle import first_call, run_oracle
from turbo_rcm_patch.config import Exact
from turbo_rcm_patch.patching import patch
from turbo_rcm_patch.patching.families.wan.cases import CASES
from turbo_rcm_patch.tiers import EXACT, ErrorLimits

from .dram import KernelTraffic, profiled
from .implementations import IMPLEMENTATIONS, NAIVE_SOFTMAX, draw_problem

DTYPE = torch.bfloat16
TIMESTEP = 500.0


@dataclass(frozen=True)
class Call:
    """A module and the arguments of one forward, which is run without gradients."""

    module: nn.Module
    args: tuple
    kwargs: Mapping[str, object] = field(default_factory=dict)

    def __call__(self) -> torch.Tensor:
        with torch.no_grad():
            return self.module(*self.args, **self.kwargs)


# A case is one forward in several implementations, which is measured. The others are checked against the first, within
# the limits of their tiers. All have the same seeded random weights and inputs.


@dataclass(frozen=True)
class AttentionCase:
    """Attention with the consistency skip (modules/rcm_attention.py) on x [batch, seq, dim]."""

    batch: int
    seq: int
    dim: int
    heads: int

    implementations: ClassVar = tuple(name for name in IMPLEMENTATIONS if name != NAIVE_SOFTMAX)

    @property
    def settings(self) -> dict[str, object]:
        return {"case": "attention module", **asdict(self), "tokens": self.batch * self.seq}

    def build(self, implementation: str, device: torch.device) -> Call:
        chosen = IMPLEMENTATIONS[implementation]
        problem = draw_problem(self.batch, self.seq, self.dim, self.heads, DTYPE, device)
        module = chosen.module_class(self.dim, self.heads, **chosen.options).to(device, DTYPE).eval()
        module.load_state_dict(problem.weights)
        if chosen.compiled:
            module.compile(fullgraph=True, dynamic=False)
        return Call(module, (problem.x.detach(), problem.timestep))

    def limits(self, implementation: str) -> ErrorLimits:
        return IMPLEMENTATIONS[implementation].limits


@dataclass(frozen=True)
class WanBlockCase:
    """A block of a model of cases.CASES, called as the model calls it, at the case's usual size.

    eager: diffusers' own code, the two-pass form. compiled: regional torch.compile of it. torch_fused, triton_fused:
    patched, with the fused ops in torch and in Triton.
    """

    config: str

    implementations: ClassVar = ("eager", "torch_fused", "compiled", "triton_fused")

    @property
    def settings(self) -> dict[str, object]:
        case = CASES[self.config]
        size = {name: getattr(case, name) for name in ("height", "width", "frames")}
        tokens = ((case.frames - 1) // 4 + 1) * (case.height // 16) * (case.width // 16)  # latents 4x8x8 times smaller
        dim = case.transformer["num_attention_heads"] * case.transformer.get("attention_head_dim", 128)
        return {"case": "Wan block", "config": self.config, **size, "tokens": tokens, "dim": dim}

    def build(self, implementation: str, device: torch.device) -> Call:
        case = CASES[self.config]
        pipe = build_pipeline(case, DTYPE, device, layers=1)
        model, (block,) = pipe.transformer, pipe.transformer.blocks
        latents = pipe.prepare_latents(
            1,
            model.config.in_channels,
            case.height,
            case.width,
            case.frames,
            DTYPE,
            device,
            torch.Generator(device).manual_seed(0),
        )
        prompt = random_prompt(pipe)
        if implementation in ("torch_fused", "triton_fused"):
            patch(model, Exact(implementation="torch") if implementation == "torch_fused" else "exact")
        call = Call(block, *first_call(block, lambda: model(latents, torch.tensor([TIMESTEP], device=device), prompt)))
        if implementation == "compiled":
            model.compile_repeated_blocks()
        return call

    def limits(self, implementation: str) -> ErrorLimits:
        return EXACT.limits


Case = AttentionCase | WanBlockCase


@dataclass(frozen=True)
class Check:
    """Relative L2 error to the fp32 oracle; refused: why the implementation was not measured, else None."""

    implementation: str
    error: float
    refused: str | None = None


@dataclass(frozen=True)
class ImplementationTraffic:
    """The kernels of one forward in the order of their launch. error, refused: as in `Check`."""

    name: str
    kernels: tuple[KernelTraffic, ...]
    error: float
    refused: str | None = None

    @property
    def read(self) -> int:
        return sum(kernel.read for kernel in self.kernels)

    @property
    def written(self) -> int:
        return sum(kernel.written for kernel in self.kernels)


@dataclass(frozen=True)
class TrafficReport:
    """Every implementation of a case."""

    settings: dict[str, object]
    environment: Environment
    implementations: tuple[ImplementationTraffic, ...]

    @property
    def pass_bytes(self) -> int:
        return self.settings["tokens"] * self.settings["dim"] * DTYPE.itemsize

    def passes(self, implementation: ImplementationTraffic) -> float:
        return (implementation.read + implementation.written) / self.pass_bytes

    def to_dict(self) -> dict[str, object]:
        """Return a dictionary for ``json.dump``: traffic in bytes, times in seconds."""
        plain = asdict(self)
        for entry, one in zip(plain["implementations"], self.implementations, strict=True):
            known = one.refused is None
            entry |= {"read": one.read, "written": one.written, "passes": self.passes(one)} if known else {}
        return {"pass_bytes": self.pass_bytes, **plain}


def check_and_profile(
    case: Case,
    device: torch.device,
    profile: Callable[[], contextlib.AbstractContextManager] = profiled,
) -> list[Check]:
    """Run every implementation, and once more inside ``profile()`` if it is right.

    An implementation is right if its error is within its limits relative to the first one's. The oracle is the first
    one's module in fp32.
    """
    checks: list[Check] = []
    for name in case.implementations:
        call = case.build(name, device)
        output = call()
        if not checks:
            oracle = run_oracle(call.module, call.args, call.kwargs, torch.float32)
        error = relative_l2(output, oracle)
        limit = case.limits(name).allowed(checks[0].error if checks else error, DTYPE, "part")
        if error <= limit:
            call()  # the first call has compiled and cached everything
            with profile():
                call()
            checks.append(Check(name, error))
        else:
            checks.append(Check(name, error, f"its error {error:.2e} is above the {limit:.2e} allowed"))
    return checks


def join(checks: Sequence[Check], ranges: Sequence[Sequence[KernelTraffic]]) -> tuple[ImplementationTraffic, ...]:
    """Return the traffic: the checks of `check_and_profile` with the kernels that `dram.measure` saw."""
    seen = iter(ranges)
    return tuple(
        ImplementationTraffic(c.implementation, tuple(next(seen)) if c.refused is None else (), c.error, c.refused)
        for c in checks
    )
