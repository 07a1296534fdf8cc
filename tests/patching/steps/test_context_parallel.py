"""Context parallelism: the ranks of a patched model compute together what one process does, with our attention."""

import contextlib
import dataclasses
import functools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.models._modeling_parallel import ParallelConfig
from torch.distributed.device_mesh import init_device_mesh

import turbo_rcm_patch as trp
from tests.oracle import assert_no_worse, relative_error
from tests.patching.launches import around_launches
from tests.patching.parallel_graphs import (
    SCENARIOS,
    STEPS,
    WITH_RUNS,
    inputs_with_runs,
    kept_after_the_end,
    run_graphs,
    run_graphs_with_runs,
    step_inputs,
)
from tests.patching.steps.test_sparse_linear import with_own_projections
from tests.patching.tape import replays
from tests.ranks import RANKS, in_cpu_ranks, in_gpu_ranks
from tests.tiny_families import tiny_family_inputs, tiny_family_transformer
from tests.tiny_wan import moved, tiny_transformer_inputs, tiny_wan_transformer
from turbo_rcm_patch.kernels import reference
from turbo_rcm_patch.kernels.launch import recorded, recording
from turbo_rcm_patch.patching.families import ahead
from turbo_rcm_patch.patching.steps import in_8_bits
from turbo_rcm_patch.patching.steps.context_parallel import ulysses_attention, why_not_between_all_to_alls

ULYSSES, RING = {"ulysses_degree": RANKS}, {"ring_degree": RANKS}
ANYTHING = {**ULYSSES, "ulysses_anything": True}
TOKENS = 18
I2V = {"added_kv_proj_dim": "inner", "image_dim": 4}
# name: (model's overrides, batch, timesteps per token, degrees, when it is patched)
MODELS = {
    "ulysses": ({}, 3, False, ULYSSES, "before"),
    "patched after": ({}, 2, False, ULYSSES, "after"),
    "an image": (I2V, 1, False, ULYSSES, "before"),
    "a timestep per token": ({"heads": 4}, 2, True, ULYSSES, "before"),
    "shares of any size": ({}, 2, False, ANYTHING, "before"),
}
# Attention in 8 bits, sparse, and both. The linears are not, unlike the tiers' own, except in IN_ALL.
BLOCKS = {"blocks": (4, 4)}  # of the 18 tokens
LEFT_OUT = {**BLOCKS, "mass": 0.5, "min_tokens": 0}
IN_8_BITS = {"quantize": ("attention",)}
TIERS = {
    "quantized": trp.Quantized(**IN_8_BITS),
    "sparse": trp.Sparse(quantize=(), topk=0.5, **BLOCKS),
    "sparse, 8 bits": trp.Sparse(topk=0.5, **BLOCKS, **IN_8_BITS),
    "block-sparse": trp.BlockSparse(quantize=(), **LEFT_OUT),
    "block-sparse, 8 bits": trp.BlockSparse(**LEFT_OUT, **IN_8_BITS),
}
ON_GPU = {
    "exact": trp.Exact(),
    "quantized": trp.Quantized(),
    "sparse": trp.Sparse(topk=0.5, blocks=(64, 128)),
    "block-sparse": trp.BlockSparse(mass=0.9, min_tokens=0),
}
IN_ALL = {
    "quantized": trp.Quantized(),
    "quantized linears": trp.Quantized(quantize=("linears",)),
    "sparse": trp.Sparse(topk=0.5, **BLOCKS),
    "block-sparse": trp.BlockSparse(**LEFT_OUT),
}
# Tiers, and how far a replay may be from a call without a graph, where GPUs embed no empty run, so that a GEMM sums in
# another order. Their own rounding is 0.006 and 0.018. The wrong run of timesteps gives 0.09, another timestep 0.17.
RUNS_ON_GPU = {"exact": 0.01, "quantized": 0.02}
IN_TURN = "fofofoof"  # calls of `inputs_with_runs`
IN_SUMMARY = {
    "quantized": "between all-to-alls",
    "sparse": "SLA 2/5 blocks",
    "block-sparse": "block-sparse with mass 0.5",
}
# Layouts that the sparse tier refuses. name: (heads, degrees, the error's beginning, the reason in the summary)
DOES_NOT_RUN = "sparse-linear attention does not run under"
REFUSED = {
    "three heads": (
        3,
        ULYSSES,
        "3 heads cannot be shared equally among 2 GPUs; give ulysses_degree a divisor of 3.",
        "3 heads on 2 ranks",
    ),
    "a ring": (2, RING, f"{DOES_NOT_RUN} ring context parallelism", "ring context parallelism"),
    "shares of any size": (2, ANYTHING, f"{DOES_NOT_RUN} ulysses_anything", "ulysses_anything"),
}
# What the summary shows before a call, for a usual video's 32,760 tokens. min_tokens is of those too.
BEFORE_A_CALL = {
    "sparse": (TIERS["sparse"], "SLA 4095/8190 blocks"),
    "block-sparse": (trp.BlockSparse(quantize=(), min_tokens=32761), "32760 tokens, fewer than min_tokens=32761"),
}
# Other families: the tiers, and the options of the model. diffusers' plan of Helios names 40 blocks.
FAMILIES = {
    "chronoedit": (("exact", "quantized", "block_sparse"), {}),
    "helios": (("exact", "quantized"), {"layers": 40}),
}
SHARED = {"chronoedit": "between all-to-alls", "helios": "hook cp_input, cp_output (40)"}  # in the summary
IN_FAMILIES = {"exact": trp.Exact(), "quantized": trp.Quantized(), "block_sparse": TIERS["block-sparse"]}
EACH_FAMILY = [(name, tier) for name, (tiers, _) in FAMILIES.items() for tier in tiers]
OURS = [name for name, (*_, degrees, _when) in MODELS.items() if degrees == ULYSSES]


