"""Checks that a module is exactly what its class says, so that a kernel may read its weights instead of calling it.

LoRA layers, quantised weights, offloading, layerwise casting and user hooks all change what calling a module does;
reading ``.weight`` past them would silently drop their effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType

import torch

from .wording import name_of_dtype


def why_not_plain(module: torch.nn.Module, expected: type) -> str | None:
    """Return why `module` is not a plain `expected`, or None. A plain module has no hooks and ordinary weights."""
    if type(module) is not expected:
        return _odd_class(module)
    return hook_on(module) or _odd_weight(module)


def why_not_linear(linear: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a kernel may not read a linear's weight for inputs of this device and dtype, or None if it may."""
    reason = why_not_plain(linear, torch.nn.Linear)
    if reason is None and linear.weight.dtype != dtype:
        reason = f"{name_of_dtype(linear.weight.dtype)} weight"
    return reason or _elsewhere(linear, device)


def linear_of(module: torch.nn.Module) -> torch.nn.Module:
    """Return the linear inside peft's LoRA layers if calling them only calls it, else the module itself.

    A layer only calls its base if its LoRA is fused (merged) into the weight, or switched off. The answer changes with
    the layer's attributes: peft unfuses in place, and in the first call of a disabled layer.
    """
    while is_lora_layer(module) and _calls_base_alone(module) and hook_on(module) is None:
        module = module.base_layer
    return module


def is_lora_layer(module: torch.nn.Module) -> bool:
    """True for peft's LoRA layer around a linear. The check is by name, so that peft need not be installed."""
    cls = type(module)
    return (cls.__module__, cls.__name__) == ("peft.tuners.lora.layer", "Linear")


def _calls_base_alone(layer: torch.nn.Module) -> bool:
    """True if the forward of peft's layer is its base layer's. A merged weight includes DoRA and other variants."""
    if layer.disable_adapters or layer.merged:
        return layer.disable_adapters != layer.merged  # disabled but merged: its forward unmerges first
    return not any(adapter in layer.lora_A for adapter in layer.active_adapters)


def unsharded_class(module: torch.nn.Module) -> type:
    """Return a module's class, or the class that it had before fully_shard (FSDP2) replaced it."""
    bases = type(module).__bases__
    return bases[1] if bases[0].__name__ == "FSDPModule" else type(module)


def is_sharded(module: torch.nn.Module) -> bool:
    """True if fully_shard (FSDP2) sharded a module or one inside it, or if it holds sharded parameters.

    FSDP2's parameters are whole while their module runs, and after it in the outermost module.
    """
    if any(unsharded_class(part) is not type(part) for part in module.modules()):
        return True
    return any(type(parameter).__name__ == "DTensor" for parameter in module.parameters())


def why_not_norm(norm: torch.nn.Module, expected: type, device: torch.device) -> str | None:
    """Return why a kernel may not read a norm's weight (of any float dtype) for inputs on this device, or None."""
    return why_not_plain(norm, expected) or _elsewhere(norm, device)


def why_not_read(
    module: torch.nn.Module,
    known: tuple[type, ...],
    device: torch.device,
    forward: object | None = None,
    *,
    is_known: bool = False,
) -> str | None:
    """Return the reason why a module's result may depend on more than its own parameters' values, or None.

    known: the classes whose results depend on nothing else. forward: a forward on the instance that is known too.
    is_known: True if the hooks that replace the module's forward depend on nothing else either.
    """
    if type(module) not in known:
        return _odd_class(module)
    hook = hook_around_forward(module) if is_known else hook_on(module, forward)
    return hook or _odd_weight(module) or _elsewhere(module, device)


def hook_on(module: torch.nn.Module, forward: object | None = None) -> str | None:
    """Return a name for the hook or replaced forward on a module, or None if a call runs only its class's forward.

    forward: a replaced forward that counts as the class's own, or None.
    """
    in_place = None if _only_places_inputs(module) else hook_in_place_of_forward(module, forward)
    return in_place or hook_around_forward(module)


