"""Users' hooks: on modules with a replaced forward, on modules inside them, beside accelerate's hooks, and global."""

from itertools import cycle

import accelerate
import pytest
import torch
from torch.nn.modules import module as torch_module

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.pairs import NAMES, blocks_of, families, output_of
from tests.tiny_families import tiny_family_inputs, tiny_family_transformer
from tests.tiny_wan import tiny_transformer_inputs, tiny_wan_transformer
from turbo_rcm_patch.patching.steps import layers

CPU = torch.device("cpu")


def negated(module, args, output):
    return tuple(map(negate, output)) if isinstance(output, tuple) else negate(output)


def negate(value):
    return -value if isinstance(value, torch.Tensor) else value


def with_larger_prompt(module, args):
    return args[0], 1.5 * args[1], *args[2:]


HOOKS = {
    "after": lambda module: module.register_forward_hook(negated),
    "before": lambda module: module.register_forward_pre_hook(with_larger_prompt),
}


OF_WANS_KIND = [name for name in NAMES if name != "ltx2"]
PLACES = [
    *((name, "blocks.1", kind) for name, kind in zip(OF_WANS_KIND, cycle(("after", "before")))),
    *((name, "condition_embedder", kind) for name, kind in zip(OF_WANS_KIND, cycle(("before", "after")))),
    *(("vace", "vace_blocks.0", kind) for kind in HOOKS),
    *(("ltx2", path, "after") for path in ("transformer_blocks.1", "time_embed")),  # their arguments have names
]


@pytest.mark.parametrize(("name", "path", "kind"), PLACES)
def test_a_hook_that_is_there_before_the_patch_runs(name, path, kind):
    patched, plain = tiny_family_transformer(name), tiny_family_transformer(name)
    base = output_of(name, plain)
    handles = [HOOKS[kind](model.get_submodule(path)) for model in (patched, plain)]
    patch = trp.patch(patched)
    assert all("forward" in block.__dict__ for block in blocks_of(patched))
    expected = output_of(name, plain)
    assert relative_error(expected, base) > 1e-3
    assert relative_error(output_of(name, patched), expected) <= 1e-5
    assert "torch hook" not in patch.summary().partition("CUDA graphs")[0]  # all steps are as without it
    patch.restore()
    assert torch.equal(output_of(name, patched), expected)
    for handle in handles:
        handle.remove()
    assert torch.equal(output_of(name, patched), base)


# What a hook may give once for all samples or for all tokens. SDPA itself does not broadcast keys over tokens.
FOR_ALL_SAMPLES = (
    *("norm1", "attn1", "norm2", "attn2", "norm3", "ffn", "attn1.to_v", "attn2.to_q", "attn2.norm_q", "attn2.to_k"),
    *("attn2.norm_k", "attn2.to_v", "attn2.to_out.0", "ffn.net.0", "ffn.net.0.proj", "ffn.net.1", "ffn.net.2"),
)
FOR_ALL_TOKENS = sorted({*FOR_ALL_SAMPLES} - {"norm1", "attn2.to_k", "attn2.norm_k"})
ONE_FOR_ALL = [*((path, 0) for path in FOR_ALL_SAMPLES), *((path, 1) for path in FOR_ALL_TOKENS)]


@pytest.mark.parametrize("implementation", ["triton", "torch"])
@pytest.mark.parametrize(("path", "dim"), ONE_FOR_ALL)
def test_a_hook_may_give_one_row_for_all(path, dim, implementation):
    """diffusers broadcasts it."""
    patched, plain = tiny_wan_transformer(), tiny_wan_transformer()
    base = output_of("wan", plain)
    for model in (patched, plain):
        hook_mean(model, path, dim)
    expected = output_of("wan", plain)
    assert relative_error(expected, base) > 1e-3
    with trp.patch(patched, trp.Exact(implementation=implementation)):
        assert relative_error(output_of("wan", patched), expected) <= 1e-5


@pytest.mark.parametrize(("path", "dim"), ONE_FOR_ALL)
def test_in_8_bits_a_hook_may_give_one_row_for_all(path, dim):
    one, each = tiny_wan_transformer(), tiny_wan_transformer()
    with trp.patch(one, "quantized"), trp.patch(each, "quantized"):
        hook_mean(one, path, dim)
        hook_mean(each, path, dim, in_each_row=True)
        assert relative_error(output_of("wan", one), output_of("wan", each)) <= 1e-5


