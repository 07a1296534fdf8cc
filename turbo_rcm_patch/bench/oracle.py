"""The oracle of a block or a model: its class's own forward, in higher precision, on the inputs of a patched one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from diffusers import DiffusionPipeline
from torch import nn
from torch.overrides import TorchFunctionMode

from ..patching.weights.linear_8bit import QuantizedLinear
from ..patching.weights.quantize_linears import is_quantized
from ..tiers import is_low_precision
from .coding import without_tf32
from .parts import Trace, hidden_states_of, in_dtype, trace_of
from .sparse import sparse_self_attention

_PACKED_LINEAR = "GGUFLinear"  # diffusers' linear for GGUF files. Its weight is a tensor of bytes.

Output = torch.Tensor | tuple[torch.Tensor | None, ...]


class CheckedSteps:
    """A generation whose first and last steps are checked.

    now: the present step, counted from 1. few: up to this many steps, all of them are checked.
    """

    def __init__(self, pipe: DiffusionPipeline, few: int = 2):
        self._pipe, self._few, self.now = pipe, few, 1

    @property
    def is_checked(self) -> bool:
        """True in a step that is checked."""
        count = self._pipe.num_timesteps
        return self.now in (1, count) or count <= self._few

    def run(self, call: Mapping[str, object], seed: int, output_type: str) -> None:
        """Run the generation."""
        generator = torch.Generator(self._pipe._execution_device).manual_seed(seed)
        options = {**call, "output_type": output_type}
        self._pipe(**options, generator=generator, callback_on_step_end=self._on_step_end)

    def _on_step_end(self, _pipe, index, _timestep, _tensors):
        self.now = index + 2
        return {}


def tensors_of(output: Output) -> list[torch.Tensor]:
    """Return a block's output as a list, without the None entries."""
    outputs = [output] if isinstance(output, torch.Tensor) else output
    return [one for one in outputs if one is not None]


def first_call(module: nn.Module, run: Callable[[], object]) -> tuple[tuple, dict]:
    """Return the arguments of a module's first call while something runs."""
    return first_calls({"module": module}, run)["module"]


def first_calls(modules: Mapping[str, nn.Module], run: Callable[[], object]) -> dict[str, tuple[tuple, dict]]:
    """Return the arguments of each module's first call while something runs, without those that are not called."""
    seen: dict[str, tuple[tuple, dict]] = {}

    def note(name: str, _module: nn.Module, args: tuple, kwargs: dict) -> None:
        seen.setdefault(name, (args, kwargs))

    with contextlib.ExitStack() as stack, torch.no_grad():
        for name, module in modules.items():
            stack.enter_context(module.register_forward_pre_hook(partial(note, name), with_kwargs=True))
        run()
    return seen


def run_oracle(block: nn.Module, args: tuple, kwargs: Mapping[str, object], dtype: torch.dtype) -> Output:
    """Return the block's class run in `dtype`, fp64 or fp32 without TF32, on upcast weights and inputs."""
    oracle = class_copy(block).to(hidden_states_of(args, kwargs).device, dtype)
    args, kwargs = in_dtype(args, dtype), in_dtype(kwargs, dtype)
    with without_tf32(), torch.no_grad(), _WidenedFloat(dtype):
        return type(oracle).forward(oracle, *args, **kwargs)


class _WidenedFloat(TorchFunctionMode):
    """Lets ``.float()``, with which blocks widen bf16, keep an fp64 oracle in fp64."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].to(self._dtype)
        return func(*args, **(kwargs or {}))


def class_copy(block: nn.Module) -> nn.Module:
    """Return a copy of parameters, buffers and submodules with the forwards of their classes.

    Other instance attributes, such as what a patch keeps on a module, are shared rather than copied. A sparse attention
    runs by the reference.
    """
    copied = ("_parameters", "_buffers", "_modules")
    shared = [value for module in block.modules() for name, value in vars(module).items() if name not in copied]
    twin = copy.deepcopy(block, {id(value): value for value in shared} | _unpacked(block))
    for module in twin.modules():
        if type(module).__name__ == _PACKED_LINEAR:
            module.__class__ = nn.Linear
        for name in [name for name in vars(module) if callable(getattr(type(module), name, None))]:
            del module.__dict__[name]  # what a patch binds in place of the class's methods
        if is_quantized(module):
            QuantizedLinear.forget(module)
    if (attn := sparse_self_attention(twin)) is not None:
        attn.processor = copy.copy(attn.processor)
        attn.processor.implementation = "torch"
    return twin


def _unpacked(block: nn.Module) -> dict[int, nn.Parameter]:
    """Return plain copies of the weights of diffusers' GGUF linears, by the weights' ids."""
    packed = [module.weight for module in block.modules() if type(module).__name__ == _PACKED_LINEAR]
    if not packed:
        return {}
    from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor  # needs the package gguf

    return {id(weight): nn.Parameter(dequantize_gguf_tensor(weight), requires_grad=False) for weight in packed}


@contextlib.contextmanager
def weights_with(block: nn.Module, args: tuple, kwargs: Mapping[str, object]) -> Iterator[None]:
    """A context in which a block's weights are on the device of its inputs, where a hook may have taken them away.

    At its end they go back. So do those that took the place of others meanwhile.
    """
    device = hidden_states_of(args, kwargs).device
    if "_diffusers_hook" in vars(block) and device.type == "cuda":
        torch.cuda.synchronize(device)  # group offloading may be copying them on another stream
    before = [*block.parameters(), *block.buffers()]
    moved = [(tensor, tensor.data) for tensor in before if tensor.device != device]
    try:
        for tensor, data in moved:
            tensor.data = data.to(device)
        yield
    finally:
        for tensor, data in moved:
            tensor.data = data
        known = set(map(id, before))
        for tensor in (*block.parameters(), *block.buffers()) if moved else ():
            if id(tensor) not in known:
                tensor.data = tensor.data.to(moved[0][1].device)


def trace_in_fp32(block: nn.Module, args: tuple, kwargs: Mapping[str, object]) -> Trace:
    """Return a run of the block without the patch, in fp32 on the device of its inputs."""
    return trace_of(class_copy(block).to(hidden_states_of(args, kwargs).device, torch.float32), args, kwargs)


def run_block_oracle(block: nn.Module, args: tuple, kwargs: Mapping[str, object]) -> Output:
    """Return `run_oracle` in fp32, or in fp64 for hidden states in fp32."""
    low = is_low_precision(hidden_states_of(args, kwargs).dtype)
    return run_oracle(block, args, kwargs, torch.float32 if low else torch.float64)


def run_unpatched(block: nn.Module, args: tuple, kwargs: Mapping[str, object]) -> Output:
    """Return the output of a patched block without the patch."""
    if any(map(is_quantized, block.modules())) or sparse_self_attention(block) is not None:
        block = class_copy(block).to(hidden_states_of(args, kwargs).device)  # more than its forwards is patched
    return type(block).forward(block, *args, **kwargs)
