"""The kept blocks and the error of block-sparse attention: in verify, in its script, and on the results page."""

import pytest

from scripts.benchmarks import measure_block_sparsity
from tests.patching.launches import around_launches
from tests.tiny_wan import rcm_pipeline, tiny_call
from turbo_rcm_patch import kernels
from turbo_rcm_patch.bench.parts import LEFT_OUT, PV, QK
from turbo_rcm_patch.bench.report import verification_table
from turbo_rcm_patch.bench.variants import DENSE_PATCH, PATCHED, single_process
from turbo_rcm_patch.bench.verify import verify
from turbo_rcm_patch.config import BlockSparse, Quantized, resolve_config

OPTIONS = {"quantize": (), "min_tokens": 0, "blocks": (4, 4)}


@pytest.fixture
def ops(monkeypatch):
    """The shares that the sparse ops themselves kept, in order."""
    shares = []

    def around(launch):
        def watched(q, k, v, mass, block_q, block_k):
            shares.append(kernels.kept_share(q, k, mass=mass, block_q=block_q, block_k=block_k))
            return launch(q, k, v, mass, block_q, block_k)

        return watched

    around_launches(monkeypatch, "BLOCK_SPARSE_ATTENTION", around)
    return shares


def test_verify_says_what_every_block_keeps(ops):
    call = tiny_call(guidance_scale=1.0, num_inference_steps=1)
    verification = verify(rcm_pipeline(), call, config=BlockSparse(**OPTIONS, mass=0.3))
    assert [(one.block, one.step) for one in verification.kept] == [(f"transformer.blocks.{i}", 1) for i in range(2)]
    assert [one.share for one in verification.kept] == pytest.approx(ops[::3])  # then the parts run it twice more
    assert all(0 < one.share < 1 for one in verification.kept)
    assert verification.to_dict()["kept"]["transformer.blocks.0"] == {1: verification.kept[0].share}
    table = verification_table(verification)
    assert "block-sparse attention of" in table
    assert f"{100 * verification.kept[1].share:.1f}" in table


def test_verify_of_all_of_the_mass_and_of_exact_layers():
    call = tiny_call(guidance_scale=1.0, num_inference_steps=1)
    verification = verify(rcm_pipeline(), call, config=BlockSparse(**OPTIONS, mass=1.0))
    assert verification.ok, verification_table(verification)
    assert [one.share for one in verification.kept] == [1.0, 1.0]
    assert max(part.error for part in verification.parts) <= 1e-4
    verification = verify(rcm_pipeline(), call, config=BlockSparse(**OPTIONS, mass=0.3, exact_layers=(0, 1)))
    assert [one.share < 1 for one in verification.kept] == [True, False]


@pytest.mark.parametrize("quantize", [(), ("attention",)], ids=["exact", "8 bits"])
def test_verify_measures_the_attention_that_runs(quantize):
    call = tiny_call(guidance_scale=1.0, num_inference_steps=1)
    errors = []
    for mass in (1.0, 0.3):
        config = BlockSparse(**{**OPTIONS, "quantize": quantize}, mass=mass, exact_layers=(0, 1))
        parts = verify(rcm_pipeline(), call, config=config).parts
        sparse, dense = ({part.part: part.error for part in parts if part.block.endswith(end)} for end in ("0", "1"))
        assert not {QK, PV} & set(sparse)
        assert LEFT_OUT not in dense
        errors.append(sparse[LEFT_OUT])
    assert errors[0] < 0.05 < errors[1]


def test_the_script_measures_every_layer_at_the_first_and_last_step(monkeypatch):
    script = measure_block_sparsity
    call = tiny_call(guidance_scale=1.0)
    monkeypatch.setattr(script, "EMBEDDED_CALL", {name: call[name] for name in ("height", "width", "num_frames")})
    monkeypatch.setattr(script, "BLOCKS", (4, 4))
    pipe = rcm_pipeline()
    few, dense, last = (
        list(script.layers_at(pipe, script.config_of(*of), 0)) for of in ((0.3,), (1.0,), (0.3, (1, 0)))
    )
    names = [(f"blocks.{block}", step) for step in (1, 4) for block in range(2)]
    assert [(row["block"], row["step"]) for row in few] == names
    assert all(row["kept"] < 1 and row["error"] > 1e-3 for row in few)
    assert all(row["kept"] == 1 and row["error"] <= 1e-6 for row in dense)
    assert last == dense[:2] + few[2:]
    assert not any(block._forward_pre_hooks for block in pipe.transformer.blocks)


def test_beside_it_runs_the_patch_whose_attention_is_dense():
    pipe = rcm_pipeline()
    switches = single_process(pipe, resolve_config("block_sparse"), with_compile=False).switches
    assert list(switches)[-2:] == [DENSE_PATCH, PATCHED]
    with switches[DENSE_PATCH]() as applied:
        assert applied.config == Quantized()
    assert DENSE_PATCH not in single_process(pipe, resolve_config("quantized"), with_compile=False).switches
