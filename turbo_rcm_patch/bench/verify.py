"""Every patched block on the real inputs of a generation: its error next to the unpatched block's own."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from diffusers import DiffusionPipeline
from torch import nn
from torch.overrides import TorchFunctionMode

from ..config import PatchConfig
from ..patching import patch
from .metrics import relative_l2

# A low-precision patched block may be this much further from the oracle than the unpatched block: the same roundings in
# another order differ by a few percent.
LOW_PRECISION_FACTOR = 1.05
# An fp32 patched block may differ from the unpatched one by the rounding of long fp32 sums in another order.
FP32_LIMIT = 1e-5


@dataclass(frozen=True)
class BlockCheck:
    """One block at one step, counted from 1.

    Errors are relative L2: of the unpatched and the patched block against the oracle, and, as the difference, of the
    patched against the unpatched block.
    """

    block: str
    step: int
    dtype: torch.dtype
    unpatched_error: float
    patched_error: float
    difference: float

    @property
    def judged(self) -> str:
        """Which figure the limit is on: the difference for fp32 and wider, the patched error for lower precisions."""
        return "patched error" if torch.finfo(self.dtype).bits < 32 else "difference"

    @property
    def judged_error(self) -> float:
        return self.patched_error if self.judged == "patched error" else self.difference

    @property
    def allowed(self) -> float:
        return LOW_PRECISION_FACTOR * self.unpatched_error if self.judged == "patched error" else FP32_LIMIT

    @property
    def ok(self) -> bool:
        """Whether the block is within its limit; a NaN never is."""
        return self.judged_error <= self.allowed


@dataclass(frozen=True)
class Verification:
    """The checks in the order of the blocks' calls, the blocks that no checked step reached, and what was patched."""

    checks: tuple[BlockCheck, ...]
    unreached: tuple[str, ...]
    patch_summary: str

    @property
    def failed(self) -> tuple[BlockCheck, ...]:
        return tuple(check for check in self.checks if not check.ok)

    @property
    def ok(self) -> bool:
        """Whether every block was reached and is within its limit."""
        return not self.failed and not self.unreached

    def to_dict(self) -> dict[str, object]:
        """For ``json.dump``; the dtype by name, with each check its limit and verdict."""
        checks = [
            {**asdict(c), "dtype": str(c.dtype).removeprefix("torch."), "allowed": c.allowed, "ok": c.ok}
            for c in self.checks
        ]
        return {"ok": self.ok, "checks": checks, "unreached": self.unreached, "patch_summary": self.patch_summary}


def verify(
    pipe: DiffusionPipeline, call: dict[str, object], *, seed: int = 0, config: PatchConfig | str = "exact"
) -> Verification:
    """Patch, run ``pipe(**call)`` once, and check every block of every transformer at the first and the last step.

    A hook on each block compares its patched output with its unpatched one and passes the unpatched one on: whatever a
    patched block does, all others get the hidden states of an unpatched generation. The oracle is the block's class run
    in fp32 (fp64 for an fp32 block) on the same inputs. The pipeline is left as it was found.
    """
    checks: list[BlockCheck] = []
    step = 1

    def on_step_end(_pipe, index, _timestep, _tensors):
        nonlocal step
        step = index + 2
        return {}

    def check_block(name: str) -> Callable:
        def hook(block: nn.Module, args: tuple, kwargs: dict, patched: torch.Tensor) -> torch.Tensor:
            unpatched = type(block).forward(block, *args, **kwargs)
            if step in (1, pipe.num_timesteps):
                checks.append(_check(name, step, block, args, kwargs, patched, unpatched))
            return unpatched

        return hook

    blocks = named_blocks(pipe)
    with patch(pipe, config) as applied, contextlib.ExitStack() as hooks:
        for name, block in blocks.items():
            handle = block.register_forward_hook(check_block(name), with_kwargs=True)
            hooks.callback(handle.remove)
        generator = torch.Generator(pipe._execution_device).manual_seed(seed)
        pipe(**{**call, "output_type": "latent"}, generator=generator, callback_on_step_end=on_step_end)
        summary = applied.summary()
    reached = {check.block for check in checks}
    return Verification(tuple(checks), tuple(name for name in blocks if name not in reached), summary)


def named_blocks(pipe: DiffusionPipeline) -> dict[str, nn.Module]:
    """The blocks of a pipeline's transformers by name, such as "transformer.blocks.0"."""
    return {
        f"{name}.blocks.{index}": block
        for name in ("transformer", "transformer_2")
        if getattr(pipe, name, None) is not None
        for index, block in enumerate(getattr(pipe, name).blocks)
    }


def _check(
    name: str, step: int, block: nn.Module, args: tuple, kwargs: dict, patched: torch.Tensor, unpatched: torch.Tensor
) -> BlockCheck:
    oracle = run_oracle(block, args, kwargs, torch.float32 if unpatched.dtype.itemsize < 4 else torch.float64)
    return BlockCheck(
        block=name,
        step=step,
        dtype=unpatched.dtype,
        unpatched_error=relative_l2(unpatched, oracle),
        patched_error=relative_l2(patched, oracle),
        difference=relative_l2(patched, unpatched),
    )


def first_call(module: nn.Module, run: Callable[[], object]) -> tuple[tuple, dict]:
    """The arguments of a module's first call while something runs."""
    seen: list[tuple[tuple, dict]] = []
    handle = module.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    try:
        with torch.no_grad():
            run()
    finally:
        handle.remove()
    return seen[0]


def run_oracle(block: nn.Module, args: tuple, kwargs: dict, dtype: torch.dtype) -> torch.Tensor:
    """The block's class run in `dtype`, fp64 or fp32 without TF32, on upcast weights and inputs."""
    oracle = _class_copy(block).to(dtype)
    args, kwargs = _upcast(args, dtype), _upcast(kwargs, dtype)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad(), _WidenedFloat(dtype):
            return type(oracle).forward(oracle, *args, **kwargs)
    finally:
        torch.set_float32_matmul_precision(precision)


class _WidenedFloat(TorchFunctionMode):
    """Lets ``.float()``, with which Wan's blocks widen bf16, keep an fp64 oracle in fp64."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].to(self._dtype)
        return func(*args, **(kwargs or {}))


def _class_copy(block: nn.Module) -> nn.Module:
    """A copy of parameters, buffers and submodules whose forwards are those of their classes.

    Other instance attributes, such as what a patch keeps on a module, are shared rather than copied.
    """
    copied = ("_parameters", "_buffers", "_modules")
    shared = [value for module in block.modules() for name, value in vars(module).items() if name not in copied]
    twin = copy.deepcopy(block, {id(value): value for value in shared})
    for module in twin.modules():
        vars(module).pop("forward", None)
    return twin


def _upcast(value, dtype: torch.dtype):
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        return type(value)(_upcast(item, dtype) for item in value)
    if isinstance(value, dict):
        return {key: _upcast(item, dtype) for key, item in value.items()}
    return value
