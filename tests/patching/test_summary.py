"""The summary against what ran: kernels launched and linears called in a forward follow from its rows."""

import sys
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig

import turbo_rcm_patch as trp
from tests.tiny_families import tiny_family_inputs, tiny_family_transformer
from turbo_rcm_patch.kernels.dispatch import interpreting
from turbo_rcm_patch.kernels.launch import launch_kernel

pytestmark = pytest.mark.skipif(not interpreting(), reason="needs Triton's CPU interpreter")

# The launches of a fused step.
FUSED = {
    "norm": {"_layer_norm_modulate_kernel": 1},
    "norm + modulation": {"_layer_norm_modulate_kernel": 1},
    "QK-norm": {"_rms_norm_rope_kernel": 2},
    "QK-norm + RoPE": {"_rms_norm_rope_kernel": 2},
    "attention": {"_attention_kernel": 1},
    "image attention": {"_rms_norm_rope_kernel": 1, "_attention_kernel": 1, "_skip_kernel": 1},  # norm of k, and sum
    "projection + skip": {"_linear_skip_kernel": 1},
    "linear + GELU": {"_linear_gelu_kernel": 1},
    "linear + skip": {"_linear_skip_kernel": 1},
}
# The linear that a step's kernel replaces; nobody calls it where the step is fused.
LINEARS = {
    ("self_attention", "projection + skip"): "attn1.to_out.0",
    ("cross_attention", "projection + skip"): "attn2.to_out.0",
    ("feed_forward", "linear + GELU"): "ffn.net.0.proj",
    ("feed_forward", "linear + skip"): "ffn.net.2",
}


def not_fused(row):
    """Return the launches of a step that is not fused."""
    if row.step in ("projection + skip", "linear + skip"):  # the skip is a pass of its own, also after a whole module
        return {"_skip_kernel": 1}
    if row.step == "image attention" and row.kernel != "PyTorch module":
        return {"_rms_norm_rope_kernel": 1}
    return {"_gelu_kernel": 1} if row.kernel == "PyTorch linear, Triton GELU" else {}


def expected_launches(rows):
    launches = Counter()
    for row in rows:
        without = sum(row.reasons.values())
        for per_block, blocks in ((FUSED.get(row.step, {}), row.count - without), (not_fused(row), without)):
            launches.update({kernel: count * blocks for kernel, count in per_block.items()})
    return +launches


@pytest.fixture
def ran(monkeypatch):
    """Launches by the kernels' names, and calls of linears by the ids of their weights. The kernels do not run."""
    launches, linears, linear = Counter(), Counter(), F.linear

    def count_launch(kernel, *arguments, **options):
        launches[kernel.fn.__name__] += 1

    def count_linear(x, weight, bias=None):
        linears[id(weight)] += 1
        return linear(x, weight, bias)

    for name, module in list(sys.modules.items()):
        if name.startswith("turbo_rcm_patch.kernels.") and getattr(module, "launch_kernel", None) is launch_kernel:
            monkeypatch.setattr(module, "launch_kernel", count_launch)
    monkeypatch.setattr(F, "linear", count_linear)
    return launches, linears


def check(name, patch, model, ran):
    """Compare a forward with the summary after it; returns the rows."""
    launches, linears = ran
    with torch.no_grad():
        model(**tiny_family_inputs(name, model))
    rows = patch.rows()
    assert launches == expected_launches(rows)
    for row in rows:
        path = LINEARS.get((row.sub_layer, row.step))
        if path is not None:
            called = 0
            for block in getattr(model, row.blocks):
                linear = block.get_submodule(path)
                called += linears[id(getattr(linear, "base_layer", linear).weight)]
            assert called == sum(row.reasons.values()), row
    return rows


def patched(name, options=None, **config):
    model = tiny_family_transformer(name, **(options or {"layers": 2 if name == "wan" else 3}))
    return model, trp.patch(model, trp.Exact(implementation="triton", **config))


def fused(rows, step):
    """Fused blocks by list of blocks and sub-layer."""
    return {(r.blocks, r.sub_layer): r.count - sum(r.reasons.values()) for r in rows if r.step == step}


@pytest.mark.parametrize("name", ["wan", "vace", "skyreels", "skyreels, causal"])
def test_a_patched_model_launches_what_its_summary_says(name, ran):
    model, patch = patched(name)
    rows = check(name, patch, model, ran)
    whole = name == "skyreels, causal"  # its mask makes the self-attention a whole
    assert fused(rows, "attention")["blocks", "self_attention"] == (0 if whole else len(model.blocks))
    assert fused(rows, "attention")["blocks", "cross_attention"] == len(model.blocks)


