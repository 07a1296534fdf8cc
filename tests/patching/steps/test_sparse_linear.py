"""A model that attends sparsely: its summary, hooks, autocast, LoRAs, copies, projections of its own."""

import copy
import pickle

import pytest
import torch
from peft import LoraConfig

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.turbowan import BLOCKS, SAGE, SLA, TOPK, is_sparse, literal, run, turbo_weights
from tests.tiny_wan import tiny_transformer_inputs, tiny_wan_transformer
from turbo_rcm_patch import kernels
from turbo_rcm_patch.tiers import SPARSE


def test_the_summary_says_how_many_blocks_are_kept(saved):
    model = tiny_wan_transformer()
    patch = trp.load_turbodiffusion(saved(turbo_weights(model)), model, **SLA)
    run(model)
    assert "SLA 4/5 blocks" not in patch.summary()  # 18 tokens a sample
    assert "SLA 3/5 blocks" in patch.summary()
    patch.restore()
    patch = trp.load_turbodiffusion(saved(turbo_weights(model)), model, attention="sla", topk=0.1, blocks=BLOCKS)
    run(model)
    assert "SLA 1/5 blocks, where the published rule keeps none" in patch.summary()


@pytest.mark.parametrize("where", ["attn1", "attn1.to_q", "attn1.proj_l"])
def test_hooks_leave_the_attention_sparse(saved, where):
    model = tiny_wan_transformer()
    weights = turbo_weights(model)
    trp.load_turbodiffusion(saved(weights), model, **SLA)
    calls = []
    model.blocks[0].get_submodule(where).register_forward_hook(lambda *_: calls.append(where))
    assert relative_error(run(model), literal(weights, model)) < 1e-5
    assert calls


def test_autocast_and_gradients_leave_the_attention_sparse(saved):
    model = tiny_wan_transformer()
    weights = turbo_weights(model)
    trp.load_turbodiffusion(saved(weights), model, **SLA)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        low = model(**tiny_transformer_inputs(model))[0]
    dense = literal(weights, model, sla=None)
    expected = literal(weights, model)
    assert relative_error(low, expected) < 0.5 * relative_error(low, dense)
    output = model(**tiny_transformer_inputs(model))[0]
    assert relative_error(output, expected) < 1e-5
    output.sum().backward()
    gradient = model.blocks[0].attn1.proj_l.weight.grad
    assert gradient is not None
    assert gradient.abs().sum() > 0


def test_fused_projections(saved):
    model = tiny_wan_transformer()
    weights = turbo_weights(model)
    trp.load_turbodiffusion(saved(weights), model, **SLA)
    for block in model.blocks:
        block.attn1.fuse_projections()
    assert relative_error(run(model), literal(weights, model)) < 1e-5


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("options", [SLA, SAGE])
def test_copies_attend_sparsely_and_can_be_restored(saved, copied, options):
    model = tiny_wan_transformer()
    trp.load_turbodiffusion(saved(turbo_weights(model)), model, **options)
    twin = copied(model)
    assert torch.equal(run(twin), run(model))
    trp.restore(twin)
    assert not any("proj_l" in name for name in twin.state_dict())
    assert is_sparse(model)
    assert not is_sparse(twin)


def with_own_projections(model):
    """Add the projections that a model trained with SLA has."""
    size = model.config.attention_head_dim
    for number, block in enumerate(model.blocks):
        torch.manual_seed(number)
        like = block.attn1.to_q.weight
        block.attn1.proj_l = torch.nn.Linear(size, size, device=like.device, dtype=like.dtype)
    return model


def test_what_diffusers_sets_on_processors_outlives_the_patch(saved):
    """Parallelism that was set before the patch counts in it, and one that was set under it stays."""
    model = tiny_wan_transformer()
    model.blocks[0].attn1.processor._parallel_config = before = object()
    patch = trp.load_turbodiffusion(saved(turbo_weights(model)), model, **SLA)
    first, second = (block.attn1.processor for block in model.blocks)
    assert first._parallel_config is before
    second._parallel_config, second._attention_backend = "parallel", "flash"
    patch.restore()
    processors = [block.attn1.processor for block in model.blocks]
    assert [processor._parallel_config for processor in processors] == [before, "parallel"]
    assert processors[1]._attention_backend == "flash"


def test_norms_that_autocast_widens(saved):
    """RMSNorm under autocast on a GPU returns q and k in fp32, while v is in bf16."""
    model = tiny_wan_transformer()
    weights = turbo_weights(model)
    trp.load_turbodiffusion(saved(weights), model, **SLA)
    for block in model.blocks:
        for norm in (block.attn1.norm_q, block.attn1.norm_k):
            norm.register_forward_hook(lambda _module, _inputs, output: output.float())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        low = model(**tiny_transformer_inputs(model))[0]
    assert relative_error(low, literal(weights, model)) < 0.5 * relative_error(low, literal(weights, model, sla=None))


def test_a_lora_on_the_projection(saved):
    """The LoRA changes the output, and the patch can be restored with it."""
    model = tiny_wan_transformer()
    weights = turbo_weights(model)
    patch = trp.load_turbodiffusion(saved(weights), model, **SLA)
    model.add_adapter(LoraConfig(r=4, target_modules=["proj_l"], init_lora_weights=False))
    with_lora = dict(weights)
    for number, block in enumerate(model.blocks):
        name = f"blocks.{number}.self_attn.attn_op.local_attn.proj_l.weight"
        with_lora[name] = weights[name] + block.attn1.proj_l.get_delta_weight("default").detach()
    assert relative_error(run(model), literal(with_lora, model)) < 1e-5
    assert relative_error(run(model), literal(weights, model)) > 1e-4
    patch.restore()
    assert not any("proj_l" in name for name in model.state_dict())


def test_a_model_with_projections_of_its_own_is_patched_by_the_preset_and_keeps_them():
    model = with_own_projections(tiny_wan_transformer())
    results = {}
    for quantize in ((), ("attention",)):
        config = trp.Sparse(quantize=quantize, topk=TOPK, blocks=BLOCKS)
        with trp.patch(model, config) as patch:
            results[quantize] = run(model)
            assert "SLA 3/5 blocks" in patch.summary()
    assert model.blocks[0].attn1.proj_l is not None
    assert not is_sparse(model)
    rounding = relative_error(results["attention",], results[()])
    assert 1e-4 < rounding < SPARSE.limits.block


@pytest.mark.parametrize("quantize", [(), ("attention",), ("linears",)])
def test_the_published_blocks_are_those_of_the_attention_that_was_asked_for(monkeypatch, quantize):
    """Also where a call's attention is not in 8 bits after all: under a hook, with gradients."""
    model = tiny_wan_transformer()
    with_own_projections(model)
    asked = []
    monkeypatch.setattr(kernels, "sparse_block_sizes", lambda _, *, quantized: asked.append(quantized) or (5, 4))
    with trp.patch(model, trp.Sparse(quantize=quantize)):
        run(model)
        model(**tiny_transformer_inputs(model))[0].sum().backward()
        model.blocks[0].attn1.register_forward_hook(lambda *_: None)
        run(model)
    assert set(asked) == {"attention" in quantize}
