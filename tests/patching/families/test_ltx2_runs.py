"""LTX-2 with a timestep per token, as from an image: tokens with equal timesteps share their rows of modulation."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import turbo_rcm_patch as trp
from scripts.tools.compile_without_gpu import MULTIPROCESSORS
from tests.oracle import relative_error
from tests.patching.pairs import in_one_tensor, output_of
from tests.tiny_families import BATCH, tiny_family_inputs, tiny_family_transformer
from tests.tiny_ltx2 import tiny_ltx2_call, tiny_ltx2_pipeline
from turbo_rcm_patch.kernels import MAX_RUNS
from turbo_rcm_patch.kernels.dispatch import meta_is_gpu
from turbo_rcm_patch.patching.families import CASES
from turbo_rcm_patch.patching.families.ltx2 import EMBEDDERS
from turbo_rcm_patch.patching.families.ltx2.block import decide
from turbo_rcm_patch.patching.families.ltx2.call import usual_call
from turbo_rcm_patch.patching.steps.plan import SHARED, Call, active_backend, state_of
from turbo_rcm_patch.tiers import EXACT, QUANTIZED

TOKENS = 18  # of a sample


def in_runs(*samples):
    """Timesteps per token. samples: for each, the values and lengths of its runs."""
    return torch.stack([torch.cat([torch.full((n,), float(value)) for value, n in runs]) for runs in samples])


ALIKE = in_runs([(700, 18)], [(700, 18)])
FIRST_FRAME = in_runs([(0, 6), (700, 12)], [(0, 6), (700, 12)])  # from an image, with guidance
UNLIKE = in_runs([(0, 6), (700, 6), (0, 6)], [(300, 17), (1, 1)])
MANY = torch.linspace(0, 999, BATCH * TOKENS).reshape(BATCH, TOKENS)  # each token has its own
# name: (timestep, how many runs it has, what has its own gate)
TIMESTEPS = {
    "one run": (ALIKE, 1, "run"),
    "a first frame": (FIRST_FRAME, 4, "run"),
    "unlike samples": (UNLIKE, 5, "run"),
    "too many": (MANY, BATCH * TOKENS, "token"),
}
VARIANTS = {
    "LTX-2": ("ltx2", {}),
    "LTX-2, interleaved": ("ltx2", {"rope_type": "interleaved"}),
    "LTX-2.3": ("ltx2.3", {}),
    "LTX-2.5": ("ltx2.3", {"ff_bias": False, "use_prompt_adaln_single": False}),
}
eager = {"cuda_graph": "off"}
EVERY_KEY = {"quantize": (), "blocks": (4, 4), **eager}
# tier: (its configuration, where it must be as exact as unpatched, the same as users have it, its limit)
TIERS = {
    "exact": (trp.Exact(**eager), EXACT.limits.fp32),
    "exact, kernels": (trp.Exact(implementation="triton", **eager), EXACT.limits.fp32),
    "quantized": (trp.Quantized(**eager), QUANTIZED.limits.step),
    "sparse": (trp.Sparse(topk=1.0, **EVERY_KEY), EXACT.limits.fp32),
    "block_sparse": (trp.BlockSparse(mass=1.0, min_tokens=0, **EVERY_KEY), EXACT.limits.fp32),
}


def gates(model):
    """Return what had its own gate in the last call: in the video's sub-layers, and in its attention to the sound."""
    calls = {state_of(block).plans.latest for block in model.transformer_blocks}
    return {(call.stream.gate, call.gate_of_video, call.audio.gate) for call in calls}


def runs_of(model):
    """The starts of the runs that each embedder's last result was made of."""
    return [each.starts.tolist() for each in vars(model)[SHARED].runs.values() if each is not None]


@pytest.fixture
def waits(monkeypatch):
    """The numbers of timesteps in which runs were looked for, each of which waits for the GPU."""
    seen, unique = [], torch.unique_consecutive

    def counted(x, *args, **options):
        seen.append(x.numel())
        return unique(x, *args, **options)

    monkeypatch.setattr(torch, "unique_consecutive", counted)
    return seen


