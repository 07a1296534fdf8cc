"""The decoder of a tiny VAE, as TAEHV publishes it (https://github.com/madebyollin/taehv, MIT).

Modules are numbered as in the published files. Frames are decoded in order, a few at a time: a block also reads its own
input of the frame before, which it keeps from one call to the next. Before frame 0 that is zeros.

Frames are packed with channels last. Copies move words of up to 16 bytes, because a copy of a strided tensor costs the
same per element, whatever its size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

GROWTH = (1, 2, 2)  # how many frames a frame becomes at each doubling of height and width
WIDTHS = {"base": (256, 128, 64, 64), "super": (512, 256, 128, 64)}  # channels from a latent to the last convolution
BLOCKS = 3  # at each width
LAST = 22  # the number of the last convolution, in both layouts
EDGE = 8  # a latent pixel becomes so many rows and columns, before channels become pixels
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}  # to copy with, by their bytes
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
        """Return the next frames of one video, [4 n, 3, H, W] in [0, 1], of its next n latent frames [n, C, h, w].

        before: the inputs that blocks keep, by their numbers. It is empty at first, and changed here.
        """
        x = latents.contiguous(memory_format=torch.channels_last)
        for index, module in enumerate(self.decoder):
            if isinstance(module, (_Block, _SuperBlock)):
                words = _in_words(x)
                both = _with_earlier(words, before.get(index))
                before[index] = words[-1:].clone()  # not a view, which would keep all frames
                x = module(x, _in_channels(both, x.dtype))
            else:
                x = module(x)
        if self.patch_size > 1:
            x = F.pixel_shuffle(x, self.patch_size)
        return x.clamp(0, 1)


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
    layers = [_SoftClamp(), _conv(latent_channels, widths[0]), nn.ReLU(inplace=True)]
    for width, narrower, growth in zip(widths, widths[1:], GROWTH, strict=False):
        layers += [*(_Block(width) for _ in range(BLOCKS)), nn.Identity(), _Grow(width, growth, double=True)]
        layers += [_conv(width, narrower, bias=False)]
    return [*layers, nn.ReLU(inplace=True), _conv(widths[-1], channels)]


def _super(widths: tuple[int, ...], latent_channels: int, channels: int) -> list[nn.Module]:
    layers = [nn.Conv2d(latent_channels, widths[0], 1, bias=False)]
    for width, narrower, growth in zip(widths, widths[1:], GROWTH, strict=False):
        layers += [*(_SuperBlock(width) for _ in range(BLOCKS)), _conv(width, 4 * narrower)]
        layers += [nn.ReLU(inplace=True), nn.PixelShuffle(2), _Grow(narrower, growth)]
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

    def forward(self, x: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
        first, second, last = self.conv[0], self.conv[2], self.conv[4]
        y = _conv_relu(second, _conv_relu(first, both, x, 0), x, 0)
        return _conv_relu(last, y, x, 1)


class _SuperBlock(nn.Module):
    """The same with a 7×7 convolution of each channel alone, and no ReLU at the end."""

    def __init__(self, width: int):
        super().__init__()
        alone = nn.Conv2d(2 * width, 2 * width, 7, padding=3, groups=2 * width, bias=False)
        wide = nn.Conv2d(2 * width, 4 * width, 1)
        self.conv = nn.Sequential(alone, wide, nn.ReLU(), nn.Conv2d(4 * width, width, 1, bias=False))

    def forward(self, x: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
        return self.conv(both).add_(x)


class _Grow(nn.Module):
    """Make `growth` frames of each, then double height and width if asked.

    The published network doubles first. This gives the same, since equal pixels stay equal, for a quarter of the work.
    """

    def __init__(self, width: int, growth: int, *, double: bool = False):
        super().__init__()
        self.conv = nn.Conv2d(width, width * growth, 1, bias=False)
        self.double = double

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, width, H, W = x.shape
        pixels = x.permute(0, 2, 3, 1).flatten(1, 2)
        frames = x.new_empty(count, self.conv.out_channels // width, H * W, width)
        for index, weight in enumerate(self.conv.weight.view(-1, width, width)):
            torch.bmm(pixels, weight.T.expand(count, -1, -1), out=frames[:, index])  # where the frame belongs
        grown = frames.view(-1, H, W, width).permute(0, 3, 1, 2)
        return _in_channels(_doubled(_in_words(grown)), x.dtype) if self.double else grown


def _conv_relu(conv: nn.Conv2d, x: torch.Tensor, skip: torch.Tensor, factor: int) -> torch.Tensor:
    """Return ReLU(conv(x) + factor · skip), with a factor of 0 or 1.

    skip is finite, because cuDNN may also read it with 0. PyTorch's variant without a skip gives cuDNN uninitialised
    memory, which may hold NaN.
    """
    if _is_fused(conv, x):
        return torch.cudnn_convolution_add_relu(
            x, conv.weight, skip, factor, conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups
        )
    y = conv(x)
    return (y.add_(skip) if factor else y).relu_()


def _is_fused(conv: nn.Conv2d, x: torch.Tensor) -> bool:
    """True if cuDNN adds bias and skip in the convolution: in fp16, with channels in eights and sizes in 32 bits.

    PyTorch picks this algorithm without regard to its settings for deterministic ones.
    """
    cudnn = torch.backends.cudnn
    on_cudnn = x.is_cuda and torch.version.hip is None and cudnn.enabled
    deterministic = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    in_eights = conv.in_channels % 8 == conv.out_channels % 8 == 0
    return on_cudnn and not deterministic and in_eights and x.dtype == torch.float16 and x.numel() < 2**31


def _in_words(x: torch.Tensor) -> torch.Tensor:
    """Return frames [n, C, H, W] as words [n, H, W, K]: a view if channels are last."""
    return x.permute(0, 2, 3, 1).contiguous().view(WORDS[math.gcd(16, x.shape[1] * x.itemsize)])


def _in_channels(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return words [n, H, W, K] as frames [n, C, H, W], a view."""
    return words.view(dtype).permute(0, 3, 1, 2)


def _with_earlier(words: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """Return frames [n, H, W, K] beside those one earlier, [n, H, W, 2 K]. before: the one before them, or zeros."""
    both = words.new_empty(*words.shape[:3], 2, words.shape[3])
    both[..., 0, :] = words
    both[1:, ..., 1, :] = words[:-1]
    both[:1, ..., 1, :] = 0 if before is None else before
    return both.flatten(3)


def _doubled(words: torch.Tensor) -> torch.Tensor:
    """Repeat each pixel of frames [n, H, W, K]: [n, 2 H, 2 W, K]."""
    count, H, W, K = words.shape
    return words.view(count, H, 1, W, 1, K).expand(-1, -1, 2, -1, 2, -1).reshape(count, 2 * H, 2 * W, K)
