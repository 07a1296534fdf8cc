"""The methods that the patch binds on a VAE: `_decode` and `tiled_decode`. `decode`, slicing and `forward` call them.

Their loops over frames are replaced. The tiles, their blending and the results are diffusers' own.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, WeakSet

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import nn

from .... import kernels
from ....config import PatchConfig
from ....plain import is_autocast
from ...cuda_graphs import why_not_recorded
from ...steps.plan import STATE, Call, active_backend, derivative_of
from ..family import graph_of
from .chunks import TILES_WORKING_SET, frames_at_once, free_for_decoding, output_shape
from .classes import clamps_tiles, patch_size_of
from .decoder import decoded
from .plain import why_not_plain_decoder
from .steps import DecoderPlan, takes_front

# For each VAE, the implementations, devices and dtypes whose kernels are compiled. The record outlives a patch, because
# looking for kernels that are left to compile takes 0.15 s each time.
_COMPILED: WeakKeyDictionary[nn.Module, set[tuple]] = WeakKeyDictionary()


@dataclass
class VaeState:
    """The patch's state on a VAE.

    users: the models that it was patched with. eager: the count of decodes that diffusers' code ran, by reason.
    receive: gets frames as they are made (`frames_sent_to`).
    """

    config: PatchConfig
    users: WeakSet[nn.Module] = field(default_factory=WeakSet)
    eager: Counter[str] = field(default_factory=Counter)
    receive: Callable[[torch.Tensor], None] | None = None

    def __reduce__(self) -> tuple:
        """Copy or pickle only the config: the rest belongs to the original models."""
        return VaeState, (self.config,)


def vae_state(vae: nn.Module) -> VaeState | None:
    """Return the patch's state on a VAE, or None if it is not patched."""
    return vars(vae).get(STATE)


@contextlib.contextmanager
def frames_sent_to(receive: Callable[[torch.Tensor], None], vae: nn.Module) -> Iterator[None]:
    """Give each part of a sample, [B, 3, n, H', W'] in [-1, 1], to a function before the next part is decoded.

    Samples that are decoded in tiles or by diffusers' own code are not given, because they are finished all at once.
    """
    state = vae_state(vae)
    if state is not None:
        state.receive = receive
    try:
        yield
    finally:
        if state is not None:
            state.receive = None


def decode(self: nn.Module, z: torch.Tensor, return_dict: bool = True) -> DecoderOutput | tuple[torch.Tensor]:
    """Run the VAE's `_decode`, several latent frames at a time; bound on instances.

    z: [B, z_dim, F, H, W]; the sample is [B, 3, F', H', W'] in [-1, 1].
    """
    edges = (self.tile_sample_min_height, self.tile_sample_min_width)
    in_tiles = self.use_tiling and any(
        size > edge // self.spatial_compression_ratio for size, edge in zip(z.shape[-2:], edges, strict=False)
    )
    if not _takes(self, z, counted=not in_tiles):  # diffusers' code comes to tiled_decode too, which counts
        return type(self)._decode(self, z, return_dict=return_dict)
    if in_tiles:
        return self.tiled_decode(z, return_dict=return_dict)
    shown = _received(self, (_shown(self, frames) for frames in _parts(self, z, _at_once(self, z), _plan(self, z))))
    return _output(_joined(shown, output_shape(self, z)[2]), return_dict)