def model_and_inputs(name):
    overrides, batch, per_token, *_ = MODELS[name]
    model = tiny_wan_transformer(**overrides)
    inputs = tiny_transformer_inputs(model, batch)
    if per_token:
        inputs["timestep"] = inputs["timestep"][:, None] - torch.arange(float(TOKENS))
    return model, inputs


def attention(q, k, v):
    return reference.attention(q, k, v, None, None, None, scale=0.4)


def random_qkv(batch):
    """In one sample a head has whole numbers of 8 bytes, in others not."""
    head_dim = 6 if batch == 1 else 5
    generator = torch.Generator().manual_seed(batch)
    return [torch.randn(batch, 10, 4, head_dim, generator=generator) for _ in range(3)]


# What each rank runs, in a process of its own


def on_cpu(rank):
    torch.accelerator.device_count = lambda: 1  # enable_parallelism divides by it
    return {
        "alone": {batch: alone(rank, batch) for batch in (1, 3)},
        "models": {name: run_model(name) for name in MODELS},
        "three heads": three_heads(),
        "ring": [ring(patched) for patched in (True, False)],
        "gradients": [gradients(patched) for patched in (True, False)],
        "compiled": compiled(),
        "graphs after the end": kept_after_the_end(parallelize),
        "graphs": run_graphs(rank, parallelize),
        "graphs with runs": run_graphs_with_runs(rank, parallelize),
        "tiers": {name: in_tier(config, ULYSSES) for name, config in TIERS.items()},
        "all in 8 bits": {
            (name, batch): in_all_in_8_bits(config, batch) for name, config in IN_ALL.items() for batch in (1, 2)
        },
        "quantized, shares of any size": in_tier(TIERS["quantized"], ANYTHING),
        "sparse, refused": {name: sparse_refused(*REFUSED[name][:2]) for name in REFUSED},
        "before a call": {name: before_a_call(config) for name, (config, _) in BEFORE_A_CALL.items()},
        "families": {(*each, when): in_family(*each, when) for each in EACH_FAMILY for when in ("before", "after")},
        "ltx2": {masked: [ltx2(patched, masked) for patched in (True, False)] for masked in (True, False)},
    }


def parallelize(model):
    model.enable_parallelism(config=parallel_config(**ULYSSES))


