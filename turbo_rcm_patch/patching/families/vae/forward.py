"""The methods that the patch binds on a VAE's decoder: `_decode` and `tiled_decode`. `decode` and `forward` call them.

Their loops over frames are replaced. The tiles, their blending and the results are diffusers' own. encode.py has the
same for the encoder.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import nn

from .... import kernels
from ....config import PatchConfig
from ....plain import is_autocast
from ...cuda_graphs import why_not_recorded
from ...steps.plan import SHARED, STATE, Call, active_backend, derivative_of
from ..family import graph_of
from .chunks import TILES_WORKING_SET, frames_at_once, free_for_decoding, output_shape, weights_bytes
from .classes import clamps_tiles, patch_size_of
from .decoder import decoded
from .finished import mark_finished
from .in_8_bits import in_8_bits
from .plain import why_not_plain
from .steps import VaePlan, takes_front
from .strips import Cuts, Strip, agreed, cuts_of, gathered, strips_of
from .tiles import Tiles, run_in_tiles

# For each VAE, the implementations, devices and dtypes whose kernels are compiled. The record outlives a patch, because
# looking for kernels that are left to compile takes 0.15 s each time.
_COMPILED: WeakKeyDictionary[nn.Module, set[tuple]] = WeakKeyDictionary()


@dataclass
class VaeState:
    """The patch's state on a VAE.

    users: the models that it was patched with. eager, eager_encodes: the count of decodes and encodes that diffusers'
    code ran, by reason. whole: the count of decodes that every process of a parallel transformer did whole, by reason.
    """

    config: PatchConfig
    users: WeakSet[nn.Module] = field(default_factory=WeakSet)
    eager: Counter[str] = field(default_factory=Counter)
    eager_encodes: Counter[str] = field(default_factory=Counter)
    whole: Counter[str] = field(default_factory=Counter)

    def __reduce__(self) -> tuple:
        """Copy or pickle only the config: the rest belongs to the original models."""
        return VaeState, (self.config,)


def vae_state(vae: nn.Module) -> VaeState | None:
    """Return the patch's state on a VAE, or None if it is not patched."""
    return vars(vae).get(STATE)


def decode(self: nn.Module, z: torch.Tensor, return_dict: bool = True) -> DecoderOutput | tuple[torch.Tensor]:
    """Run the VAE's `_decode`, several latent frames at a time; bound on instances.

    z: [B, z_dim, F, H, W]; the sample is [B, 3, F', H', W'] in [-1, 1].
    """
    edges = (self.tile_sample_min_height, self.tile_sample_min_width)
    in_tiles = self.use_tiling and any(
        size > edge // self.spatial_compression_ratio for size, edge in zip(z.shape[-2:], edges, strict=False)
    )
    is_ours = _takes(self, z, counted=not in_tiles)  # diffusers' code comes to tiled_decode too, which counts
    strips = _strips(self, z, "tiles" if in_tiles else None if is_ours else "diffusers' own decoder")
    if not is_ours:
        return type(self)._decode(self, z, return_dict=return_dict)
    if in_tiles:
        return self.tiled_decode(z, return_dict=return_dict)
    plan = plan_for(self, z)
    parts = _parts(self, z, _at_once(self, z), plan) if strips is None else _parts_of_all(self, z, strips, plan)
    shown = (_shown(self, frames) for frames in parts)
    return _output(joined(shown, output_shape(self, z)[2], then=mark_finished), return_dict)


class _Strips(NamedTuple):
    """The shares of a decode by the processes of a group: all strips, this process's cuts, and frames at a time."""

    every: list[Strip]
    cuts: Cuts
    frames: list[int]
    group: dist.ProcessGroup


