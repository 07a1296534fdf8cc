"""torch.compile, group offloading and layerwise casting of a model that attends sparsely."""

import pytest
import torch
from diffusers.hooks import apply_group_offloading

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.turbowan import SAGE, SLA, is_sparse, literal, run, turbo_weights
from tests.tiny_wan import tiny_wan_transformer
from turbo_rcm_patch.tiers import SPARSE

CPU = torch.device("cpu")
KINDS = {"block_level": {"num_blocks_per_group": 1}, "leaf_level": {}}
LIMITS = {"sla": 1e-5, "sagesla": SPARSE.limits.step}

both = pytest.mark.parametrize("options", [SLA, SAGE], ids=lambda options: options["attention"])
either_order = pytest.mark.parametrize("first", [True, False], ids=["before", "after"])


@both
def test_compile_repeated_blocks(saved, options):
    torch._dynamo.reset()
    model = tiny_wan_transformer()
    patch = trp.load_turbodiffusion(saved(turbo_weights(model)), model, **options)
    expected = run(model)
    model.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    assert relative_error(run(model), expected) <= 1e-5
    patch.restore()
    assert not is_sparse(model)


@both
@either_order
@pytest.mark.parametrize("kind", KINDS)
def test_group_offload(saved, options, first, kind):
    model, expected = tiny_wan_transformer(), tiny_wan_transformer()
    weights = saved(turbo_weights(model))
    trp.load_turbodiffusion(weights, expected, **options)
    offload = {"onload_device": CPU, "offload_type": kind, **KINDS[kind]}
    if first:
        apply_group_offloading(model, **offload)
    trp.load_turbodiffusion(weights, model, **options)
    if not first:
        apply_group_offloading(model, **offload)
    assert is_sparse(model)
    # Under hooks modules run, not fused steps.
    assert relative_error(run(model), run(expected)) <= LIMITS[options["attention"]]


@both
@either_order
def test_layerwise_casting(saved, options, first):
    """The file's weights, proj_l included, are stored in bf16 without a loss."""
    model = tiny_wan_transformer()
    weights = {name: tensor.bfloat16().float() for name, tensor in turbo_weights(model).items()}
    cast = {"storage_dtype": torch.bfloat16, "compute_dtype": torch.float32}
    if first:
        model.enable_layerwise_casting(**cast)
    trp.load_turbodiffusion(saved(weights), model, **options)
    if not first:
        model.enable_layerwise_casting(**cast)
    assert model.blocks[0].attn1.proj_l.weight.dtype == torch.bfloat16
    assert relative_error(run(model), literal(weights, model)) <= LIMITS[options["attention"]]
