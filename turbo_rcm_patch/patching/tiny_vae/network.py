"""The decoder of a tiny VAE, as TAEHV publishes it (https://github.com/madebyollin/taehv, MIT).

Modules are numbered as in the published files. Frames are decoded in order, a few at a time: a block also reads its own
input of the frame before, which it keeps from one call to the next. Before frame 0 that is zeros.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

GROWTH = (1, 2, 2)  # how many frames a frame becomes at each doubling of height and width
WIDTHS = {"base": (256, 128, 64, 64), "super": (512, 256, 128, 64)}  # channels from a latent to the last convolution
BLOCKS = 3  # at each width
LAST = 22  # the number of the last convolution, in both layouts
EDGE = 8  # a latent pixel becomes so many rows and columns, before channels become pixels
FIRST = 3  # frames that come before the first one of the video: 4 of a latent frame, and the first latent is one frame


class TinyDecoder(nn.Module):
    """Decode latents to frames.

    layout: "base" or "super". latent_channels: of a latent. patch_size: rows and columns that become of a last pixel.
    """

    def __init__(self, layout: str, latent_channels: int, patch_size: int):
        super().__init__()
        self.layout, self.patch_size = layout, patch_size
        channels = 3 * patch_size**2
        make = _base if layout == "base" else _super
        self.decoder = nn.Sequential(*make(WIDTHS[layout], latent_channels, channels))

    @property
    def latent_channels(self) -> int:
        return next(m for m in self.decoder if isinstance(m, nn.Conv2d)).in_channels

    def forward(self, latents: torch.Tensor, before: dict[int, torch.Tensor]) -> torch.Tensor:
        """Return the frames [B, 4 n, 3, H, W] in [0, 1] of the next n latent frames [B, n, C, h, w].

        before: the inputs that blocks keep, by their numbers. It is empty at first, and changed here.
        """
        B = latents.shape[0]
        x = latents.flatten(0, 1).contiguous(memory_format=torch.channels_last)
        for index, module in enumerate(self.decoder):
            if not isinstance(module, (_Block, _SuperBlock)):
                x = module(x)
                continue
            frames = x.unflatten(0, (B, -1))
            first = before.get(index, torch.zeros_like(frames[:, :1]))
            earlier = torch.cat((first, frames[:, :-1]), 1).flatten(0, 1)
            before[index] = frames[:, -1:].clone()  # not a view, which would keep all frames
            x = module(x, earlier)
        if self.patch_size > 1:
            x = F.pixel_shuffle(x, self.patch_size)
        return x.clamp(0, 1).unflatten(0, (B, -1))


def layout_of(shapes: Mapping[str, torch.Size]) -> TinyDecoder:
    """Return the decoder, without its weights (on the meta device), whose tensors have these names and shapes.

    shapes: of all tensors of a file, which may hold an encoder too. Raises ValueError if no layout has these tensors.
    """
    given = {name: shape for name, shape in shapes.items() if name.startswith("decoder.")}
    layout = "super" if "decoder.0.weight" in given else "base"
    first, last = (given.get(f"decoder.{index}.weight", ()) for index in ({"super": 0, "base": 1}[layout], LAST))
    patch_size = {3: 1, 12: 2}.get(last[0] if last else None)
    if len(first) != 4 or patch_size is None:
        raise ValueError("it has no first or no last convolution of a decoder like taew2_1's and taew2_2's.")
    with torch.device("meta"):
        network = TinyDecoder(layout, first[1], patch_size)
    wanted = {name: tensor.shape for name, tensor in network.state_dict().items()}
    if odd := sorted(wanted.keys() ^ given.keys()):
        raise ValueError(f"{'it lacks' if odd[0] in wanted else 'it has'} {odd[0]}, unlike taew2_1 and taew2_2.")
    for name, shape in wanted.items():
        if given[name] != shape and not _makes_more_frames(network, name, given[name]):
            raise ValueError(f"{name} is {tuple(given[name])}, not {tuple(shape)} as in taew2_1 and taew2_2.")
    return network


def load(network: TinyDecoder, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give a decoder its weights. A layer that makes more frames in the file gives those of its last frame."""
    wanted = network.state_dict()
    network.load_state_dict(
        {name: tensors[name][-like.shape[0] :].contiguous() for name, like in wanted.items()}, assign=True
    )


def _makes_more_frames(network: TinyDecoder, name: str, shape: torch.Size) -> bool:
    """True if a file's tensor of this shape belongs to a growing layer, and makes more frames than the network's."""
    frames, *others = network.state_dict()[name].shape
    is_whole = len(shape) > 0 and shape[0] > 0 and shape[0] % frames == 0
    return is_whole and list(shape[1:]) == others and isinstance(network.decoder[int(name.split(".")[1])], _Grow)


def _base(widths: tuple[int, ...], latent_channels: int, channels: int) -> list[nn.Module]:
    layers = [_SoftClamp(), _conv(latent_channels, widths[0]), nn.ReLU()]
    for width, narrower, growth in zip(widths, widths[1:], GROWTH, strict=False):
        layers += [*(_Block(width) for _ in range(BLOCKS)), nn.Upsample(scale_factor=2), _Grow(width, growth)]
        layers += [_conv(width, narrower, bias=False)]
    return [*layers, nn.ReLU(), _conv(widths[-1], channels)]


def _super(widths: tuple[int, ...], latent_channels: int, channels: int) -> list[nn.Module]:
    layers = [nn.Conv2d(latent_channels, widths[0], 1, bias=False)]
    for width, narrower, growth in zip(widths, widths[1:], GROWTH, strict=False):
        layers += [*(_SuperBlock(width) for _ in range(BLOCKS)), _conv(width, 4 * narrower), nn.ReLU()]
        layers += [nn.PixelShuffle(2), _Grow(narrower, growth)]
    return [*layers, _conv(widths[-1], channels)]


def _conv(given: int, made: int, *, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(given, made, 3, padding=1, bias=bias)


class _SoftClamp(nn.Module):
    """Keep latents within ±3, smoothly."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x / 3) * 3


class _Block(nn.Module):
    """A residual block that reads a frame and the one before: ReLU(x + convolutions of both)."""

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Sequential(
            _conv(2 * width, width), nn.ReLU(), _conv(width, width), nn.ReLU(), _conv(width, width)
        )

    def forward(self, x: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
        return F.relu(self.conv(torch.cat((x, earlier), 1)) + x)


class _SuperBlock(nn.Module):
    """The same with a 7×7 convolution of each channel alone, and no ReLU at the end."""

    def __init__(self, width: int):
        super().__init__()
        alone = nn.Conv2d(2 * width, 2 * width, 7, padding=3, groups=2 * width, bias=False)
        wide = nn.Conv2d(2 * width, 4 * width, 1)
        self.conv = nn.Sequential(alone, wide, nn.ReLU(), nn.Conv2d(4 * width, width, 1, bias=False))

    def forward(self, x: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
        return self.conv(torch.cat((x, earlier), 1)) + x


class _Grow(nn.Module):
    """Make `growth` frames of each."""

    def __init__(self, width: int, growth: int):
        super().__init__()
        self.conv = nn.Conv2d(width, width * growth, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grown = self.conv(x)
        frames = grown.unflatten(1, (-1, x.shape[1])).flatten(0, 1)
        return frames.contiguous(memory_format=torch.channels_last)
