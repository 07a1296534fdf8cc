import torch

from scripts.training.embedded.models import build_vae
from scripts.training.embedded.vae import NOISE, NoisyAutoencoder, fix_posterior_deviation, in_bf16


def test_the_posterior_has_the_same_deviation_everywhere():
    posterior = fix_posterior_deviation(build_vae()).encode(torch.randn(1, 3, 5, 16, 24)).latent_dist
    torch.testing.assert_close(posterior.std, torch.full_like(posterior.std, NOISE))
    assert posterior.mean.std() > 0


def test_bf16_keeps_the_result_and_trains_the_fp32_weights():
    model = NoisyAutoencoder(fix_posterior_deviation(build_vae()))
    video = torch.randn(1, 3, 5, 16, 24)
    mean, _ = model(video)
    half_mean, decoded = in_bf16(model, video)
    assert half_mean.dtype == torch.bfloat16
    assert (half_mean - mean).norm() / mean.norm() < 0.05
    decoded.float().square().mean().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in gradients.values())
