"""The embeddings of an encoder in 8 bits err at most twice as much as those of bf16, against fp32."""

import copy
import gc

import pytest
import torch

import turbo_rcm_patch as trp
from tests.umt5 import embeddings, random_encoder, random_tokens, relative


@pytest.mark.parametrize(("seed", "tails"), [(1, 5)])
def test_in_8_bits_the_embeddings_err_at_most_twice_as_much_as_in_bf16(seed, tails):
    encoder, tokens = random_encoder(layers=12, seed=seed, tails=tails), random_tokens(seed=seed)
    exact = embeddings(encoder, tokens)
    encoder.bfloat16()
    in_bf16 = relative(embeddings(encoder, tokens), exact)
    with trp.patch_text_encoder(encoder):
        assert relative(embeddings(encoder, tokens), exact) < 1.1 * in_bf16
    with trp.patch_text_encoder(encoder, in_8_bits=True):
        in_8_bits = relative(embeddings(encoder, tokens), exact)
    assert 1.2 * in_bf16 < in_8_bits <= 2 * in_bf16


@pytest.mark.gpu
@pytest.mark.parametrize(("seed", "tails"), [(0, None), (1, 5)])  # 290 million weights each
def test_a_wide_encoder_on_a_gpu(seed, tails):
    gc.collect()
    others = torch.cuda.memory_allocated()
    with torch.device("cuda"):  # a CPU takes a minute to draw the weights
        encoder = random_encoder(1024, seed=seed, tails=tails)
    tokens = random_tokens(seed=seed).cuda()
    exact = embeddings(encoder, tokens)
    encoder.bfloat16()
    in_bf16 = relative(embeddings(encoder, tokens), exact)
    with trp.patch_text_encoder(encoder):
        assert relative(embeddings(encoder, tokens), exact) < 1.1 * in_bf16
    gc.collect()
    before = torch.cuda.memory_allocated() - others
    with trp.patch_text_encoder(encoder, in_8_bits=True, keep_prompts=1) as patch:
        assert torch.cuda.memory_allocated() - others < 0.65 * before
        assert relative(embeddings(encoder, tokens), exact) <= 2 * in_bf16
        assert patch.kept_prompts == 1
        again = copy.deepcopy(encoder).cpu()
        assert relative(embeddings(again, tokens.cpu()), exact.cpu()) <= 2 * in_bf16
