"""The summary's rows and notes for a VAE: the steps of its encoder and decoder, and what diffusers' own code ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator

from diffusers.utils.torch_utils import get_module_execution_device
from torch import nn

from ...steps.plan import MODULE, Call, Step
from .chunks import TILES_WORKING_SET, WORKING_SET
from .classes import ATTENTION, NORM, OF_IMAGES, RESAMPLE, RESIDUAL_BLOCK
from .encode import encode
from .encoder import PIXEL
from .forward import call_for, decode, parallel_group, vae_state
from .in_8_bits import in_8_bits
from .plain import why_not_plain
from .steps import attention, convolution, convolution_8bit, downsampling, kernel_size, pairs, rms_norm

NETWORKS = ("encoder", "decoder")
HEIGHT, WIDTH = 60, 104  # latents of a video at 832×480
KEPT = (
    "8 bits: the resnets' convolutions. For accuracy the middle block, the first up block, and all other convolutions "
    "stay in the VAE's dtype, and so does the encoder"
)


def network_steps(vae: nn.Module, network: str) -> Iterator[tuple[str, list[Step]]]:
    """Yield a network's steps by name, each as often as it occurs, as they would run now without autograd.

    network: "encoder" or "decoder". If diffusers' own code runs, one step stands for all of them.
    """
    if (reason := _why_not_ours(vae, network)) is not None:
        yield network, [Step(getattr(vae, network), MODULE, reason)]
        return
    call = call_for(vae, get_module_execution_device(vae), vae.dtype)
    convolutions = list(_convolutions(vae, network))
    modules = [module for part in _parts(vae, network) for module in part.modules()]
    resnets, _ = in_8_bits(vae.decoder, call) if network == "decoder" else (frozenset(), None)
    of_8_bits = {conv for resnet in resnets for conv in resnet.children()}
    yield from _convolution_steps(convolutions, of_8_bits, _in_pairs(vae, modules), call)
    yield "norm + SiLU", [rms_norm(module, call) for module in modules if type(module) in NORM]
    yield "attention", [attention(module.dim, call) for module in modules if type(module) in ATTENTION]


def _why_not_ours(vae: nn.Module, network: str) -> str | None:
    """Return the reason why diffusers' own code runs a network, or None."""
    parameters = (
        parameter for part in (getattr(vae, network), vae) if part is not None for parameter in part.parameters()
    )
    resting = next(parameters).device  # offloaded weights lie elsewhere than the network runs
    reason = why_not_plain(vae, network, resting, vae.dtype)
    method, ours = {"encoder": ("_encode", encode), "decoder": ("_decode", decode)}[network]
    if reason is None and getattr(vars(vae).get(method), "__func__", None) is not ours:
        return f"its {method} was replaced"
    return reason


def _convolution_steps(
    convolutions: list[tuple[nn.Module, float]],
    in_8_bits: Container[nn.Module],
    in_pairs: Container[nn.Module],
    call: Call,
) -> Iterator[tuple[str, list[Step]]]:
    """Yield the steps of convolutions by name.

    in_8_bits: those that run in 8 bits. in_pairs: those that multiply pairs of frames where a kernel can.
    """
    names = ("convolution in 8 bits", "convolution", "projection", "downsampling")
    steps: dict[str, list[Step]] = {name: [] for name in names}
    for conv, scale in convolutions:
        if conv in in_8_bits and kernel_size(conv) != (1, 1, 1):
            steps["convolution in 8 bits"].append(convolution_8bit(conv, _shape(conv, scale), call))
        elif max(conv.stride) > 1:
            steps["downsampling"].append(downsampling(conv, call))
        else:
            name = "projection" if kernel_size(conv) == (1, 1, 1) else "convolution"
            shape = _shape(conv, scale)
            of_pairs = pairs(conv, shape, call) if conv in in_pairs else None
            steps[name].append(of_pairs or convolution(conv, shape, call))
    yield from ((name, found) for name, found in steps.items() if found)


