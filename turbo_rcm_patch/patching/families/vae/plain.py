"""Find the reason why an encoder or a decoder differs from diffusers'. Then diffusers' own code runs all of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ....plain import is_original, why_not_read
from .classes import (
    ATTENTION,
    AVERAGE,
    CAUSAL,
    DECODER,
    ENCODER,
    MID_BLOCK,
    NORM,
    RESAMPLE,
    RESIDUAL_BLOCK,
    RESIDUAL_DOWN_BLOCK,
    RESIDUAL_UP_BLOCK,
    SHORTCUT,
    UP_BLOCK,
    UPSAMPLE,
)
from .steps import kernel_size

# The classes whose forwards encoder.py and decoder.py replace, by the attribute that holds a module or a list of them.
_PARTS = {
    "post_quant_conv": CAUSAL,
    "decoder": DECODER,
    "quant_conv": CAUSAL,
    "encoder": ENCODER,
    "conv_in": CAUSAL,
    "mid_block": MID_BLOCK,
    "down_blocks": RESIDUAL_BLOCK + RESAMPLE + RESIDUAL_DOWN_BLOCK,
    "up_blocks": UP_BLOCK + RESIDUAL_UP_BLOCK,
    "norm_out": NORM,
    "conv_out": CAUSAL,
    "resnets": RESIDUAL_BLOCK,
    "norm1": NORM,
    "conv1": CAUSAL,
    "norm2": NORM,
    "dropout": (nn.Dropout,),
    "conv2": CAUSAL,
    "conv_shortcut": (*CAUSAL, nn.Identity),
    "nonlinearity": (nn.SiLU,),
    "attentions": ATTENTION,
    "norm": NORM,
    "to_qkv": (nn.Conv2d,),
    "proj": (nn.Conv2d,),
    "upsamplers": RESAMPLE,
    "upsampler": RESAMPLE,
    "downsampler": RESAMPLE,
    "resample": (*UPSAMPLE, nn.ZeroPad2d, nn.Conv2d),
    "time_conv": CAUSAL,
    "avg_shortcut": SHORTCUT + AVERAGE,
}
_LISTS = {"down_blocks", "up_blocks", "resnets", "attentions", "upsamplers", "resample"}
_METHODS = {"encoder": ("_encode", "tiled_encode"), "decoder": ("_decode", "tiled_decode")}
_BLENDING = ("blend_v", "blend_h")
_OUTSIDE = {"encoder": "quant_conv", "decoder": "post_quant_conv"}


def why_not_plain(vae: nn.Module, network: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why diffusers' own code takes input of this device and dtype, or None if ours does.

    network: "encoder" or "decoder".
    """
    for name in (*_METHODS[network], *_BLENDING):
        if not is_original(getattr(type(vae), name), type(vae)) or (name in _BLENDING and name in vars(vae)):
            return f"replaced {name}"
    if (whole := getattr(vae, network)) is None:
        return f"no {network}"
    causal = [m for _, m in whole.named_modules(remove_duplicate=False) if isinstance(m, CAUSAL)]
    if len(set(causal)) < len(causal):  # ours keeps the frames before a chunk by convolution, diffusers by place
        return f"a convolution at two places in {network}"
    for path, module in _parts(vae, network):
        reason = _why_not_part(path, module, device, dtype)
        if reason is not None:
            return f"{reason} on {path}"
    return None


def why_replaced(vae: nn.Module, network: str) -> str | None:
    """Return the reason why the patch does not bind its methods for a network, or None: the VAE's were replaced."""
    for name in _METHODS[network]:
        if name in vars(vae) or not is_original(getattr(type(vae), name), type(vae)):
            return f"its {name} was replaced"
    return None


def _parts(vae: nn.Module, network: str) -> Iterator[tuple[str, nn.Module]]:
    yield _OUTSIDE[network], getattr(vae, _OUTSIDE[network])
    yield from getattr(vae, network).named_modules(prefix=network)


def _why_not_part(path: str, module: nn.Module, device: torch.device, dtype: torch.dtype) -> str | None:
    steps = path.split(".")
    name = next(step for step in reversed(steps) if not step.isdigit())
    known = (nn.ModuleList, nn.Sequential) if name in _LISTS and name == steps[-1] else _PARTS.get(name, ())
    reason = why_not_read(module, known, device)
    if reason is None and module._compiled_call_impl is not None:
        reason = "torch.compile"
    if reason is None and type(module) is nn.Dropout and module.training and module.p > 0:
        reason = "dropout"
    if reason is None and any(p is not None and p.dtype != dtype for p in module._parameters.values()):
        reason = "a weight of another dtype"
    if reason is None and not _is_as_built(module, steps[0] == "encoder", name):
        reason = "changed attributes"
    return reason


def _is_as_built(module: nn.Module, in_encoder: bool, name: str) -> bool:
    """True if the attributes that a module's forward reads, besides weights, are as built for its network."""
    kind = type(module)
    if kind in (nn.Conv2d, *CAUSAL):
        halves = in_encoder and name in ("resample", "time_conv")
        return _halves_as_built(module) if halves else _is_convolution_as_built(module)
    if kind in NORM:
        return _is_norm_as_built(module)
    if kind in UPSAMPLE:
        return (module.mode, module.scale_factor) == ("nearest-exact", (2.0, 2.0))
    if kind is nn.ZeroPad2d:
        return module.padding == (0, 1, 0, 1)
    return kind not in RESAMPLE or module.mode in (_DOWN if in_encoder else _UP)


_DOWN, _UP = ("downsample2d", "downsample3d"), ("upsample2d", "upsample3d")


def _is_convolution_as_built(conv: nn.Conv2d | nn.Conv3d) -> bool:
    kt, kh, kw = kernel_size(conv)
    ones = (1,) * len(conv.kernel_size)
    padding = {2: (kh // 2, kw // 2), 3: (0, 0, 0)}[len(ones)]
    in_front = getattr(conv, "_padding", None)
    return (
        (conv.stride, conv.dilation, conv.groups, conv.padding_mode) == (ones, ones, 1, "zeros")
        and conv.padding == padding
        and in_front in (None, (kw // 2, kw // 2, kh // 2, kh // 2, kt - 1, 0))
    )


def _halves_as_built(conv: nn.Conv2d | nn.Conv3d) -> bool:
    """True for the encoder's convolution of stride 2 over images or frames, as built."""
    rank = len(conv.kernel_size)
    sizes = {2: ((3, 3), (2, 2)), 3: ((3, 1, 1), (2, 1, 1))}[rank]
    rest = (conv.dilation, conv.groups, conv.padding_mode, conv.padding)
    in_front = getattr(conv, "_padding", (0,) * 6)
    return (
        (conv.kernel_size, conv.stride) == sizes
        and rest == ((1,) * rank, 1, "zeros", (0,) * rank)
        and not any(in_front)
    )


def _is_norm_as_built(norm: nn.Module) -> bool:
    is_scaled = norm.scale == norm.gamma.numel() ** 0.5
    return norm.channel_first and is_scaled and isinstance(norm.bias, float) and norm.bias == 0