def parallel_group(vae: nn.Module, device: torch.device) -> dist.ProcessGroup | None:
    """Return the processes among which a transformer that was patched with the VAE splits its tokens, or None.

    None also if they compute on another type of device than this one, or after their process group was destroyed.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    parallel = (user._parallel_config for user in vae_state(vae).users if SHARED in vars(user))
    meshes = [
        config.context_parallel_config._flattened_mesh
        for config in parallel
        if config is not None and config.context_parallel_config is not None
    ]
    groups = (mesh.get_group() for mesh in meshes if mesh.device_type == device.type)
    return min(groups, key=lambda group: group.group_name, default=None)  # the same on every process


def _strips(vae: nn.Module, z: torch.Tensor, why_not: str | None) -> _Strips | None:
    """Return how the processes of a parallel transformer share a decode, or None if each decodes all of z.

    Every process comes here once in a decode, and all get the same answer. why_not: the reason why this one decodes all
    of z, or None. The reasons are counted for the summary.
    """
    group = None if torch.compiler.is_compiling() else parallel_group(vae, z.device)
    if group is None:
        return None
    strips = strips_of(*z.shape[-2:], group.size()) if why_not is None else None
    if strips is None and why_not is None:
        why_not = f"{max(z.shape[-2:])} latent pixels on {group.size()} processes"
    cuts = frames = None
    if why_not is None:
        cuts = cuts_of(vae.decoder, strips[dist.get_rank(group)])
        frames = _at_once(vae, z, shares=cuts.shares)
    found = agreed(z, frames, 1 + len(vae.decoder.up_blocks), group)
    if isinstance(found, str):
        vae_state(vae).whole[why_not or found] += 1
        return None
    return _Strips(strips, cuts, found, group)


def _parts_of_all(vae: nn.Module, z: torch.Tensor, strips: _Strips, plan: VaePlan) -> Iterator[torch.Tensor]:
    """Decode this process's strip, and return the parts of `decoded` for whole frames."""
    return gathered(_parts(vae, z, strips.frames, plan, strips.cuts), strips.every, strips.group)


