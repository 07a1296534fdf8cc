"""Read weights that offloading brings to the device for each call of a module, without calling the module.

diffusers' group offloading and accelerate's offloading and device maps put a hook on each layer. A kernel that reads
the layer's weights runs between the hook's two halves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from diffusers.hooks import group_offloading
from torch import nn

from ...plain import function_bound_to, hook_around_forward, is_align_devices_hook, is_original
from ..journal import slot_below_hooks


def are_brought(module: nn.Module) -> bool:
    """True if a call of a module runs its class's forward, after a hook that brings its weights and does no more."""
    if torch.compiler.is_compiling() or hook_around_forward(module) is not None:
        return False
    hooks, cls = _hooks(module), type(module)
    if not hooks or not all(map(_only_brings, hooks)) or not is_original(cls.forward, cls):
        return False
    if "_hf_hook" not in vars(module):
        return slot_below_hooks(module) is not None
    return len(hooks) == 1 and function_bound_to(module, vars(module).get("_old_forward")) is cls.forward


def _hooks(module: nn.Module) -> list[object]:
    """Return the hooks of diffusers and accelerate on a module, in the order in which they run before its forward."""
    own, registry = vars(module).get("_hf_hook"), vars(module).get("_diffusers_hook")
    names = [] if registry is None else reversed(registry._hook_order)
    return [*([] if own is None else [own]), *(registry.hooks[name] for name in names)]


def _only_brings(hook: object) -> bool:
    return is_align_devices_hook(hook) or type(hook).__module__ == group_offloading.__name__


def between_hooks(run: Callable, modules: Iterable[nn.Module], device: torch.device) -> Callable:
    """Return a function that does what ``run`` does, while the modules' weights are on the device."""
    modules = [module for module in modules if are_brought(module)]
    return partial(_run_between_hooks, modules, device, run) if modules else run


def _run_between_hooks(modules: Sequence[nn.Module], device: torch.device, run: Callable, *inputs: object) -> object:
    with _brought(modules, device):
        return run(*inputs)


@contextmanager
def _brought(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """A context in which hooks have brought the modules' weights. Weights that they leave elsewhere come too.

    All go back at its end, or if bringing one fails.
    """
    with ExitStack() as taking_back:
        for module in modules:
            for hook in _hooks(module):
                taking_back.callback(hook.post_forward, module, None)
                hook.pre_forward(module)
        for parameter in (p for module in modules for p in module._parameters.values()):
            if parameter is not None and parameter.device != device:
                taking_back.callback(setattr, parameter, "data", parameter.data)
                parameter.data = parameter.data.to(device, non_blocking=True)
        yield
