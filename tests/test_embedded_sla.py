"""The embedded model fine-tuned to sparse-linear attention: what its difference holds, brings and leaves alone."""

import pytest
import torch
from safetensors.torch import load_file

import turbo_rcm_patch as trp
from turbo_rcm_patch import embedded
from turbo_rcm_patch.modules import SparseLinearAttention
from turbo_rcm_patch.shapes.grammar import EXAMPLES
from turbo_rcm_patch.solvers import model_timesteps, rcm_times


@pytest.fixture(scope="module")
def dense():
    return trp.load_embedded_pipeline()


@pytest.fixture(scope="module")
def tuned():
    return trp.load_embedded_pipeline(sla=True)


def test_the_weights_are_the_dense_ones_plus_the_difference(dense, tuned):
    file = load_file(embedded.WEIGHTS / "sla/difference.safetensors")
    before, after = dense.transformer.state_dict(), tuned.transformer.state_dict()
    projections = {name for name in file if "proj_l" in name}
    assert set(after) - set(before) == projections
    assert all(torch.equal(after[name], file[name].float()) for name in projections)
    changed = set()
    for name, tensor in before.items():
        path = name.removesuffix(".weight")
        expected = tensor
        if f"{path}.lora_A.weight" in file:
            expected = tensor + file[f"{path}.lora_B.weight"].float() @ file[f"{path}.lora_A.weight"].float()
        elif f"{path}.diff" in file:
            expected = tensor + file[f"{path}.diff"].float()
        torch.testing.assert_close(after[name], expected)
        if not torch.equal(after[name], tensor):
            changed.add(name)
    attention = ("to_q", "to_k", "to_v", "to_out.0", "norm_q", "norm_k")
    blocks = range(len(dense.transformer.blocks))
    assert changed == {f"blocks.{number}.attn1.{part}.weight" for number in blocks for part in attention}


def test_low_precision(tuned):
    low = trp.load_embedded_pipeline(torch.bfloat16, sla=True).transformer
    linear = low.blocks[0].attn1.to_q.weight
    assert linear.dtype == low.blocks[0].attn1.proj_l.weight.dtype == torch.bfloat16
    wide = tuned.transformer.blocks[0].attn1.to_q.weight
    torch.testing.assert_close(linear.float(), wide, rtol=2**-7, atol=1e-3)


@torch.no_grad()
def test_it_is_nearer_to_dense_attention_than_block_sparsity_alone(dense, tuned):
    """In the velocity at the sampler's last state, after steps of the dense model."""
    text = dense.encode_prompt([EXAMPLES[0]], do_classifier_free_guidance=False)[0]
    times = rcm_times(4).tolist()
    timesteps = model_timesteps(rcm_times(4)[:-1])
    first, last = torch.randn(2, 1, 16, 5, 20, 28, generator=torch.Generator().manual_seed(0))
    first = times[0] * first
    clean = first - times[0] * dense.transformer(first, timesteps[:1], text)[0]
    state = (1 - times[3]) * clean + times[3] * last
    expected = dense.transformer(state, timesteps[3:], text)[0]

    def error(transformer):
        config = trp.Sparse(quantize=(), topk=0.1, blocks=embedded.SLA_BLOCKS)
        with trp.patch(transformer, config):
            return ((transformer(state, timesteps[3:], text)[0] - expected).norm() / expected.norm()).item()

    untrained = trp.load_embedded_pipeline().transformer
    for block in untrained.blocks:
        block.attn1.proj_l = SparseLinearAttention(64).proj_l
    assert error(tuned.transformer) < error(untrained)
