"""Every family: results of its patched model, unchanged parts, and steps that the summary says are not fused."""

import contextlib
import copy
from itertools import cycle

import pytest
import torch
from peft import LoraConfig

import turbo_rcm_patch as trp
from tests.oracle import assert_no_worse, relative_error, torch_device
from tests.patching.pairs import assert_same_output, blocks_of, make_pair, output_of
from tests.tiny_families import EACH_MODEL, FAMILIES, HEAD_DIM, tiny_family_inputs, tiny_family_transformer
from tests.tiny_ltx2 import tiny_ltx2_pipeline
from tests.tiny_wan import tiny_wan_pipeline
from turbo_rcm_patch.patching.families import FAMILIES as KNOWN
from turbo_rcm_patch.patching.families import PIPELINES, family_of, pipeline_of
from turbo_rcm_patch.patching.steps import layers
from turbo_rcm_patch.patching.steps.plan import SHARED

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def fewest_layers(name):
    return 2 if name == "vace" else 1  # VACE's has two control blocks, at different layers


def test_every_family_is_tested():
    classes = {type(tiny_family_transformer(name)) for name in (*FAMILIES, "wan")}
    assert classes == {family.transformer_class for family in KNOWN}


def test_every_pipeline_that_a_command_runs_states_its_frame_rate():
    run = [each for each in PIPELINES if each.starts_from != "video" and not each.is_modular]
    assert [each for each in run if each.frame_rate is None] == []
    wan = {variant: tiny_wan_pipeline(variant) for variant in ("t2v", "i2v", "wan22", "ti2v", "ti2v_i2v")}
    ltx2 = {kind: tiny_ltx2_pipeline(kind) for kind in ("text", "image")}
    rates = {name: pipeline_of(pipe).frame_rate(pipe) for name, pipe in (wan | ltx2).items()}
    assert rates == {"t2v": 16, "i2v": 16, "wan22": 16, "ti2v": 24, "ti2v_i2v": 24, "text": 24, "image": 24}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_fp32_models_match_unpatched(name, implementation, device):
    device = torch_device(device)
    model = tiny_family_transformer(name, layers=fewest_layers(name)).to(device)
    expected = output_of(name, model, device)
    with trp.patch(model, trp.Exact(implementation=implementation)):
        assert relative_error(output_of(name, model, device), expected) <= 1e-5


@pytest.mark.parametrize(
    ("on", "name", "dtype"),
    [
        *zip(cycle(["cpu"]), EACH_MODEL, cycle([torch.bfloat16, torch.float16])),
        *(
            pytest.param("cuda", name, dtype, marks=pytest.mark.gpu)
            for name, dtype in zip(FAMILIES, cycle([torch.bfloat16, torch.float16]))
        ),
    ],
)
def test_low_precision_models_are_no_further_from_the_oracle(name, dtype, on):
    layers = 3 if on == "cuda" else fewest_layers(name)
    model, oracle = (tiny_family_transformer(name, d, layers=layers).to(on) for d in (dtype, torch.float32))
    oracle.load_state_dict(model.state_dict())
    reference, unpatched = output_of(name, oracle, on), output_of(name, model, on)
    with trp.patch(model):
        assert_no_worse(output_of(name, model, on), unpatched, reference)


# diffusers' LTX-2 with projections of prompts takes one for each sample.
@pytest.mark.parametrize("on", DEVICES)
@pytest.mark.parametrize("name", [name for name in EACH_MODEL if name != "ltx2"])
def test_one_prompt_serves_several_latents(name, on):
    model = tiny_family_transformer(name, layers=2).to(on)
    prompts = {key: v[:1] for key, v in tiny_family_inputs(name, model).items() if key.startswith("encoder_hidden")}
    expected = output_of(name, model, on, **prompts)
    with trp.patch(model):
        assert relative_error(output_of(name, model, on, **prompts), expected) <= 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_every_block_runs_its_plan(name, monkeypatch):
    """The equivalence above would hold without a patch too: a wrong step must show in the output."""
    model = tiny_family_transformer(name, layers=fewest_layers(name))
    expected = output_of(name, model)
    skip = layers._skip
    with trp.patch(model):
        monkeypatch.setattr(layers, "_skip", lambda *args, **options: 2 * skip(*args, **options))
        assert relative_error(output_of(name, model), expected) > 1e-2


@pytest.mark.parametrize("name", EACH_MODEL)
def test_lora_hooks_and_a_copy(name):
    patched, plain, patch = make_pair(name, layers=fewest_layers(name))
    base = output_of(name, plain)
    for model in (patched, plain):
        torch.manual_seed(5)
        targets = ["to_q", "to_out.0", "ffn.net.2", "ff.net.2", "ffn.2"]
        model.add_adapter(LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=targets))
        blocks_of(model)[0].norm1.register_forward_hook(lambda module, args, output: -output)
    assert relative_error(output_of(name, plain), base) > 0.01
    assert_same_output(name, patched, plain)
    assert "+ LoRA" in patch.summary()
    assert "torch hook (1)" in patch.summary()
    twin = copy.deepcopy(patched)
    patch.restore()
    assert_same_output(name, twin, plain)


