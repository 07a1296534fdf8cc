"""Whether a module is exactly what it seems, so that a kernel may read its weights instead of calling it.

LoRA layers, quantised weights, offloading, layerwise casting and user hooks all change what calling a module does;
reading ``.weight`` past them would silently drop their effect.
"""

from __future__ import annotations

import torch


def why_not_plain(module: torch.nn.Module, expected: type) -> str | None:
    """Why `module` is not simply an `expected`, in a few words; None when it is, with no hook and ordinary weights."""
    if type(module) is not expected:
        return _peft_layer(module) or f"{type(module).__module__.split('.')[0]} {type(module).__name__} layer"
    return hook_on(module) or _odd_weight(module)


def why_not_linear(linear: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a kernel may not read a linear's weight for inputs of this device and dtype; None when it may."""
    reason = why_not_plain(linear, torch.nn.Linear)
    if reason is None and linear.weight.dtype != dtype:
        reason = f"{str(linear.weight.dtype).removeprefix('torch.')} weight"
    return reason or _elsewhere(linear, device)


def why_not_norm(norm: torch.nn.Module, expected: type, device: torch.device) -> str | None:
    """Why a kernel may not read a norm's weight (of any float dtype) for inputs on this device; None when it may."""
    return why_not_plain(norm, expected) or _elsewhere(norm, device)


def why_not_read(module: torch.nn.Module, device: torch.device) -> str | None:
    """Why what a module computes may depend on more than the bits of its own parameters; None when it does not."""
    return _peft_layer(module) or hook_on(module) or _odd_weight(module) or _elsewhere(module, device)


def hook_on(module: torch.nn.Module) -> str | None:
    """The hook or replaced forward on a module, in a few words; None when calling it runs its class's forward alone."""
    registry = module.__dict__.get("_diffusers_hook")
    if registry is not None and registry.hooks:
        return f"hook {', '.join(registry.hooks)}"
    if "_hf_hook" in module.__dict__:
        return f"hook {type(module._hf_hook).__name__}"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return "torch hook"
    if "forward" in module.__dict__:
        return "replaced forward"
    return None


def _peft_layer(module: torch.nn.Module) -> str | None:
    path = type(module).__module__
    if not path.startswith("peft."):
        return None
    return "LoRA layer" if ".lora." in path else "PEFT layer"


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
