"""Let diffusers' group offloading follow the tensors that a patch puts in place of weights.

When it is enabled, each group lists what it moves. With streams it lists the copies on the CPU that a weight goes back
to (``cpu_param_dict``). When it offloads to disk it lists the tensors of its file (``tensor_to_key``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from diffusers.hooks.group_offloading import ModuleGroup
from torch import nn

ON_DISK = "group offloading keeps its weights on disk, in files that stay as they are; load it again without that."


def is_on_disk(transformer: nn.Module) -> bool:
    """True if diffusers' group offloading keeps a transformer's weights in files, to which none can be added."""
    return are_on_disk(groups_of(transformer))


def are_on_disk(groups: Iterable[ModuleGroup]) -> bool:
    """True if any of the groups keeps its weights in files."""
    return any(group.offload_to_disk_path is not None for group in groups)


def update_groups(transformer: nn.Module) -> None:
    """Let the groups move the tensors that their modules have now."""
    for group in groups_of(transformer):
        if group.stream is not None and group.offload_to_disk_path is None:
            copies = group.cpu_param_dict
            group.cpu_param_dict = {t: copies[t] if t in copies else _on_cpu(t, group) for t in _tensors(group)}


def overwrite(groups: Iterable[ModuleGroup], parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Write values into a parameter, and into the groups' copies of it. groups: those of its transformer."""
    with torch.no_grad():
        parameter.copy_(values)
    for group in groups:
        if group.stream is not None and parameter in (group.cpu_param_dict or {}):
            group.cpu_param_dict[parameter].copy_(parameter.data)


def groups_of(transformer: nn.Module) -> list[ModuleGroup]:
    """Return the groups of modules that diffusers offloads together. This walks through the whole model."""
    registries = (module.__dict__.get("_diffusers_hook") for module in transformer.modules())
    hooks = [registry.get_hook("group_offloading") for registry in registries if registry is not None]
    return list({id(hook.group): hook.group for hook in hooks if hook is not None}.values())


def _tensors(group: ModuleGroup) -> Iterator[torch.Tensor]:
    for module in group.modules:
        yield from module.parameters()
        yield from module.buffers()
    yield from group.parameters
    yield from group.buffers


def _on_cpu(tensor: torch.Tensor, group: ModuleGroup) -> torch.Tensor:
    copy = tensor.data.cpu()
    return copy if group.low_cpu_mem_usage else copy.pin_memory()
