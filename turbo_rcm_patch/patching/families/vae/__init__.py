"""The VAEs AutoencoderKLWan (Wan 2.1's, and TI2V-5B's residual one) and AutoencoderKLQwenImage.

classes.py: the classes of both VAEs and their parts. forward.py, encode.py: the methods bound on the VAE. decoder.py,
encoder.py: the networks on channels-last activations. layers.py: what both have. tiles.py: images in tiles. strips.py:
decodes that processes share. chunks.py: the number of frames at a time. steps.py: the steps and their kernels.
plain.py: the reasons for diffusers' own code. shown.py: what the summary shows.
"""

from __future__ import annotations

from torch import nn

from ....config import PatchConfig
from ...copying import reduce_ex
from ...journal import bind
from ...steps.plan import STATE
from ..family import Binding, class_path
from .classes import VAE
from .encode import encode, tiled_encode
from .forward import VaeState, decode, tiled_decode, vae_state
from .plain import why_replaced
from .shown import NETWORKS, network_steps, vae_notes

__all__ = [
    "NETWORKS",
    "bindings",
    "is_vae",
    "network_steps",
    "vae_notes",
    "vae_state",
    "why_left_alone",
]


def is_vae(model: object) -> bool:
    """True for a VAE of a class that can be patched, or of one derived from it."""
    return isinstance(model, VAE)


def why_left_alone(vae: nn.Module) -> str | None:
    """Return the reason why a VAE cannot be patched, or None."""
    if hasattr(vae, "_orig_mod"):
        return "it is compiled; patch it before compiling it"
    if type(vae) not in VAE:
        return f"its class is {class_path(vae)}, not {' or '.join(known.__name__ for known in VAE)}"
    return "it has no decoder" if vae.decoder is None else why_replaced(vae, "decoder")


def bindings(vae: nn.Module, config: PatchConfig) -> list[Binding]:
    """Return the bindings that patch a VAE, in the order to set them. An encoder that was replaced stays as it is."""
    encoding = []
    if vae.encoder is not None and why_replaced(vae, "encoder") is None:
        encoding = [(vae, "tiled_encode", bind(tiled_encode, vae)), (vae, "_encode", bind(encode, vae))]
    return [
        (vae, STATE, VaeState(config)),
        (vae, "__reduce_ex__", bind(reduce_ex, vae)),
        *encoding,
        (vae, "tiled_decode", bind(tiled_decode, vae)),
        (vae, "_decode", bind(decode, vae)),
    ]
