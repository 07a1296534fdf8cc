"""The contests of the sparse tier's ops, at small sizes: ours is within the tier's limits; what its figures show."""

import functools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from turbo_rcm_patch.bench import ops, ops_conv, ops_quantized, ops_sparse
from turbo_rcm_patch.bench.ops import OpCase, error_limit, measure_errors, run_case
from turbo_rcm_patch.bench.ops_sparse import DENSE
from turbo_rcm_patch.bench.report import ops_table
from turbo_rcm_patch.tiers import SPARSE

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from result_tables.ops import ops_table as page_of

CPU = torch.device("cpu")
SMALL = {
    "sparse_linear_attention": functools.partial(ops_sparse.sparse_linear_attention, 2, 1500, 64),
    "norms_sparse_linear_attention": functools.partial(ops_sparse.norms_sparse_linear_attention, 2, 1500, 64),
}
ON_A_GPU = {**SMALL, "sparse_kernel": functools.partial(ops_sparse.sparse_kernel, 2, 1500, 64)}


def check(build, device):
    contest = build(device, lambda function: function)
    errors = measure_errors(contest)
    (name,) = contest.ours
    assert torch.finfo(torch.bfloat16).eps < errors[name] <= error_limit(contest, errors, SPARSE.limits)
    shifted = replace(contest, oracle=lambda rows: contest.oracle((rows + 1) % contest.tokens))
    assert measure_errors(shifted)[name] > 0.1


@pytest.mark.parametrize("name", SMALL)
def test_ours_is_within_the_tiers_limit(name):
    check(SMALL[name], CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_A_GPU)
def test_ours_is_within_the_tiers_limit_on_a_gpu(name):
    check(ON_A_GPU[name], torch.device("cuda"))


def test_cases_are_of_the_tier_and_their_names_unique():
    cases = (*ops.CASES, *ops_conv.CASES, *ops_quantized.CASES, *ops_sparse.CASES)
    assert len({case.name for case in cases}) == len(cases)
    assert all(case.tier is SPARSE and case.build.func.__name__ in ON_A_GPU for case in ops_sparse.CASES)


@pytest.mark.parametrize(("most", "missed"), [(1e9, False), (1e-9, True), (None, False)])
def test_what_takes_longer_than_wanted_is_marked(most, missed):
    case = OpCase("small", SMALL["norms_sparse_linear_attention"], {}, SPARSE, most)
    result = run_case(case, CPU, copy_bandwidth=1e9, rounds=2, compile_rivals=False)
    assert set(result.speedups) == {DENSE}
    assert ("(above 1e-09)" in ops_table([result])) == missed
    timings = {name: vars(timing) for name, timing in result.timings.items()}
    page = page_of({"results": [{**vars(result), "timings": timings}], "rounds": 2, "copy_bandwidth": 1e9})
    time = f"{result.timings[result.best].milliseconds:.3f}"
    assert (f"| **{time}** |" if missed else f"| {time} |") in page
    assert (most is not None) == (f"| {most or 0:g} ms |" in page)