def parallel_config(device="cpu", **degrees):
    shape = degrees.get("ring_degree", 1), degrees.get("ulysses_degree", 1)
    return ContextParallelConfig(**degrees, mesh=init_device_mesh(device, shape, mesh_dim_names=("ring", "ulysses")))


def alone(rank, batch):
    """The rank's part of ulysses_attention, the shapes that attend was given, and the part of one to fewer keys."""
    config = ParallelConfig(context_parallel_config=parallel_config(**ULYSSES))
    config.setup(rank, RANKS, torch.device("cpu"), mesh=config.context_parallel_config.mesh)
    given = []

    def attend(*qkv):
        given.extend(list(x.shape) for x in qkv)
        return attention(*qkv)

    q, k, v = (x.chunk(RANKS, 1)[rank] for x in random_qkv(batch))
    if rank == 0:  # compiling kernels ahead: rank 1 does not answer
        with recorded(lambda _: None):
            assert ulysses_attention(config, lambda q, k, v: q, q, k, v).shape == q.shape
    to_fewer = ulysses_attention(config, attention, q, k[:, :3], v[:, :3])
    return ulysses_attention(config, attend, q, k, v), given, to_fewer


def run_model(name):
    """Its output, its summary, and its output when it is restored. Rank 0 compiles kernels ahead, as on a GPU."""
    *_, degrees, when = MODELS[name]
    model, inputs = model_and_inputs(name)
    if when == "after":
        model.enable_parallelism(config=parallel_config(**degrees))
    patch = trp.patch(model)
    if when == "before":
        model.enable_parallelism(config=parallel_config(**degrees))
    with torch.no_grad(), Recorded() as queries, pytest.MonkeyPatch.context() as as_on_a_gpu:
        as_on_a_gpu.setattr(ahead, "_launches_kernels", lambda *_: dist.get_rank() == 0)
        output, summary = model(**inputs)[0], patch.summary()
        patch.restore()
        return output, summary, queries.shapes, model(**inputs)[0]


class Recorded:
    """The shapes of the queries that our attention is given, except while kernels are compiled ahead."""

    def __enter__(self):
        self.shapes, self._patch = [], pytest.MonkeyPatch()
        around_launches(self._patch, "ATTENTION", lambda launch: partial(self._record, launch))
        return self

    def __exit__(self, *_):
        self._patch.undo()

    def _record(self, launch, q, *others):
        if not recording():
            self.shapes.append(list(q.shape))
        return launch(q, *others)


def ring(patched):
    """Return the result of a ring, here an error: diffusers has no CPU attention that returns the logsumexp."""
    model, inputs = model_and_inputs("ulysses")
    patch = trp.patch(model) if patched else None
    model.enable_parallelism(config=parallel_config(**RING))
    try:
        with torch.no_grad():
            outcome = model(**inputs)[0]
    except ValueError as error:
        outcome = str(error)
    return outcome, patch and patch.summary()


def three_heads():
    """Return the error of a model whose heads two ranks cannot share, and the summary."""
    model = tiny_wan_transformer(heads=3)
    patch = trp.patch(model)
    model.enable_parallelism(config=parallel_config(**ULYSSES))
    with torch.no_grad(), pytest.raises(ValueError, match="heads") as caught:
        model(**tiny_transformer_inputs(model))
    return str(caught.value), patch.summary()


def sparse_refused(heads, degrees):
    """Return the error of a sparse model, and the summary."""
    model = with_own_projections(tiny_wan_transformer(heads=heads))
    patch = trp.patch(model, TIERS["sparse"])
    model.enable_parallelism(config=parallel_config(**degrees))
    with torch.no_grad(), pytest.raises(ValueError, match=r"heads|does not run") as caught:
        model(**tiny_transformer_inputs(model))
    return str(caught.value), patch.summary()


def before_a_call(config):
    """Return the summary of a model that was not called yet."""
    model = tiny_wan_transformer()
    if isinstance(config, trp.Sparse):
        with_own_projections(model)
    patch = trp.patch(model, config)
    parallelize(model)
    return patch.summary()


