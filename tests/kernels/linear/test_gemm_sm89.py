"""The tiles of linear_skip for sm_89: tune chooses them, and their result is that of the portable tiles."""

import pytest
import torch

from tests.kernels.linear.test_picks import ADA, AMPERE, BF16, FP16, FP32, HOPPER, LINEAR, PORTABLE, REFERENCE, gpu
from tests.tune_times import small_shapes, timed
from turbo_rcm_patch.cli.tuning import keep
from turbo_rcm_patch.kernels.choice import measured, tuned
from turbo_rcm_patch.kernels.linear.gemm_sm89 import SM89, tiles_sm89
from turbo_rcm_patch.kernels.linear.linear_skip import LINEAR_SKIP
from turbo_rcm_patch.kernels.linear.spec import LinearSpec

SHAPES = small_shapes()
SHARED_MEMORY = 99 * 1024  # bytes that a program may have on sm_89


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv(tuned.CACHE, str(tmp_path))
    measured.all_tuned.cache_clear()
    yield
    measured.all_tuned.cache_clear()


def tune(**times):
    keep(SHAPES, "a GPU", ADA, timed(**times))
    measured.all_tuned.cache_clear()


def picked(monkeypatch, capability=ADA, **options):
    with gpu(monkeypatch, capability) as device:
        fields = {"dtype": BF16, "result": BF16, "residual": BF16, "rows": 32760, "N": 1536, "K": 1536}
        spec = LinearSpec(op="linear_skip", device=device, **{"linears": "auto", **fields, **options})
        return LINEAR_SKIP.pick(spec).name


@pytest.mark.parametrize("linears", ["auto", "triton", None])
def test_without_tune_they_are_never_picked(monkeypatch, linears):
    assert picked(monkeypatch, linears=linears) == (LINEAR if linears == "auto" else PORTABLE)
    tune()  # which did not time them
    assert picked(monkeypatch, linears=linears) == PORTABLE
    tune(kernels={"linear_skip": [(SM89, 2.5)]})  # slower than the portable tiles' 2 ms
    assert picked(monkeypatch, linears=linears) == PORTABLE


def test_where_tune_found_them_faster_they_are_picked(monkeypatch, capsys):
    tune(kernels={"linear_skip": [(SM89, 1.5)]})
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"linear_skip 4.000 6.000 {SM89}" in lines
    for linears in ("auto", "triton", None):
        assert picked(monkeypatch, linears=linears) == SM89
    assert picked(monkeypatch, linears="torch") == LINEAR
    assert picked(monkeypatch, dtype=FP32) == LINEAR
    assert picked(monkeypatch, implementation="torch") == LINEAR
    assert picked(monkeypatch, capability=AMPERE) != SM89
    assert picked(monkeypatch, capability=HOPPER) != SM89


def test_their_result_is_that_of_the_portable_tiles():
    B, S, C, K = 2, 70, 136, 72
    a, weight, bias, residual = (torch.randn(shape).half() for shape in ((B, S, K), (C, K), (C,), (B, S, C)))
    arguments = (a, weight, bias, residual, None, torch.randn(1, 1, C), FP16, 1.0, 1.0, None, None, None, None, None)
    ours, portable = (LINEAR_SKIP.named(name).launch(*arguments) for name in (SM89, PORTABLE))
    # The sums are in fp32, whose order depends on the tiles; rounding them to fp16 may differ by one step.
    torch.testing.assert_close(ours, portable, rtol=2**-10, atol=1e-4)
    expected = LINEAR_SKIP.named(REFERENCE).launch(*arguments)
    torch.testing.assert_close(ours, expected, rtol=2e-3, atol=2e-2)


def test_two_programs_fit_the_shared_memory():
    for tiles in tiles_sm89(ADA, BF16, False):
        size = (tiles.rows + tiles.columns) * tiles.depth * BF16.itemsize * tiles.num_stages
        assert size * tiles.programs <= SHARED_MEMORY
