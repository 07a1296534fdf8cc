"""A patched transformer's first call compiles its blocks' kernels ahead, in a run that only the compiler notices."""

import functools
import sys
import threading

import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.normalization import FP32LayerNorm
from triton import knobs
from triton.runtime import JITFunction

import turbo_rcm_patch as trp
from tests.tiny_families import tiny_family_inputs, tiny_family_transformer
from tests.tiny_wan import tiny_transformer_inputs, tiny_wan_transformer
from turbo_rcm_patch import kernels
from turbo_rcm_patch.kernels import dispatch
from turbo_rcm_patch.kernels.linear import gemm_sm90
from turbo_rcm_patch.kernels.linear.spec import why_linear
from turbo_rcm_patch.patching.families import ahead

REAL = kernels.compile_ahead


@pytest.fixture
def compiled_ahead(monkeypatch):
    """The runs that were compiled ahead; on a CPU as on a GPU, with the values that unwritten memory might hold."""
    runs = []

    def compile_ahead(run):
        runs.append(run)
        REAL(run)

    monkeypatch.setattr(kernels, "compile_ahead", compile_ahead)
    monkeypatch.setattr(ahead, "_launches_kernels", lambda config, x: config.implementation != "torch")
    return runs


def outputs_of_calls(model, inputs, config, calls=2):
    with torch.no_grad(), trp.patch(model, config):
        return [model(**inputs)[0] for _ in range(calls)]


@pytest.mark.parametrize(("implementation", "cuda_graph"), [("auto", "auto"), ("auto", "off"), ("triton", "auto")])
def test_the_first_block_of_the_first_call_alone_and_with_the_same_result(compiled_ahead, implementation, cuda_graph):
    model = tiny_wan_transformer()
    inputs = tiny_transformer_inputs(model, batch=1, frames=1)
    config = trp.Exact(implementation=implementation, cuda_graph=cuda_graph)
    with_it = outputs_of_calls(model, inputs, config)
    assert len(compiled_ahead) == 1
    with pytest.MonkeyPatch.context() as without:
        without.setattr(ahead, "_launches_kernels", lambda config, x: False)
        without_it = outputs_of_calls(model, inputs, config)
    assert len(compiled_ahead) == 1
    assert all(torch.equal(a, b) for a, b in zip(with_it, without_it, strict=True))


@pytest.mark.parametrize("preset", ["exact", "sparse"])
def test_ltx2(compiled_ahead, preset, monkeypatch):
    """Its blocks get more tensors than Wan's, and give two. All of them, RoPE tables too, may forbid the extra run."""
    seen = []
    monkeypatch.setattr(ahead, "why_not_recorded", seen.append)
    model = tiny_family_transformer("ltx2")
    inputs = tiny_family_inputs("ltx2", model)
    with torch.no_grad(), trp.patch(model, preset):
        first, second = (model(**inputs) for _ in range(2))
    assert len(compiled_ahead) == len(seen) == 1
    assert len(seen[0]) >= 10 + 4 * 2  # tensors that every block gets, and four tables of cos and sin
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_first_call_under_autograd_or_autocast_leaves_it_to_the_next(compiled_ahead):
    model = tiny_wan_transformer()
    inputs = tiny_transformer_inputs(model)
    with trp.patch(model):
        model(**inputs)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(**inputs)
        assert not compiled_ahead
        with torch.no_grad():
            model(**inputs)
        assert len(compiled_ahead) == 1


def test_not_with_the_torch_implementation(compiled_ahead):
    model = tiny_wan_transformer()
    outputs_of_calls(model, tiny_transformer_inputs(model), trp.Exact(implementation="torch"))
    assert not compiled_ahead


def watch_hidden_layer(model, seen):
    model.blocks[0].ffn.net[2].register_forward_hook(lambda *_: seen.append("hook"))


def replace_linear(model, seen):
    class Watched(torch.nn.Linear):
        def forward(self, x):
            seen.append("own layer")
            return super().forward(x)

    old = model.blocks[0].attn1.to_q
    new = Watched(*reversed(old.weight.shape))
    new.load_state_dict(old.state_dict())
    model.blocks[0].attn1.to_q = new


def replace_processor(model, seen):
    attn = model.blocks[0].attn2
    processor = attn.processor

    class Watched:
        def __call__(self, *args, **kwargs):
            seen.append("processor")
            return processor(*args, **kwargs)

    attn.processor = Watched()


@pytest.mark.parametrize("change", [watch_hidden_layer, replace_linear, replace_processor])
def test_what_users_put_into_a_block_is_called_once_per_call(compiled_ahead, change):
    model, seen = tiny_wan_transformer(), []
    change(model, seen)
    outputs_of_calls(model, tiny_transformer_inputs(model), trp.Exact(), calls=3)
    assert len(seen) == 3
    assert not compiled_ahead


