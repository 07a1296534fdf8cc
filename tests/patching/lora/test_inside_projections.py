"""LoRA layers inside patched projections: outputs equal peft's own, and matrices are prepared once per change."""

import copy
import gc

import pytest
import torch
from peft import LoraConfig
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import turbo_rcm_patch as trp
from scripts.tools import compile_without_gpu
from tests.oracle import relative_error
from tests.tiny_wan import moved, output_of, tiny_transformer_inputs, tiny_wan_transformer
from turbo_rcm_patch.kernels.dispatch import meta_is_gpu
from turbo_rcm_patch.patching.families.wan import block as wan_block
from turbo_rcm_patch.patching.steps.plan import state_of
from turbo_rcm_patch.tiers import EXACT, QUANTIZED

# The steps of a block with a LoRA's product inside. q, k and v are one step, and so are k and v of the prompt.
STEPS = ["QKV", "out", "Q of the prompt", "K and V of the prompt", "out", "linear + GELU", "linear + skip"]
ALL = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]


def add_lora(model, name="first", *, seed=5, targets=ALL, **options):
    torch.manual_seed(seed)
    options = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, **options}
    model.add_adapter(LoraConfig(target_modules=targets, **options), adapter_name=name)


def make_pair(config=None, **lora):
    """A patched model and an unpatched one with the same LoRA."""
    pair = tiny_wan_transformer(layers=1), tiny_wan_transformer(layers=1)
    patch = trp.patch(pair[0], config or "exact")
    for model in pair:
        add_lora(model, **lora)
    return *pair, patch


def assert_same(patched, plain):
    expected = output_of(plain)
    assert relative_error(output_of(patched), expected) <= 1e-5
    return expected


def lora_rows(patch):
    return [line for line in patch.summary().splitlines() if "+ LoRA" in line]


# What they compute


@pytest.mark.parametrize("of_adapters", [torch.bfloat16, torch.float32])
def test_errs_no_more_against_fp32_than_unpatched(of_adapters):
    oracle = tiny_wan_transformer(layers=1)
    add_lora(oracle)
    add_lora(oracle, "second", seed=6, r=9)
    oracle.set_adapters(["first", "second"], [0.7, 0.4])
    for parameter in oracle.parameters():
        parameter.data = parameter.data.bfloat16().float()
    unpatched = copy.deepcopy(oracle).to(torch.bfloat16)
    for name, module in unpatched.named_modules():
        if "lora_" in name:
            module.to(of_adapters)
    patched = copy.deepcopy(unpatched)
    patch = trp.patch(patched)
    errors = [relative_error(output_of(model), output_of(oracle)) for model in (patched, unpatched)]
    assert errors[0] <= EXACT.limits.factor * errors[1]
    assert len(lora_rows(patch)) == len(STEPS)


@pytest.mark.parametrize("lora_bias", [False, True])
def test_the_kernels_take_layers_of_several_ranks(lora_bias):
    """Two of q, k and v have a LoRA, of unequal ranks. With two adapters one goes beyond a step of ranks."""
    config = trp.Exact(implementation="triton")
    targets = ["to_q", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]
    options = {"targets": targets, "lora_bias": lora_bias}
    patched, plain, _ = make_pair(config, rank_pattern={"to_v": 7, "ffn.net.2": 61}, **options)
    for model in (patched, plain):
        add_lora(model, "second", seed=9, **options)
        model.set_adapters(["first", "second"], [0.5, -1.5])
        for name, parameter in model.named_parameters():
            if "lora_B" in name and name.endswith("bias"):
                nn.init.normal_(parameter, generator=torch.Generator().manual_seed(3))
    assert_same(patched, plain)


def test_quantized_tier():
    patched, plain, patch = make_pair("quantized")
    for scale in (1.0, 0.25):
        for model in (patched, plain):
            model.set_adapters(["first"], [scale])
        assert relative_error(output_of(patched), output_of(plain)) <= QUANTIZED.limits.step
    assert len(lora_rows(patch)) == len(STEPS)
    assert torch.equal(output_of(patched), output_of(copy.deepcopy(patched)))  # for which all is prepared anew


# Changes between two calls


@pytest.fixture
def decided(monkeypatch):
    """The blocks whose plans were decided."""
    blocks, decide = [], wan_block.decide
    monkeypatch.setattr(wan_block, "decide", lambda *args: (blocks.append(args[1]), decide(*args))[1])
    return blocks


def addresses(model):
    return state_of(model.blocks[0]).shared.products.bring_up_to_date()


def test_a_scale_is_written_into_what_was_prepared(decided):
    patched, plain, _ = make_pair()
    first = assert_same(patched, plain)
    before = addresses(patched)
    decided.clear()
    for model in (patched, plain):
        for layer in model.modules():
            if hasattr(layer, "set_scale"):
                layer.set_scale("first", 0.3)
    assert relative_error(assert_same(patched, plain), first) > 0.01
    assert (decided, addresses(patched)) == ([], before)