@pytest.mark.parametrize("timestep", TIMESTEPS)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tier_matches_unpatched(variant, tier, timestep):
    if tier == "sparse" and variant not in ("LTX-2", "LTX-2, interleaved"):
        pytest.skip("LTX-2.3 has no sparse tier")
    (family, options), (config, limit) = VARIANTS[variant], TIERS[tier]
    timestep, count, varies = TIMESTEPS[timestep]
    model = tiny_family_transformer(family, layers=1, **options)
    for crossed in (False, True):  # with the pipeline's default the sound's timestep decides how the video sees it
        call = {"timestep": timestep, "use_cross_timestep": crossed}
        expected = output_of(family, model, **call)
        with trp.patch(model, config):
            assert relative_error(output_of(family, model, **call), expected) <= limit
            assert gates(model) == {(varies, "sample" if crossed else varies, "sample")}
            made = runs_of(model)
        assert [len(starts) for starts in made] == [count + 1] * (0 if varies == "token" else 1 if crossed else 3)
        assert torch.equal(output_of(family, model, **call), expected)  # restored


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_each_embedder_looks_for_runs_once(mode, waits):
    """With use_cross_timestep only the first one gets a timestep per token."""
    model = tiny_family_transformer("ltx2")
    inputs = tiny_family_inputs("ltx2", model)
    with mode(), trp.patch(model, trp.Exact(**eager)):
        for timestep, crossed, count in (
            (inputs["timestep"], False, 0),
            (inputs["timestep"], True, 0),
            (FIRST_FRAME, True, 1),
            (FIRST_FRAME, False, 3),
        ):
            waits.clear()
            model(**{**inputs, "timestep": timestep, "use_cross_timestep": crossed})
            assert waits == [BATCH * TOKENS] * count


def test_timesteps_in_other_layouts():
    model = tiny_family_transformer("ltx2", layers=1)
    by_column, expanded = FIRST_FRAME.T.contiguous().T, FIRST_FRAME[:1].expand(2, -1)
    for timestep in (by_column, expanded, FIRST_FRAME[..., None], FIRST_FRAME.repeat(2, 2)[::2, ::2]):
        expected = output_of("ltx2", model, timestep=timestep)
        with trp.patch(model, trp.Exact(**eager)):
            assert relative_error(output_of("ltx2", model, timestep=timestep), expected) <= EXACT.limits.fp32
            assert gates(model) == {("run", "run", "sample")}
    column = torch.tensor([[700.0], [300.0]])  # one for each sample
    expected = output_of("ltx2", model, timestep=column)
    with trp.patch(model, trp.Exact(**eager)):
        assert relative_error(output_of("ltx2", model, timestep=column), expected) <= EXACT.limits.fp32
        assert gates(model) == {("sample", "sample", "sample")}


@pytest.mark.parametrize("tier", ["exact", "exact, kernels"])
def test_a_module_of_a_block_that_is_called_takes_runs(tier):
    """A hook on each module, one after the other."""
    models = [tiny_family_transformer("ltx2.3", layers=1) for _ in range(2)]
    paths = [
        path
        for path, part in models[0].transformer_blocks[0].named_modules()
        if path and type(part) is not torch.nn.ModuleList and (tier == "exact" or path.count(".") == 0)
    ]
    trp.patch(models[0], TIERS[tier][0])
    for path in paths:
        outputs = []
        for model in models:
            hook = model.transformer_blocks[0].get_submodule(path).register_forward_hook(lambda m, args, out: -out)
            outputs.append(output_of("ltx2.3", model, timestep=UNLIKE))
            hook.remove()
        assert relative_error(*outputs) <= EXACT.limits.fp32, path
    assert gates(models[0]) == {("run", "run", "sample")}


@pytest.mark.parametrize("fuse", [(), ("self_attention",), ("cross_attention",), ("feed_forward",)])
def test_sub_layers_that_are_not_fused_take_runs(fuse):
    model = tiny_family_transformer("ltx2", layers=1)
    expected = output_of("ltx2", model, timestep=UNLIKE)
    with trp.patch(model, trp.Exact(fuse=fuse, **eager)):
        assert relative_error(output_of("ltx2", model, timestep=UNLIKE), expected) <= EXACT.limits.fp32
        assert gates(model) == {("run", "run", "sample")}


class Largest(TorchDispatchMode):
    """The values of the largest tensor that an op made, other than weights."""

    values = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.ndim > 2]
        self.values = max([self.values, *(tensor.numel() for tensor in made)])
        return result