def test_a_class_forward_that_a_program_wrapped_runs_once_per_call(compiled_ahead, monkeypatch):
    model, seen, norm = tiny_wan_transformer(), [], FP32LayerNorm.forward

    @functools.wraps(norm)
    def counted(self, x):
        seen.append(self)
        return norm(self, x)

    monkeypatch.setattr(FP32LayerNorm, "forward", counted)
    outputs_of_calls(model, tiny_transformer_inputs(model), trp.Exact(fuse=("self_attention",)), calls=3)
    assert seen.count(model.blocks[0].norm3) == 3
    assert not compiled_ahead


def test_dropout_draws_once(compiled_ahead):
    model = tiny_wan_transformer()
    model.blocks[0].ffn.net[1].p = 0.5
    model.train()
    inputs = tiny_transformer_inputs(model)
    outputs_of_calls(model, inputs, trp.Exact())
    assert not compiled_ahead
    model.eval()
    state = torch.get_rng_state()
    outputs_of_calls(model, inputs, trp.Exact())
    assert len(compiled_ahead) == 1
    assert torch.equal(torch.get_rng_state(), state)


def test_an_attention_backend_of_the_users_choice_runs_once(compiled_ahead):
    model = tiny_wan_transformer()
    with attention_backend("_native_math"):
        outputs_of_calls(model, tiny_transformer_inputs(model), trp.Exact())
    assert not compiled_ahead


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_an_attention_function_of_the_users_runs_once(compiled_ahead, monkeypatch, attention):
    calls, sdpa = [], torch.nn.functional.scaled_dot_product_attention

    def counted(*args, **kwargs):
        calls.append(1)
        return sdpa(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    model = tiny_wan_transformer(layers=3)
    outputs_of_calls(model, tiny_transformer_inputs(model), trp.Exact(attention=attention))
    assert len(compiled_ahead) == 1
    assert len(calls) == 2 * 3 * 2  # calls, blocks, attentions


def test_a_torch_mode_sees_the_calls_that_count(compiled_ahead):
    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    model = tiny_wan_transformer()
    inputs = tiny_transformer_inputs(model)
    with torch.no_grad(), trp.patch(model):
        with Watching():
            model(**inputs)
        assert not compiled_ahead
        model(**inputs)
        assert len(compiled_ahead) == 1


def test_nothing_that_it_computed_is_kept(compiled_ahead, monkeypatch):
    """Every kept value would be noise: the first run's tensors are left unwritten by the kernels."""
    monkeypatch.setattr(torch, "empty_like", lambda x, **kwargs: torch.full_like(x, torch.nan, **kwargs))
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *size, **kw: new_empty(x, *size, **kw).fill_(torch.nan))
    model = tiny_wan_transformer()
    inputs = tiny_transformer_inputs(model, batch=1, frames=1)
    outputs = outputs_of_calls(model, inputs, trp.Exact(implementation="triton"))
    assert len(compiled_ahead) == 1
    assert all(output.isfinite().all() for output in outputs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [{}, {"height": 64, "width": 64}])  # the larger fills a GPU: it takes other GEMMs
def test_no_kernel_of_a_block_is_compiled_where_it_is_launched(dtype, size, tmp_path, monkeypatch):
    ahead, launched = set(), set()

    def listen(*, metadata, **_):
        in_main = threading.current_thread() is threading.main_thread()
        (launched if in_main else ahead).add(metadata["name"])

    model = tiny_wan_transformer(heads=4, head_dim=128, ffn_dim=2048, dtype=dtype).cuda()
    inputs = {name: on_gpu(value) for name, value in tiny_transformer_inputs(model, **size).items()}
    config = trp.Exact(cuda_graph="off")
    expected = outputs_of_calls(model, inputs, config)
    forget_compiled_kernels()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(knobs.compilation, "listener", listen)
    outputs = outputs_of_calls(model, inputs, config)
    norms = {"_layer_norm_modulate_kernel", "_rms_norm_rope_kernel"}
    assert ahead >= norms | set(gemms_and_attention(dtype, large=bool(size)))
    assert not launched
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def gemms_and_attention(dtype, large):
    """Return the names of the kernels that a block certainly launches on this GPU."""
    gpu = torch.device("cuda")
    if why_linear("linear_skip", gpu, dtype) is not None:
        return ["_gelu_kernel", "_skip_kernel"]
    sm90 = dispatch.is_sm90(gpu) and gemm_sm90.GLUON_ERROR is None
    large_gemms = ["gemm_kernel", "gemm_of_three_kernel"]
    gemms = large_gemms if large and sm90 else ["_linear_gelu_kernel", "_linear_skip_kernel"]
    return [*gemms, *(["attention_kernel"] if sm90 else [])]


def on_gpu(value):
    return value.cuda() if isinstance(value, torch.Tensor) else value


def forget_compiled_kernels():
    for name, module in list(sys.modules.items()):
        if name.startswith("turbo_rcm_patch"):
            for kernel in vars(module).values():
                if isinstance(kernel, JITFunction):
                    kernel.device_caches.clear()
