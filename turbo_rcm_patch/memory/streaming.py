"""Stream the blocks of a model to the GPU, with diffusers' group offloading, and undo that.

diffusers moves what is not in a block to the GPU at each call, from memory that is not pinned: 60 ms for a step of
Wan 14B, measured on an H100. Here it stays on the GPU, and only the blocks move. A text encoder's token embeddings stay
on the host, because a prompt reads few of their rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from diffusers.hooks import HookRegistry, ModelHook, apply_group_offloading
from torch import nn

from ..plain import function_bound_to
from .components import blocks_of, embeddings_of, holder_of_blocks
from .pinned import pin

ON_HOST = "turbo_rcm_patch_on_host"  # the name of the hook on token embeddings


def stream(model: nn.Module, device: torch.device) -> None:
    """Let a model's blocks stream to a device. Everything else goes there, except a text encoder's token embeddings.

    On a GPU the next block is copied on a CUDA stream of its own while one runs.
    """
    holder, table = holder_of_blocks(model), embeddings_of(model)
    blocks = {name for name, child in holder.named_children() if isinstance(child, nn.ModuleList)}
    in_parallel = device.type == "cuda"
    if in_parallel:  # first of all, so that weights on a GPU go straight to pinned memory
        pin(tensor for block in blocks_of(model) for tensor in (*block.parameters(), *block.buffers()))
    for block in blocks_of(model):
        block.to("cpu")
    with _without_children(holder, blocks):
        _move_all_but(model, table, device)
    for embedding in _modules_of(model, table):
        embedding.to("cpu")
        HookRegistry.check_if_exists_or_initialize(embedding).register_hook(_RowsFromHost(device), ON_HOST)
    others = {
        name
        for name, child in holder.named_children()
        if name not in blocks and next(child.parameters(), None) is not None
    }
    with _without_children(holder, others):
        apply_group_offloading(
            holder,
            onload_device=device,
            offload_device=torch.device("cpu"),
            offload_type="block_level",
            num_blocks_per_group=1,
            use_stream=in_parallel,
            record_stream=in_parallel,  # else the host waits for the GPU after each block
        )


def stop_streaming(model: nn.Module) -> None:
    """Remove what `stream` added. The weights stay where they are, and are no longer pinned."""
    for module in model.modules():
        registry = vars(module).get("_diffusers_hook")
        if registry is not None:
            for name in reversed(list(registry._hook_order)):
                if name == ON_HOST or "group_offloading" in name or name == "layer_execution_tracker":
                    registry.remove_hook(name, recurse=False)
            if not registry.hooks:
                del module._diffusers_hook
                if function_bound_to(module, vars(module).get("forward")) is type(module).forward:
                    del module.forward  # diffusers leaves the class's own on the instance
    pinned = [t for t in (*model.parameters(), *model.buffers()) if t.device.type == "cpu" and t.is_pinned()]
    for tensor in pinned:
        tensor.data = tensor.data.clone()
    if pinned and hasattr(torch.accelerator, "empty_host_cache"):  # newer than torch 2.11
        torch.accelerator.empty_host_cache()  # else PyTorch keeps the pinned memory


class _RowsFromHost(ModelHook):
    """Look token embeddings up on the host, and send the rows to a device."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device

    def pre_forward(self, module: nn.Module, tokens: torch.Tensor) -> tuple[tuple[torch.Tensor], dict]:
        return (tokens.cpu(),), {}

    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return output.to(self._device)


@contextmanager
def _without_children(module: nn.Module, names: set[str]) -> Iterator[None]:
    """A context in which a module does not have some of its children."""
    children = dict(module._modules)
    for name in names:
        del module._modules[name]
    try:
        yield
    finally:
        module._modules = children


def _modules_of(model: nn.Module, table: nn.Embedding | None) -> list[nn.Module]:
    """Return the modules that look up in a table. UMT5 has two with one weight: `shared` and `encoder.embed_tokens`."""
    if table is None:
        return []
    return [module for module in model.modules() if getattr(module, "weight", None) is table.weight]


def _move_all_but(model: nn.Module, table: nn.Embedding | None, device: torch.device) -> None:
    """Move all tensors of a model except a table, which may be in it under several names."""
    kept = set() if table is None else {id(table.weight)}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is not None and id(tensor) not in kept:
                    tensor.data = tensor.data.to(device)
