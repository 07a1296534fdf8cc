"""LTX-2's pipelines patched: videos with sound, LoRA files, offloading, caches, steps, and what is refused."""

import pytest
import torch
from diffusers import (
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)

import turbo_rcm_patch as trp
from tests.official_ltx2 import official_ltx2
from tests.oracle import relative_error
from tests.tiny_ltx2 import LTX2_PIPELINES, tiny_ltx2_call, tiny_ltx2_pipeline
from turbo_rcm_patch.bench.cases import add_random_projections
from turbo_rcm_patch.patching.families.ltx2.connector_free import WITHOUT_GUIDANCE
from turbo_rcm_patch.patching.families.ltx2.forward import block_forward
from turbo_rcm_patch.tiers import EXACT

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def assert_same(outputs, expected, limit=EXACT.limits.fp32):
    assert len(outputs) == len(expected) == 2
    for ours, theirs in zip(map(torch.as_tensor, outputs), map(torch.as_tensor, expected), strict=True):
        assert relative_error(ours, theirs) <= limit


@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize("kind", LTX2_PIPELINES)
def test_every_pipeline_makes_the_same_video_and_sound(kind, on):
    pipe = tiny_ltx2_pipeline(kind).to(on)
    limit = EXACT.limits.fp32 if on == "cpu" else 2e-4
    make = lambda: pipe(**tiny_ltx2_call(kind, device=on, output_type="np"))  # noqa: E731
    expected = make()
    with trp.patch(pipe) as patch:
        assert pipe.transformer.transformer_blocks[0].forward.__func__ is block_forward
        assert_same(make(), expected, limit)
        summary = patch.summary()
    assert "attention mask" not in summary  # the connectors' masks hide nothing
    assert "vae: AutoencoderKLLTX2Video, as without the patch" in summary
    assert "connectors" in summary
    assert_same(make(), expected, 0.0)


def test_perturbed_guidance_of_ltx2_3():
    """Guidance runs each step once more, and there perturbs the self-attention of one block, in both streams."""
    pipe = tiny_ltx2_pipeline(family="ltx2.3")
    call = {"stg_scale": 1.0, "audio_stg_scale": 1.0, "output_type": "np"}
    make = lambda block: pipe(**tiny_ltx2_call(**call, spatio_temporal_guidance_blocks=[block]))  # noqa: E731
    expected, not_perturbed = make(1), make(2)  # there is no block 2
    for ours, theirs in zip(map(torch.as_tensor, expected), map(torch.as_tensor, not_perturbed), strict=True):
        assert relative_error(ours, theirs) > 1e-3
    with trp.patch(pipe):
        assert pipe.transformer.transformer_blocks[1].forward.__func__ is block_forward
        assert_same(make(1), expected)
    assert_same(make(1), expected, 0.0)


def lora_tensors(transformer):
    """A LoRA of both streams, the attentions between them and layers before the blocks, as diffusers saves it."""
    generator, tensors = torch.Generator().manual_seed(6), {}
    parts = ("attn1.to_q", "audio_attn2.to_v", "audio_to_video_attn.to_out.0", "ff.net.2", "audio_ff.net.0.proj")
    blocks = range(len(transformer.transformer_blocks))
    inside = [f"transformer_blocks.{index}.{part}" for part in parts for index in blocks]
    for path in (*inside, "time_embed.linear", "audio_proj_in"):
        out_features, in_features = transformer.get_submodule(path).weight.shape
        tensors[f"transformer.{path}.lora_A.weight"] = 0.2 * torch.randn(4, in_features, generator=generator)
        tensors[f"transformer.{path}.lora_B.weight"] = 0.2 * torch.randn(out_features, 4, generator=generator)
    return tensors


def authors_name(key):
    return f"diffusion_model.{official_ltx2(key.removeprefix('transformer.'))}"


@pytest.mark.parametrize("name_of", [str, authors_name], ids=["diffusers' names", "the authors' names"])
def test_a_lora_from_a_file(name_of):
    plain, patched = tiny_ltx2_pipeline(), tiny_ltx2_pipeline()
    call = lambda pipe: pipe(**tiny_ltx2_call(num_inference_steps=1))  # noqa: E731
    base = call(plain)
    patch = trp.patch(patched)
    lora = {name_of(key): tensor for key, tensor in lora_tensors(plain.transformer).items()}
    for pipe in (plain, patched):
        pipe.load_lora_weights(dict(lora), adapter_name="l")
        assert sum(hasattr(module, "lora_A") for module in pipe.transformer.modules()) == len(lora) // 2
    expected = call(plain)
    assert relative_error(expected[0], base[0]) > 0.01
    assert_same(call(patched), expected)
    assert "+ LoRA" in patch.summary()
    for pipe in (plain, patched):
        pipe.set_adapters("l", 0.4)
    assert_same(call(patched), call(plain))
    for pipe in (plain, patched):
        pipe.unload_lora_weights()
    assert_same(call(patched), base)