def test_a_scale_that_is_a_tensor(decided):
    """peft's preparation for hot swapping makes scales tensors."""
    patched, plain, _ = make_pair()
    for model in (patched, plain):
        for layer in model.modules():
            if hasattr(layer, "scaling"):
                layer.scaling["first"] = torch.tensor(layer.scaling["first"])
    first = assert_same(patched, plain)
    for model in (patched, plain):
        for layer in model.modules():
            if hasattr(layer, "scaling"):
                layer.scaling["first"].fill_(0.2)
    assert relative_error(assert_same(patched, plain), first) > 0.01


def test_adapters_are_added_chosen_switched_off_fused_and_removed():
    patched, plain, patch = make_pair()
    first = assert_same(patched, plain)
    for change in (
        lambda model: add_lora(model, "second", seed=9, r=70),
        lambda model: model.set_adapters(["first", "second"], [0.5, 0.7]),
        lambda model: model.set_adapters(["second"]),
        lambda model: model.disable_lora(),
        lambda model: model.enable_lora(),
        lambda model: model.set_adapters(["second", "first"], [0.1, 1.0]),
        lambda model: model.fuse_lora(),
        lambda model: model.unfuse_lora(),
        lambda model: model.delete_adapters("second"),
    ):
        for model in (patched, plain):
            change(model)
        assert_same(patched, plain)
    assert relative_error(output_of(patched), first) < 1e-4  # unfusing rounds
    for model in (patched, plain):
        model.unload_lora()
    assert_same(patched, plain)
    assert lora_rows(patch) == []
    gc.collect()
    assert addresses(patched) == ()  # nothing is kept


def hot_swap(parameter, value):
    torch.utils.swap_tensors(parameter, nn.Parameter(value))


def write(parameter, value):
    parameter.copy_(value)


def exchange_data(parameter, value):
    parameter.data = value


@pytest.mark.parametrize("how", [hot_swap, write, exchange_data])
def test_matrices_are_exchanged(how, decided):
    patched, plain, _ = make_pair()
    before = assert_same(patched, plain)
    for model in (patched, plain):
        torch.manual_seed(8)
        with torch.no_grad():
            for name, parameter in list(model.named_parameters()):
                if "lora_" in name:
                    how(parameter, torch.randn_like(parameter).detach())
    assert relative_error(assert_same(patched, plain), before) > 0.1


def test_data_is_exchanged_twice_between_two_calls():
    """After two exchanges the memory may have its first address again."""
    patched, plain, _ = make_pair()
    for _ in range(3):
        assert_same(patched, plain)
        for model in (patched, plain):
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.data = parameter.data * 2
                    parameter.data = parameter.data / 3
    assert_same(patched, plain)


def test_in_and_out_of_inference_mode():
    patched, plain, _ = make_pair()
    with torch.inference_mode():
        output_of(patched)
    for model in (patched, plain):
        model.set_adapters(["first"], [0.5])
    assert_same(patched, plain)


def test_each_kind_of_call_shares_what_was_prepared():
    patched, _, _ = make_pair()
    output_of(patched)
    before = addresses(patched)
    inputs = tiny_transformer_inputs(patched)
    with torch.no_grad():
        patched(**{**inputs, "hidden_states": inputs["hidden_states"][:, :, :1]})
    assert addresses(patched) == before
    assert len(before) == 2 * len(STEPS)


@pytest.mark.parametrize("tier", ["exact", "quantized"])
@pytest.mark.parametrize("moved", [lambda model: model, lambda model: nn.ModuleList([model])])
def test_nothing_that_was_prepared_stays_behind_when_the_model_moves(tier, moved):
    patched, _, _ = make_pair(tier)
    output_of(patched)
    products = state_of(patched.blocks[0]).shared.products
    before = addresses(patched)
    moved(patched).to("cpu")  # where it is
    assert addresses(patched) == before
    tensors = [t for product in products._known.values() for t in product._prepared.values()]
    tensors += [parameter for name, parameter in patched.named_parameters() if "lora_" in name]
    memory = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
    del tensors
    moved(patched).to("meta")
    gc.collect()
    assert len(memory) > 4 * len(STEPS)
    assert all(one.expired() for one in memory)


# What is left to the layers


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"use_dora": True}, "DoraLinearVariant"), ({"lora_dropout": 0.5}, "dropout")],
)
def test_reasons_to_call_the_layers(options, reason):
    patched, plain, patch = make_pair(**options)
    if reason == "dropout":
        patched.train()
        assert relative_error(output_of(patched), output_of(patched)) > 1e-3
    else:
        assert_same(patched, plain)
    assert lora_rows(patch) == []
    assert f"LoRA layer: {reason} (1)" in patch.summary()


