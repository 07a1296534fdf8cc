"""use_tiny_vae: let a tiny VAE decode in place of a pipeline's own. After any failure nothing is changed."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import torch
from diffusers.models.autoencoders.vae import DecoderOutput
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import nn

from ...checkpoints.lazy import files_of, open_tensors
from ...plain import function_bound_to
from ...wording import name_of_dtype, with_article
from ..errors import PatchError
from ..families.vae import is_vae
from ..families.vae.finished import mark_finished
from ..restoring import Handle
from .network import EDGE, FIRST, GROWTH, TinyDecoder, layout_of, load

_NETWORK = "_turbo_rcm_patch_tiny_vae"  # the attribute of a VAE that holds the decoder
OTHERS = ("taehv", "taecvx", "taeos", "taeltx", "taeh3", "taem1", "taesd")  # published for other latents, by file name
RGB = 3
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # in which PyTorch has convolutions
WORKING_SET = 1 << 30  # bytes of activations: a few frames of 832×480 in full resolution
GROWN = math.prod(GROWTH)  # frames that a latent frame becomes
ALIVE = 2  # tensors of the last width that live together: what a convolution at full size reads and makes


class TinyVae(Handle):
    """A tiny VAE on a pipeline's VAE, and how to undo it. It is a context manager that restores on exit.

    Attributes:
        vae: the VAE whose ``decode`` is the tiny VAE's. It still encodes.
    """

    def __init__(self, vae: nn.Module, network: TinyDecoder, name: str):
        self.vae, self._network, self._name = vae, network, name

    @property
    def active(self) -> bool:
        """True until `restore`."""
        return vars(self.vae).get(_NETWORK) is self._network

    def restore(self) -> None:
        """Let the VAE decode again. Raises PatchError if this was done, or if its ``decode`` was replaced since."""
        if not self.active:
            raise PatchError("nothing to restore: this tiny VAE was taken off already.")
        if function_bound_to(self.vae, vars(self.vae).get("decode")) is not decode:
            raise PatchError("cannot restore: the VAE's decode was replaced after use_tiny_vae; take that off first.")
        del vars(self.vae)["decode"], vars(self.vae)[_NETWORK]

    def __str__(self) -> str:
        if not self.active:
            return "tiny VAE: restored"
        dtype = name_of_dtype(next(self._network.parameters()).dtype)
        return f"tiny VAE: {self._name} decodes, {self._network.layout} layout, in {dtype}"


def use_tiny_vae(target: object, file: str | Path, *, dtype: torch.dtype | None = None) -> TinyVae:
    """Let a tiny VAE decode: frames in a fraction of the time and memory, of somewhat lower quality.

    The pipeline's own VAE stays for encoding, and its ``decode`` comes back with the handle's ``restore()``. There are
    no gradients through the tiny VAE.

    Args:
        target: a diffusers pipeline whose VAE is an AutoencoderKLWan or AutoencoderKLQwenImage, or the VAE.
        file: a published file of TAEHV, .safetensors or .pth (code in it does not run): taew2_1 for Wan 2.1, A14B and
            Qwen-Image, taew2_2 or taew2_2_super for TI2V-5B.
        dtype: what the network computes in. Default: the dtype of the file's weights, float16 as published.

    Raises:
        TypeError: the file is no path.
        ValueError: the file cannot be read, has another layout or weights in 8 bits, or is for other latents than the
            VAE's; or the VAE's images have transparency; or no network computes in the dtype.
        PatchError: the target has no such VAE, or has a tiny VAE already, or its ``decode`` was replaced.
    """
    vae = _vae_of(target)
    if not isinstance(file, (str, Path)):
        raise TypeError(f"file={file!r}; give the path of a tiny VAE, such as 'taew2_1.safetensors'.")
    file = Path(file).expanduser()
    for name in (part.name for part in files_of(file)):  # the folder of a file may have any name
        if name.lower().startswith(OTHERS):
            raise ValueError(f"{name} is for other latents than Wan's and Qwen-Image's; give taew2_1 or taew2_2.")
    with open_tensors(file) as tensors:
        try:
            network = layout_of({name: torch.Size(tensor.shape) for name, tensor in tensors.items()})
        except ValueError as error:
            raise ValueError(f"{file} is no tiny VAE that is known: {error}") from None
        _check_latents(vae, network, file)
        weights = {name: tensor.load() for name, tensor in tensors.items() if name.startswith("decoder.")}
    if odd := {weight.dtype for weight in weights.values()}.difference(DTYPES):
        raise ValueError(f"{file} holds weights in {name_of_dtype(odd.pop())}; give a file in float16 or float32.")
    load(network, weights)
    dtype = dtype or next(network.parameters()).dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}; give one of {', '.join(map(str, DTYPES))}.")
    network.requires_grad_(False).eval().to(dtype=dtype, memory_format=torch.channels_last)
    vars(vae)[_NETWORK] = network  # not a submodule: the VAE's state_dict stays the same
    vars(vae)["decode"] = partial(decode, vae)  # unlike a method, it can be pickled
    return TinyVae(vae, network, file.name)


def has_tiny_vae(vae: object) -> bool:
    """True if a tiny VAE decodes in place of a VAE."""
    return isinstance(vae, nn.Module) and _NETWORK in vars(vae)


def _vae_of(target: object) -> nn.Module:
    vae = target if isinstance(target, nn.Module) else getattr(target, "vae", None)
    if not is_vae(vae):
        found = "no VAE" if vae is None else with_article(type(vae).__name__)
        raise PatchError(f"use_tiny_vae needs an AutoencoderKLWan or AutoencoderKLQwenImage; there is {found}.")
    if _NETWORK in vars(vae):
        raise PatchError("a tiny VAE decodes already; call restore() on its handle first.")
    if "decode" in vars(vae):
        raise PatchError("the VAE's decode was replaced; take that off first.")
    return vae


def _check_latents(vae: nn.Module, network: TinyDecoder, file: Path) -> None:
    theirs = network.latent_channels, EDGE * network.patch_size
    own = vae.config.z_dim, vae.spatial_compression_ratio
    if theirs != own:
        raise ValueError(
            f"{file.name} decodes latents of {theirs[0]} channels, {theirs[1]} pixels wide each; this VAE's have "
            f"{own[0]} and {own[1]}. taew2_1 is for Wan 2.1, A14B and Qwen-Image, taew2_2 for TI2V-5B."
        )
    channels = vae.config.get("input_channels", RGB)  # 4 in Qwen-Image-Layered's
    if channels != RGB:
        raise ValueError(
            f"{file.name} makes images of {RGB} channels; this VAE's have {channels}. Leave the VAE as it is."
        )


@apply_forward_hook  # as diffusers' decode: offloading of whole models moves the model before this one away
@torch.no_grad()
def decode(self: nn.Module, z: torch.Tensor, return_dict: bool = True) -> DecoderOutput | tuple[torch.Tensor]:
    """Replace a VAE's ``decode``; bound on the instance.

    z: [B, z_dim, F, h, w] -> the sample [B, 3, 1 + 4 (F - 1), H, W] in [-1, 1], in z's dtype.
    """
    if z.dim() != 5 or z.shape[1] != self.config.z_dim or z.shape[2] == 0:
        raise ValueError(f"the latents have shape {list(z.shape)}; they must be [B, {self.config.z_dim}, F, h, w].")
    network: TinyDecoder = vars(self)[_NETWORK].to(z.device)
    dtype = next(network.parameters()).dtype
    mean, deviation = (
        torch.tensor(values, device=z.device).view(1, -1, 1, 1, 1)
        for values in (self.config.latents_mean, self.config.latents_std)
    )
    latents = ((z.float() - mean) / deviation).to(dtype).movedim(1, 2)  # as the transformer made them
    B, count, _, height, width = latents.shape
    shape = B, 3, count * GROWN, height * self.spatial_compression_ratio, width * self.spatial_compression_ratio
    made = z.new_empty(shape)
    sample = made[:, :, FIRST:]
    for index, (video, result) in enumerate(zip(latents, made, strict=True), start=1):
        done, before = 0, {}
        for part in video.split(_at_once(network, video)):
            frames = network(part, before)
            result[:, done : done + len(frames)] = (frames * 2 - 1).movedim(1, 0)
            done += len(frames)
            if index == B:  # the other samples have all their frames
                mark_finished(sample, done - FIRST)
    return DecoderOutput(sample=sample) if return_dict else (sample,)


def _at_once(network: TinyDecoder, latents: torch.Tensor) -> int:
    """Return the number of latent frames [F, C, h, w] to decode at a time."""
    _, _, height, width = latents.shape
    last = network.decoder[-1].in_channels * GROWN * height * width * EDGE**2
    return max(1, WORKING_SET // (ALIVE * last * latents.itemsize))
