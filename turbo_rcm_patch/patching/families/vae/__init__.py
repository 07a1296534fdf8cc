"""The decoder of AutoencoderKLWan (Wan 2.1's, and TI2V-5B's residual one) and of AutoencoderKLQwenImage.

classes.py: the classes of both VAEs and their parts. forward.py: the methods bound on the VAE. decoder.py: the decoder
on channels-last activations. chunks.py: the number of frames at a time. steps.py: the steps and their kernels.
plain.py: the reasons for diffusers' own code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from diffusers.utils.torch_utils import get_module_execution_device
from torch import nn

from ....config import PatchConfig
from ....plain import is_original
from ...copying import reduce_ex
from ...journal import bind
from ...steps.plan import MODULE, STATE, Step
from ..family import Binding, class_path
from .chunks import TILES_WORKING_SET, WORKING_SET
from .classes import ATTENTION, NORM, RESAMPLE, VAE
from .forward import VaeState, call_for, decode, frames_sent_to, tiled_decode, vae_state
from .plain import why_not_plain_decoder
from .steps import attention, convolution, kernel_size, rms_norm

__all__ = ["bindings", "decoder_notes", "decoder_steps", "frames_sent_to", "is_vae", "vae_state", "why_left_alone"]

HEIGHT, WIDTH = 60, 104  # latents of a video at 832×480


def is_vae(model: object) -> bool:
    """True for a VAE of a class that can be patched, or of one derived from it."""
    return isinstance(model, VAE)


def why_left_alone(vae: nn.Module) -> str | None:
    """Return the reason why a VAE cannot be patched, or None."""
    if type(vae) not in VAE:
        return f"its class is {class_path(vae)}, not {' or '.join(known.__name__ for known in VAE)}"
    if vae.decoder is None:
        return "it has no decoder"
    for name in ("_decode", "tiled_decode"):
        if name in vars(vae) or not is_original(getattr(type(vae), name), type(vae)):
            return f"its {name} was replaced"
    return None


def bindings(vae: nn.Module, config: PatchConfig) -> list[Binding]:
    """Return the bindings that patch a VAE, in the order to set them."""
    return [
        (vae, STATE, VaeState(config)),
        (vae, "__reduce_ex__", bind(reduce_ex, vae)),
        (vae, "tiled_decode", bind(tiled_decode, vae)),
        (vae, "_decode", bind(decode, vae)),
    ]


def decoder_steps(vae: nn.Module) -> Iterator[tuple[str, list[Step]]]:
    """Yield the decoder's steps by name, each as often as it occurs, as they would run now without autograd.

    If diffusers' own code runs, one step stands for the whole decoder.
    """
    parameters = (parameter for part in (vae.decoder, vae) if part is not None for parameter in part.parameters())
    resting = next(parameters).device  # offloaded weights lie elsewhere than the decoder runs
    reason = why_not_plain_decoder(vae, resting, vae.dtype)
    if reason is not None:
        yield "decoder", [Step(vae.decoder, MODULE, reason)]
        return
    call = call_for(vae, get_module_execution_device(vae), vae.dtype)
    modules = [vae.post_quant_conv, *vae.decoder.modules()]
    convolutions = list(_convolutions(vae))
    for name, is_projection in (("convolution", False), ("projection", True)):
        of_kind = [pair for pair in convolutions if (kernel_size(pair[0]) == (1, 1, 1)) == is_projection]
        yield name, [convolution(conv, _shape(conv, scale), call) for conv, scale in of_kind]
    yield "norm + SiLU", [rms_norm(module, call) for module in modules if type(module) in NORM]
    yield "attention", [attention(module.dim, call) for module in modules if type(module) in ATTENTION]


def _shape(conv: nn.Module, scale: int) -> tuple[int, ...]:
    """Return the shape of a convolution's input for four frames, if it is `scale` times as high as the latents."""
    return 1, 4, scale * HEIGHT, scale * WIDTH, conv.in_channels


def _convolutions(vae: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Yield the decoder's convolutions, each with the factor of its input's height and width to the latents'."""
    decoder, scale = vae.decoder, 1
    for part in (vae.post_quant_conv, decoder.conv_in, decoder.mid_block, *decoder.up_blocks, decoder.conv_out):
        modules = list(part.modules())
        yield from ((module, scale) for module in modules if isinstance(module, (nn.Conv2d, nn.Conv3d)))
        scale *= 2 if any(type(module) in RESAMPLE for module in modules) else 1


def decoder_notes(vae: nn.Module) -> list[str]:
    """Return the summary's lines on the frames at a time, and on the decodes that diffusers' code ran."""
    state = vae_state(vae)
    chunk, eager = state.config.vae_chunk, state.eager.copy()
    working_set = TILES_WORKING_SET if vae.use_tiling else WORKING_SET
    size = f"as many frames as {working_set >> 20} MiB hold" if chunk is None else f"{chunk} latent frames"
    notes = [f"{size} at a time"]
    return notes + ([f"diffusers' own decoder ran: {_counted(eager)}"] if eager else [])


def _counted(reasons: Counter[str]) -> str:
    return ", ".join(f"{reason} ({count})" for reason, count in reasons.items())
