"""Graphs: replays give what an eager forward would give now, whatever changed since they were recorded.

On the CPU a tape stands for the CUDA graph. Like one, it computes on the addresses that were recorded and knows nothing
else: a replay that should not have happened gives the old result, and memory of a graph that is not running is NaN.
"""

import contextlib
import copy
import dataclasses
import gc
import sys
import threading
import weakref

import accelerate
import pytest
import torch
from diffusers import FirstBlockCacheConfig, WanTransformer3DModel
from diffusers.models.attention import FeedForward
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from peft import LoraConfig
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.tiny_wan import tiny_call, tiny_transformer_inputs, tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch.patching import graphs
from turbo_rcm_patch.patching.snapshot import Snapshot
from turbo_rcm_patch.patching.wan import graph as wan_graph

AUTO = trp.PatchConfig(cuda_graph="auto")
VARIANTS = {
    "t2v": ({}, {}),
    "i2v": ({"image_dim": 4, "added_kv_proj_dim": "inner", "in_channels": 36}, {}),
    "ti2v": ({}, {"per_token": True}),
}


CudaRecorder = graphs.CudaRecorder
TAPES = weakref.WeakSet()


class Tape(TorchDispatchMode):
    """A recorded call on the CPU: its ops and the memory that they read and write."""

    def __init__(self, function, inputs):
        super().__init__()
        self._steps, self._memory = [], []
        self._inputs = [None if tensor is None else tensor.clone() for tensor in inputs]
        with self:
            self._output = function(*self._inputs)
        TAPES.add(self)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        # A detached tensor stays at its address when the original's ``.data`` is set.
        args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs or {}))
        read = {address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        output = op(*args, **kwargs)
        own = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and address(t) not in read]
        self._steps.append((op, args, kwargs, own, read))
        self._memory += own
        return output

    def replay(self, inputs):
        for tape in TAPES:  # all of them share a pool
            tape.forget()
        for static, tensor in zip(self._inputs, inputs, strict=True):
            if static is not None:
                static.copy_(tensor)
        for op, args, kwargs, own, read in self._steps:
            leaves = [leaf for leaf in tree_leaves(op(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
            new = [leaf for leaf in leaves if address(leaf) not in read]
            for memory, result in zip(own, new, strict=True):
                memory.copy_(result)
        return self._output.clone()

    def forget(self):
        for memory in self._memory:
            if memory.is_floating_point():
                memory.fill_(torch.nan)


def address(tensor):
    return tensor.untyped_storage().data_ptr()


class TapeRecorder:
    """What Graphs takes on the CPU."""

    device_type, reserved_bytes = "cpu", 3 * 2**20

    def __init__(self, device):
        pass

    def record(self, function, inputs):
        return Tape(function, inputs)

    def release(self):
        pass


@pytest.fixture
def tape(monkeypatch):
    TAPES.clear()
    monkeypatch.setattr(graphs, "CudaRecorder", TapeRecorder)


@pytest.fixture(params=VARIANTS)
def models(request, tape):
    """The same model twice, patched with graphs and without; their weights are separate."""
    return make_models(VARIANTS[request.param][0]), VARIANTS[request.param][1]


def make_models(options=None, config=AUTO, **more):
    pair = [tiny_wan_transformer(**{**(options or {}), **more}) for _ in range(2)]
    trp.patch(pair[0], config)
    trp.patch(pair[1], dataclasses.replace(config, cuda_graph="off"))
    return pair


def inputs_for(model, per_token=False, **options):
    inputs = tiny_transformer_inputs(model, **options)
    if per_token:
        batch, _, frames, height, width = inputs["hidden_states"].shape
        tokens = frames * height * width // 4
        inputs["timestep"] = torch.linspace(0, 999, batch * tokens).reshape(batch, tokens)
    return inputs


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs)[0]


def assert_same(pair, inputs):
    expected = run(pair[1], inputs)
    assert not expected.isnan().any()
    assert torch.equal(run(pair[0], inputs), expected)


def warm(pair, inputs):
    """Until the call is replayed."""
    for _ in range(3):
        assert_same(pair, inputs)
    assert replays(pair[0]) > 0


def graphs_of(model):
    return getattr(model, wan_graph.GRAPH)._graphs


def replays(model):
    return graphs_of(model).replays


def note(model):
    return getattr(model, wan_graph.GRAPH).note()


def assert_replayed(pair, inputs):
    before = replays(pair[0])
    assert_same(pair, inputs)
    assert replays(pair[0]) == before + 1


def assert_eager(pair, inputs, reason):
    before = replays(pair[0])
    assert_same(pair, inputs)
    assert replays(pair[0]) == before
    assert reason in graphs_of(pair[0]).eager
    assert reason in note(pair[0])


# ------------------------------------------------------------------ what is replayed


def test_steps_with_new_inputs_are_replayed(models):
    pair, options = models
    inputs = inputs_for(pair[0], **options)
    for step in range(5):
        inputs["hidden_states"] = torch.randn_like(inputs["hidden_states"])
        inputs["timestep"] = inputs["timestep"] * 0.7
        assert_same(pair, inputs)
        assert replays(pair[0]) == max(0, step)
    assert note(pair[0]) == ("CUDA graphs (auto): 1 kept in 3 MiB; 4 calls replayed; run without: not recorded yet (1)")


def test_alternating_prompts_share_a_graph_and_outputs_may_be_held(models):
    pair, options = models
    prompts = [inputs_for(pair[0], seed=seed, **options) for seed in (7, 11)]
    held = []
    for _ in range(3):
        for inputs in prompts:
            held.append((run(pair[0], inputs), run(pair[1], inputs)))
    assert graphs_of(pair[0]).kept == 1
    assert replays(pair[0]) == 5
    assert len({ours.data_ptr() for ours, _ in held}) == len(held)
    for ours, theirs in held:
        assert torch.equal(ours, theirs)


def test_new_shapes_and_dtypes_get_graphs_of_their_own(models):
    pair, options = models
    for _ in range(3):
        for more in ({}, {"batch": 1}, {"height": 6}):
            assert_same(pair, inputs_for(pair[0], **options, **more))
    assert graphs_of(pair[0]).kept == 3
    assert replays(pair[0]) == 6
    for model in pair:
        model.double()
    warm(pair, inputs_for(pair[0], **options))
    assert graphs_of(pair[0]).kept == 1


def test_the_number_of_graphs_is_bounded(tape):
    pair = make_models()
    calls = [inputs_for(pair[0], width=4 + 2 * i) for i in range(graphs.KINDS_KEPT + 2)]
    for inputs in calls:
        warm(pair, inputs)
    assert graphs_of(pair[0]).kept == graphs.KINDS_KEPT
    gc.collect()
    assert len(TAPES) == graphs.KINDS_KEPT
    assert_replayed(pair, calls[2])
    warm(pair, calls[0])  # evicts the one not used for longest, which is no longer calls[2]
    assert_replayed(pair, calls[2])


def test_image_or_none_and_strides_are_told_apart(tape):
    pair = make_models(VARIANTS["i2v"][0])
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    latents = inputs["hidden_states"]
    inputs["hidden_states"] = latents.transpose(3, 4).contiguous().transpose(3, 4)
    assert_same(pair, inputs)
    inputs["timestep"] = torch.tensor([500.0]).expand(2)
    warm(pair, inputs)
    inputs["timestep"] = inputs["timestep"] + torch.tensor([0.0, 100.0])
    assert_same(pair, inputs)


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("then", [torch.inference_mode, torch.no_grad])
def test_inference_mode_and_no_grad_share_a_graph(tape, first, then):
    pair = make_models()
    inputs = inputs_for(pair[0])
    expected = run(pair[1], inputs)
    with first():
        for _ in range(2):
            pair[0](**inputs)
    with then():
        inputs = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        output = pair[0](**inputs)[0]
    assert replays(pair[0]) == 2
    assert output.is_inference() == (then is torch.inference_mode)
    assert torch.equal(output, expected)


def test_the_output_comes_as_it_is_asked_for(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    for _ in range(2):
        for return_dict in (True, False):
            inputs["return_dict"] = return_dict
            ours, theirs = run(pair[0], inputs), run(pair[1], inputs)
            assert torch.equal(ours, theirs)
            with torch.no_grad():
                assert type(pair[0](**inputs)) is type(pair[1](**inputs))


@pytest.mark.parametrize("variant", ["t2v", "i2v", "ti2v", "wan22"])
def test_pipelines_with_guidance_generate_the_same(tape, variant):
    pipe = tiny_wan_pipeline(variant)
    call = tiny_call(variant, num_inference_steps=4, guidance_scale=4.0)
    generate = lambda: pipe(**call, generator=torch.Generator().manual_seed(3)).frames  # noqa: E731
    with trp.patch(pipe, trp.PatchConfig(cuda_graph="off")):
        expected = generate()
    with trp.patch(pipe, AUTO) as patch:
        for _ in range(2):
            assert torch.equal(generate(), expected)
        for model in patch.transformers.values():
            assert graphs_of(model).kept == 1
            assert replays(model) > 2
        assert patch.graph_memory == len(patch.transformers) * TapeRecorder.reserved_bytes
    assert patch.graph_memory == 0


def test_threads_take_turns(tape):
    pair = make_models()
    calls = [inputs_for(pair[0], seed=seed) for seed in range(4)]
    expected, results = [run(pair[1], inputs) for inputs in calls], {}

    def work(index):
        results[index] = [run(pair[0], calls[index]) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, outputs in results.items():
        assert all(torch.equal(output, expected[index]) for output in outputs)
    assert replays(pair[0]) == 19


def test_threads_with_and_without_graphs_and_a_summary(tape):
    model, plain = make_models()
    calls = [inputs_for(model, width=4 + 2 * i) for i in range(graphs.KINDS_KEPT + 1)]
    expected, wrong = [run(plain, inputs) for inputs in calls], []

    def work(**more):
        try:
            for i in range(40):
                ours = run(model, {**calls[i % len(calls)], **more})
                wrong.extend([] if torch.equal(ours, expected[i % len(calls)]) else [i])
                note(model)
        except Exception as error:
            wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work, kwargs={"attention_kwargs": kwargs}) for kwargs in (None, {}, {})]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


# ------------------------------------------------------------------ what must not be stale

WRITES = {
    "in place": lambda tensor: tensor.mul_(-1.5),
    "through data": lambda tensor: tensor.data.mul_(-1.5),
    "new storage": lambda tensor: setattr(tensor, "data", tensor.data * -1.5),
}
WEIGHTS = [
    "patch_embedding.weight",
    "condition_embedder.time_embedder.linear_1.weight",
    "condition_embedder.text_embedder.linear_1.weight",
    "condition_embedder.image_embedder.ff.net.2.weight",
    "rope.freqs_cos",
    "blocks.0.scale_shift_table",
    "blocks.1.attn1.to_q.weight",
    "blocks.1.attn2.to_k.weight",
    "blocks.1.attn2.to_v.bias",
    "blocks.0.attn2.norm_k.weight",
    "blocks.0.attn2.add_k_proj.weight",
    "blocks.0.ffn.net.2.weight",
    "proj_out.bias",
    "scale_shift_table",
]


@pytest.mark.parametrize("write", WRITES)
def test_weights_changed_between_calls_take_effect(tape, write):
    pair = make_models(VARIANTS["i2v"][0])
    inputs = inputs_for(pair[0])
    before = run(pair[1], inputs)
    for name in WEIGHTS:
        for _ in range(2):
            run(pair[0], inputs)
        assert_replayed(pair, inputs)
        with torch.no_grad():
            for model in pair:
                WRITES[write]({**dict(model.named_parameters()), **dict(model.named_buffers())}[name])
        after = run(pair[0], inputs)
        assert torch.equal(after, run(pair[1], inputs)), name
        assert not torch.equal(after, before), name
        before = after


def test_a_transposed_weight_at_the_same_address_takes_effect(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    for model in pair:
        weight = model.blocks[0].attn1.to_q.weight
        weight.data = weight.data.t()
    warm(pair, inputs)


@pytest.mark.parametrize("assign", [False, True])
def test_a_reloaded_state_dict_takes_effect(tape, assign):
    pair = make_models()
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    for model in pair:
        model.load_state_dict(tiny_wan_transformer(seed=5).state_dict(), assign=assign)
    for _ in range(3):
        assert_same(pair, inputs)
    assert_replayed(pair, inputs)


@contextlib.contextmanager
def hooked(register):
    """A user's forward hook that doubles an output."""
    handle = register(lambda module, args, output: 2 * output)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def changed(thing, name, value):
    before = getattr(thing, name)
    setattr(thing, name, value)
    try:
        yield
    finally:
        setattr(thing, name, before)


class Doubled(FeedForward):
    def forward(self, *args, **kwargs):
        return 2 * super().forward(*args, **kwargs)


class NegatingProcessor(WanAttnProcessor):
    def __call__(self, *args, **kwargs):
        return -super().__call__(*args, **kwargs)


def forward_of_linear(linear):
    return lambda x: -torch.nn.functional.linear(x, linear.weight, linear.bias)


def doubled(forward):
    def twice(*args, **kwargs):
        output = forward(*args, **kwargs)
        return (2 * output[0],) if isinstance(output, tuple) else 2 * output

    return twice


def with_class_forward(cls):
    """As programs that skip steps patch a model."""
    return lambda m: changed(cls, "forward", doubled(cls.forward))


# name: (what changes the model, the reason for running eagerly meanwhile or None where a new graph is made)
CHANGES = {
    "eps": (lambda m: changed(m.blocks[0].norm1, "eps", 10.0), None),
    "eps of kept values": (lambda m: changed(m.blocks[0].attn2.norm_k, "eps", 10.0), None),
    "another module": (lambda m: changed(m.blocks[0].attn1, "to_q", copy.deepcopy(m.blocks[0].attn1.to_k)), None),
    "a block less": (lambda m: changed(m, "blocks", m.blocks[:1]), None),
    "class": (lambda m: changed(m.blocks[0].ffn, "__class__", Doubled), "tests Doubled layer"),
    "processor": (
        lambda m: changed(m.blocks[0].attn1, "processor", NegatingProcessor()),
        "processor NegatingProcessor",
    ),
    "forward": (
        lambda m: changed(m.blocks[0].attn1.to_v, "forward", forward_of_linear(m.blocks[0].attn1.to_v)),
        "replaced forward",
    ),
    "forward of the model's class": (with_class_forward(WanTransformer3DModel), "replaced forward of its class"),
    "forward of a layer's class": (with_class_forward(torch.nn.SiLU), "replaced forward of its class"),
    "hook": (lambda m: hooked(m.blocks[1].attn1.to_q.register_forward_hook), "torch hook"),
    "hook on a block": (lambda m: hooked(m.blocks[1].register_forward_hook), "torch hook"),
    "global hook": (
        lambda m: hooked(
            lambda h: torch.nn.modules.module.register_module_forward_hook(
                lambda module, args, output: h(module, args, output) if isinstance(module, torch.nn.Conv3d) else None
            )
        ),
        "global torch hook",
    ),
    "a processor's backend": (
        lambda m: changed(m.blocks[0].attn1.processor, "_attention_backend", "_native_math"),
        "attention backend _native_math",
    ),
    "a backend of all": (lambda m: attention_backend("_native_math"), "attention backend _native_math"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_is_not_replayed(tape, name):
    change, reason = CHANGES[name]
    pair = make_models()
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    before = run(pair[1], inputs)
    with change(pair[0]), change(pair[1]):
        if "backend" not in name:
            assert not torch.equal(run(pair[1], inputs), before)
        if reason is None:
            warm(pair, inputs)
        else:
            assert_eager(pair, inputs, reason)
            assert "none now: " + reason in note(pair[0])
            assert_eager(pair, inputs, reason)
    assert torch.equal(run(pair[1], inputs), before)
    warm(pair, inputs)
    assert_replayed(pair, inputs)


def test_a_processors_class_that_runs_something_else_is_not_replayed(tape):
    pair = make_models(config=trp.PatchConfig(fuse=(), cuda_graph="auto"))
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    before = run(pair[1], inputs)
    with changed(WanAttnProcessor, "__call__", doubled(WanAttnProcessor.__call__)):
        assert not torch.equal(run(pair[1], inputs), before)
        assert_eager(pair, inputs, "WanAttnProcessor changed by a program")
    warm(pair, inputs)


def test_a_class_forward_replaced_before_the_import_is_not_recorded(tape, monkeypatch):
    pair = make_models()
    replaced = doubled(torch.nn.SiLU.forward)
    monkeypatch.setattr(torch.nn.SiLU, "forward", replaced)
    monkeypatch.setitem(wan_graph._KNOWN, torch.nn.SiLU, replaced)
    assert_eager(pair, inputs_for(pair[0]), "replaced forward of its class")


@pytest.mark.parametrize("calls", [1, 2])  # of one prompt, or of a conditional and an unconditional one
def test_a_model_that_changes_on_every_step_goes_without(tape, monkeypatch, caplog, calls):
    recorded, record = [], TapeRecorder.record
    monkeypatch.setattr(TapeRecorder, "record", lambda *args: recorded.append(1) or record(*args))
    pair = make_models()
    inputs = inputs_for(pair[0])
    for _ in range(5):
        assert_same(pair, inputs)
    for step in range(graphs.MOST_LOST + 5):
        pair[0].current_step = step
        for _ in range(calls):
            assert_same(pair, inputs)
    assert len(recorded) == 1 + (calls - 1) * graphs.MOST_LOST
    assert len(caplog.records) == 1
    assert "none now: modules or weights changed too often; " in note(pair[0])


def test_a_model_that_changes_between_generations_keeps_its_graphs(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    for generation in range(graphs.MOST_LOST + 2):
        pair[0].generation = generation
        for _ in range(graphs.REPLAYS_WORTH_RECORDING):
            assert_same(pair, inputs)
        assert_replayed(pair, inputs)


def test_settings_of_torch_are_told_apart(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    with sdpa_kernel(SDPBackend.MATH):
        assert_eager(pair, inputs, "not recorded yet")
        warm(pair, inputs)
    assert_replayed(pair, inputs)
    assert graphs_of(pair[0]).kept == 2


def test_an_attention_that_a_program_replaces_takes_effect(tape, monkeypatch):
    pair = make_models()
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    before, attention = run(pair[1], inputs), torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *args, **kwargs: -attention(*args, **kwargs)
    )
    assert not torch.equal(run(pair[1], inputs), before)
    warm(pair, inputs)


def test_dropout_in_training_is_drawn(tape):
    model = tiny_wan_transformer().train()
    trp.patch(model, AUTO)
    inputs = inputs_for(model)
    for _ in range(3):
        run(model, inputs)
    assert replays(model) == 2
    model.blocks[0].attn1.to_out[1].p = 0.5
    assert relative_error(run(model, inputs), run(model, inputs)) > 1e-3
    assert "none now: dropout" in note(model)


def test_lora_between_the_calls(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    base = run(pair[1], inputs)
    for model in pair:
        torch.manual_seed(5)
        targets = ["to_q", "to_k", "to_out.0", "ffn.net.2"]
        model.add_adapter(LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=targets))
    assert relative_error(run(pair[1], inputs), base) > 0.1
    assert_eager(pair, inputs, "LoRA layer")
    for scale in (0.3, 1.0):
        for model in pair:
            model.set_adapters(["default"], [scale])
        assert_eager(pair, inputs, "LoRA layer")
    for model in pair:
        model.disable_lora()
    assert_eager(pair, inputs, "LoRA layer")
    for model in pair:
        model.enable_lora()
        model.fuse_lora()
        model.unload_lora()
    fused = run(pair[1], inputs)
    assert relative_error(fused, base) > 0.1
    warm(pair, inputs)
    assert_replayed(pair, inputs)


def test_lora_fused_and_unloaded_between_two_calls_is_not_missed(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    before = run(pair[1], inputs)
    for model in pair:
        torch.manual_seed(5)
        model.add_adapter(LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=["to_q", "to_k"]))
        model.fuse_lora()
        model.unload_lora()
    assert relative_error(run(pair[1], inputs), before) > 0.01
    warm(pair, inputs)


# ------------------------------------------------------------------ what runs without


def with_autocast(model, inputs):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return model(**inputs)[0]


def under_a_mode(model, inputs):
    with torch.no_grad(), torch.device("cpu"):
        return model(**inputs)[0]


def with_attention_kwargs(model, inputs):
    with torch.no_grad():
        return model(**inputs, attention_kwargs={"scale": 1.0})[0]


class Subclass(torch.Tensor):
    pass


def with_a_subclass(model, inputs):
    inputs = {**inputs, "hidden_states": inputs["hidden_states"].as_subclass(Subclass)}
    return run(model, inputs).as_subclass(torch.Tensor)


EAGER_CALLS = {
    "autograd": lambda model, inputs: model(**inputs)[0],
    "autocast": with_autocast,
    "torch mode": under_a_mode,
    "attention_kwargs": with_attention_kwargs,
    "inputs of another class": with_a_subclass,
}


@pytest.mark.parametrize("reason", EAGER_CALLS)
def test_calls_that_run_eagerly(tape, reason):
    pair = make_models()
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    before = replays(pair[0])
    ours, theirs = (EAGER_CALLS[reason](model, inputs) for model in pair)
    assert torch.equal(ours, theirs)
    assert replays(pair[0]) == before
    assert f"{reason} (1)" in note(pair[0])
    assert_replayed(pair, inputs)


def test_function_transforms_run_eagerly(tape):
    transformed = lambda x: x + float(graphs.why_not_recorded([torch.zeros(1)]) is None)  # noqa: E731
    with torch.no_grad():
        assert graphs.why_not_recorded([torch.zeros(1)]) is None
        assert torch.equal(torch.vmap(transformed)(torch.zeros(2)), torch.zeros(2))
        assert torch.equal(torch.func.jvp(transformed, (torch.zeros(2),), (torch.ones(2),))[0], torch.zeros(2))
        assert torch.equal(torch.jit.trace(transformed, torch.ones(2))(torch.zeros(2)), torch.zeros(2))


def test_parameters_of_a_function_transform_are_never_taken_for_known():
    linear = torch.nn.Linear(2, 2)

    def holds(weight):
        with torch.no_grad():
            return weight.sum() + torch.func.functional_call(Asked(linear), {"inner.weight": weight}, ())

    assert torch.equal(torch.vmap(holds)(torch.zeros(3, 2, 2)), torch.zeros(3))


class Asked(torch.nn.Module):
    """Returns whether a snapshot of its inner module holds."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self):
        return float(Snapshot([self.inner]).holds())


class Slots:
    __slots__ = ()

    def __call__(self, attn, hidden_states, *args):
        return hidden_states


def test_a_processor_without_attributes_runs_eagerly(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    for model in pair:
        model.blocks[0].attn1.processor = Slots()
    assert_eager(pair, inputs, "processor Slots")
    assert_eager(pair, inputs, "processor Slots")


def test_latents_of_another_rank_get_the_models_own_error(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    inputs["hidden_states"] = inputs["hidden_states"][:, :, 0]
    messages = []
    for model in pair:
        with pytest.raises(ValueError, match="unpack") as caught:
            run(model, inputs)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_large_calls_run_eagerly_unless_asked(tape, monkeypatch):
    pair = make_models()
    inputs = inputs_for(pair[0])
    monkeypatch.setattr(wan_graph, "MOST_FLOPS_PER_BLOCK", wan_graph.flops_per_block(pair[0], inputs["hidden_states"]))
    warm(pair, inputs)
    assert_eager(pair, inputs_for(pair[0], width=8), "too large to gain")
    trp.restore(pair[0])
    trp.patch(pair[0], trp.PatchConfig(cuda_graph="on"))
    warm(pair, inputs_for(pair[0], width=8))


@pytest.mark.parametrize(
    ("dim", "heads", "ffn", "frames", "height", "width", "taken"),
    [
        (1536, 12, 8960, 5, 60, 104, True),  # Wan2.1-1.3B, 17 frames 832×480
        (1536, 12, 8960, 21, 60, 104, False),  # 81 frames
        (5120, 40, 13824, 1, 60, 104, True),  # 14B, one frame
        (5120, 40, 13824, 21, 90, 160, False),  # 81 frames 1280×720
    ],
)
def test_the_limit_at_real_sizes(dim, heads, ffn, frames, height, width, taken):
    with torch.device("meta"):
        model = WanTransformer3DModel(
            num_attention_heads=heads, attention_head_dim=dim // heads, ffn_dim=ffn, num_layers=1
        )
        latents = torch.empty(1, 16, frames, height, width)
    tokens = frames * height * width // 4
    flops = wan_graph.flops_per_block(model, latents)
    linears = sum(m.weight.numel() for m in model.blocks.modules() if isinstance(m, torch.nn.Linear)) - 2 * dim * dim
    assert flops == 2 * tokens * linears + 4 * tokens * tokens * dim
    assert (flops <= wan_graph.MOST_FLOPS_PER_BLOCK) == taken


def test_first_block_cache_runs_eagerly(tape):
    model, plain = tiny_wan_transformer(layers=3), tiny_wan_transformer(layers=3)
    patch = trp.patch(model, AUTO)
    inputs = inputs_for(model)
    for _ in range(3):
        run(model, inputs)
    for m in (model, plain):
        m.enable_cache(FirstBlockCacheConfig(threshold=10.0))
    outputs = []
    for m in (model, plain):
        with m.cache_context("cond"):
            outputs.append([run(m, {**inputs, "timestep": torch.full((2,), t)}) for t in (900.0, 800.0)])
    for ours, theirs in zip(*outputs, strict=True):
        assert relative_error(ours, theirs) <= 1e-5
    assert "none now: hook fbc_leader_block_hook" in patch.summary()
    model.disable_cache()
    before = replays(model)
    for _ in range(3):
        run(model, inputs)
    assert replays(model) == before + 2
    patch.restore()


def test_compiled_blocks_run_eagerly(tape):
    torch._dynamo.reset()
    pair = make_models()
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    expected = run(pair[1], inputs)
    pair[0].compile_repeated_blocks(backend="eager")
    before = replays(pair[0])
    assert torch.equal(run(pair[0], inputs), expected)
    assert replays(pair[0]) == before
    assert "none now: torch.compile" in note(pair[0])


def test_a_compiled_model_traces_its_own_forward(tape):
    torch._dynamo.reset()
    pair = make_models()
    inputs = inputs_for(pair[0])
    expected = run(pair[1], inputs)
    compiled = torch.compile(pair[0], backend="eager", fullgraph=True)
    assert torch.equal(run(compiled, inputs), expected)
    assert replays(pair[0]) == 0


def test_a_model_offloaded_before_the_patch(tape):
    model = tiny_wan_transformer()
    inputs = inputs_for(model)
    expected = run(model, inputs)
    accelerate.cpu_offload_with_hook(model, execution_device=torch.device("cpu"))
    with trp.patch(model, AUTO) as patch:
        for _ in range(3):
            assert relative_error(run(model, inputs), expected) <= 1e-5
        assert "none now: the model had a hook when it was patched" in patch.summary()
    assert torch.equal(run(model, inputs), expected)


def test_a_model_offloaded_after_the_patch(tape):
    model = tiny_wan_transformer()
    inputs = inputs_for(model)
    expected = run(model, inputs)
    with trp.patch(model, AUTO) as patch:
        for _ in range(3):
            run(model, inputs)
        assert replays(model) == 2
        accelerate.cpu_offload_with_hook(model, execution_device=torch.device("cpu"))
        assert relative_error(run(model, inputs), expected) <= 1e-5
        assert replays(model) == 2
        assert "none now: hook CpuOffload" in patch.summary()
    assert torch.equal(run(model, inputs), expected)


def test_off_and_cpu():
    model = tiny_wan_transformer()
    inputs = inputs_for(model)
    with trp.patch(model, AUTO) as patch:
        run(model, inputs)
        assert "CUDA graphs (auto): none now: cpu tensors; 0 calls replayed" in patch.summary()
    with trp.patch(model, trp.PatchConfig(cuda_graph="off")) as patch:
        assert "forward" not in model.__dict__
        assert "CUDA graphs (off): none now: cuda_graph='off'" in patch.summary()
    with pytest.raises(ValueError, match="cuda_graph='always' is unknown; accepted are auto, on, off"):
        trp.PatchConfig(cuda_graph="always")


# ------------------------------------------------------------------ recording, failing, freeing


def test_a_failed_recording_is_said_once_and_never_tried_again(tape, monkeypatch, caplog):
    pair = make_models()
    inputs, other = inputs_for(pair[0]), inputs_for(pair[0], width=8)
    warm(pair, other)
    tries = []

    def failing(self, function, inputs):
        tries.append(1)
        try:
            raise RuntimeError("an op waits for the GPU\nand more")
        except RuntimeError:
            raise RuntimeError("capture ended")  # noqa: B904

    monkeypatch.setattr(TapeRecorder, "record", failing)
    for _ in range(4):
        assert_same(pair, inputs)
    assert_same(pair, other)
    assert len(tries) == 1
    assert len(caplog.records) == 1
    assert "none now: recording failed (RuntimeError: an op waits for the GPU); " in note(pair[0])
    assert "recording failed (RuntimeError: an op waits for the GPU) (4)" in note(pair[0])
    assert graphs_of(pair[0]).kept == 0
    monkeypatch.undo()
    monkeypatch.setattr(graphs, "CudaRecorder", TapeRecorder)
    trp.restore(pair[0])
    trp.patch(pair[0], AUTO)
    warm(pair, inputs)


def test_the_functions_own_error_reaches_the_caller(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    assert_same(pair, inputs)
    wrong = {**inputs, "encoder_hidden_states": inputs["encoder_hidden_states"][..., :5]}
    for _ in range(3):
        with pytest.raises(RuntimeError, match="shapes"):
            run(pair[0], wrong)
    warm(pair, inputs)


def test_an_error_of_the_function_while_recording_is_raised_and_recording_goes_on(tape):
    recorded, memory = graphs.Graphs(), {"enough": True}

    def function(x):
        if not memory["enough"]:
            raise torch.OutOfMemoryError("no memory")
        return 2 * x

    call = lambda: recorded.run("key", function, [torch.ones(3)])  # noqa: E731
    call()
    memory["enough"] = False
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            call()
    assert recorded.failure is None
    memory["enough"] = True
    for _ in range(3):
        assert torch.equal(call(), torch.full((3,), 2.0))
    assert recorded.replays == 2


class Allocator:
    """PyTorch's account of one memory pool, and what is left of it after a capture that breaks.

    ends: the end of a broken capture ends the allocation to the pool (since pull request 180395). releases: resetting
    its graph releases the pool (since 190348).
    """

    def __init__(self, ends, releases):
        self.ends, self.releases, self.users, self.allocating, self.bytes, self.waited = (
            ends,
            releases,
            0,
            False,
            0,
            False,
        )

    def put_under(self, monkeypatch):
        for name, value in {
            "CUDAGraph": lambda: BrokenGraph(self),
            "graph": self.capture,
            "graph_pool_handle": lambda: (0, 1),
            "Stream": lambda device: None,
            "stream": contextlib.nullcontext,
            "current_stream": lambda device: None,
            "Event": lambda: self,
            "memory_snapshot": lambda: [{"segment_pool_id": (0, 1), "total_size": self.bytes}],
            "empty_cache": self.empty_cache,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        for name, value in {
            "_cuda_endAllocateToPool": lambda device, pool: self.end(),
            "_cuda_releasePool": lambda device, pool: self.release(),
            "_cuda_clearCublasWorkspaces": lambda: None,
        }.items():
            monkeypatch.setattr(torch._C, name, value, raising=False)
        monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: None)

    @contextlib.contextmanager
    def capture(self, graph, pool=None, stream=None, capture_error_mode="global"):
        if pool is not None:
            self.users, self.allocating, self.bytes, graph.began = self.users + 1, True, 2**20, True
        try:
            yield
        except ValueError:
            if self.ends:
                self.end()
            raise RuntimeError("capture ended")  # noqa: B904

    def end(self):
        if not self.allocating:
            raise RuntimeError("not allocating to this pool")
        self.allocating = False

    def release(self):
        self.users -= 1
        assert self.users >= 0, "ends the process in a destructor"

    def synchronize(self):
        self.waited = True

    def empty_cache(self):
        assert self.waited
        self.bytes = self.bytes if self.users else 0


class BrokenGraph:
    def __init__(self, allocator):
        self.allocator, self.began = allocator, False

    def reset(self):
        if self.began and self.allocator.releases:
            self.allocator.release()
        self.began = False

    __del__ = reset


@pytest.mark.parametrize(("ends", "releases"), [(False, False), (True, False), (True, True)])
def test_a_broken_capture_leaves_nothing_in_any_pytorch(monkeypatch, ends, releases):
    allocator = Allocator(ends, releases)
    allocator.put_under(monkeypatch)
    recorded, errors = graphs.Graphs(), [ValueError("an op waits for the GPU")]

    def function(x):
        if allocator.allocating:
            raise errors[0]  # that someone keeps, and with it the frames and the graph
        return x

    for _ in range(2):
        recorded.run("key", function, [torch.ones(3)])
    errors.clear()
    assert recorded.failure == "recording failed (ValueError: an op waits for the GPU)"
    assert (allocator.allocating, allocator.users, allocator.bytes) == (False, 0, 0)


def test_a_summary_where_the_allocator_does_not_tell_its_memory(tape, monkeypatch):
    pair = make_models()
    warm(pair, inputs_for(pair[0]))
    with monkeypatch.context() as context:
        Allocator(True, True).put_under(context)

        def unavailable():
            raise RuntimeError("cudaMallocAsync does not yet support snapshot")

        context.setattr(torch.cuda, "memory_snapshot", unavailable)
        graphs_of(pair[0])._recorder = CudaRecorder(torch.device("cuda"))
        assert ": 1 kept; 2 calls replayed;" in note(pair[0])


def test_the_summary_says_where_constants_are_computed(tape):
    model = tiny_wan_transformer()
    patch = trp.patch(model, AUTO)
    for where in ("kept ", "kept ", "computed in each replay ", "computed in each replay "):
        assert f" {where}" in patch.summary().split("prompt, cross K/V")[1].split("2/2")[0]
        run(model, inputs_for(model))


def test_a_move_to_another_device_frees_the_graphs_at_the_next_forward(tape, monkeypatch):
    pair = make_models(config=trp.PatchConfig(cuda_graph="auto", cache_text=False))
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    pair[0].to("meta")
    moved = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # it knows no "meta"
    with contextlib.suppress(RuntimeError, NotImplementedError):  # tensors without contents have no checksum
        run(pair[0], moved)
    assert len(TAPES) == 0
    assert "none now: meta tensors" in note(pair[0])


def test_a_restore_that_cannot_free_its_graphs_leaves_no_patch(tape, monkeypatch):
    pipe = tiny_wan_pipeline("wan22")
    patch = trp.patch(pipe, AUTO)

    def failing(self):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(graphs.Graphs, "clear", failing)
    with pytest.raises(RuntimeError, match="CUDA error"):
        patch.restore()
    assert not patch.active
    for model in (pipe.transformer, pipe.transformer_2):
        assert not any("turbo_rcm_patch" in name for module in model.modules() for name in module.__dict__)


def test_restore_frees_the_graphs_and_patching_again_starts_anew(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    assert len(TAPES) == 1
    held = getattr(pair[0], wan_graph.GRAPH)  # as a hook that kept a patched forward would
    trp.restore(pair[0])
    gc.collect()
    assert len(TAPES) == 0
    assert not held._graphs.kept
    assert "forward" not in pair[0].__dict__
    assert not any("turbo_rcm_patch" in name for name in pair[0].__dict__)
    plain = run(tiny_wan_transformer(), inputs)
    assert torch.equal(run(pair[0], inputs), plain)
    trp.patch(pair[0], AUTO)
    assert replays(pair[0]) == 0
    warm(pair, inputs)


def test_a_deep_copy_records_its_own(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    twin = copy.deepcopy(pair[0])
    with torch.no_grad():
        for model in (twin, pair[1]):
            for parameter in model.parameters():
                parameter.mul_(0.9)
    for _ in range(3):
        assert torch.equal(run(twin, inputs), run(pair[1], inputs))
    assert replays(twin) == 2
    assert graphs_of(twin) is not graphs_of(pair[0])


def test_nothing_is_kept_between_steps_where_graphs_serve(tape):
    pair = make_models()
    inputs = inputs_for(pair[0])
    warm(pair, inputs)
    state = pair[0]._turbo_rcm_patch
    assert not state._contexts.values()
    assert not state._rotary.values()
    assert state.keeps(torch.device("cpu")) == (not torch.is_grad_enabled())


def test_rope_tables_are_halved_once_per_call(tape, monkeypatch):
    module, made = trp.patching.wan.state, []
    tables = module.RotaryTables
    monkeypatch.setattr(module, "RotaryTables", lambda *full: made.append(1) or tables(*full))
    pair = make_models(layers=3)
    run(pair[0], inputs_for(pair[0]))
    assert len(made) == 1


# ------------------------------------------------------------------ on a GPU


def cuda_pair(options=None, **more):
    pair = make_models(options, dtype=torch.bfloat16, heads=4, **more)
    return [model.cuda() for model in pair]


def cuda_inputs(model, **options):
    inputs = inputs_for(model, **options)
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["auto", "triton", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gpu_steps_prompts_and_sizes(variant, attention):
    options, call = VARIANTS[variant]
    pair = cuda_pair(options)
    for model, mode in zip(pair, ("auto", "off"), strict=True):
        trp.restore(model)
        trp.patch(model, trp.PatchConfig(attention=attention, cuda_graph=mode))
    calls = [cuda_inputs(pair[0], seed=seed, **call, **size) for size in ({}, {"height": 10}) for seed in (7, 11)]
    held = []
    for _ in range(4):
        for inputs in calls:
            inputs["hidden_states"] = torch.randn_like(inputs["hidden_states"])
            inputs["timestep"] = inputs["timestep"] * 0.7
            held.append((run(pair[0], inputs), run(pair[1], inputs)))
    for ours, theirs in held:
        assert torch.equal(ours, theirs)
    assert graphs_of(pair[0]).kept == 2
    assert replays(pair[0]) == len(held) - 2
    assert "2 kept in " in note(pair[0])
    assert "2 kept in 0 MiB" not in note(pair[0])


@pytest.mark.gpu
@pytest.mark.parametrize("write", WRITES)
def test_gpu_weights_changed_between_calls_take_effect(write):
    pair = cuda_pair(VARIANTS["i2v"][0])
    inputs = cuda_inputs(pair[0])
    for name in WEIGHTS:
        before = run(pair[1], inputs)
        warm(pair, inputs)
        with torch.no_grad():
            for model in pair:
                WRITES[write]({**dict(model.named_parameters()), **dict(model.named_buffers())}[name])
        assert_same(pair, inputs)
        assert not torch.equal(run(pair[1], inputs), before), name


@pytest.mark.gpu
def test_gpu_lora_between_the_calls():
    pair = cuda_pair()
    inputs = cuda_inputs(pair[0])
    for _ in range(2):
        warm(pair, inputs)
        for model in pair:
            torch.manual_seed(5)
            model.add_adapter(LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=["to_q", "to_k"]))
        for scale in (1.0, 0.3):
            for model in pair:
                model.set_adapters(["default"], [scale])
            assert_eager(pair, inputs, "LoRA layer")
        for model in pair:
            model.fuse_lora()
            model.unload_lora()


@pytest.mark.gpu
def test_gpu_restore_gives_the_memory_back():
    pair = cuda_pair()
    inputs = cuda_inputs(pair[0])
    plain = run(tiny_wan_transformer(dtype=torch.bfloat16, heads=4).cuda(), inputs)
    for _ in range(2):
        warm(pair, inputs)
        pool = graphs_of(pair[0])._recorder._pool
        assert pool_bytes(pool) > 0
        trp.restore(pair[0])
        assert pool_bytes(pool) == 0
        assert torch.equal(run(pair[0], inputs), plain)
        trp.patch(pair[0], AUTO)


def pool_bytes(pool):
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == tuple(pool))


@pytest.mark.gpu
def test_gpu_streams_take_turns():
    pair = cuda_pair()
    inputs = cuda_inputs(pair[0])
    warm(pair, inputs)
    streams, held = [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for i in range(20):
        with torch.cuda.stream(streams[i % 2]):
            moved = {**inputs, "hidden_states": inputs["hidden_states"] * (1 + i)}
            held.append((moved, run(pair[0], moved)))
    torch.cuda.synchronize()
    for moved, ours in held:
        assert torch.equal(ours, run(pair[1], moved))


@pytest.mark.gpu
def test_gpu_random_numbers_are_those_without_graphs():
    drawn = []
    for model in cuda_pair():
        inputs = cuda_inputs(model)
        torch.cuda.manual_seed(3)
        for _ in range(4):
            run(model, inputs)
            drawn.append(torch.randn(5, device="cuda"))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(drawn[:4], drawn[4:], strict=True))


@pytest.mark.gpu
def test_gpu_a_failed_capture_leaves_the_gpu_usable(monkeypatch, caplog):
    pools, handle = [], torch.cuda.graph_pool_handle
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: pools.append(handle()) or pools[-1])
    pair, other = cuda_pair(), cuda_pair()
    inputs = cuda_inputs(pair[0])
    layers = trp.patching.wan.layers
    fused = layers.kernels.linear_gelu

    def waiting(x, *args, **kwargs):
        x.sum().item()
        return fused(x, *args, **kwargs)

    stream = torch.cuda.current_stream()
    with monkeypatch.context() as context:
        context.setattr(layers.kernels, "linear_gelu", waiting)
        for _ in range(4):
            assert_same(pair, inputs)
    assert "none now: recording failed (" in note(pair[0])
    assert len(caplog.records) == 1
    assert len(pools) == 1
    assert pool_bytes(pools[0]) == 0
    assert torch.cuda.current_stream() == stream
    torch.cuda.manual_seed(3)
    assert torch.randn(5, device="cuda").isfinite().all()
    warm(other, inputs)
    trp.restore(pair[0])
    trp.patch(pair[0], AUTO)
    warm(pair, inputs)
    assert torch.randn(5, device="cuda").isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["t2v", "wan22"])
def test_gpu_pipelines_with_guidance_generate_the_same(variant):
    pipe = tiny_wan_pipeline(variant, torch.bfloat16).to("cuda")
    call = tiny_call(variant, num_inference_steps=4, guidance_scale=4.0)
    generate = lambda: pipe(**call, generator=torch.Generator().manual_seed(3)).frames  # noqa: E731
    with trp.patch(pipe, trp.PatchConfig(cuda_graph="off")):
        expected = generate()
    with trp.patch(pipe, AUTO) as patch:
        for _ in range(2):
            assert torch.equal(generate(), expected)
        assert all(replays(model) > 2 for model in patch.transformers.values())
        pipe.enable_model_cpu_offload()
        assert torch.equal(generate(), expected)