def gradients(patched):
    model, inputs = model_and_inputs("ulysses")
    if patched:
        trp.patch(model)
    model.enable_parallelism(config=parallel_config(**ULYSSES))
    model(**inputs)[0].square().mean().backward()
    return {name: parameter.grad for name, parameter in model.blocks.named_parameters()}


def compiled():
    """One block, because each of them is traced anew in every rank."""
    model = tiny_wan_transformer(layers=1)
    inputs = tiny_transformer_inputs(model)
    trp.patch(model)
    model.enable_parallelism(config=parallel_config(**ULYSSES))
    model.compile_repeated_blocks(backend="eager")
    with torch.no_grad():
        return model(**inputs)[0]


@torch.no_grad()
def in_tier(config, degrees=None, batch=3):
    """The output and the summary of a model in a tier, on all ranks if degrees are given, else in one process."""
    model = tiny_wan_transformer()
    inputs = tiny_transformer_inputs(model, batch)
    if isinstance(config, trp.Sparse):
        with_own_projections(model)
    patch = trp.patch(model, config)
    if degrees is not None:
        model.enable_parallelism(config=parallel_config(**degrees))
    return model(**inputs)[0], patch.summary()


def in_all_in_8_bits(config, batch):
    """The results of `in_tier` on all ranks, and the shapes of rows in parts that are quantised."""
    in_parts = []

    def recorded_launch(launch, x, *options):
        if options[2:] == (True,):
            in_parts.append(tuple(x.shape))
        return launch(x, *options)

    with pytest.MonkeyPatch.context() as watched:
        around_launches(watched, "QUANTIZE_ROWS", lambda launch: partial(recorded_launch, launch), in_8_bits)
        return *in_tier(config, ULYSSES, batch), in_parts


@torch.no_grad()
def in_family(name, tier, when=None):
    """The output and the summary of a model in a tier: on all ranks, patched before or after, else in one process.

    The last result is the output of the restored model.
    """
    model, inputs = family_and_inputs(name)
    if when == "after":
        parallelize(model)
    patch = trp.patch(model, IN_FAMILIES[tier])
    if when == "before":
        parallelize(model)
    output, summary = model(**inputs)[0], patch.summary()
    patch.restore()
    return output, summary, model(**inputs)[0]


def family_and_inputs(name):
    """Two ranks can share Helios's 72 new tokens and the 56 of its history, unlike those of smaller latents."""
    model = tiny_family_transformer(name, **FAMILIES[name][1])
    inputs = tiny_family_inputs(name, model)
    if name == "helios":
        generator = torch.Generator().manual_seed(8)
        for key in [key for key, value in inputs.items() if isinstance(value, torch.Tensor) and value.ndim == 5]:
            inputs[key] = torch.randn(*inputs[key].shape[:3], 8, 12, generator=generator)
    return model, inputs


@torch.no_grad()
def ltx2(patched, masked):
    """Return the error of LTX-2, or None. masked: True for prompts with a mask, which pipelines pass."""
    model = tiny_family_transformer("ltx2")
    inputs = tiny_family_inputs("ltx2", model)
    prompts = inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"][:, :6]  # two ranks can share them
    if masked:
        inputs["encoder_attention_mask"] = torch.ones(prompts.shape[:2])
    if patched:
        trp.patch(model)
    parallelize(model)
    try:
        model(**inputs)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


