"""Whole clips against the stock autoencoder's chunks with caches."""

import copy

import pytest
import torch

from scripts.training.embedded.models import build_vae
from scripts.training.embedded.whole_clips import decode_clip, encode_clip, take_whole_clips


@pytest.mark.parametrize("frames", [5, 9, 17])
def test_whole_clips_give_what_chunks_give(frames):
    vae = build_vae()
    with torch.no_grad():
        vae.decoder.conv_out.weight.mul_(30)  # so that some pixels saturate
    whole = take_whole_clips(copy.deepcopy(vae))
    video = torch.randn(2, 3, frames, 16, 24)
    with torch.no_grad():
        mean = vae.encode(video).latent_dist.mean
        torch.testing.assert_close(encode_clip(whole, video), mean, rtol=1e-4, atol=1e-5)
        decoded, expected = decode_clip(whole, mean), vae.decode(mean).sample
    assert decoded.abs().max() > 1  # unclamped
    torch.testing.assert_close(decoded.clamp(-1, 1), expected, rtol=1e-4, atol=1e-4)