@pytest.mark.parametrize("name", ["a first frame", "too many"])
def test_only_many_runs_make_a_block_compute_modulation_for_every_token(name):
    timestep, *_ = TIMESTEPS[name]
    model = tiny_family_transformer("ltx2", layers=1)
    (block,), largest = model.transformer_blocks, Largest()
    trp.patch(model, trp.Exact(implementation="torch", **eager))
    forward = block.forward

    def watched(*args, **options):
        with largest:
            return forward(*args, **options)

    block.forward = watched
    output_of("ltx2", model, timestep=timestep)
    assert (largest.values >= BATCH * TOKENS * 6 * 128) == (name == "too many")  # [B, S, 6, C]


# A hook on a part of an embedder sees all timesteps. So it must not embed runs.
PARTS = ["emb", "emb.time_proj", "emb.timestep_embedder.linear_1", "silu", "linear"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("path", EMBEDDERS)
def test_a_hook_inside_an_embedder_sees_every_token(path, part):
    models, seen = [tiny_family_transformer("ltx2", layers=1) for _ in range(2)], []
    for model in models:
        module = model.get_submodule(f"{path}.{part}")
        module.register_forward_hook(lambda _, args, output: seen.append(len(args[0])) or -output)
    trp.patch(models[0], trp.Exact(**eager))
    outputs = [output_of("ltx2", model, timestep=FIRST_FRAME) for model in models]
    assert relative_error(*outputs) <= EXACT.limits.fp32
    assert seen == [BATCH * TOKENS] * 2
    ((own, crossed, _),) = gates(models[0])
    assert (own, crossed) == ("token" if path == "time_embed" else "run", "token" if "gate" in path else "run")


def test_offloading_inside_an_embedder_is_no_user():
    """Its hooks bring weights, and read no timesteps."""
    model = tiny_family_transformer("ltx2", layers=1)
    expected = output_of("ltx2", model, timestep=FIRST_FRAME)
    trp.patch(model, trp.Exact(**eager))
    for path in EMBEDDERS:
        add_hook_to_module(model.get_submodule(f"{path}.linear"), ModelHook())
    assert relative_error(output_of("ltx2", model, timestep=FIRST_FRAME), expected) <= EXACT.limits.fp32
    assert gates(model) == {("run", "run", "sample")}


@pytest.mark.parametrize("path", ["audio_time_embed", "av_cross_attn_video_a2v_gate", "transformer_blocks.0"])
def test_a_call_in_another_thread_has_its_own_runs(path):
    """It comes between two embedders, or between these and a block."""
    model, between = tiny_family_transformer("ltx2", layers=1), []
    expected = [output_of("ltx2", model, timestep=timestep) for timestep in (UNLIKE, FIRST_FRAME)]
    trp.patch(model, trp.Exact(**eager))

    def call_in_another_thread(*_):
        hook.remove()
        with ThreadPoolExecutor(1) as pool:
            between.append(pool.submit(output_of, "ltx2", model, timestep=FIRST_FRAME).result())

    hook = model.get_submodule(path).register_forward_pre_hook(call_in_another_thread)
    outputs = output_of("ltx2", model, timestep=UNLIKE), *between
    for ours, theirs in zip(outputs, expected, strict=True):
        assert relative_error(ours, theirs) <= EXACT.limits.fp32


def doubled_in_place(_, args, output):
    output[0].mul_(2)


def some_doubled_in_place(_, args, output):
    output[0].view(-1)[7:].mul_(2)


HOOKS = {
    "written to": doubled_in_place,
    "a view written to": some_doubled_in_place,
    "replaced": lambda _, args, output: (2 * output[0], output[1]),
    "a copy": lambda _, args, output: (output[0].clone(), output[1]),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("path", EMBEDDERS)
def test_what_a_hook_makes_of_the_modulation_takes_effect(path, hook, mode):
    models = [tiny_family_transformer("ltx2", layers=1) for _ in range(2)]
    for model in models:
        model.get_submodule(path).register_forward_hook(HOOKS[hook])
    trp.patch(models[0], trp.Exact(**eager))
    outputs = []
    for model in models:
        with mode():
            outputs.append(in_one_tensor("ltx2", model(**{**tiny_family_inputs("ltx2", model), "timestep": UNLIKE})))
    assert relative_error(*outputs) <= EXACT.limits.fp32
    assert gates(models[0]) != {("run", "run", "sample")} or "scale_shift" in path


@pytest.mark.parametrize("name", ["temb", "temb_ca_scale_shift", "temb_ca_gate"])
@pytest.mark.parametrize("in_place", [False, True])
def test_what_a_hook_gives_a_block_takes_effect(name, in_place):
    models = [tiny_family_transformer("ltx2") for _ in range(2)]

    def other(_, args, given):
        temb = given[name].mul_(1.5) if in_place else 1.5 * given[name]
        return args, {**given, name: temb}

    for model in models:
        model.transformer_blocks[0].register_forward_pre_hook(other, with_kwargs=True)
    trp.patch(models[0], trp.Exact(**eager))
    outputs = [output_of("ltx2", model, timestep=FIRST_FRAME) for model in models]
    assert relative_error(*outputs) <= EXACT.limits.fp32
    assert relative_error(outputs[1], output_of("ltx2", tiny_family_transformer("ltx2"), timestep=FIRST_FRAME)) > 1e-3


@pytest.mark.parametrize("path", EMBEDDERS)
@pytest.mark.parametrize("writes", [False, True])
def test_a_hook_before_an_embedder_may_change_its_timesteps(path, writes):
    """Also those that an earlier embedder found runs in."""
    models = [tiny_family_transformer("ltx2", layers=1) for _ in range(2)]

    def other(_, args, given):
        timestep = args[0] if writes else args[0].clone()
        timestep[3:5] += 100.0
        return (timestep, *args[1:]), given

    for model in models:
        model.get_submodule(path).register_forward_pre_hook(other, with_kwargs=True)
    trp.patch(models[0], trp.Exact(**eager))
    outputs = [output_of("ltx2", model, timestep=FIRST_FRAME.clone()) for model in models]
    assert relative_error(*outputs) <= EXACT.limits.fp32
    assert gates(models[0]) == {("run", "run", "sample")}


class Other(torch.nn.Module):
    """An embedder of another class."""

    def __init__(self, embedder):
        super().__init__()
        self.embedder = embedder

    def forward(self, *args, **options):
        temb, embedded = self.embedder(*args, **options)
        return 1.5 * temb, embedded


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("path", EMBEDDERS)
def test_another_embedder_runs(path, when):
    models = [tiny_family_transformer("ltx2", layers=1) for _ in range(2)]
    others = [Other(copy.deepcopy(model.get_submodule(path))) for model in models]
    patch = trp.patch(models[0], trp.Exact(**eager)) if when == "after" else None
    for model, other in zip(models, others, strict=True):
        setattr(model, path, other)
    patch = patch or trp.patch(models[0], trp.Exact(**eager))
    for _ in range(3):
        outputs = [output_of("ltx2", model, timestep=FIRST_FRAME) for model in models]
    assert relative_error(*outputs) <= EXACT.limits.fp32
    assert len(runs_of(models[0])) == 2
    patch.restore()
    assert torch.equal(output_of("ltx2", models[0], timestep=FIRST_FRAME), outputs[1])


def test_an_embedder_with_a_forward_of_its_own_is_left_alone():
    model = tiny_family_transformer("ltx2", layers=1)
    forward = model.time_embed.forward
    model.time_embed.forward = replaced = lambda *args, **options: tuple(1.5 * x for x in forward(*args, **options))
    expected = output_of("ltx2", model, timestep=FIRST_FRAME)
    with trp.patch(model, trp.Exact(**eager)):
        assert relative_error(output_of("ltx2", model, timestep=FIRST_FRAME), expected) <= EXACT.limits.fp32
        assert gates(model) == {("token", "run", "sample")}
    assert vars(model.time_embed)["forward"] is replaced


def test_training_and_autocast_have_a_row_for_every_token():
    model = tiny_family_transformer("ltx2", layers=1)
    inputs = {**tiny_family_inputs("ltx2", model), "timestep": FIRST_FRAME}
    gradients = []
    for patched in (False, True):
        if patched:
            trp.patch(model, trp.Exact(**eager))
        model.zero_grad()
        sum(stream.square().mean() for stream in model(**inputs)).backward()
        gradients.append(model.time_embed.linear.weight.grad.clone())
    assert gates(model) == {("token", "token", "sample")}
    assert relative_error(gradients[1], gradients[0]) <= 1e-4
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        patched = in_one_tensor("ltx2", model(**inputs))
        assert runs_of(model) == []
    trp.restore(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(patched, in_one_tensor("ltx2", model(**inputs)))


def test_a_block_of_runs_may_be_traced(monkeypatch):
    """torch.compile of blocks alone: the embedders find runs, which a traced block does not read."""
    model = tiny_family_transformer("ltx2", layers=1)
    expected = output_of("ltx2", model, timestep=FIRST_FRAME)
    with trp.patch(model, trp.Exact(**eager)):
        block = model.transformer_blocks[0]
        block.compile(backend="eager")
        assert relative_error(output_of("ltx2", model, timestep=FIRST_FRAME), expected) <= EXACT.limits.fp32
        assert len(runs_of(model)) == 3
        block._compiled_call_impl = None
        model.compile(backend="eager")
        assert relative_error(output_of("ltx2", model, timestep=FIRST_FRAME), expected) <= EXACT.limits.fp32


def test_a_copy_has_no_runs_and_finds_its_own():
    model = tiny_family_transformer("ltx2", layers=1)
    patch = trp.patch(model, trp.Exact(**eager))
    expected = output_of("ltx2", model, timestep=FIRST_FRAME)
    twin = copy.deepcopy(model)
    assert vars(twin)[SHARED].runs is None
    patch.restore()
    assert torch.equal(output_of("ltx2", twin, timestep=FIRST_FRAME), expected)
    assert len(runs_of(twin)) == 3


def test_restore_brings_the_embedders_back():
    model = tiny_family_transformer("ltx2", layers=1)
    before = {path: set(vars(model.get_submodule(path))) for path in EMBEDDERS}
    expected = output_of("ltx2", model, timestep=FIRST_FRAME)
    patch = trp.patch(model)
    assert all("forward" in vars(model.get_submodule(path)) for path in EMBEDDERS)
    output_of("ltx2", model, timestep=FIRST_FRAME)
    patch.restore()
    assert {path: set(vars(model.get_submodule(path))) for path in EMBEDDERS} == before
    assert torch.equal(output_of("ltx2", model, timestep=FIRST_FRAME), expected)


def test_few_runs_are_as_many_as_the_kernels_take():
    model = tiny_family_transformer("ltx2", layers=1)
    for count, varies in ((MAX_RUNS, "run"), (MAX_RUNS + 1, "token")):
        timestep = (900.0 - torch.arange(BATCH * TOKENS) * count // (BATCH * TOKENS)).view(BATCH, TOKENS)
        expected = output_of("ltx2", model, timestep=timestep)
        with trp.patch(model, trp.Exact(**eager)):
            assert relative_error(output_of("ltx2", model, timestep=timestep), expected) <= EXACT.limits.fp32
            assert gates(model) == {(varies, varies, "sample")}


def test_runs_take_the_kernels_that_a_gate_of_a_sample_takes():
    """A gate of every token is what sm_90's GEMM refuses."""
    case, kernels = CASES["ltx2-19b"], {}
    with torch.device("meta"):
        model = case.transformer_class(**{**case.transformer, "num_layers": 1}).to(torch.bfloat16)
    trp.patch(model)
    with meta_is_gpu((9, 0), MULTIPROCESSORS):
        usual = usual_call(Call(trp.Exact(), torch.device("meta"), torch.bfloat16, None, active_backend()))
        for gate in ("sample", "run", "token"):
            call = usual._replace(stream=usual.stream._replace(gate=gate), gate_of_video=gate)
            rows = decide(model.transformer_blocks[0], call).rows()
            kernels[gate] = {(name, step): [part.kernel for part in parts] for name, step, parts in rows}
    assert kernels["run"] == kernels["sample"]
    others = [row for row in kernels["run"] if kernels["token"][row] != kernels["run"][row]]
    assert [name for name, _ in others] == [
        "video self_attention",
        "audio-to-video cross_attention",
        "video feed_forward",
    ]
    assert {kernel for row in others for kernel in kernels["token"][row]} == {"portable Triton (c_out per token)"}


@pytest.mark.parametrize("crossed", [False, True])
def test_the_pipeline_from_an_image(crossed, waits):
    pipe = tiny_ltx2_pipeline("image")
    make = lambda: pipe(**tiny_ltx2_call("image", use_cross_timestep=crossed))  # noqa: E731
    expected, seen = make(), []
    with trp.patch(pipe, trp.Exact(**eager)):
        hook = pipe.transformer.register_forward_hook(lambda model, *_: seen.append(gates(model)))
        for ours, theirs in zip(make(), expected, strict=True):
            assert relative_error(ours, theirs) <= EXACT.limits.fp32
        hook.remove()
    # Two steps, of each a call for guidance, and one for each kind of guidance without the other stream.
    assert {gate for each in seen for gate in each} == {
        ("run", "sample" if crossed else "run", "sample"),
        ("run", None, "sample"),
    }
    assert len(waits) == len(seen) * (1 if crossed else 3)
    assert all(map(torch.equal, make(), expected))
