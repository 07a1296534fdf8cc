"""Block-sparse attention in patched models: where it runs, where it is dense and why, and refusals."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanAttention
from peft import LoraConfig
from torch import nn

import turbo_rcm_patch as trp
from scripts.tools import compile_without_gpu
from tests.oracle import relative_error
from tests.patching.launches import around_launches
from tests.tiny_families import DENSE, FAMILIES, first_of, tiny_family_inputs, tiny_family_transformer
from tests.tiny_wan import tiny_call, tiny_transformer_inputs, tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch.kernels.dispatch import meta_is_gpu
from turbo_rcm_patch.patching import use_rcm
from turbo_rcm_patch.patching.families import family_of
from turbo_rcm_patch.patching.families.wan.block import WanCall, decide
from turbo_rcm_patch.patching.families.wan.forward import wan_block
from turbo_rcm_patch.patching.steps.plan import Call, Stream, active_backend, state_of
from turbo_rcm_patch.tiers import QUANTIZED

BLOCKS = (4, 4)  # of the tiny models' 18 tokens


def config(**options):
    return trp.BlockSparse(**{"quantize": (), "min_tokens": 0, "blocks": BLOCKS} | options)


@pytest.fixture
def calls(monkeypatch):
    """Record each call of the sparse ops: its name, mass and blocks."""
    seen = []

    def watch(name):
        def around(launch):
            def counted(*arguments):
                mass, *blocks = arguments[1:4] if name.endswith("8bit") else arguments[3:]
                seen.append((name, mass, tuple(blocks)))
                return launch(*arguments)

            return counted

        around_launches(monkeypatch, name.upper(), around)

    watch("block_sparse_attention")
    watch("block_sparse_attention_8bit")
    return seen


@torch.no_grad()
def run(model, inputs):
    return first_of(model(**inputs) if isinstance(inputs, dict) else model(*inputs))


@torch.no_grad()
def outputs(model, config, inputs):
    with trp.patch(model, config):
        return run(model, inputs)


@pytest.mark.parametrize("name", ["wan", *FAMILIES])
def test_in_every_family(name, calls):
    """Attention is dense with the whole mass. With less it is sparse wherever there is no mask or cache."""
    model = tiny_family_transformer(name, layers=2 if name == "vace" else 1)
    inputs = tiny_family_inputs(name, model)
    before, exact = run(model, inputs), outputs(model, "exact", inputs)
    assert relative_error(outputs(model, config(mass=1.0), inputs), exact) <= 1e-6
    blocks = list(family_of(model).every_block(model))
    masked = name in DENSE
    assert calls == [] if masked else [("block_sparse_attention", 1.0, BLOCKS)] * len(blocks)
    sparse = outputs(model, config(mass=0.2), inputs)
    assert relative_error(sparse, exact) < 1e-6 if masked else relative_error(sparse, exact) > 1e-3
    assert torch.equal(run(model, inputs), before)


def test_8_bits_and_not(calls):
    model = tiny_wan_transformer()
    inputs = tiny_transformer_inputs(model)
    quantized = outputs(model, trp.Quantized(), inputs)
    dense = outputs(model, config(mass=1.0, quantize=("attention", "linears")), inputs)
    assert {name for name, *_ in calls} == {"block_sparse_attention_8bit"}
    # This is the quantized tier, except that the linear after the attention rounds the attention's result to 8 bits.
    assert relative_error(dense, quantized) <= QUANTIZED.limits.step
    assert relative_error(outputs(model, config(mass=0.2, quantize=("attention",)), inputs), dense) > 1e-3


def test_lora(calls):
    """The result is that of weights that have the LoRA merged into them."""
    model = tiny_wan_transformer()
    inputs = tiny_transformer_inputs(model)
    plain = outputs(model, config(mass=0.5), inputs)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    model.add_adapter(LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=targets), "first")
    calls.clear()
    sparse = outputs(model, config(mass=0.5), inputs)
    assert len(calls) == len(model.blocks)
    assert relative_error(sparse, plain) > 1e-2
    merged = copy.deepcopy(model)
    merged.fuse_lora()
    merged.unload_lora()
    assert relative_error(sparse, outputs(merged, config(mass=0.5), inputs)) <= 1e-5


@pytest.mark.parametrize("quantize", [(), ("attention",)])
def test_short_videos_are_dense_and_the_summary_says_so(quantize, calls):
    model = tiny_wan_transformer()
    inputs = tiny_transformer_inputs(model)
    expected = outputs(model, trp.Quantized(quantize=quantize), inputs)
    with trp.patch(model, config(quantize=quantize, min_tokens=19, mass=0.2)) as patch:
        assert torch.equal(run(model, inputs), expected)
        assert f"18 tokens, fewer than min_tokens=19 ({len(model.blocks)})" in patch.summary()
    assert calls == []
    with trp.patch(model, config(quantize=quantize, min_tokens=18, mass=0.2)) as patch:
        assert not torch.equal(run(model, inputs), expected)
        assert "block-sparse with mass 0.2" in patch.summary()
        assert "fewer than" not in patch.summary()


@pytest.mark.parametrize("quantize", [(), ("attention",)])
def test_exact_layers(quantize, calls):
    model = tiny_family_transformer("vace", layers=3)  # of each list of blocks
    inputs = tiny_family_inputs("vace", model)
    with trp.patch(model, config(quantize=quantize, exact_layers=(1, 1))) as patch:
        run(model, inputs)
        assert len(calls) == 1
        assert "exact_layers=(1, 1) (2)" in patch.summary()
        reasons = [[state_of(block).exactly for block in blocks] for blocks in (model.blocks, model.vace_blocks)]
    assert reasons == [["exact_layers=(1, 1)", None, "exact_layers=(1, 1)"], ["exact_layers=(1, 1)"] * 2]
    exact = outputs(model, trp.Quantized(quantize=()), inputs)
    assert torch.equal(outputs(model, config(quantize=quantize, exact_layers=(0, 9)), inputs), exact)


@pytest.mark.parametrize("quantize", [(), ("attention",)])
def test_exact_steps(quantize, calls):
    pipe = tiny_wan_pipeline()
    use_rcm(pipe)
    call = tiny_call(guidance_scale=1.0, num_inference_steps=4)
    made = []

    def on_step_end(*_):
        made.append(len(calls))
        return {}

    with trp.patch(pipe, config(quantize=quantize, exact_steps=(1, 2))) as patch:
        pipe(**call, generator=torch.Generator().manual_seed(0), callback_on_step_end=on_step_end)
        assert "in the first 1 and last 2 steps" in patch.summary()
    assert made == [0, 2, 2, 2]


def test_autograd_attends_to_all_keys(calls):
    model = tiny_wan_transformer().requires_grad_(True)
    inputs = tiny_transformer_inputs(model)
    exact = outputs(model, "exact", inputs)
    with trp.patch(model, config(mass=0.2)) as patch:
        out = model(**inputs)[0] if isinstance(inputs, dict) else model(*inputs)[0]
        out.square().sum().backward()
        assert "under autograd block-sparse attention is dense" in patch.summary()
    assert calls == []
    assert relative_error(out, exact) <= 1e-5
    assert all(block.attn1.to_q.weight.grad.any() for block in model.blocks)
    assert "block-sparse" not in trp.patch(model).summary()


def plan_on_a_gpu(options, heads=2, head_dim=64, capability=(8, 9), change=None, tokens=32760, batch=1, **call):
    """The self-attention's step as chosen for a GPU that is not there. change: of the model, before it is patched."""
    model = tiny_wan_transformer(heads=heads, head_dim=head_dim)
    if change is not None:
        change(model)
    trp.patch(model, config(**{"min_tokens": 8192, "blocks": None} | options))
    block = model.blocks[0]
    model.to("meta")
    values = (torch.device("meta"), torch.bfloat16, None)
    with meta_is_gpu(capability, 100):
        kind = Call(state_of(block).shared.config, *values, active_backend())._replace(**call)
        plan = decide(wan_block(WanAttention), block, WanCall(kind, Stream(batch, tokens), 1, 7))
        return plan.self_attention.attention