@pytest.mark.gpu
@pytest.mark.parametrize("first", ["offload", "patch"])
@pytest.mark.parametrize(
    "offload", ["enable_model_cpu_offload", "enable_group_offload", "enable_sequential_cpu_offload"]
)
def test_offloading_on_a_gpu(offload, first):
    patched, plain = tiny_ltx2_pipeline(), tiny_ltx2_pipeline().to("cuda")
    options = {"onload_device": torch.device("cuda"), "offload_type": "leaf_level"} if "group" in offload else {}
    if first == "offload" and "sequential" in offload:
        getattr(patched, offload)(**options)
        with pytest.raises(trp.PatchError, match="patch first"):
            trp.patch(patched)
        return
    steps = [lambda: getattr(patched, offload)(**options), lambda: trp.patch(patched)]
    for step in steps if first == "offload" else reversed(steps):
        step()
    patched_outputs, expected = (pipe(**tiny_ltx2_call(device="cuda")) for pipe in (patched, plain))
    assert_same(patched_outputs, expected, 1e-4)


TAYLOR_SEER = {"cache_interval": 2, "disable_cache_before_step": 1, "taylor_factors_dtype": torch.float32}
# name: builds the cache's config for a pipeline. Each of the first three computes two of three steps.
CACHES = {
    "PyramidAttentionBroadcast": lambda pipe: PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(0, 1001),
        current_timestep_callback=lambda: pipe.current_timestep,
    ),
    "TaylorSeer": lambda _: TaylorSeerCacheConfig(**TAYLOR_SEER),
    "TaylorSeer of all attentions": lambda _: TaylorSeerCacheConfig(
        **TAYLOR_SEER, cache_identifiers=[r"transformer_blocks\.\d+\..*attn\d?"]
    ),
    "FirstBlockCache": lambda _: FirstBlockCacheConfig(),
    "MagCache": lambda _: MagCacheConfig(calibrate=True),
}
NOT_FOR_LTX2 = ("FirstBlockCache", "MagCache")  # diffusers 0.42.1 has not registered the class of LTX-2's blocks


@pytest.mark.parametrize("first", ["cache", "patch"])
@pytest.mark.parametrize("name", CACHES)
def test_a_cache_of_diffusers_does_what_it_does_unpatched(name, first):
    """Without guidance: diffusers' PyramidAttentionBroadcast would mix up the several runs of a step."""
    patched, plain = tiny_ltx2_pipeline(), tiny_ltx2_pipeline()
    make = lambda pipe: pipe(**tiny_ltx2_call(num_inference_steps=3, **WITHOUT_GUIDANCE))  # noqa: E731
    base = make(plain)
    if first == "patch":
        patch = trp.patch(patched)
    refusals = [refusal(pipe, CACHES[name](pipe)) for pipe in (patched, plain)]
    if first == "cache":
        patch = trp.patch(patched)
    expected = make(plain)
    assert_same(make(patched), expected)
    assert refusals[0] == refusals[1]
    if name in NOT_FOR_LTX2:
        assert "LTX2VideoTransformerBlock'> not registered" in refusals[0]
        assert_same(expected, base, 0.0)
    else:
        assert refusals[0] is None
        assert relative_error(expected[0], base[0]) > 1e-3
        patched.transformer.disable_cache()
    patch.restore()
    assert_same(make(patched), base, 0.0)


def refusal(pipe, cache):
    """Switch a cache on, and return diffusers' error if it refuses."""
    try:
        pipe.transformer.enable_cache(cache)
    except ValueError as error:
        return str(error)
    return None


def test_exact_steps_are_counted():
    """With all steps exact only the linears are in 8 bits."""
    pipe = tiny_ltx2_pipeline()
    with trp.patch(pipe, trp.Quantized(quantize=("linears",))):
        expected = pipe(**tiny_ltx2_call())
    for exact_steps, same in (((1, 1), True), ((0, 0), False)):
        with trp.patch(pipe, trp.Quantized(exact_steps=exact_steps)):
            assert (relative_error(pipe(**tiny_ltx2_call())[0], expected[0]) <= 1e-6) == same


@pytest.mark.parametrize("has_linear_part", [False, True])
def test_the_sparse_tier_with_and_without_projections(has_linear_part):
    pipe = tiny_ltx2_pipeline(dtype=torch.bfloat16)
    if has_linear_part:
        add_random_projections(pipe)
    with trp.patch(pipe, trp.Sparse(blocks=(8, 8))) as patch:
        latents, _ = pipe(**tiny_ltx2_call(dtype=torch.bfloat16, num_inference_steps=1))
        assert latents.isfinite().all()
        assert "SLA 2/9 blocks" in patch.summary()  # the share that is published for TurboT2AV, 0.3
        assert ("no linear part" in patch.summary()) != has_linear_part
