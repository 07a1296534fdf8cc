"""What the patch binds on a VAE: `_decode` and `tiled_decode`, which `decode`, `enable_slicing` and `forward` come to.

Their loops over frames are replaced; the tiles, how they are blended, and what is returned are diffusers' own.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, WeakSet

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan, unpatchify
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import nn

from .... import kernels
from ....config import PatchConfig
from ....plain import is_autocast
from ...graphs import why_not_recorded
from ...plan import STATE, Call, active_backend, derivative_of
from .chunks import frames_at_once
from .decoder import decoded
from .plain import why_not_plain_decoder
from .steps import takes_front

# By VAE the implementations, devices and dtypes whose kernels are compiled. Not by patch: to look for what is left to
# compile takes 0.15 s each time.
_COMPILED: WeakKeyDictionary[nn.Module, set[tuple]] = WeakKeyDictionary()


@dataclass
class VaeState:
    """What the patch keeps on a VAE. users: the models that it was patched with. eager: decodes that diffusers' code
    ran, by reason. receive: gets frames as they are made (`frames_sent_to`)."""

    config: PatchConfig
    users: WeakSet[nn.Module] = field(default_factory=WeakSet)
    eager: Counter[str] = field(default_factory=Counter)
    receive: Callable[[torch.Tensor], None] | None = None

    def __reduce__(self) -> tuple:
        """Copied and pickled without what is of the models that were copied from."""
        return VaeState, (self.config,)


def vae_state(vae: nn.Module) -> VaeState | None:
    """What the patch keeps on a VAE; None for one that is not patched."""
    return vars(vae).get(STATE)


@contextlib.contextmanager
def frames_sent_to(receive: Callable[[torch.Tensor], None], vae: nn.Module) -> Iterator[None]:
    """While the context lasts, give each part of a sample, [B, 3, n, H', W'] in [-1, 1], to a function before the next
    is decoded. What is decoded in tiles or by diffusers' own code is finished all at once, and not given."""
    state = vae_state(vae)
    if state is not None:
        state.receive = receive
    try:
        yield
    finally:
        if state is not None:
            state.receive = None


def decode(self: AutoencoderKLWan, z: torch.Tensor, return_dict: bool = True) -> DecoderOutput | tuple[torch.Tensor]:
    """AutoencoderKLWan._decode, several latent frames at a time; bound on instances.

    z: [B, z_dim, F, H, W]; the sample is [B, 3, F', H', W'] in [-1, 1].
    """
    if not _takes(self, z):
        return type(self)._decode(self, z, return_dict=return_dict)
    edges = (self.tile_sample_min_height, self.tile_sample_min_width)
    if self.use_tiling and any(
        size > edge // self.spatial_compression_ratio for size, edge in zip(z.shape[-2:], edges, strict=True)
    ):
        return self.tiled_decode(z, return_dict=return_dict)
    receive, parts = vae_state(self).receive, []
    for frames in _parts(self, z):
        parts.append(_sample(self, frames))
        if receive is not None:
            receive(parts[-1])
    return _output(torch.cat(parts, dim=2).contiguous(), return_dict)