def test_kernels_on_a_gpu():
    step = plan_on_a_gpu({})
    assert (step.kernel, step.reason) == ("portable Triton, block-sparse with mass 0.9", None)
    step = plan_on_a_gpu({"quantize": ("attention",), "mass": 0.85})
    assert (step.kernel, step.reason) == ("portable Triton int8, e4m3, block-sparse with mass 0.85", None)
    assert step.run.args[1] == (0.85, 128, 64, torch.bfloat16)
    step = plan_on_a_gpu({"quantize": ("attention",)}, capability=(9, 0))
    assert (step.kernel, step.reason) == ("sm_90 Gluon int8, e4m3, block-sparse with mass 0.9", None)
    assert step.run.args[1] == (0.9, 192, 128, torch.bfloat16)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
@pytest.mark.parametrize("implementation", ["auto", "triton"])
def test_without_8_bits_it_runs_by_the_kernel_of_the_models_dtype(implementation, capability):
    """The preset has attention in 8 bits, but another mechanism of this self-attention keeps it from them."""

    def hooked(model):
        for block in model.blocks:
            block.attn1.norm_q.register_forward_hook(lambda *_: None)

    options = {"quantize": ("attention",), "implementation": implementation}
    step = plan_on_a_gpu(options, capability=capability, change=hooked)
    assert step.kernel == "portable Triton, block-sparse with mass 0.9"
    assert step.reason == "torch hook"
    x = torch.empty(1, 32760, 2, 64, device="meta", dtype=torch.bfloat16)
    launched = compile_without_gpu.record_launches(partial(step.run, x, x, x), capability)
    assert launched[-1].kernel.fn.__name__ == "_sparse_attention_kernel"


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
def test_on_several_gpus_q_k_and_v_are_put_in_8_bits_after_their_exchange(capability):
    def on_two_gpus(model):
        degrees = SimpleNamespace(ring_degree=1, ulysses_degree=2, ulysses_anything=False)
        for block in model.blocks:
            block.attn1.processor._parallel_config = SimpleNamespace(context_parallel_config=degrees)

    step = plan_on_a_gpu({"quantize": ("attention",)}, capability=capability, change=on_two_gpus)
    assert step.kernel.endswith(" int8, e4m3, block-sparse with mass 0.9 between all-to-alls")
    assert step.reason is None
    of_its_own_heads = step.run.args[1]
    received = torch.empty(32760, 3, 1, 1, 64, device="meta", dtype=torch.bfloat16)  # side by side for each token
    q_k_v = [x.transpose(0, 1) for x in received.unbind(1)]
    launched = compile_without_gpu.record_launches(partial(of_its_own_heads, *q_k_v), capability)
    names = [launch.kernel.fn.__name__ for launch in launched]
    quantize = ["_quantize_q_kernel", "_summarize_kv_kernel", "_reduce_summaries_kernel", "_quantize_kv_kernel"]
    assert names[:4] == quantize
    assert len(names) > 4


