"""Find the reason why a decoder differs from diffusers'. Then diffusers' own code runs the whole decoder."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ....plain import is_original, why_not_read
from .classes import (
    ATTENTION,
    CAUSAL,
    DECODER,
    MID_BLOCK,
    NORM,
    RESAMPLE,
    RESIDUAL_BLOCK,
    RESIDUAL_UP_BLOCK,
    SHORTCUT,
    UP_BLOCK,
    UPSAMPLE,
)
from .steps import kernel_size

# The classes whose forwards decoder.py replaces, by the attribute that holds one module or a list of them.
_PARTS = {
    "post_quant_conv": CAUSAL,
    "decoder": DECODER,
    "conv_in": CAUSAL,
    "mid_block": MID_BLOCK,
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
    "resample": (*UPSAMPLE, nn.Conv2d),
    "time_conv": CAUSAL,
    "avg_shortcut": SHORTCUT,
}
_LISTS = {"up_blocks", "resnets", "attentions", "upsamplers", "resample"}
_METHODS = ("_decode", "tiled_decode", "blend_v", "blend_h")


def why_not_plain_decoder(vae: nn.Module, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why diffusers' own code decodes latents of this device and dtype, or None if ours does."""
    for name in _METHODS:
        if not is_original(getattr(type(vae), name), type(vae)) or (name.startswith("blend") and name in vars(vae)):
            return f"replaced {name}"
    if vae.decoder is None:
        return "no decoder"
    causal = [m for _, m in vae.decoder.named_modules(remove_duplicate=False) if isinstance(m, CAUSAL)]
    if len(set(causal)) < len(causal):  # ours keeps the frames before a chunk by convolution, diffusers by place
        return "a convolution at two places in decoder"
    for path, module in _parts(vae):
        reason = _why_not_part(path, module, device, dtype)
        if reason is not None:
            return f"{reason} on {path}"
    return None


def _parts(vae: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    yield "post_quant_conv", vae.post_quant_conv
    yield from vae.decoder.named_modules(prefix="decoder")


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
    if reason is None and type(module) in _IS_AS_BUILT and not _IS_AS_BUILT[type(module)](module):
        reason = "changed attributes"
    return reason


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


def _is_norm_as_built(norm: nn.Module) -> bool:
    is_scaled = norm.scale == norm.gamma.numel() ** 0.5
    return norm.channel_first and is_scaled and isinstance(norm.bias, float) and norm.bias == 0


def _is_upsample_as_built(upsample: nn.Upsample) -> bool:
    return (upsample.mode, upsample.scale_factor) == ("nearest-exact", (2.0, 2.0))


def _is_resample_as_built(resample: nn.Module) -> bool:
    return resample.mode in ("upsample2d", "upsample3d")


# For each class a test of the attributes that its forward reads besides weights: are they as built for the decoder?
_IS_AS_BUILT = {
    **dict.fromkeys((nn.Conv2d, *CAUSAL), _is_convolution_as_built),
    **dict.fromkeys(NORM, _is_norm_as_built),
    **dict.fromkeys(UPSAMPLE, _is_upsample_as_built),
    **dict.fromkeys(RESAMPLE, _is_resample_as_built),
}