def tiled_decode(self: nn.Module, z: torch.Tensor, return_dict: bool = True) -> DecoderOutput | tuple[torch.Tensor]:
    """Run the VAE's `tiled_decode` with several latent frames of a tile at a time. Bound on instances.

    Only a tile's visible part is kept, in its place in the sample, and the ends that other tiles are blended with.
    """
    if not _takes(self, z):
        return type(self).tiled_decode(self, z, return_dict=return_dict)
    ratio, patch = self.spatial_compression_ratio, patch_size_of(self)
    tile = self.tile_sample_min_height, self.tile_sample_min_width
    stride = self.tile_sample_stride_height, self.tile_sample_stride_width
    (tile_h, tile_w), (step_h, step_w) = ([edge // ratio for edge in edges] for edges in (tile, stride))
    crop_h, crop_w = (edge // patch for edge in stride)
    blend_h, blend_w = (max(0, whole // patch - crop) for whole, crop in zip(tile, (crop_h, crop_w), strict=True))
    (height, width), count = z.shape[-2:], output_shape(self, z)[2]
    at_once = _at_once(self, z, z[..., :tile_h, :tile_w])
    channels = self.decoder.conv_out.out_channels // patch**2
    sample = z.new_empty(z.shape[0], channels, count, *(edge * ratio // patch * patch for edge in (height, width)))
    plan = _plan(self, z)
    ends: dict[int, torch.Tensor] = {}  # of the tiles above, by column
    bottom = 0
    for top in range(0, height, step_h):
        left, right, band = None, 0, sample[..., bottom:, :]
        for first in range(0, width, step_w):
            part = z[..., top : top + tile_h, first : first + tile_w]
            frames = _joined(_parts(self, part, at_once, plan), count)
            if top > 0:
                _blend(ends.pop(first), frames, blend_h, dim=-2)
            if left is not None:
                _blend(left, frames, blend_w, dim=-1)
            ends[first], left = _end(frames, blend_h, dim=-2), _end(frames, blend_w, dim=-1)
            shown = _shown(self, frames[..., :crop_h, :crop_w], clamp=clamps_tiles(self))
            place = band[..., : shown.shape[-2], right : right + shown.shape[-1]]
            place.copy_(shown[..., : place.shape[-2], : place.shape[-1]])
            right += place.shape[-1]
            del frames, shown  # not kept while the next tile is decoded
        bottom += place.shape[-2]
    return _output(sample[..., :bottom, :right].contiguous(), return_dict)  # smaller where tiles are less than strides


def _takes(vae: nn.Module, z: torch.Tensor, *, counted: bool = True) -> bool:
    """True if our code decodes z. If not, the reason is counted for the summary if `counted`."""
    if torch.compiler.is_compiling():
        return False
    reason = _why_not_call(vae, z) or why_not_plain_decoder(vae, z.device, z.dtype)
    if reason is not None and counted:
        vae_state(vae).eager[reason] += 1
    return reason is None


def _why_not_call(vae: nn.Module, z: torch.Tensor) -> str | None:
    if derivative_of(vae, z) is not None:
        return "autograd"
    if is_autocast(z.device):
        return "autocast"
    if type(z) not in (torch.Tensor, nn.Parameter):
        return f"{type(z).__name__} latents"
    return None if z.dim() == 5 and z.shape[1] == vae.config.z_dim and z.numel() > 0 else "latents of another shape"


def call_for(vae: nn.Module, device: torch.device, dtype: torch.dtype) -> Call:
    """Return what the choice of the decoder's kernels depends on."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return Call(vae_state(vae).config, device, dtype, None, active_backend(), sdpa=sdpa)


def _at_once(vae: nn.Module, z: torch.Tensor, tile: torch.Tensor | None = None) -> list[int]:
    """Return the number of frames that each stage takes at a time, for latents z or for a tile of them."""
    free, chunk = free_for_decoding(vae, z.device), vae_state(vae).config.vae_chunk
    left = None if free is None else free - math.prod(output_shape(vae, z)) * z.itemsize - _graph_memory(vae)
    if tile is None:
        return frames_at_once(vae, z, chunk, free=left)
    return frames_at_once(vae, tile, chunk, working_set=TILES_WORKING_SET, free=left)


def _graph_memory(vae: nn.Module) -> int:
    """Return the bytes that only CUDA graphs can use, over the models that were patched with the VAE."""
    graphs = filter(None, map(graph_of, vae_state(vae).users))
    return sum(graph.reserved_bytes or 0 for graph in graphs)


def _plan(vae: nn.Module, z: torch.Tensor) -> DecoderPlan:
    return DecoderPlan(call_for(vae, z.device, z.dtype))


def _parts(vae: nn.Module, z: torch.Tensor, frames: list[int], plan: DecoderPlan) -> Iterator[torch.Tensor]:
    """Return the parts of `decoded`. Compile the kernels ahead if this is the first decode of its kind."""
    compiled, kind = _COMPILED.setdefault(vae, set()), (plan.call.config.implementation, z.device, z.dtype)
    if kind not in compiled and _launches_kernels(vae, z, plan) and why_not_recorded((z,)) is None:
        # Compiled one after the other the kernels take half a minute. An extra run of a plain decoder has no effect.
        kernels.compile_ahead(lambda: deque(decoded(vae, z, plan, frames), maxlen=0))
        compiled.add(kind)
    return decoded(vae, z, plan, frames)


def _launches_kernels(vae: nn.Module, z: torch.Tensor, plan: DecoderPlan) -> bool:
    """True on a GPU, if the convolutions are kernels too. PyTorch's would run while others are only compiled."""
    return z.is_cuda and _convolutions_are_ours(vae, z, plan)


def _convolutions_are_ours(vae: nn.Module, z: torch.Tensor, plan: DecoderPlan) -> bool:
    shape = z.permute(0, 2, 3, 4, 1).shape
    return takes_front(plan.convolution(vae.decoder.conv_in, shape))


def _blend(before: torch.Tensor, frames: torch.Tensor, extent: int, dim: int) -> None:
    """Fade the end of the previous tile into the beginning of frames, in place, along a dimension."""
    extent = min(before.shape[dim], frames.shape[dim], extent)
    if extent <= 0:
        return
    wide = torch.promote_types(frames.dtype, torch.float32)
    share = torch.arange(extent, device=frames.device, dtype=wide) / extent
    share = share[:, None] if dim == -2 else share
    old = before.narrow(dim, before.shape[dim] - extent, extent).to(wide)
    new = frames.narrow(dim, 0, extent)
    new.copy_(old * (1 - share) + new.to(wide) * share)


def _end(frames: torch.Tensor, extent: int, dim: int) -> torch.Tensor:
    """Return a copy of the last rows or columns, so that the rest need not be kept."""
    start = max(0, frames.shape[dim] - extent)
    return frames.narrow(dim, start, frames.shape[dim] - start).clone()


def _joined(parts: Iterator[torch.Tensor], count: int) -> torch.Tensor:
    """Join parts to `count` frames [B, C, count, H, W]. Each part is copied before the next is made."""
    joined, done = None, 0
    for part in parts:
        if joined is None:
            joined = part.new_empty(*part.shape[:2], count, *part.shape[3:])
        joined[:, :, done : done + part.shape[2]] = part
        done += part.shape[2]
        del part
    return joined


def _received(vae: nn.Module, parts: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the parts, each after it was given to the function of `frames_sent_to`, if any."""
    receive = vae_state(vae).receive
    for part in parts:
        if receive is not None:
            receive(part)
        yield part


def _shown(vae: nn.Module, frames: torch.Tensor, *, clamp: bool = True) -> torch.Tensor:
    """Return the decoder's output as a video in [-1, 1]: unpatchified if need be, then clamped in place if `clamp`."""
    frames = unpatchify(frames, patch_size=patch_size_of(vae))
    return frames.clamp_(min=-1.0, max=1.0) if clamp else frames


def _output(sample: torch.Tensor, return_dict: bool) -> DecoderOutput | tuple[torch.Tensor]:
    return DecoderOutput(sample=sample) if return_dict else (sample,)