@torch.no_grad()
def on_gpu(rank):
    """Return results of a bf16 model on this rank's GPU.

    By batch: its outputs, for one batch also those of compiled blocks, and the shapes that our attention got. Under
    "graphs", by tier: the outputs with CUDA graphs, the number of replays, and the summary. Under "graphs with runs":
    these, after the outputs without graphs.
    """
    torch.cuda.set_device(rank)
    results = {}
    for batch in (1, 2):
        model, inputs = large_model_and_inputs(batch)
        trp.patch(model, trp.Exact(cuda_graph="off"))
        model.enable_parallelism(config=parallel_config("cuda", **ULYSSES))
        with Recorded() as queries:
            outputs = [model(**inputs)[0].cpu() for _ in range(3)]
        if batch == 1:  # for another size torch.compile takes as long again
            model.compile_repeated_blocks()
            outputs.append(model(**inputs)[0].cpu())
        results[batch] = outputs, queries.shapes
    results["graphs"] = {}
    for tier, config in ON_GPU.items():
        model, inputs = large_model_and_inputs(1, config)
        model.enable_parallelism(config=parallel_config("cuda", **ULYSSES))
        patch = trp.patch(model, dataclasses.replace(config, cuda_graph="on"))
        outputs = [model(**inputs)[0].cpu() for _ in range(4)]
        results["graphs"][tier] = outputs, replays(model), patch.summary()
    results["graphs with runs"] = {tier: gpu_steps_with_runs(ON_GPU[tier]) for tier in RUNS_ON_GPU}
    return results


@torch.no_grad()
def gpu_steps_with_runs(config):
    """The outputs of IN_TURN without and with graphs, the number of replays, and the summary."""
    outputs = []
    for mode in ("off", "on"):
        model, _ = large_model_and_inputs(1)
        model.enable_parallelism(config=parallel_config("cuda", **ULYSSES))
        patch = trp.patch(model, dataclasses.replace(config, cuda_graph=mode))
        outputs.append([model(**large_inputs_with_runs(model, *each))[0].cpu() for each in enumerate(IN_TURN)])
    return *outputs, replays(model), patch.summary()


def large_inputs_with_runs(model, step, call):
    """Return the inputs of `inputs_with_runs` for `large_model_and_inputs`: a share is longer than the first frame."""
    inputs = tiny_transformer_inputs(model, 1, frames=5, height=48, width=64, seed=step)
    timestep = torch.full((1, 5 * 24 * 32), 900.0 - 100 * step)
    if call == "f":
        timestep[:, : 24 * 32] = 0.0
    return moved({**inputs, "timestep": timestep}, "cuda")


def large_model_and_inputs(batch, config=None):
    """Return a bf16 model so large that kernels and exchanges still run when the host launches the next one."""
    model = tiny_wan_transformer(heads=8, head_dim=128, dtype=torch.bfloat16).cuda()
    if isinstance(config, trp.Sparse):
        with_own_projections(model)
    inputs = tiny_transformer_inputs(model, batch, frames=5, height=48, width=64)
    return model, moved(inputs, "cuda")


# Checks of the ranks' results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return in_cpu_ranks(on_cpu, tmp_path_factory.mktemp("ranks"))


@functools.cache
def expected(name):
    model, inputs = model_and_inputs(name)
    with torch.no_grad():
        return model(**inputs)[0]


def row(summary, sub_layer, step):
    return next(line for line in summary.splitlines() if sub_layer in line and step in line)


@pytest.mark.parametrize("batch", [1, 3])
def test_ranks_attend_to_the_tokens_of_all(ranks, batch):
    outputs = [results["alone"][batch][0] for results in ranks]
    assert relative_error(torch.cat(outputs, dim=1), attention(*random_qkv(batch))) <= 1e-6
    q, k, v = random_qkv(batch)
    k, v = (x.unflatten(1, (RANKS, -1))[:, :, :3].flatten(1, 2) for x in (k, v))
    to_fewer = [results["alone"][batch][2] for results in ranks]
    assert relative_error(torch.cat(to_fewer, dim=1), attention(q, k, v)) <= 1e-6
    for results in ranks:
        assert results["alone"][batch][1] == [[batch, 10, 2, q.shape[3]]] * 3