def _only_places_inputs(module: torch.nn.Module) -> bool:
    """True if the hook on a module only moves inputs to the device of its weights, as accelerate's device maps do."""
    hook, cls = vars(module).get("_hf_hook"), type(module)
    if hook is None or not is_align_devices_hook(hook) or hook.offload or "_diffusers_hook" in vars(module):
        return False
    return function_bound_to(module, vars(module).get("_old_forward")) is cls.forward and is_original(cls.forward, cls)


def is_align_devices_hook(hook: object) -> bool:
    """True for accelerate's hook that offloads weights or moves inputs. By name, so that accelerate is not imported."""
    return (type(hook).__module__, type(hook).__name__) == ("accelerate.hooks", "AlignDevicesHook")


def hook_in_place_of_forward(module: torch.nn.Module, forward: object | None = None) -> str | None:
    """Like `hook_on`, but only for hooks that hold a module's forward or replace it."""
    registry = module.__dict__.get("_diffusers_hook")
    if registry is not None and registry.hooks:
        kinds = (name.partition("---")[0] for name in registry.hooks)  # context parallelism adds a path
        return f"hook {', '.join(kinds)}"
    if "_hf_hook" in module.__dict__:
        return f"hook {type(module._hf_hook).__name__}"
    if module.__dict__.get("forward") is not forward and not _is_class_forward(module):
        return "replaced forward"
    if not is_original(type(module).forward, type(module)):
        return "replaced forward of its class"
    return None


def hook_around_forward(module: torch.nn.Module) -> str | None:
    """Like `hook_on`, but only for torch's hooks, which run around any forward of the module."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return "torch hook"
    return "global torch hook" if torch.nn.modules.module._has_any_global_hook() else None


def _is_class_forward(module: torch.nn.Module) -> bool:
    """True if the instance has no forward, or only its class's own, which removed hooks leave behind."""
    forward = module.__dict__.get("forward")
    return forward is None or function_bound_to(module, forward) is type(module).forward


def function_bound_to(module: torch.nn.Module, value: object) -> Callable | None:
    """Return the function of a method, or of a partial with one argument, that is bound to the module, or None."""
    if isinstance(value, partial) and len(value.args) == 1 and not value.keywords:
        return value.func if value.args[0] is module else None
    return value.__func__ if isinstance(value, MethodType) and value.__self__ is module else None


def is_original(method: Callable, cls: type) -> bool:
    """True if a class's method was defined in the module of the class or of one of its bases.

    functools.wraps gives a replacement the original's module name. Such a replacement is still recognised.
    """
    modules = [base.__module__ for base in cls.__mro__]
    if method.__module__ not in modules:
        return False
    if not hasattr(method, "__wrapped__"):
        return _defined_in(method) == method.__module__
    packages = {_package(module) for module in modules}  # torch counts for modules: its no_grad is harmless
    return all(_package(_defined_in(layer)) in packages for layer in _layers(method))


def _layers(method: Callable) -> Iterator[Callable]:
    while method is not None:
        yield method
        method = getattr(method, "__wrapped__", None)


def _defined_in(function: Callable) -> str:
    return getattr(function, "__globals__", {}).get("__name__", "")


def _package(module: str) -> str:
    return module.split(".")[0]


def _odd_class(module: torch.nn.Module) -> str:
    path = type(module).__module__
    if path.startswith("peft."):
        return "LoRA layer" if ".lora." in path else "PEFT layer"
    return f"{path.split('.')[0]} {type(module).__name__} layer"


def _odd_weight(module: torch.nn.Module) -> str | None:
    for parameter in module._parameters.values():
        if parameter is not None and type(parameter) not in (torch.nn.Parameter, torch.Tensor):
            return f"{type(parameter).__name__} weight"
    return None


def _elsewhere(module: torch.nn.Module, device: torch.device) -> str | None:
    for parameter in module._parameters.values():
        if parameter is not None and parameter.device != device:
            return f"weight on {parameter.device}"
    return None


def is_autocast(device: torch.device) -> bool:
    """True if autocast is on for a device. autocast does not know the meta device."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def is_transformed() -> bool:
    """True while a transform of torch.func runs. False while torch.compile traces."""
    return not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is not None
