"""The ways to run one pipeline that `compare` puts beside each other: unpatched, under torch.compile, and patched.

A variant is switched on for a generation and off after it.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from diffusers import DiffusionPipeline
from torch import nn
from torch._inductor import config as inductor_config
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..config import BlockSparse, Exact, PatchConfig, Quantized
from ..patching import Patch, patch
from ..patching.apply import transformers_of
from ..patching.families import family_of
from .replaced import replaced

UNPATCHED, COMPILED, PATCHED = "unpatched", "torch.compile", "patched"
# An 8-bit tier is compared with torchao's 8 bits, if it is installed, and with the exact patch. Block-sparse attention
# is compared with the patch with dense attention.
TORCHAO, EXACT_PATCH, DENSE_PATCH = "torchao float8 + torch.compile", "patched exactly", "patched, dense in 8 bits"

Switch = Callable[[], contextlib.AbstractContextManager[Patch | None]]
Patching = Callable[[PatchConfig], contextlib.AbstractContextManager[Patch]]


@dataclass(frozen=True)
class Variants:
    """The switches in the order in which they take turns, and the bytes of weights that only one of them uses."""

    switches: dict[str, Switch]
    spare_memory: int = 0


def single_process(
    pipe: DiffusionPipeline, config: PatchConfig, with_compile: bool | None = None, patched: Patching | None = None
) -> Variants:
    """Return the variants on one device; switching off leaves the pipeline as it was.

    with_compile: None: only on a GPU. patched: patches the pipeline with a configuration. None: `patch` alone.
    """
    patched = patched or partial(patch, pipe)
    switches, spare_memory = unpatched_variants(pipe, with_compile), 0
    if not isinstance(config, Exact):
        switches[EXACT_PATCH] = lambda: patched(Exact(cuda_graph=config.cuda_graph))
        if isinstance(config, BlockSparse):
            switches[DENSE_PATCH] = lambda: patched(Quantized(cuda_graph=config.cuda_graph))
        if COMPILED in switches and _has_torchao() and getattr(pipe, "transformer_2", None) is None:
            switches[TORCHAO], spare_memory = _torchao_float8(pipe)
    switches[PATCHED] = lambda: patched(config)
    return Variants(switches, spare_memory)


def _has_torchao() -> bool:
    return importlib.util.find_spec("torchao") is not None


# The options that torchao sets for the whole process when it quantises. With them, compiling the other variants, above
# all the VAE's decoder, takes many minutes longer.
_TORCHAO_TUNING = {
    "coordinate_descent_tuning": True,
    "coordinate_descent_check_all_directions": True,
    "force_fuse_int_mm_with_mul": True,
}


def _torchao_float8(pipe: DiffusionPipeline) -> tuple[Switch, int]:
    """Return a twin with e4m3 weights and inputs quantised by row, compiled by region, and its bytes."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    twin = copy.deepcopy(pipe.transformer)
    config = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False)
    for blocks in family_of(twin).blocks:
        quantize_(getattr(twin, blocks.name), config)
    twin.compile_repeated_blocks()

    @contextlib.contextmanager
    def tuned() -> Iterator[None]:
        with replaced(pipe, "transformer", twin), inductor_config.patch(_TORCHAO_TUNING):
            yield

    return tuned, memory_of(twin)


def memory_of(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers."""
    return sum(map(_stored_bytes, (*model.parameters(), *model.buffers())))


def _stored_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, or of those that it consists of. torchao's in 8 bits tells the size of bf16."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    return sum(_stored_bytes(getattr(tensor, name)) for name in names)


def unpatched_variants(pipe: DiffusionPipeline, with_compile: bool | None) -> dict[str, Switch]:
    """Return the variants without a patch. with_compile: None: torch.compile is one only on a GPU."""
    if with_compile is None:
        with_compile = torch.device(pipe._execution_device).type == "cuda"
    plain: dict[str, Switch] = {UNPATCHED: contextlib.nullcontext}
    return plain | {COMPILED: _CompiledBlocks(pipe)} if with_compile else plain


class _CompiledBlocks:
    """A context manager factory: regional torch.compile of the transformers, and torch.compile of the VAE's decoder
    with channels-last weights, are on inside, off outside, and compile once."""

    def __init__(self, pipe: DiffusionPipeline):
        self._models = list(transformers_of(pipe).values())
        self._decoder = getattr(getattr(pipe, "vae", None), "decoder", None)
        self._compiled: dict[nn.Module, object] = {}

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        strides = {module: module.weight.stride() for module in self._convolutions()}
        try:
            if not self._compiled:
                self._compile()
            for module, compiled_call in self._compiled.items():
                module._compiled_call_impl = compiled_call
            self._to_channels_last()
            yield
        finally:
            for module in self._modules():
                module._compiled_call_impl = None
            _restride(strides)

    def _compile(self) -> None:
        for model in self._models:
            model.compile_repeated_blocks()
        if self._decoder is not None:
            self._decoder.compile()  # compiling the VAE would not reach it: diffusers calls it frame by frame
        self._compiled = {
            module: module._compiled_call_impl for module in self._modules() if module._compiled_call_impl
        }

    def _modules(self) -> Iterator[nn.Module]:
        return (module for model in filter(None, (*self._models, self._decoder)) for module in model.modules())

    def _convolutions(self) -> Iterator[nn.Module]:
        modules = self._decoder.modules() if self._decoder is not None else ()
        return (module for module in modules if isinstance(module, (nn.Conv2d, nn.Conv3d)))

    def _to_channels_last(self) -> None:
        for module in self._convolutions():
            last = torch.channels_last if isinstance(module, nn.Conv2d) else torch.channels_last_3d
            module.weight.data = module.weight.data.contiguous(memory_format=last)


def _restride(strides: dict[nn.Module, tuple[int, ...]]) -> None:
    """Lay weights out anew with these strides. The old tensors are not kept for it: they would count as memory."""
    for module, stride in strides.items():
        weight = module.weight.data
        if weight.stride() != stride:
            empty = torch.empty_strided(weight.shape, stride, dtype=weight.dtype, device=weight.device)
            module.weight.data = empty.copy_(weight)


def allocated(device: torch.device) -> int:
    """Return the bytes that tensors take on the device now, or 0 on the CPU, which does not count them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
