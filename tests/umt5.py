"""Random UMT5 encoders, and the error of their embeddings."""

import torch
from transformers import UMT5Config, UMT5EncoderModel

from tests.tiny_wan import seeded

TOKENS = 48


def random_encoder(width=256, layers=24, *, seed=0, tails=None):
    """An encoder in fp32 whose weights are bf16 numbers. tails: the degrees of freedom of Student's t, or normal."""
    config = UMT5Config(
        vocab_size=256, d_model=width, d_kv=64, d_ff=width * 5 // 2, num_layers=layers, num_heads=width // 64
    )
    encoder = seeded(seed, lambda: UMT5EncoderModel(config))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in encoder.modules():
            if tails is not None and isinstance(module, torch.nn.Linear):
                sample = torch.distributions.StudentT(torch.tensor(float(tails))).sample(module.weight.shape)
                module.weight.copy_(sample / (tails / (tails - 2)) ** 0.5 * module.weight.std())
        for parameter in encoder.parameters():
            parameter.copy_(parameter.bfloat16())
    return encoder


def random_tokens(batch=1, *, seed=0):
    return torch.randint(3, 256, (batch, TOKENS), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def embeddings(encoder, tokens):
    mask = torch.ones_like(tokens)
    return encoder(tokens, mask).last_hidden_state.double()


def relative(found, exact):
    return float((found - exact).norm() / exact.norm())
