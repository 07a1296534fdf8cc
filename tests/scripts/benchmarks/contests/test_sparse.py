"""The contests of the sparse tier's ops, at small sizes: ours is within the tier's limits; what its figures show."""

import functools

import pytest
import torch

from scripts.benchmarks.contests import conv, exact, quantized, sparse
from scripts.benchmarks.contests.sparse import DENSE_BF16, IN_PYTORCH
from scripts.benchmarks.rivals.sla_in_pytorch import sla_in_pytorch
from tests.bench.contests import errors_beside_another_row
from turbo_rcm_patch import kernels
from turbo_rcm_patch.bench import ops, ops_sparse
from turbo_rcm_patch.bench.metrics import relative_l2
from turbo_rcm_patch.bench.ops import Draws, error_limit, measure_errors
from turbo_rcm_patch.bench.ops_sparse import DENSE
from turbo_rcm_patch.tiers import BLOCK_SPARSE, SPARSE

CPU = torch.device("cpu")
SMALL = {
    "sparse_linear_attention": functools.partial(ops_sparse.sparse_linear_attention, 2, 1500, 64),
    "sparse_linear_attention_bf16": functools.partial(sparse.sparse_linear_attention_bf16, 2, 1500, 64),
    "norms_sparse_linear_attention": functools.partial(sparse.norms_sparse_linear_attention, 2, 1500, 64),
}
ON_A_GPU = {**SMALL, "sparse_kernel": functools.partial(sparse.sparse_kernel, 2, 1500, 64)}


def check(build, device, compiled):
    contest = build(device, compiled)
    errors = measure_errors(contest)
    (name,) = contest.ours
    least = torch.finfo(torch.bfloat16).eps / (8 if "bf16" in build.func.__name__ else 1)
    assert least < errors[name] <= error_limit(contest, errors, SPARSE.limits)
    assert min(errors_beside_another_row(contest)) > 0.1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", SMALL)
def test_ours_is_within_the_tiers_limit(name):
    check(SMALL[name], CPU, lambda function: function)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_A_GPU)
def test_ours_is_within_the_tiers_limit_on_a_gpu(name):
    compiled = functools.partial(torch.compile, fullgraph=True, dynamic=False, backend="aot_eager")
    check(ON_A_GPU[name], torch.device("cuda"), compiled)


def test_cases_are_of_the_tier_and_their_names_unique():
    cases = (*exact.CASES, *conv.CASES, *quantized.CASES, *sparse.CASES)
    assert len({case.name for case in cases}) == len(cases)
    assert {case.tier for case in sparse.CASES} == {SPARSE, BLOCK_SPARSE}
    assert {case.build.func.__name__ for case in sparse.CASES} <= {*ON_A_GPU, "block_sparse_attention"}


def test_sla_in_pytorch_is_sla():
    """fp32, at lengths that no block divides, against the fp64 reference with the blocks that ours chooses."""
    q, k, v = (torch.randn(2, 700, 2, 64) for _ in range(3))
    weight, bias = torch.randn(64, 64) / 8, torch.randn(64)
    block_map = kernels.chosen_key_blocks(q, k, 3, 128, 64)
    wide = (x.double() for x in (q, k, v, weight, bias))
    expected = kernels.sparse_linear_attention(*wide, block_map=block_map, block_q=128, block_k=64)
    run = torch.compile(sla_in_pytorch, fullgraph=True, dynamic=False, backend="aot_eager")
    assert relative_l2(run(q, k, v, weight, bias, 3, 128, 64), expected) < 1e-6


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_sla_in_bf16_is_beside_sla_in_pytorch_and_dense_attention():
    contest = SMALL["sparse_linear_attention_bf16"](CPU, lambda function: function)
    assert set(contest.partial) == {DENSE_BF16, ops.SDPA}
    errors = measure_errors(contest)
    assert errors[IN_PYTORCH] < 0.01
    assert errors["sparse_linear_attention"] < 0.01
    assert contest.kept == 2 / 24
    for run in contest.partial.values():
        assert relative_l2(run(), next(iter(contest.ours.values()))()) > 0.1


def test_a_rival_that_this_pytorch_cannot_compile_is_left_out(capsys):
    def compiled(function):
        def run(*arguments):
            raise RuntimeError("no compiler")

        return run

    assert SMALL["sparse_linear_attention_bf16"](CPU, compiled).rivals == {}
    assert f"{IN_PYTORCH} does not run here: RuntimeError: no compiler" in capsys.readouterr().out


def test_alike_values_are_packed():
    """Quantising would copy others first, and its time would be the copy's."""
    values = ops_sparse.alike_values(Draws(CPU), 1000, 3, 64)
    assert values.is_contiguous()
    later, earlier = values[:, 1:].float(), values[:, :-1].float()
    assert (later * earlier).sum() / earlier.square().sum() == pytest.approx(0.99, abs=0.01)


def test_block_sparsity_is_timed_by_mass_with_the_share_that_it_keeps():
    cases = [case for case in sparse.CASES if case.tier is BLOCK_SPARSE]
    masses = (0.6, 0.7, 0.9, 0.95, 0.98)
    assert [case.name.split("(")[1].split(")")[0] for case in cases] == [f"mass={mass}" for mass in masses]
    kept, errors = [], []
    for case in cases:
        small = functools.partial(case.build.func, 2, 600, 64, **case.build.keywords)
        contest = small(CPU, lambda function: function)
        assert set(contest.partial) == {DENSE}
        errors.append(measure_errors(contest)["block_sparse_attention"])
        assert errors[-1] <= error_limit(contest, {}, case.tier.limits)
        kept.append(contest.kept)
    assert kept == sorted(set(kept))
    assert 0.05 < kept[0] < kept[-1] < 1
    assert errors == sorted(set(errors), reverse=True)