@pytest.mark.parametrize("name", MODELS)
def test_the_ranks_of_a_patched_model_compute_what_one_process_does(ranks, name):
    for results in ranks:
        output, _, _, restored = results["models"][name]
        assert relative_error(output, expected(name)) <= 1e-5
        assert relative_error(restored, expected(name)) <= 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_our_attention_runs_between_the_all_to_alls(ranks, name):
    """In cross-attention it runs over the rank's own tokens."""
    overrides, batch, *_ = MODELS[name]
    heads = overrides.get("heads", 2)
    between, crossing = [batch, TOKENS, heads // RANKS, 64], [batch, TOKENS // RANKS, heads, 64]
    for results in ranks:
        _, summary, shapes, _ = results["models"][name]
        assert shapes.count(between) == (2 if name in OURS else 0)
        assert shapes.count(crossing) == (4 if name == "an image" else 2)
        ours = "between all-to-alls" if name in OURS else "ulysses_anything (2)"
        assert ours in row(summary, "self_attention", " attention ")
        assert "all-to-alls" not in row(summary, "cross_attention", " attention ")


def test_a_ring_is_left_to_diffusers(ranks):
    for results in ranks:
        (ours, summary), (theirs, _) = results["ring"]
        assert ours == theirs
        assert "return_lse" in ours
        assert "ring context parallelism (2)" in row(summary, "self_attention", " attention ")


def test_heads_that_do_not_divide(ranks):
    for results in ranks:
        error, summary = results["three heads"]
        assert error.startswith("3 heads cannot be shared equally among 2 GPUs; give ulysses_degree a divisor of 3")
        assert "3 heads on 2 ranks (2)" in row(summary, "self_attention", " attention ")


def test_gradients_are_diffusers(ranks):
    for results in ranks:
        ours, theirs = results["gradients"]
        for name, gradient in theirs.items():
            assert relative_error(ours[name], gradient) <= 1e-5, name


@functools.cache
def alone_in_tier(name):
    return in_tier(TIERS[name])[0]


@pytest.mark.parametrize("name", TIERS)
def test_the_ranks_attend_in_8_bits_or_to_a_part_of_the_keys_as_one_process_does(ranks, name):
    wide, _, in_8_bits = name.partition(",")
    for results in ranks:
        output, summary = results["tiers"][name]
        # Sums in another order move a few roundings to 8 bits. They err much less than all roundings.
        exact = expected("ulysses") if name == "quantized" else alone_in_tier(wide)
        rounding = relative_error(alone_in_tier(name), exact) / 10 if in_8_bits or name == "quantized" else 1e-5
        assert relative_error(output, alone_in_tier(name)) <= rounding
        assert IN_SUMMARY[wide] in row(summary, "self_attention", " attention ")
    assert relative_error(alone_in_tier(name), expected("ulysses")) > 1e-4  # the tier changes the result


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", IN_ALL)
def test_tokens_are_put_in_8_bits_where_they_arrive(ranks, name, batch):
    """One launch in each of two blocks gives the output projection's input, for one sample without a copy before."""
    alone, exact = in_tier(IN_ALL[name], batch=batch)[0], exact_of(batch)
    for results in ranks:
        output, _, in_parts = results["all in 8 bits"][name, batch]
        own, heads, head_dim = TOKENS // RANKS, 2, 64
        arrived = (own, RANKS, heads // RANKS * head_dim) if batch == 1 else (batch * own, heads, head_dim)
        assert in_parts == 2 * [arrived]
        assert relative_error(output, exact) <= 1.05 * relative_error(alone, exact)


@functools.cache
def exact_of(batch):
    model = tiny_wan_transformer()
    with torch.no_grad():
        return model(**tiny_transformer_inputs(model, batch))[0]


def test_a_quantized_model_with_shares_of_any_size_takes_the_exact_attention(ranks):
    for results in ranks:
        output, summary = results["quantized, shares of any size"]
        assert relative_error(output, expected("ulysses")) <= 1e-5
        assert "ulysses_anything (2)" in row(summary, "self_attention", " attention ")


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_sparse_model_refuses(ranks, name):
    *_, message, reason = REFUSED[name]
    for results in ranks:
        error, summary = results["sparse, refused"][name]
        assert error.startswith(message)
        assert "anything=True" not in error  # no way out of the sparse tier
        attends = row(summary, "self_attention", " attention ")
        assert " no kernel " in attends
        assert " 0/2 " in attends
        assert f"{reason} (2)" in attends


@pytest.mark.parametrize("name", BEFORE_A_CALL)
def test_before_a_call_the_summary_counts_the_tokens_of_one_video(ranks, name):
    _, shown = BEFORE_A_CALL[name]
    for results in ranks:
        assert shown in row(results["before a call"][name], "self_attention", " attention ")


@functools.cache
def family_alone(name, tier):
    output, _, unpatched = in_family(name, tier)
    return output, unpatched


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("name", "tier"), EACH_FAMILY)
def test_the_ranks_of_another_family_compute_what_one_process_does(ranks, name, tier, when):
    alone, unpatched = family_alone(name, tier)
    # On several ranks other modules hand their results on in 8 bits. They err as much as those of one process.
    rounding = relative_error(alone, unpatched) if tier == "quantized" else 1e-5
    assert tier == "exact" or relative_error(alone, unpatched) > 1e-3  # the tier changes the result
    for results in ranks:
        output, summary, restored = results["families"][name, tier, when]
        assert relative_error(output, alone) <= rounding
        assert relative_error(restored, unpatched) <= 1e-5
        assert SHARED[name] in row(summary, "self_attention", " attention ")


@pytest.mark.parametrize("masked", [True, False])
def test_ltx2_fails_as_without_the_patch(ranks, masked):
    """If this fails because a newer diffusers runs LTX-2, test it as the families above, and say so in the docs."""
    for results in ranks:
        ours, theirs = results["ltx2"][masked]
        assert theirs is not None
        assert masked or "Expected 8 arguments but got 0" in theirs
        assert ours == theirs


@functools.cache
def expected_steps(config=None):
    model = tiny_wan_transformer()
    with torch.no_grad(), trp.patch(model, config) if config is not None else contextlib.nullcontext():
        return [model(**step_inputs(model, step))[0] for step in range(STEPS)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_graph_is_recorded_and_replayed_by_all_ranks_or_by_none(ranks, name):
    alone = expected_steps(trp.Quantized(cuda_graph="off") if name == "quantized" else None)
    for results in ranks:
        outputs, _, _ = results["graphs"][name]
        for number, output in enumerate(outputs):
            # Sums in another order move some roundings to 8 bits.
            rounding = relative_error(alone[number % STEPS], expected_steps()[number % STEPS])
            assert relative_error(output, alone[number % STEPS]) <= max(rounding, 1e-5)
    notes, replayed = ([results["graphs"][name][i] for results in ranks] for i in (1, 2))
    if name == "one has a hook":
        assert replayed == [(0, STEPS - 1)] * 2  # then, all see the call for the first time
        assert "another GPU runs without (4)" in notes[0]
        assert "none now: torch hook" in notes[1]
    elif name == "one fails":
        assert replayed == [0, 0]
        assert "none now: recording failed on another GPU" in notes[0]
        assert "none now: recording failed (RuntimeError: out of memory)" in notes[1]
    elif name == "one failed alone":
        assert replayed == [0, 0]
        assert "another GPU runs without (4)" in notes[0]
        assert "none now: recording failed (RuntimeError: out of memory)" in notes[1]
    elif name == "one moved its weights":
        assert replayed == [2 * (STEPS - 1)] * 2
    else:
        assert replayed == [STEPS - 1] * 2, notes
        assert notes[0] == notes[1]


REPLAYED = {
    "other timesteps": "-fff",
    "two kinds in turn": "-ofofofoof",
    "too many runs on one": "----ff---",
    "large": "-fffoo--",
    "large, if asked for": "--",
    "too large": "--",
    "a hook on one": "---",
    "large, with a hook on one": "--",
}


@pytest.mark.parametrize("name", WITH_RUNS)
@torch.no_grad()
def test_ranks_with_other_numbers_of_runs_replay_together(ranks, name):
    model, calls = tiny_wan_transformer(), WITH_RUNS[name]["calls"]
    alone = [model(**inputs_with_runs(model, step, call))[0] for step, call in enumerate(calls)]
    notes = []
    for results in ranks:
        outputs, replayed, note = results["graphs with runs"][0][name]
        assert replayed == REPLAYED[name], note
        for output, expected in zip(outputs, alone, strict=True):
            assert relative_error(output, expected) <= 1e-5
        notes.append(note)
    reasons = {
        "a hook on one": ("another GPU runs without (3)", "torch hook (3)"),
        "large, with a hook on one": ("another GPU runs without (2)", "torch hook (2)"),
        "large": ("another GPU runs without (2)", "timesteps per token that are not embedded as 2 runs or fewer (2)"),
        "too large": ("too large to gain (2)", "too large to gain (2)"),
    }
    assert all(reason in note for reason, note in zip(reasons.get(name, ("", "")), notes, strict=True)), notes


def test_ranks_replay_recordings_that_were_made_together(ranks):
    """NCCL does not allow others."""
    numbers = [results["graphs with runs"][1] for results in ranks]
    assert numbers[0] == numbers[1]
    assert len(numbers[0]) == sum(call != "-" for calls in REPLAYED.values() for call in calls)


def test_compiled_blocks(ranks):
    model = tiny_wan_transformer(layers=1)
    with torch.no_grad():
        alone = model(**tiny_transformer_inputs(model))[0]
    for results in ranks:
        assert relative_error(results["compiled"], alone) <= 1e-5


@pytest.mark.parametrize(
    ("degrees", "heads", "differentiated", "reason"),
    [
        ({"ulysses_degree": 4}, 40, False, None),
        ({"ulysses_degree": 3}, 40, False, "40 heads on 3 ranks"),
        ({"ulysses_degree": 4}, 40, True, "autograd under context parallelism"),
        ({"ring_degree": 2}, 40, False, "ring context parallelism"),
        ({"ring_degree": 2, "ulysses_degree": 2}, 40, False, "ring context parallelism"),
        ({"ulysses_degree": 2, "ulysses_anything": True}, 40, False, "ulysses_anything"),
    ],
)
def test_why_not(degrees, heads, differentiated, reason):
    config = ParallelConfig(context_parallel_config=ContextParallelConfig(**degrees))
    assert why_not_between_all_to_alls(config, heads, differentiated=differentiated) == reason


def test_graphs_are_gone_when_a_process_group_ends(ranks):
    """Else NCCL waits for them."""
    assert all(results["graphs after the end"] == (1, 0) for results in ranks)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")
@torch.no_grad()
def test_two_gpus_are_no_worse_than_one(tmp_path):
    ranks = in_gpu_ranks(on_gpu, tmp_path, seconds=600)
    for batch in (1, 2):
        model, inputs = large_model_and_inputs(batch)
        alone = model(**inputs)[0].cpu()
        wide = {name: x.float() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
        oracle = model.float()(**wide)[0].cpu()
        for results in ranks:
            outputs, shapes = results[batch]
            assert shapes.count([batch, 5 * 24 * 32, 8 // RANKS, 128]) == 2 * 3  # blocks, calls
            for output in outputs:
                assert_no_worse(output, alone, oracle)
    for tier, config in ON_GPU.items():
        model, inputs = large_model_and_inputs(1, config)
        is_sparse = isinstance(config, trp.Sparse)  # then dense attention, without proj_l, gives something else
        with trp.patch(model, dataclasses.replace(config, quantize=())) if is_sparse else contextlib.nullcontext():
            exact = model(**inputs)[0].cpu()
        with trp.patch(model, config):
            alone = model(**inputs)[0].cpu()
        for results in ranks:
            outputs, replayed, summary = results["graphs"][tier]
            assert replayed == 3, summary
            for output in outputs:  # the first is computed eagerly
                rounding = relative_error(alone, exact)
                assert relative_error(output, alone) <= max(rounding, 0.02), (tier, summary)
    for results in ranks:
        for tier, most in RUNS_ON_GPU.items():
            without, outputs, replayed, summary = results["graphs with runs"][tier]
            assert replayed == len(IN_TURN) - 1, summary  # both kinds of call have two runs, and so one graph
            for ours, theirs in zip(outputs, without, strict=True):
                assert relative_error(ours, theirs) <= most, (tier, summary)