def tiled_decode(
    self: AutoencoderKLWan, z: torch.Tensor, return_dict: bool = True
) -> DecoderOutput | tuple[torch.Tensor]:
    """AutoencoderKLWan.tiled_decode, several latent frames of a tile at a time; bound on instances. As `decode`."""
    if not _takes(self, z):
        return type(self).tiled_decode(self, z, return_dict=return_dict)
    ratio, patch = self.spatial_compression_ratio, self.config.patch_size or 1
    tile = self.tile_sample_min_height, self.tile_sample_min_width
    stride = self.tile_sample_stride_height, self.tile_sample_stride_width
    (tile_h, tile_w), (step_h, step_w) = ([edge // ratio for edge in edges] for edges in (tile, stride))
    crop_h, crop_w = (edge // patch for edge in stride)
    blend_h, blend_w = (whole // patch - crop for whole, crop in zip(tile, (crop_h, crop_w), strict=True))
    height, width = z.shape[-2:]
    above, rows = [], []
    for top in range(0, height, step_h):
        row = []
        for left in range(0, width, step_w):
            frames = torch.cat(list(_parts(self, z[..., top : top + tile_h, left : left + tile_w])), dim=2).contiguous()
            if above:
                _blend(above[len(row)], frames, blend_h, dim=-2)
            if row:
                _blend(row[-1], frames, blend_w, dim=-1)
            row.append(frames)
        rows.append(torch.cat([frames[..., :crop_h, :crop_w] for frames in row], dim=-1))
        above = row
    frames = torch.cat(rows, dim=-2)
    return _output(_sample(self, frames[..., : height * ratio // patch, : width * ratio // patch]), return_dict)


def _takes(vae: AutoencoderKLWan, z: torch.Tensor) -> bool:
    """Whether our code decodes z. If not, the reason is counted for the summary."""
    if torch.compiler.is_compiling():
        return False
    reason = _why_not_call(vae, z) or why_not_plain_decoder(vae, z.device, z.dtype)
    if reason is not None:
        vae_state(vae).eager[reason] += 1
    return reason is None


def _why_not_call(vae: AutoencoderKLWan, z: torch.Tensor) -> str | None:
    if derivative_of(vae, z) is not None:
        return "autograd"
    if is_autocast(z.device):
        return "autocast"
    if type(z) not in (torch.Tensor, nn.Parameter):
        return f"{type(z).__name__} latents"
    return None if z.dim() == 5 and z.shape[1] == vae.config.z_dim and z.numel() > 0 else "latents of another shape"


def call_for(vae: AutoencoderKLWan, batch: int, positions: int, device: torch.device, dtype: torch.dtype) -> Call:
    """What the choice of kernels depends on. positions: of the batch's latents."""
    return Call(vae_state(vae).config, device, dtype, batch, positions, 0, 0, "sample", None, active_backend())


def _parts(vae: AutoencoderKLWan, z: torch.Tensor) -> Iterator[torch.Tensor]:
    """The decoder's output for latents z, some frames after the other."""
    call = call_for(vae, z.shape[0], z.numel() // z.shape[1], z.device, z.dtype)
    frames = frames_at_once(vae, z, call.config.vae_chunk)
    compiled, kind = _COMPILED.setdefault(vae, set()), (call.config.implementation, z.device, z.dtype)
    if kind not in compiled and _launches_kernels(vae, call) and why_not_recorded((z,)) is None:
        # One after the other the kernels take half a minute. The decoder is plain: nobody notices a run of it.
        kernels.compile_ahead(lambda: deque(decoded(vae, z, call, frames), maxlen=0))
        compiled.add(kind)
    return decoded(vae, z, call, frames)


def _launches_kernels(vae: AutoencoderKLWan, call: Call) -> bool:
    """On a GPU, for the convolutions too: PyTorch's would run while the others are only compiled."""
    return call.device.type == "cuda" and takes_front(vae.decoder.conv_in, call)


def _blend(before: torch.Tensor, frames: torch.Tensor, extent: int, dim: int) -> None:
    """Fade the end of the tile before into the beginning of frames, in place, along a dimension."""
    extent = min(before.shape[dim], frames.shape[dim], extent)
    if extent <= 0:
        return
    wide = torch.promote_types(frames.dtype, torch.float32)
    share = torch.arange(extent, device=frames.device, dtype=wide) / extent
    share = share[:, None] if dim == -2 else share
    old = before.narrow(dim, before.shape[dim] - extent, extent).to(wide)
    new = frames.narrow(dim, 0, extent)
    new.copy_(old * (1 - share) + new.to(wide) * share)


def _sample(vae: AutoencoderKLWan, frames: torch.Tensor) -> torch.Tensor:
    """What the decoder's output shows, in [-1, 1]."""
    if vae.config.patch_size is not None:
        frames = unpatchify(frames, patch_size=vae.config.patch_size)
    return frames.clamp(min=-1.0, max=1.0)


def _output(sample: torch.Tensor, return_dict: bool) -> DecoderOutput | tuple[torch.Tensor]:
    return DecoderOutput(sample=sample) if return_dict else (sample,)