I2V = {"image_dim": 4, "added_kv_proj_dim": "inner", "in_channels": 36}


@pytest.mark.parametrize("name", ["wan", "animate"])
def test_every_projection_of_a_prompt_has_a_row(name, ran):
    """PyTorch's, each a linear alone, which is not called fused."""
    model, patch = patched(name, I2V if name == "wan" else None)
    rows = {row.step: row for row in check(name, patch, model, ran)}
    _, linears = ran
    paths = {"Q": ["to_q"], "K and V": ["to_k", "to_v"], "image K and V": ["add_k_proj", "add_v_proj"]}
    for step, of_step in paths.items():
        row = next(rows[key] for key in rows if key.startswith(f"{step} projection"))
        assert (row.sub_layer, row.kernel) == ("cross_attention", "PyTorch linear")
        assert row.reasons == {"nothing to fuse": len(model.blocks)}
        assert all(
            linears[id(block.attn2.get_submodule(path).weight)] == 1 for block in model.blocks for path in of_step
        )


def test_an_attention_that_is_called_as_a_whole_has_the_same_steps(ran):
    model, patch = patched("wan", I2V)
    steps = [row.step for row in patch.rows()]
    for block in model.blocks:
        for attn in (block.attn1, block.attn2):
            attn.register_forward_hook(lambda module, args, output: output)
    rows = check("wan", patch, model, ran)
    assert [row.step for row in rows] == steps
    assert [row.step for row in rows if row.reasons == {"torch hook": 2}] == [
        step for step in steps if "norm + mod" not in step and step != "norm" and "linear" not in step
    ]


def test_a_step_that_some_blocks_lack_is_counted_where_it_is():
    """Only the middle one of three blocks computes its self-attention in 8 bits."""
    model = tiny_family_transformer("wan", layers=3)
    config = trp.BlockSparse(exact_layers=(1, 1), min_tokens=0)
    steps = {row.step: row for row in trp.patch(model, config).rows() if row.sub_layer == "self_attention"}
    assert list(steps) == [
        "norm + modulation",
        "QKV projection",
        "QK-norm + RoPE + 8 bits",
        "QK-norm + RoPE",
        "attention",
        "projection + skip",
    ]
    assert {step: row.count for step, row in steps.items() if "QK-norm" in step} == {
        "QK-norm + RoPE + 8 bits": 1,
        "QK-norm + RoPE": 2,
    }
    assert steps["attention"].count == 3


@pytest.mark.parametrize("backend", [None, "native"])
def test_attention_over_an_image(backend, ran):
    model, patch = patched("wan", I2V)
    if backend is not None:
        model.set_attention_backend(backend)
    rows = check("wan", patch, model, ran)
    for step in ("attention", "image attention"):
        assert fused(rows, step)["blocks", "cross_attention"] == (2 if backend is None else 0)


def test_torchs_linears(ran):
    model, patch = patched("wan", linears="torch")
    assert not any(fused(check("wan", patch, model, ran), "linear + skip").values())


@pytest.mark.parametrize("group", ["self_attention", "cross_attention", "feed_forward"])
def test_groups_that_are_not_asked_for(group, ran):
    model, patch = patched("wan", fuse={"self_attention", "cross_attention", "feed_forward"} - {group})
    rows = check("wan", patch, model, ran)
    assert all("not in fuse" in row.reasons for row in rows if row.sub_layer == group)


@pytest.mark.parametrize("name", ["wan", "vace"])
def test_dora_on_some_linears_and_hooks_on_some_norms(name, ran):
    model, patch = patched(name)
    targets = r"blocks\.(0\.attn1\.to_out\.0|1\.ffn\.net\.(0\.proj|2))"
    model.add_adapter(LoraConfig(r=4, target_modules=targets, use_dora=True))
    first = model.blocks[0]
    for norm in (first.norm1, first.norm2, first.attn2.norm_q, first.attn2.norm_k):
        norm.register_forward_hook(lambda module, args, output: output)
    rows = check(name, patch, model, ran)
    count = len(model.blocks)
    assert fused(rows, "projection + skip")["blocks", "self_attention"] == count - 1
    assert fused(rows, "linear + GELU")["blocks", "feed_forward"] == count - 1
    assert fused(rows, "linear + skip")["blocks", "feed_forward"] == count - 1
    assert fused(rows, "QK-norm")["blocks", "cross_attention"] == count - 1
    assert fused(rows, "norm + modulation")["blocks", "self_attention"] == count - 1
