"""Tiny VAEs' decoders as published, computed from a file's tensors over all frames at once; files and VAEs for them.

Written from the published definition, apart from the package: a list of operations, and no state between frames.
"""

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.tiny_vae import tiny_vae
from turbo_rcm_patch.patching.tiny_vae import network

WIDTHS = {"base": (8, 6, 4, 4), "super": (8, 6, 4, 2)}
KINDS = {"taew2_1": ("base", 16, 1), "taew2_2": ("base", 48, 2), "taew2_2_super": ("super", 48, 2)}


def tiny_file(folder, kind="taew2_1", *, dtype=torch.float32, wide=False, name=None, channels=None, **changes):
    """Write a file of random tensors and return it. wide: the first growing layer has two frames' weights.

    changes: tensors in place of others, by name with _ for ".". None leaves one out.
    """
    layout, own, patch = KINDS[kind]
    torch.manual_seed(3)
    tensors = network.TinyDecoder(layout, channels or own, patch).to(dtype).state_dict()
    tensors = {key: (tensor.float() * 1.7).to(dtype) for key, tensor in tensors.items()}
    tensors["encoder.0.weight"] = torch.ones(4, dtype=dtype)
    if wide:
        tensors["decoder.7.conv.weight"] = torch.cat([torch.randn_like(tensors["decoder.7.conv.weight"])] * 2)
        tensors["decoder.7.conv.weight"][len(tensors["decoder.7.conv.weight"]) // 2 :] *= 0.5
    for key, tensor in changes.items():
        tensors.pop(key.replace("_", "."), None)
        if tensor is not None:
            tensors[key.replace("_", ".")] = tensor
    file = folder / (name or f"{kind}.safetensors")
    save_file(tensors, file)
    return file


def published_video(tensors, kind, latents):
    """Return frames [B, T, 3, H, W] in [0, 1] for latents [B, F, C, h, w] as the transformer makes them."""
    layout, _, patch = KINDS[kind]
    B = len(latents)
    x = latents.flatten(0, 1)

    def weights(key):
        return tensors[f"decoder.{key}.weight"], tensors.get(f"decoder.{key}.bias")

    def conv(x, key, **options):
        weight, bias = weights(key)
        return F.conv2d(x, weight, bias, padding=weight.shape[-1] // 2, **options)

    def with_past(x):
        frames = x.unflatten(0, (B, -1))
        past = F.pad(frames, (0, 0, 0, 0, 0, 0, 1, 0))[:, : frames.shape[1]]
        return torch.cat((frames, past), 2).flatten(0, 1)

    def block(x, index):
        y = with_past(x)
        if layout == "super":
            y = conv(y, f"{index}.conv.0", groups=y.shape[1])
            return conv(conv(y, f"{index}.conv.1").relu(), f"{index}.conv.3") + x
        for part in (0, 2):
            y = conv(y, f"{index}.conv.{part}").relu()
        return (conv(y, f"{index}.conv.4") + x).relu()

    def grow(x, index, stride):
        weight = weights(f"{index}.conv")[0][-stride * x.shape[1] :]
        return F.conv2d(x, weight).reshape(-1, *x.shape[1:])

    if layout == "super":
        x = conv(x, 0)
        for level, stride in enumerate((1, 2, 2)):
            first = 1 + 7 * level
            for index in range(first, first + 3):
                x = block(x, index)
            x = grow(F.pixel_shuffle(conv(x, first + 3).relu(), 2), first + 6, stride)
    else:
        x = conv(torch.tanh(x / 3) * 3, 1).relu()
        for level, stride in enumerate((1, 2, 2)):
            first = 3 + 6 * level
            for index in range(first, first + 3):
                x = block(x, index)
            x = grow(F.interpolate(x, scale_factor=2, mode="nearest"), first + 4, stride)
            x = conv(x, first + 5)
        x = x.relu()
    x = conv(x, 22)
    x = F.pixel_shuffle(x, patch) if patch > 1 else x
    return x.clamp(0, 1).unflatten(0, (B, -1))[:, 3:]


def vae_for(kind, **options):
    return tiny_vae("wan 2.1" if KINDS[kind][2] == 1 else "residual", **options, **mean_and_deviation(KINDS[kind][1]))


def mean_and_deviation(channels):
    return {
        "z_dim": channels,
        "latents_mean": torch.linspace(-1, 1, channels).tolist(),
        "latents_std": torch.linspace(1, 3, channels).tolist(),
    }


def latents(vae, frames=3, batch=2):
    """Return latents as the transformer makes them, [B, F, C, h, w], and as a pipeline gives them to the VAE."""
    torch.manual_seed(1)
    made = 2 * torch.randn(batch, frames, vae.config.z_dim, 3, 5)
    mean, deviation = (
        torch.tensor(values).view(-1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return made, (made * deviation + mean).movedim(1, 2)


def published_sample(file, kind, made):
    """Return the published sample [B, 3, T, H, W] in [-1, 1], in fp64, on the latents' device."""
    tensors = {name: tensor.to(made.device).double() for name, tensor in load_file(file).items()}
    return published_video(tensors, kind, made.double()).movedim(2, 1) * 2 - 1