@pytest.mark.parametrize("dim", [0, 1])
def test_a_hook_on_fused_projections_may_give_one_row_for_all(dim):
    patched, plain = tiny_wan_transformer(), tiny_wan_transformer()
    for model in (patched, plain):
        model.fuse_qkv_projections()
    with trp.patch(patched, trp.Exact(implementation="triton")):
        for model, in_each_row in ((patched, False), (plain, True)):  # diffusers' own RoPE does not broadcast
            hook_mean(model, "attn1.to_qkv", dim, in_each_row=in_each_row)
        assert relative_error(output_of("wan", patched), output_of("wan", plain)) <= 1e-5


def test_the_dropout_after_a_gelu_kernel_may_give_one_row_for_all():
    """The linear after it may be fused, where the one before is PyTorch's."""
    x = torch.randn(2, 3, 4)
    mean = lambda y: y.mean((0, 1), keepdim=True)  # noqa: E731
    found = layers._linear_then_gelu(torch.nn.Identity(), mean, torch.nn.functional.gelu, x)
    assert torch.equal(found, mean(torch.nn.functional.gelu(x)).expand_as(x))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_hook_in_place_of_a_norm_may_give_one_row_for_all(dim):
    """Without cross_attn_norm norm2 is an Identity."""
    patched, plain = (tiny_wan_transformer(cross_attn_norm=False) for _ in range(2))
    for model in (patched, plain):
        hook_mean(model, "norm2", dim)
    with trp.patch(patched, trp.Exact(implementation="triton")):
        assert relative_error(output_of("wan", patched), output_of("wan", plain)) <= 1e-5


def test_an_attention_of_ltx_2_calls_two_layers_of_its_output():
    patched, plain = (tiny_family_transformer("ltx2") for _ in range(2))
    with trp.patch(patched):
        for model in (patched, plain):
            for name in ("attn1", "audio_attn2", "audio_to_video_attn"):
                model.transformer_blocks[0].get_submodule(name).to_out.append(torch.nn.Tanh())
        assert relative_error(output_of("ltx2", patched), output_of("ltx2", plain)) <= 1e-5


def hook_mean(model, path, dim, *, in_each_row=False):
    def mean(module, args, output):
        mean = output.mean(dim, keepdim=True)
        return mean.expand_as(output).contiguous() if in_each_row else mean

    model.blocks[0].get_submodule(path).register_forward_hook(mean)


@pytest.mark.parametrize("path", ["attn1", "attn2", "ffn"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), "channels"])
def test_a_module_in_place_of_a_sub_layer_may_give_one_number_for_all(path, shape):
    patched, plain = tiny_wan_transformer(), tiny_wan_transformer()
    size = plain.blocks[0].ffn.net[2].out_features
    with trp.patch(patched, trp.Exact(implementation="triton")):
        for model in (patched, plain):
            setattr(model.blocks[0], path, Constant((size,) if shape == "channels" else shape))
        assert relative_error(output_of("wan", patched), output_of("wan", plain)) <= 1e-5


