import dataclasses

import pytest
import torch

from turbo_rcm_patch.bench import cases
from turbo_rcm_patch.bench.cases import (
    OUTLIER,
    OUTLIER_CHANNELS,
    add_random_projections,
    add_structure,
    build_pipeline,
    random_inputs,
    structured_inputs,
)
from turbo_rcm_patch.bench.verify import verify
from turbo_rcm_patch.config import PRESETS
from turbo_rcm_patch.patching import patch, use_rcm
from turbo_rcm_patch.patching.families import CASES
from turbo_rcm_patch.patching.families.wan.image_free import IMAGE_TOKENS
from turbo_rcm_patch.patching.families.wan.sub_layers import TEXT_TOKENS
from turbo_rcm_patch.patching.steps.sparse_linear import is_sparse

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


def first_inputs(name):
    """A case's pipeline, and what its first block and its transformer are given in a call with random inputs."""
    pipe, seen = build_pipeline(CASES[name], torch.float32, torch.device("cpu")), {}
    use_rcm(pipe)
    transformer = pipe.transformer
    transformer.blocks[0].register_forward_pre_hook(lambda _, args: seen.update(block=args))
    transformer.register_forward_pre_hook(lambda _, args, kwargs: seen.update(model=kwargs), with_kwargs=True)
    inputs = {**random_inputs(pipe), **SIZE}
    pipe(**inputs, guidance_scale=1.0, num_inference_steps=1, output_type="latent")
    return seen["block"], seen["model"]


@pytest.mark.parametrize(
    ("name", "distinct"), [("tiny", None), ("tiny-image", None), ("tiny-tokens", 1), ("tiny-image-tokens", 2)]
)
def test_timesteps_are_per_token_where_the_case_says_so(name, distinct):
    (hidden_states, _, temb, _), inputs = first_inputs(name)
    tokens = hidden_states.shape[1]
    assert tokens == 3 * 4 * 6
    if distinct is None:
        assert temb.dim() == 3
        return
    timesteps = inputs["timestep"]
    assert timesteps.shape == (1, tokens)
    assert temb.shape[:3] == (1, tokens, 6)
    assert len(timesteps.unique()) == distinct
    assert (timesteps[0, : 4 * 6] == 0).all() == (distinct == 2)  # the first frame is the image
    assert (timesteps[0, 4 * 6 :] > 0).all()


def test_an_image_is_257_tokens_and_a_mask():
    (_, context, _, _), inputs = first_inputs("tiny-image")
    assert context.shape[1] == IMAGE_TOKENS + TEXT_TOKENS
    assert inputs["hidden_states"].shape[1] == 36
    masks = inputs["hidden_states"][:, 16:20]
    assert (masks[:, :, 0] == 1).all()
    assert (masks[:, :, 1:] == 0).all()


@pytest.mark.parametrize("name", ["tiny-image", "tiny-image-tokens", "tiny-tokens"])
def test_every_kind_of_case_can_be_verified(name):
    pipe = build_pipeline(CASES[name], torch.float32, torch.device("cpu"))
    add_structure(pipe)
    use_rcm(pipe)
    size = {"height": 32, "width": 48, "num_frames": 5}
    verification = verify(
        pipe, {**structured_inputs(pipe, **size), **size, "guidance_scale": 1.0, "num_inference_steps": 1}
    )
    assert verification.ok
    assert len(verification.checks) == 2


def test_two_experts_have_structure_and_share_the_steps():
    pipe, ran = build_pipeline(CASES["tiny-experts"], torch.float32, torch.device("cpu")), []
    add_structure(pipe)
    add_random_projections(pipe)
    use_rcm(pipe)
    for name in ("transformer", "transformer_2"):
        model = getattr(pipe, name)
        assert (model.patch_embedding.bias == OUTLIER).sum() == OUTLIER_CHANNELS
        assert all(hasattr(block.attn1, "proj_l") for block in model.blocks)
        model.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
    pipe(**call(pipe, num_inference_steps=3))
    assert ran == ["transformer", "transformer", "transformer_2"]  # the third step begins at 0.85, below the boundary