@pytest.mark.parametrize("quantize", [(), ("attention",)])
def test_few_tokens_take_the_reference_where_no_sparse_kernel_is(quantize):
    """Otherwise verify and evaluate would run the embedded model, 700 tokens in small blocks, with dense attention."""
    options = {"blocks": (16, 16), "min_tokens": 0, "quantize": quantize}
    step = plan_on_a_gpu(options, tokens=700)
    reason = "blocks of 16 queries and 16 keys"
    assert (step.kernel, step.reason) == ("torch reference, block-sparse with mass 0.9", reason)
    for options_of_dense, tokens in ((options, 8192), ({**options, "implementation": "triton"}, 700)):
        step = plan_on_a_gpu(options_of_dense, tokens=tokens)
        assert "block-sparse" not in step.kernel
        assert step.reason == reason


def test_an_attention_backend_that_the_user_chose_stays(calls):
    model = tiny_wan_transformer()
    inputs = tiny_transformer_inputs(model)
    model.set_attention_backend("_native_math")
    try:
        with trp.patch(model, config(mass=0.2)) as patch:
            run(model, inputs)
            assert "attention backend _native_math (2)" in patch.summary()
    finally:
        model.reset_attention_backend()
        model.set_attention_backend("native")
    assert calls == []


def test_a_model_of_sparse_linear_attention_is_refused():
    model = tiny_wan_transformer()
    for block in model.blocks:
        block.attn1.proj_l = nn.Linear(64, 64)
    with pytest.raises(trp.PatchError, match=r"trained with sparse-linear attention .*; take the preset 'sparse'"):
        trp.patch(model, "block_sparse")
    assert "forward" not in vars(model.blocks[0])


def test_the_sparse_preset_names_it_where_a_model_has_no_proj_l():
    with pytest.raises(
        trp.PatchError, match="another preset: 'block_sparse', whose sparse attention needs no training"
    ):
        trp.patch(tiny_wan_transformer(), "sparse")