def test_a_hook_on_a_matrix_runs():
    patched, plain, patch = make_pair()
    for model in (patched, plain):
        layer = model.blocks[0].ffn.net[2]
        layer.lora_B["first"].register_forward_hook(lambda module, args, output: 3 * output)
    assert_same(patched, plain)
    assert "LoRA layer: torch hook (1)" in patch.summary()


def test_a_hook_on_a_layer_runs():
    """The hook is on peft's layer around the linear, past which the linear is read otherwise."""
    patched, plain, patch = make_pair()
    for model in (patched, plain):
        model.blocks[0].attn1.to_out[0].register_forward_hook(lambda module, args, output: 3 * output)
    assert_same(patched, plain)
    assert "LoRA layer: torch hook (1)" in patch.summary()
    assert len(lora_rows(patch)) == len(STEPS) - 1


@pytest.mark.parametrize("tier", ["exact", "quantized"])
def test_a_bias_on_a_first_matrix_is_added(tier):
    """peft makes none."""
    patched, plain, patch = make_pair(tier)
    before = output_of(plain)
    for model in (patched, plain):
        model.blocks[0].ffn.net[2].lora_A["first"].bias = nn.Parameter(torch.full((4,), 5.0))
    after = output_of(plain)
    assert relative_error(after, before) > QUANTIZED.limits.step
    assert relative_error(output_of(patched), after) <= (1e-5 if tier == "exact" else QUANTIZED.limits.step)
    assert "LoRA layer: bias of a lora_A (1)" in patch.summary()


def test_training_gradients():
    patched, plain, _ = make_pair()
    output_of(patched)
    gradients = []
    for model in (patched, plain):
        model.train()
        model(**tiny_transformer_inputs(model))[0].square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if "lora_" in name})
    assert gradients[0]
    for name, expected in gradients[1].items():
        assert relative_error(gradients[0][name], expected) <= 1e-4
    with torch.no_grad():
        for model, of_model in zip((patched, plain), gradients, strict=True):
            for name, parameter in model.named_parameters():
                if name in of_model:
                    parameter -= 10 * of_model[name]
    assert_same(patched.eval(), plain.eval())


@pytest.mark.parametrize("tier", ["exact", "quantized"])
def test_restore_and_copies(tier):
    model = tiny_wan_transformer(layers=1)
    add_lora(model)
    before = output_of(model)
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    patch = trp.patch(model, tier)
    patched = output_of(model)
    copied = copy.deepcopy(model)
    assert torch.equal(output_of(copied), patched)
    copied.set_adapters(["first"], [0.1])
    assert relative_error(output_of(copied), patched) > 0.01
    assert torch.equal(output_of(model), patched)
    patch.restore()
    assert torch.equal(output_of(model), before)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
def test_on_sm_90_the_queries_of_a_prompt_have_their_lora_in_one_gemm(capability):
    """Elsewhere PyTorch's two products, which nobody has timed ours beside. The prompt's own tokens are too few."""
    sizes = {"layers": 1, "heads": 4, "head_dim": 128, "ffn_dim": 256, "rope_max_seq_len": 64}
    model = tiny_wan_transformer(dtype=torch.bfloat16, **sizes)
    patch = trp.patch(model)
    add_lora(model)
    model.to("meta")
    inputs = moved(tiny_transformer_inputs(model), "meta")
    inputs["hidden_states"] = torch.empty(2, model.config.in_channels, 13, 60, 80, dtype=model.dtype, device="meta")
    with torch.no_grad(), meta_is_gpu(capability, compile_without_gpu.MULTIPROCESSORS):
        launches = compile_without_gpu.record_launches(lambda: model(**inputs), capability)
        rows = {(row.sub_layer, row.step): row for row in patch.rows()}
    names = [launch.kernel.fn.__name__ for launch in launches]
    queries = rows["cross_attention", "Q projection"]
    if capability == (9, 0):
        assert (queries.kernel, queries.reasons) == ("sm_90 Gluon + LoRA", {})
        assert names.count("gemm_kernel") == 5  # the queries', two projections with the skip, two of the feed-forward
    else:
        assert (queries.kernel, queries.reasons) == ("PyTorch linear + LoRA", {"no GPU of sm_90": 1})
        assert "_linear_kernel" not in names


def test_the_queries_of_a_prompt_say_why_pytorch_has_them():
    model = tiny_wan_transformer(layers=1, dtype=torch.bfloat16)
    patch = trp.patch(model, trp.Exact(linears="torch"))
    add_lora(model)
    model.to("meta")
    inputs = moved(tiny_transformer_inputs(model), "meta")
    with torch.no_grad(), meta_is_gpu((9, 0), compile_without_gpu.MULTIPROCESSORS):
        compile_without_gpu.record_launches(lambda: model(**inputs), (9, 0))
        row = next(row for row in patch.rows() if row.step == "Q projection")
    assert row.reasons == {"linears='torch'": 1}