@pytest.mark.parametrize(
    ("name", "dim", "layers", "ffn", "channels", "parameters", "spatial"),
    [
        ("wan2.1-1.3b", 1536, 30, 8960, 16, 1.42e9, 8),
        ("wan2.1-14b", 5120, 40, 13824, 16, 14.3e9, 8),
        ("wan2.2-5b", 3072, 30, 14336, 48, 5.0e9, 16),
    ],
)
def test_the_real_cases_have_the_published_sizes(name, dim, layers, ffn, channels, parameters, spatial):
    case = CASES[name]
    pipe = build_pipeline(case, torch.bfloat16, torch.device("meta"))
    blocks = pipe.transformer.blocks
    assert len(blocks) == layers
    assert blocks[0].attn1.to_q.weight.shape == (dim, dim)
    assert blocks[0].ffn.net[2].weight.shape == (dim, ffn)
    assert pipe.transformer.config.in_channels == pipe.vae.config.z_dim == channels
    assert sum(p.numel() for p in pipe.transformer.parameters()) == pytest.approx(parameters, rel=0.02)
    assert pipe.vae_scale_factor_spatial == spatial
    assert pipe.config.expand_timesteps == (name == "wan2.2-5b")
    assert case.frames % 4 == 1
    assert case.height % (2 * spatial) == case.width % (2 * spatial) == 0
    dtypes = {n.split(".")[-2]: p.dtype for n, p in blocks[0].named_parameters() if "." in n}
    assert (dtypes["to_q"], dtypes["norm2"]) == (torch.bfloat16, torch.float32)


def test_the_vae_of_the_5b_case_decodes_to_its_size():
    vae = build_pipeline(CASES["wan2.2-5b"], torch.bfloat16, torch.device("meta"), layers=1).vae
    latents = torch.empty(1, 48, 1, 2, 3, dtype=torch.bfloat16, device="meta")
    assert vae.decode(latents, return_dict=False)[0].shape == (1, 3, 1, 32, 48)


def test_the_real_cases_from_an_image_have_the_published_sizes():
    case = CASES["wan2.1-i2v-14b"]
    pipe = build_pipeline(case, torch.bfloat16, torch.device("meta"), layers=1)
    block = pipe.transformer.blocks[0]
    assert block.attn2.add_k_proj.weight.shape == (5120, 5120)
    assert pipe.transformer.condition_embedder.image_embedder.ff.net[0].proj.in_features == 1280
    assert build_pipeline(
        CASES["wan2.2-5b-image"], torch.bfloat16, torch.device("meta"), layers=1
    ).config.expand_timesteps
    experts = build_pipeline(CASES["wan2.2-i2v-a14b"], torch.bfloat16, torch.device("meta"), layers=1)
    assert experts.config.boundary_ratio == 0.9
    assert experts.transformer.config == experts.transformer_2.config
    assert experts.transformer.patch_embedding.in_channels == 36


def test_projections_make_a_model_sparse():
    pipes = [build_pipeline(CASES["tiny"], torch.float32, torch.device("cpu")) for _ in range(2)]
    for pipe in pipes:
        add_random_projections(pipe)
    weights = [[block.attn1.proj_l.weight for block in pipe.transformer.blocks] for pipe in pipes]
    assert all(map(torch.equal, *weights))
    assert not torch.equal(*weights[0][:2])
    with patch(pipes[0].transformer, PRESETS["sparse"]):
        assert all(is_sparse(block.attn1) for block in pipes[0].transformer.blocks)


def test_a_transformer_is_cast_before_other_models_are_built(monkeypatch):
    """Else LTX-2 in fp32 and its VAE do not fit on a GPU of 80 GB."""
    case, seen = CASES["tiny"], []
    cast = cases.cast_as_loaded
    monkeypatch.setattr(cases, "cast_as_loaded", lambda *args: seen.append("cast") or cast(*args))
    vae = lambda **options: seen.append("a VAE") or case.vae_class(**options)  # noqa: E731
    pipe = build_pipeline(dataclasses.replace(case, vae_class=vae), torch.bfloat16, torch.device("cpu"))
    assert seen == ["cast", "a VAE", "cast"]
    assert pipe.transformer.dtype == pipe.vae.dtype == torch.bfloat16