class Constant(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.register_buffer("value", torch.linspace(0.5, 1.5, torch.Size(shape).numel()).reshape(shape))

    def forward(self, *args, **kwargs):
        return self.value


def test_a_hook_may_add_tokens_to_keys_and_values():
    patched, plain = tiny_wan_transformer(), tiny_wan_transformer()
    base = output_of("wan", plain)
    with trp.patch(patched, trp.Exact(implementation="triton")):
        for model in (patched, plain):
            for name in ("to_k", "to_v"):
                model.blocks[0].attn2.get_submodule(name).register_forward_hook(with_two_tokens_more)
        expected = output_of("wan", plain)
        assert relative_error(expected, base) > 1e-4
        assert relative_error(output_of("wan", patched), expected) <= 1e-5


def with_two_tokens_more(module, args, output):
    return torch.cat([output, 2 * output[:, :2]], 1)


@families
def test_a_backward_hook_that_is_there_before_the_patch_runs(name):
    gradients = []
    for is_patched in (False, True):
        model, seen = tiny_family_transformer(name), []
        blocks_of(model)[0].register_full_backward_hook(
            lambda module, given, taken, seen=seen: seen.extend(g for g in (*given, *taken) if g is not None)
        )
        if is_patched:
            trp.patch(model)
        model(**tiny_family_inputs(name, model))[0].square().mean().backward()
        gradients.append(seen)
    assert len(gradients[0]) >= 2
    assert all(relative_error(*pair) <= 1e-5 for pair in zip(*gradients, strict=True))


def test_a_model_with_a_hook_of_its_own_has_graphs_when_that_is_gone(tape):
    patched, plain = tiny_wan_transformer(), tiny_wan_transformer()
    handles = [model.register_forward_hook(lambda module, args, output: (-output[0],)) for model in (patched, plain)]
    patch = trp.patch(patched)
    expected = output_of("wan", plain)
    for _ in range(3):
        assert relative_error(output_of("wan", patched), expected) <= 1e-5
    assert "none now: torch hook; 0 calls replayed" in patch.summary()
    for handle in handles:
        handle.remove()
    for _ in range(3):
        assert relative_error(output_of("wan", patched), -expected) <= 1e-5
    assert "2 calls replayed" in patch.summary()
    assert patch.graph_count == 1


@pytest.mark.parametrize("path", [f"blocks.0{part}" for part in ("", ".attn1", ".attn1.to_q", ".ffn.net.2")])
@pytest.mark.parametrize("hooked", ["before the patch", "after the patch", "after offloading"])
def test_a_hook_beside_one_of_offloading_runs(path, hooked):
    patched, plain = tiny_wan_transformer(), tiny_wan_transformer()
    base = output_of("wan", plain)
    add = lambda model: model.get_submodule(path).register_forward_hook(negated)  # noqa: E731
    add(plain)
    if hooked == "before the patch":
        add(patched)
    patch = trp.patch(patched)
    if hooked == "after the patch":
        add(patched)
    accelerate.cpu_offload(patched, execution_device=CPU)
    if hooked == "after offloading":
        add(patched)
    expected = output_of("wan", plain)
    assert relative_error(expected, base) > 1e-3
    assert relative_error(output_of("wan", patched), expected) <= 1e-5
    patch.restore()
    assert torch.equal(output_of("wan", patched), expected)


class Recording(accelerate.hooks.ModelHook):
    def __init__(self, rows):
        self.rows = rows

    def post_forward(self, module, output):
        self.rows.append(output.shape[:-1].numel())
        return output


@pytest.mark.parametrize("kind", ["torch's", "torch's beside accelerate's", "accelerate's", "accelerate's, appended"])
def test_a_hook_in_the_time_embedding_sees_a_row_per_token(kind):
    """Also where offloading hooks, which do not mind fewer rows, are there too."""
    model = tiny_wan_transformer()
    inputs = tiny_transformer_inputs(model)
    inputs["timestep"] = torch.full((2, 18), 700.0)  # by token
    seen, linear = [], model.condition_embedder.time_embedder.linear_1
    trp.patch(model)
    if kind.endswith(("beside accelerate's", "appended")):
        accelerate.cpu_offload(model, execution_device=CPU)
    with torch.no_grad():
        model(**inputs)
        if kind.startswith("torch's"):
            linear.register_forward_hook(lambda module, args, output: seen.append(output.shape[:-1].numel()))
        else:
            accelerate.hooks.add_hook_to_module(linear, Recording(seen), append=kind.endswith("appended"))
        model(**inputs)
    assert seen == [inputs["timestep"].numel()]


@pytest.mark.parametrize(
    ("name", "first"), [*zip([*NAMES, "anyflow far", "animate 2", "wan"], cycle(("hook", "patch")))]
)
def test_a_global_hook_sees_what_it_sees_unpatched(name, first):
    """Every module is called then, and the summary says why."""
    outputs, seen = [], []
    for is_patched in (False, True):
        model, calls = tiny_family_transformer(name), []
        paths = {module: path for path, module in model.named_modules()}

        def look(module, args, output, paths=paths, calls=calls):
            if module in paths:
                several = tuple(output.values()) if type(output) is dict else output
                first = several[0] if isinstance(several, tuple) else getattr(several, "sample", several)
                first = torch.stack(first) if isinstance(first, list) else first
                calls.append((paths[module], None if first is None else first.detach().clone()))
            return -output if paths.get(module, "").endswith(("norm1", "to_q", "net.2")) else None

        patch = trp.patch(model) if is_patched and first == "patch" else None
        if patch is not None:
            output_of(name, model)  # plans are made
        handle = torch_module.register_module_forward_hook(look)
        try:
            patch = trp.patch(model) if is_patched and patch is None else patch
            outputs.append(output_of(name, model))
            summary = patch.summary() if is_patched else ""
        finally:
            handle.remove()
        seen.append(calls)
    assert relative_error(outputs[1], outputs[0]) <= 1e-5
    assert [path for path, _ in seen[1]] == [path for path, _ in seen[0]]
    for (path, ours), (_, theirs) in zip(seen[1], seen[0], strict=True):
        assert theirs is None or relative_error(ours, theirs) <= 1e-5, path
    assert "global torch hook" in summary
    assert "global torch hook" not in patch.summary()
