"""The tiny VAE's decoder keeps channels last and copies little, and its fused convolutions are the plain ones."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import turbo_rcm_patch as trp
from tests.patching.tiny_vae.published import WIDTHS, latents, published_sample, tiny_file, vae_for
from turbo_rcm_patch.bench.metrics import relative_l2
from turbo_rcm_patch.patching.tiny_vae import network

FUSED = torch.ops.aten.cudnn_convolution_add_relu.default
COPIES = {"copy_", "clone", "cat", "contiguous", "_to_copy"}


class _Written(TorchDispatchMode):
    """Counts calls of each op, and the bytes that copies write."""

    def __init__(self):
        super().__init__()
        self.calls, self.copied = {}, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        made = op(*args, **(kwargs or {}))
        self.calls[op] = self.calls.get(op, 0) + 1
        if op.overloadpacket.__name__ in COPIES:
            self.copied += made.numel() * made.itemsize
        return made


def packed(*shape, dtype=torch.float32):
    torch.manual_seed(4)
    return torch.randn(shape).to(dtype, memory_format=torch.channels_last)


def size_of(x):
    return x.numel() * x.itemsize


@torch.no_grad()
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("growth", [1, 2])
def test_growing_writes_frames_where_they_belong(growth, double):
    """Nothing is copied but to double the frames, once."""
    layer, x = network._Grow(8, growth, double=double), packed(3, 8, 4, 6)
    with _Written() as written:
        frames = layer(x)
    assert frames.is_contiguous(memory_format=torch.channels_last)
    assert written.copied == (size_of(frames) if double else 0)
    larger = nn.functional.interpolate(x, scale_factor=2) if double else x
    expected = layer.conv(larger).unflatten(1, (growth, 8)).flatten(0, 1)
    torch.testing.assert_close(frames, expected)


@torch.no_grad()
def test_a_block_copies_its_input_twice():
    """4 frames are written, then 3 of them beside the frame that follows. The last is kept for the next call."""
    decoder, x = network.TinyDecoder("base", 16, 1), packed(4, 8, 4, 6)
    decoder.decoder = nn.Sequential(network._Block(8))
    with _Written() as written:
        decoder(x, {})
    assert written.copied == 2 * size_of(x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("width", [1, 2, 3, 6, 8])
def test_words_are_the_same_bits_for_any_width(width, dtype):
    """NaN too."""
    x = packed(3, width, 4, 5, dtype=dtype)
    x[0, 0, 0, 0] = float("nan")
    words = network._in_words(x)
    torch.testing.assert_close(network._in_channels(words, dtype), x, rtol=0, atol=0, equal_nan=True)
    doubled = network._in_channels(network._doubled(words), dtype)
    expected = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
    torch.testing.assert_close(doubled, expected, rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_convolutions_read_packed_channels(dtype):
    decoder = network.TinyDecoder("base", 16, 1).to(dtype=dtype, memory_format=torch.channels_last)
    seen = []
    for module in decoder.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3):
            module.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    decoder(torch.randn(2, 16, 3, 5, dtype=dtype), {})
    assert len(seen) == 1 + 3 * 9 + 3 + 1
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x in seen)


def test_the_fused_convolution_is_called_as_it_is_defined(tmp_path, monkeypatch):
    """Its operands are put in their places by the operator's own schema, with a skip that is finite and packed."""

    def fused(*given):
        named = dict(zip((argument.name for argument in FUSED._schema.arguments), given, strict=True))
        x, weight, bias, z, alpha = (named.pop(name) for name in ("self", "weight", "bias", "z", "alpha"))
        assert all(t.is_contiguous(memory_format=torch.channels_last) for t in (x, z))
        assert z.isfinite().all()
        factors.append(alpha)
        return (nn.functional.conv2d(x, weight, bias, **named) + alpha * z).relu()

    monkeypatch.setattr(network, "WIDTHS", WIDTHS)
    factors, vae, file = [], vae_for("taew2_1"), tiny_file(tmp_path)
    _, z = latents(vae)
    with trp.use_tiny_vae(vae, file):
        plain = vae.decode(z).sample
        monkeypatch.setattr(network, "_is_fused", lambda conv, x: True)
        monkeypatch.setattr(torch, "cudnn_convolution_add_relu", fused)
        torch.testing.assert_close(vae.decode(z).sample, plain)
    assert factors == [0, 0, 1] * (len(factors) // 3)
    assert len(factors) == 2 * 27  # 2 videos


@pytest.mark.gpu
def test_a_gpu_fuses_the_blocks_without_more_error(tmp_path, monkeypatch):
    """At the real widths. It rounds less often: no sum is rounded before the bias and the skip are added."""
    vae, file = vae_for("taew2_1"), tiny_file(tmp_path, dtype=torch.float16)
    made, z = latents(vae)
    expected = published_sample(file, "taew2_1", made.half())
    errors = []
    with trp.use_tiny_vae(vae, file):
        for fuses in (True, False):
            with _Written() as written:
                sample = vae.decode(z.cuda()).sample
            assert written.calls.get(FUSED, 0) == (2 * 27 if fuses else 0)
            errors.append(relative_l2(sample.cpu(), expected))
            monkeypatch.setattr(network, "_is_fused", lambda conv, x: False)
    assert errors[0] < 1.25 * errors[1]