@pytest.mark.parametrize("fuse", [("self_attention",), ("feed_forward",)])  # the latter calls its module as a whole
@pytest.mark.parametrize("name", ["vace", "chronoedit", "anyflow", "helios", "ltx2"])
def test_sparse_linear_attention_to_all_keys_is_attention_and_the_linear_branch(name, fuse):
    model = tiny_family_transformer(name, layers=fewest_layers(name))
    expected = output_of(name, model)
    attentions = [attn for _, attn, _ in family_of(model).self_attentions(model)]
    for attn in attentions:
        attn.proj_l = torch.nn.Linear(HEAD_DIM, HEAD_DIM)
        torch.nn.init.zeros_(attn.proj_l.weight)
        torch.nn.init.zeros_(attn.proj_l.bias)
    with trp.patch(model, trp.Sparse(topk=1.0, blocks=(16, 8), quantize=(), fuse=fuse)):
        assert relative_error(output_of(name, model), expected) <= 1e-5
        for attn in attentions:
            torch.nn.init.normal_(attn.proj_l.weight)
        assert relative_error(output_of(name, model), expected) > 1e-2


@pytest.mark.parametrize("name", ["skyreels", "animate", "animate 2", "anyflow far", "ltx2.3"])
def test_models_without_sparse_linear_attention_are_refused(name):
    with pytest.raises(trp.PatchError, match="cannot have sparse-linear attention"):
        trp.patch(tiny_family_transformer(name), "sparse")


RUNS = {
    "anyflow": [0, 18, 36],
    "anyflow, a timestep per frame": [0, 6, 12, 18, 30, 36],  # the second sample's first two frames have one timestep
    "anyflow far": [0, 1, 7, 13, 20, 26],  # each sample's first frame is compressed to one token
    "anyflow far, with a cache": [0, 6, 12],
    "helios": [0, 15, 33, 48, 66],  # each sample's history, then its new frames
}


@pytest.mark.parametrize("name", RUNS)
def test_frames_with_the_same_timesteps_share_a_row_of_modulation(name):
    model = tiny_family_transformer(name)
    with trp.patch(model):
        output_of(name, model)
        assert vars(model)[SHARED].runs.starts.tolist() == RUNS[name]


def test_clean_frames_leave_no_runs():
    """In training clean frames follow the others, and have timesteps of their own."""
    model, calls = tiny_family_transformer("anyflow far"), []
    embedder = model.condition_embedder
    with trp.patch(model), torch.no_grad():
        hook = embedder.register_forward_pre_hook(lambda _, *call: calls.append(call), with_kwargs=True)
        output_of("anyflow far", model)
        hook.remove()
        assert vars(model)[SHARED].runs is not None
        args, kwargs = calls[0]
        embedder(*args, **{**kwargs, "clean_timestep": torch.zeros_like(args[0][:, 1:])})
        assert vars(model)[SHARED].runs is None


def test_a_causal_model_writes_the_same_cache_as_unpatched():
    name = "anyflow far, with a cache"
    model, caches = tiny_family_transformer(name), []
    inputs = tiny_family_inputs("anyflow far", model)
    image = tiny_family_inputs(name, model)["encoder_hidden_states_image"]
    for patched in (False, True):
        cache = tiny_family_inputs(name, model)["kv_cache"]
        caches.append([{key: torch.zeros_like(tensor) for key, tensor in block.items()} for block in cache])
        flag = {"num_cached_chunks": 2, "is_cache_step": True}
        patch = trp.patch(model) if patched else contextlib.nullcontext()
        with patch, torch.no_grad():
            model(**inputs, kv_cache=caches[-1], kv_cache_flag=flag, encoder_hidden_states_image=image)
    for block, expected in zip(*caches, strict=True):
        for key in block:
            assert block[key].any()
            assert relative_error(block[key], expected[key]) <= 1e-5


NOT_FUSED = {
    "vace": "not fused: the control blocks' input and output projections",
    "skyreels, causal": "attention mask (2)",
    "anyflow far": "processor AnyFlowCausalAttnProcessor (2)",
    "helios": "not fused: the patch embeddings of the history",
    "animate": "not fused: 2 face adapters between the blocks",
}


@pytest.mark.parametrize("name", NOT_FUSED)
def test_the_summary_names_what_is_not_fused(name):
    model = tiny_family_transformer(name)
    patch = trp.patch(model)
    output_of(name, model)
    assert NOT_FUSED[name] in patch.summary()
    assert "no CUDA graphs" in patch.summary()
    assert {row.blocks for row in patch.rows()} == ({"blocks", "vace_blocks"} if name == "vace" else {"blocks"})