def _in_pairs(vae: nn.Module, modules: list[nn.Module]) -> set[nn.Module]:
    """Return the convolutions that may multiply pairs of frames: those of resnets. A VAE of images has one frame."""
    if isinstance(vae, OF_IMAGES):
        return set()
    return {conv for module in modules if type(module) in RESIDUAL_BLOCK for conv in (module.conv1, module.conv2)}


def _shape(conv: nn.Module, scale: float) -> tuple[int, ...]:
    """Return the shape of a convolution's input for four frames, if it is `scale` times as high as the latents."""
    channels = max(conv.in_channels, PIXEL)  # as encoder.py lays out pixels
    return 1, 4, int(scale * HEIGHT), int(scale * WIDTH), channels


def _parts(vae: nn.Module, network: str) -> list[nn.Module]:
    """Return the parts of a network in the order in which they run."""
    whole = getattr(vae, network)
    if network == "encoder":
        return [whole.conv_in, *whole.down_blocks, whole.mid_block, whole.norm_out, whole.conv_out, vae.quant_conv]
    up_blocks = [*whole.up_blocks, whole.norm_out, whole.conv_out]
    return [vae.post_quant_conv, whole.conv_in, whole.mid_block, *up_blocks]


def _convolutions(vae: nn.Module, network: str) -> Iterator[tuple[nn.Module, float]]:
    """Yield a network's convolutions, each with the factor of its input's height and width to the latents'."""
    parts = _parts(vae, network)
    resamples = sum(type(module) in RESAMPLE for part in parts for module in part.modules())
    scale, change = (2**resamples, 0.5) if network == "encoder" else (1, 2)
    for part in parts:
        modules = list(part.modules())
        yield from ((module, scale) for module in modules if isinstance(module, (nn.Conv2d, nn.Conv3d)))
        scale *= change if any(type(module) in RESAMPLE for module in modules) else 1


def vae_notes(vae: nn.Module, *, decodes: bool = True) -> list[str]:
    """Return the summary's lines on the frames at a time, on strips, and on what diffusers' code ran.

    decodes: False if a tiny VAE decodes in place of this one.
    """
    state = vae_state(vae)
    chunk = state.config.vae_chunk
    working_set = TILES_WORKING_SET if vae.use_tiling else WORKING_SET
    size = f"as many frames as {working_set >> 20} MiB hold" if chunk is None else f"{chunk} latent frames"
    eager = {"encoder": state.eager_encodes, "decoder": state.eager}
    ran = [f"diffusers' own {name} ran: {_counted(reasons)}" for name, reasons in eager.items() if reasons]
    of_decoder = [*_notes_on_8_bits(vae), *_notes_on_strips(vae)] if decodes else []
    return [f"{size} at a time", *of_decoder, *ran]


def _notes_on_8_bits(vae: nn.Module) -> list[str]:
    """Return what ``vae="8bit"`` leaves in the VAE's dtype and why, if it was asked for and our decoder runs."""
    if _why_not_ours(vae, "decoder") is not None:
        return []
    call = call_for(vae, get_module_execution_device(vae), vae.dtype)
    resnets, reason = in_8_bits(vae.decoder, call)
    if reason is not None:
        others = "other convolutions" if resnets else "convolutions"
        return [f'vae="8bit": {others} stay in the VAE\'s dtype: {reason}']
    return [KEPT] if resnets else []


def _notes_on_strips(vae: nn.Module) -> list[str]:
    group, whole = parallel_group(vae, get_module_execution_device(vae)), vae_state(vae).whole
    strips = [] if group is None else [f"each of {group.size()} processes decodes a strip of the frames"]
    return [*strips, f"each process decoded whole frames: {_counted(whole)}"] if whole else strips


def _counted(reasons: Counter[str]) -> str:
    return ", ".join(f"{reason} ({count})" for reason, count in reasons.items())
