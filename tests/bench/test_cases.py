import torch

from tests.bench.damage import damage_block
from turbo_rcm_patch.bench import verify as verify_module
from turbo_rcm_patch.bench.cases import CASES, OUTLIER_CHANNELS, add_structure, build_pipeline, structured_inputs
from turbo_rcm_patch.bench.verify import verify
from turbo_rcm_patch.patching import use_rcm

SIZE = {"height": 64, "width": 96, "num_frames": 9}


def tiny_pipeline(structured=True):
    pipe = build_pipeline(CASES["tiny"], torch.float32, torch.device("cpu"))
    if structured:
        add_structure(pipe)
    use_rcm(pipe)
    return pipe


def call(pipe, **overrides):
    inputs = structured_inputs(pipe, **SIZE)
    return {**inputs, **SIZE, "guidance_scale": 1.0, "num_inference_steps": 1, "output_type": "latent", **overrides}


def first_attention(pipe):
    """The hidden states that enter the first block, and the probabilities [B, H, S, S] of its self-attention."""
    seen = {}
    block = pipe.transformer.blocks[0]
    handles = [block.register_forward_pre_hook(lambda _, args: seen.update(hidden=args[0]))]
    for name in ("norm_q", "norm_k"):
        norm = getattr(block.attn1, name)
        handles.append(norm.register_forward_hook(lambda _, args, out, name=name: seen.update({name: out})))
    pipe(**call(pipe), generator=torch.Generator().manual_seed(0))
    for handle in handles:
        handle.remove()
    q, k = (seen[name].unflatten(2, (block.attn1.heads, -1)).transpose(1, 2) for name in ("norm_q", "norm_k"))
    return seen["hidden"], torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1)


def test_structured_weights_have_outlying_channels_and_attention_that_chooses():
    hidden, probabilities = first_attention(tiny_pipeline())
    plain_hidden, plain_probabilities = first_attention(tiny_pipeline(structured=False))
    size = hidden.square().mean(dim=(0, 1)).sqrt()
    assert (size > 4 * size.median()).sum() == OUTLIER_CHANNELS
    plain_size = plain_hidden.square().mean(dim=(0, 1)).sqrt()
    assert (plain_size < 4 * plain_size.median()).all()
    assert probabilities.amax(-1).mean() > 2 * plain_probabilities.amax(-1).mean()


def test_structured_latents_are_smooth_and_seeded():
    pipe = tiny_pipeline()
    inputs = structured_inputs(pipe, **SIZE)
    latents = inputs["latents"]
    assert latents.shape == (1, 16, 3, 8, 12)
    assert 0.8 < latents.square().mean().sqrt() < 1.25
    neighbours = (latents[..., 1:] * latents[..., :-1]).mean() / latents.square().mean()
    assert neighbours > 0.5  # 0 for white noise
    for name, again in structured_inputs(pipe, **SIZE).items():
        assert torch.equal(again, inputs[name])
    assert not torch.equal(structured_inputs(pipe, **SIZE, seed=1)["latents"], latents)


def test_a_structured_prompt_is_padded_with_zeros():
    prompt = structured_inputs(tiny_pipeline(), **SIZE)["prompt_embeds"][0]
    used = prompt.abs().sum(dim=1) > 0
    assert used[:77].all()
    assert not used[77:].any()


def test_verify_finds_a_damaged_block_on_structured_inputs(monkeypatch):
    pipe = tiny_pipeline()
    assert verify(pipe, call(pipe)).ok
    damage_block(monkeypatch, verify_module, "transformer.blocks.1", lambda output: output + 1e-4 * output.roll(1, -1))
    assert {check.block for check in verify(pipe, call(pipe)).failed} == {"transformer.blocks.1"}
