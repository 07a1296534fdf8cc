import torch
from embedded_training.models import build_vae
from embedded_training.vae import (
    CROP,
    NOISE,
    NoisyAutoencoder,
    crop,
    decode_unclamped,
    fix_posterior_deviation,
    in_bf16,
    is_foreground,
)


def test_unclamped_decoding_differs_by_the_clamp_alone():
    torch.manual_seed(0)
    vae = build_vae()
    latents = torch.randn(2, 16, 3, 4, 5)
    with torch.no_grad():
        vae.decoder.conv_out.weight.mul_(30)  # so that some pixels saturate
        decoded, expected = decode_unclamped(vae, latents), vae.decode(latents).sample
    assert decoded.abs().max() > 1
    assert torch.equal(decoded.clamp(-1, 1), expected)


def test_the_posterior_has_the_same_deviation_everywhere():
    torch.manual_seed(0)
    posterior = fix_posterior_deviation(build_vae()).encode(torch.randn(1, 3, 5, 16, 24)).latent_dist
    torch.testing.assert_close(posterior.std, torch.full_like(posterior.std, NOISE))
    assert posterior.mean.std() > 0


def test_foreground_is_what_differs_from_the_most_frequent_colour():
    video = torch.full((1, 3, 2, 8, 8), 0.4)
    video[:, 1, 0, 2:4, 2:5] = -0.2
    foreground = is_foreground(video)
    assert foreground.shape == (1, 1, 2, 8, 8)
    assert foreground[0, 0, 0, 2:4, 2:5].all()
    assert foreground.sum() == 6


def test_bf16_keeps_the_result_and_trains_the_fp32_weights():
    torch.manual_seed(0)
    model = NoisyAutoencoder(fix_posterior_deviation(build_vae()))
    video = torch.randn(1, 3, 5, 16, 24)
    mean, _ = model(video)
    half_mean, decoded = in_bf16(model, video)
    assert half_mean.dtype == torch.bfloat16
    assert (half_mean - mean).norm() / mean.norm() < 0.05
    decoded.float().square().mean().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in gradients.values())


def test_crops_are_squares_around_objects():
    torch.manual_seed(0)
    video = torch.zeros(4, 3, 2, 200, 300)
    corners = [(0, 0), (190, 290), (100, 150), (60, 280)]
    for part, (y, x) in zip(video, corners, strict=True):
        part[:, 1, y : y + 10, x : x + 10] = torch.rand(3, 10, 10) + 0.1
    squares = crop(video)
    assert squares.shape == (4, 3, 2, CROP, CROP)
    torch.testing.assert_close(squares.sum(dim=(1, 2, 3, 4)), video.sum(dim=(1, 2, 3, 4)))
    # The object in the middle of the frame is in the middle of its square, give or take its own size.
    rows, columns = squares[2, 0, 1].nonzero().unbind(dim=1)
    assert ((rows - CROP / 2).abs() <= 10).all()
    assert ((columns - CROP / 2).abs() <= 10).all()