def tiled_decode(self: nn.Module, z: torch.Tensor, return_dict: bool = True) -> DecoderOutput | tuple[torch.Tensor]:
    """Run the VAE's `tiled_decode` with several latent frames of a tile at a time. Bound on instances."""
    if not _takes(self, z):
        return type(self).tiled_decode(self, z, return_dict=return_dict)
    ratio, patch = self.spatial_compression_ratio, patch_size_of(self)
    edges = self.tile_sample_min_height, self.tile_sample_min_width
    strides = self.tile_sample_stride_height, self.tile_sample_stride_width
    crop = tuple(stride // patch for stride in strides)
    tiles = Tiles(
        size=tuple(edge // ratio for edge in edges),
        step=tuple(stride // ratio for stride in strides),
        crop=crop,
        blend=tuple(max(0, edge // patch - shown) for edge, shown in zip(edges, crop, strict=True)),
    )
    count, plan = output_shape(self, z)[2], plan_for(self, z)
    at_once = _at_once(self, z, z[..., : tiles.size[0], : tiles.size[1]])
    channels = self.decoder.conv_out.out_channels // patch**2
    sample = z.new_empty(z.shape[0], channels, count, *(edge * ratio // patch * patch for edge in z.shape[-2:]))
    sample = run_in_tiles(
        z,
        tiles,
        lambda part: joined(_parts(self, part, at_once, plan), count),
        sample,
        lambda frames: _shown(self, frames, clamp=clamps_tiles(self)),
    )
    return _output(sample.contiguous(), return_dict)


def _takes(vae: nn.Module, z: torch.Tensor, *, counted: bool = True) -> bool:
    """True if our code decodes z. If not, the reason is counted for the summary if `counted`."""

    def fits() -> bool:
        return z.dim() == 5 and z.shape[1] == vae.config.z_dim and z.numel() > 0

    return takes(vae, z, "decoder", fits, counted=counted)


def takes(vae: nn.Module, x: torch.Tensor, network: str, fits: Callable[[], bool], *, counted: bool) -> bool:
    """True if our code runs a network of the VAE on x. If not, the reason is counted for the summary if `counted`.

    network: "encoder" or "decoder". fits: returns True if x has a shape that a plain network takes.
    """
    if torch.compiler.is_compiling():
        return False
    reason = _why_not_call(vae, x) or why_not_plain(vae, network, x.device, x.dtype)
    reason = reason or (None if fits() else "input of another shape")
    if reason is not None and counted:
        state = vae_state(vae)
        (state.eager if network == "decoder" else state.eager_encodes)[reason] += 1
    return reason is None


def _why_not_call(vae: nn.Module, x: torch.Tensor) -> str | None:
    if derivative_of(vae, x) is not None:
        return "autograd"
    if is_autocast(x.device):
        return "autocast"
    return None if type(x) in (torch.Tensor, nn.Parameter) else f"a {type(x).__name__}"


def call_for(vae: nn.Module, device: torch.device, dtype: torch.dtype) -> Call:
    """Return what the choice of the decoder's kernels depends on."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return Call(vae_state(vae).config, device, dtype, None, active_backend(), sdpa=sdpa)


def _at_once(
    vae: nn.Module, z: torch.Tensor, tile: torch.Tensor | None = None, shares: Sequence[float] | None = None
) -> list[int]:
    """Return the number of frames that each stage takes at a time, for latents z, for a tile or for a strip of them.

    shares: as of `frames_at_once`.
    """
    resnets, _ = in_8_bits(vae.decoder, call_for(vae, z.device, z.dtype))
    weights = weights_bytes(vae.decoder, bool(resnets), is_image=z.shape[2] == 1)
    held = math.prod(output_shape(vae, z)) * z.itemsize + weights
    chunk, left = vae_state(vae).config.vae_chunk, free_beside(vae, z.device, held)
    options = {"free": left, "in_8_bits": bool(resnets)}
    if tile is None:
        return frames_at_once(vae, z, chunk, shares=shares, **options)
    return frames_at_once(vae, tile, chunk, working_set=TILES_WORKING_SET, **options)


def free_beside(vae: nn.Module, device: torch.device, result: int) -> int | None:
    """Return the bytes that are free for activations beside a result of so many bytes, or None if that is not known.

    The memory that only CUDA graphs can use, of the models that were patched with the VAE, is not free.
    """
    free = free_for_decoding(vae, device)
    graphs = filter(None, map(graph_of, vae_state(vae).users))
    return None if free is None else free - result - sum(graph.reserved_bytes or 0 for graph in graphs)


def plan_for(vae: nn.Module, x: torch.Tensor) -> VaePlan:
    return VaePlan(call_for(vae, x.device, x.dtype))


def _parts(
    vae: nn.Module, z: torch.Tensor, frames: list[int], plan: VaePlan, cuts: Cuts | None = None
) -> Iterator[torch.Tensor]:
    """Return the parts of `decoded`. Compile the kernels ahead if this is the first decode of its kind."""
    return compiled_ahead(vae, vae.decoder, z, plan, lambda: decoded(vae, z, plan, frames, cuts))


def compiled_ahead(
    vae: nn.Module, network: nn.Module, x: torch.Tensor, plan: VaePlan, run: Callable[[], Iterator[torch.Tensor]]
) -> Iterator[torch.Tensor]:
    """Return ``run()``, the parts of an encode or a decode. If it is the first of its kind, compile the kernels ahead.

    network: the VAE's encoder or decoder. x: its input, [B, C, F, H, W].
    """
    compiled = _COMPILED.setdefault(vae, set())
    config = plan.call.config
    kind = network is vae.encoder, config.implementation, config.vae, x.device, x.dtype
    if kind not in compiled and _launches_kernels(network, x, plan) and why_not_recorded((x,)) is None:
        # Compiled one after the other the kernels take half a minute. An extra run of a plain network has no effect.
        kernels.compile_ahead(lambda: deque(run(), maxlen=0))
        compiled.add(kind)
    return run()


def _launches_kernels(network: nn.Module, x: torch.Tensor, plan: VaePlan) -> bool:
    """True on a GPU, if the convolutions are kernels too. PyTorch's would run while others are only compiled."""
    return x.is_cuda and _convolutions_are_ours(network, x, plan)


def _convolutions_are_ours(network: nn.Module, x: torch.Tensor, plan: VaePlan) -> bool:
    return takes_front(plan.convolution(network.conv_in, x.permute(0, 2, 3, 4, 1).shape))


def joined(
    parts: Iterator[torch.Tensor], count: int, then: Callable[[torch.Tensor, int], None] | None = None
) -> torch.Tensor:
    """Join parts to `count` frames [B, C, count, H, W]. Each part is copied before the next is made.

    then: called with the whole and the number of frames so far, after each copy.
    """
    whole, done = None, 0
    for part in parts:
        if whole is None:
            whole = part.new_empty(*part.shape[:2], count, *part.shape[3:])
        whole[:, :, done : done + part.shape[2]] = part
        done += part.shape[2]
        del part
        if then is not None:
            then(whole, done)
    return whole


def _shown(vae: nn.Module, frames: torch.Tensor, *, clamp: bool = True) -> torch.Tensor:
    """Return the decoder's output as a video in [-1, 1]: unpatchified if need be, then clamped in place if `clamp`."""
    frames = unpatchify(frames, patch_size=patch_size_of(vae))
    return frames.clamp_(min=-1.0, max=1.0) if clamp else frames


def _output(sample: torch.Tensor, return_dict: bool) -> DecoderOutput | tuple[torch.Tensor]:
    return DecoderOutput(sample=sample) if return_dict else (sample,)
