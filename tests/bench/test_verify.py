import math
from types import SimpleNamespace

import pytest
import torch

from tests.bench.damage import damage_block
from tests.oracle import relative_error, torch_device
from tests.tiny_families import tiny_family_transformer
from tests.tiny_wan import rcm_pipeline, tiny_call
from turbo_rcm_patch.bench import verify as module
from turbo_rcm_patch.bench.cases import build_pipeline, structured_inputs
from turbo_rcm_patch.bench.oracle import run_block_oracle, run_oracle
from turbo_rcm_patch.bench.report import verification_table
from turbo_rcm_patch.bench.verify import BlockCheck, PartCheck, Verification, check_outputs, named_blocks, verify
from turbo_rcm_patch.config import Exact
from turbo_rcm_patch.patching import use_rcm
from turbo_rcm_patch.patching.families import CASES
from turbo_rcm_patch.patching.families.vae import decoder, encoder, forward
from turbo_rcm_patch.tiers import EXACT

VARIANTS_AND_DTYPES = [
    ("t2v", torch.float32),
    ("i2v", torch.bfloat16),
    ("ti2v", torch.float32),
    ("wan22", torch.bfloat16),
]
BLOCKS = Exact(vae=False)  # blocks alone are checked


def call(variant="t2v", **overrides):
    return tiny_call(variant, guidance_scale=1.0, num_inference_steps=3, **overrides)


@pytest.mark.parametrize(("variant", "dtype"), VARIANTS_AND_DTYPES)
def test_every_block_of_every_variant_is_checked_at_the_first_and_last_step(variant, dtype):
    pipe = rcm_pipeline(variant, dtype)
    verification = verify(pipe, call(variant))
    assert verification.ok, verification_table(verification)
    checked = {(check.block, check.step) for check in verification.checks}
    if variant == "wan22":
        expected = {
            (f"{name}.blocks.{i}", step) for name, step in (("transformer", 1), ("transformer_2", 3)) for i in range(2)
        }
    else:
        expected = {(f"transformer.blocks.{i}", step) for i in range(2) for step in (1, 3)}
    assert checked == expected
    assert {check.dtype for check in verification.checks} == {dtype}
    assert all(0 < check.unpatched_error < (1e-6 if dtype == torch.float32 else 2e-2) for check in verification.checks)


@pytest.mark.parametrize("variant", ["t2v", "i2v", "ti2v"])
def test_the_triton_kernels_pass_and_are_what_is_checked(variant, device):
    pipe = rcm_pipeline(variant).to(torch_device(device))
    one_step = call(variant) | {"num_inference_steps": 1}
    verification = verify(pipe, one_step, config=Exact(implementation="triton", vae=False))
    assert verification.ok, verification_table(verification)
    assert verification.decoding is verification.to_dict()["decoding"] is None
    assert all(check.difference > 0 for check in verification.checks)  # sums in another order than the class's


def test_hidden_states_are_those_of_the_unpatched_generation(monkeypatch):
    pipe, seen = rcm_pipeline(), {}

    def keep_inputs(block, args, kwargs):
        seen.setdefault(block, []).append(args[0])
        return run_block_oracle(block, args, kwargs)

    damage_block(monkeypatch, module, "transformer.blocks.0", lambda output: output * math.nan)
    monkeypatch.setattr(module, "run_block_oracle", keep_inputs)
    verify(pipe, call(), config=BLOCKS, seed=5)
    at_first_step, at_last_step = seen[pipe.transformer.blocks[1]]

    expected = []
    pipe = rcm_pipeline()
    pipe.transformer.blocks[1].register_forward_pre_hook(lambda block, args: expected.append(args[0]))
    pipe(**call(), generator=torch.Generator().manual_seed(5))
    assert torch.equal(at_first_step, expected[0])
    assert torch.equal(at_last_step, expected[2])


@pytest.mark.parametrize(
    ("damage", "dtype"),
    [(lambda y: 1.01 * y, torch.float32), (lambda y: y * math.nan, torch.bfloat16)],
    ids=["scaled", "nan"],
)
def test_a_wrong_block_alone_is_named(monkeypatch, dtype, damage):
    damage_block(monkeypatch, module, "transformer.blocks.1", damage)
    verification = verify(rcm_pipeline(dtype=dtype), call() | {"num_inference_steps": 2}, config=BLOCKS)
    assert not verification.ok
    assert {check.block for check in verification.failed} == {"transformer.blocks.1"}
    last_lines = verification_table(verification).splitlines()[-2:]
    assert all("transformer.blocks.1, step" in line for line in last_lines)
    blocks = verification.to_dict()["blocks"]
    assert (blocks["failed"], blocks["worst"]["block"], blocks["worst"]["ok"]) == (2, "transformer.blocks.1", False)


def test_a_transformer_that_no_step_reached_is_not_called_verified():
    verification = verify(rcm_pipeline("wan22"), call("wan22") | {"num_inference_steps": 1}, config=BLOCKS)
    assert verification.unreached == ("transformer_2.blocks.0", "transformer_2.blocks.1")
    assert not verification.ok
    assert "transformer_2.blocks.0: no step reached it" in verification_table(verification)


def test_the_table_says_which_error_is_limited():
    checks = (
        BlockCheck("low", 1, torch.bfloat16, unpatched_error=4e-3, patched_error=3e-3, difference=9e-3),
        BlockCheck("wide", 1, torch.float32, unpatched_error=1e-7, patched_error=2e-7, difference=3e-7),
    )
    _, low, wide, *_ = verification_table(Verification(checks, (), "")).splitlines()
    assert low.endswith("9.00e-03  patched error up to 4.20e-03")
    assert wide.endswith("3.00e-07     difference up to 1.00e-05")


def test_the_table_of_parts_shows_a_nan():
    parts = tuple(PartCheck(f"block.{i}", 1, "feed_forward", error, 1e-2) for i, error in enumerate((1e-3, math.nan)))
    table = verification_table(Verification((), (), "", parts))
    (row,) = (line for line in table.splitlines() if line.startswith("feed_forward"))
    assert row.split() == ["feed_forward", "nan", "block.1,", "step", "1", "nan", "1.00e-02", "WORSE"]


def test_limits_by_dtype():
    limit = EXACT.limits.factor * 1e-3
    wide = BlockCheck("b", 1, torch.float32, unpatched_error=1e-7, patched_error=5e-7, difference=9e-6)
    assert wide.ok  # fp32: the difference counts
    assert not BlockCheck("b", 1, torch.float32, 1e-7, 1e-7, difference=2e-5).ok
    assert BlockCheck("b", 1, torch.bfloat16, unpatched_error=1e-3, patched_error=limit, difference=1.0).ok
    assert not BlockCheck("b", 1, torch.bfloat16, 1e-3, 1.01 * limit, 0.0).ok
    assert not BlockCheck("b", 1, torch.bfloat16, 1e-3, math.nan, math.nan).ok


def test_oracle_is_the_class_in_fp64_and_leaves_the_block_alone():
    pipe = rcm_pipeline()
    captured = []
    block = pipe.transformer.blocks[0]
    handle = block.register_forward_pre_hook(lambda block, args: captured.append(args))
    pipe(**call())
    handle.remove()
    before = {name: value.clone() for name, value in block.state_dict().items()}
    keys = set(vars(block))

    expected = run_oracle(block, captured[0], {}, torch.float64)
    for part in (block, block.attn1):
        part.__dict__["forward"] = lambda *args: pytest.fail("the oracle ran an instance's forward")
    oracle = run_oracle(block, captured[0], {}, torch.float64)
    for part in (block, block.attn1):
        del part.__dict__["forward"]
    assert torch.equal(oracle, expected)
    assert oracle.dtype == torch.float64
    assert set(vars(block)) == keys
    assert all(torch.equal(value, before[name]) for name, value in block.state_dict().items())

    # fp64 throughout: casting to fp32 anywhere would move it as far as the fp32 block is from it
    low = type(block).forward(block, *captured[0])
    nudged = run_oracle(block, (captured[0][0].double() * (1 + 1e-12), *captured[0][1:]), {}, torch.float64)
    assert 1e-9 < relative_error(low, oracle) < 1e-6
    assert 0 < relative_error(nudged, oracle) < 1e-11


def test_the_pipeline_is_left_as_it_was_found():
    pipe = rcm_pipeline()
    verify(pipe, call() | {"num_inference_steps": 1}, config=BLOCKS)
    for submodule in pipe.transformer.modules():
        assert "forward" not in vars(submodule)
        assert not submodule._forward_hooks


def test_to_dict_sums_up_the_blocks():
    verification = verify(rcm_pipeline(dtype=torch.bfloat16), call())
    result = verification.to_dict()
    assert result["ok"] is True
    errors = sorted(check.patched_error for check in verification.checks)
    assert result["blocks"]["patched_error"] == {
        "mean": pytest.approx(sum(errors) / len(errors)),
        "median": pytest.approx((errors[1] + errors[2]) / 2),
        "largest": errors[-1],
    }
    assert (result["blocks"]["count"], result["blocks"]["failed"]) == (len(errors), 0) == (4, 0)
    worst = result["blocks"]["worst"]
    assert (worst["block"], worst["step"]) in {(check.block, check.step) for check in verification.checks}
    assert worst["dtype"] == "bfloat16"
    assert worst["allowed"] == pytest.approx(EXACT.limits.factor * worst["unpatched_error"])


def case_and_call(dtype):
    pipe = build_pipeline(CASES["tiny"], torch.float32, torch.device("cpu"))
    use_rcm(pipe)
    pipe.vae.to(dtype)
    size = {"height": 32, "width": 32, "num_frames": 5}
    return pipe, {**structured_inputs(pipe, **size), **size, "guidance_scale": 1.0, "num_inference_steps": 1}


@pytest.mark.parametrize(("dtype", "tiled"), [(torch.bfloat16, True), (torch.float64, False)])
def test_what_the_vae_decodes_is_checked_once(dtype, tiled):
    pipe, arguments = case_and_call(dtype)
    if tiled:
        pipe.vae.enable_tiling(16, 16, 8, 8)
    verification = verify(pipe, arguments)
    decoding = verification.decoding
    assert verification.ok, verification_table(verification)
    assert (decoding.block, decoding.step, decoding.dtype) == ("vae.decode", 1, dtype)
    assert decoding.difference > 0  # channels last, and several frames at a time
    rounding = torch.finfo(torch.float32 if dtype == torch.float64 else dtype).eps  # upsampling is never wider
    assert decoding.unpatched_error < 20 * rounding
    assert f"{decoding.unpatched_error:.2e}" in verification_table(verification)
    assert "all 2 blocks and the VAE are within" in verification_table(verification)
    assert verification.to_dict()["decoding"]["dtype"] == str(dtype).removeprefix("torch.")
    assert "decode" not in vars(pipe.vae)


def decoding_judged(dtype):
    return "difference" if dtype == torch.float32 else "patched error"


@pytest.mark.parametrize(  # the quantized tier's limits are wider, but not the VAE's
    ("config", "dtype"), [("exact", torch.float32), ("quantized", torch.bfloat16)]
)
def test_a_wrong_decoder_alone_is_named(monkeypatch, dtype, config):
    pipe, arguments = case_and_call(dtype)
    right = decoder.decoded
    monkeypatch.setattr(forward, "decoded", lambda *args: (1.05 * part for part in right(*args)))
    verification = verify(pipe, arguments, config=config)
    assert [check.block for check in verification.failed] == ["vae.decode"]
    assert not verification.ok
    assert f"vae.decode, step 1: {decoding_judged(dtype)} " in verification_table(verification)


@pytest.mark.parametrize(("dtype", "is_wrong"), [(torch.float32, True), (torch.bfloat16, False)])
def test_what_the_vae_encodes_is_checked_once(monkeypatch, dtype, is_wrong):
    """A pipeline that animates an image encodes a video. A wrong encoder alone is named."""
    pipe = rcm_pipeline("i2v")
    pipe.vae.to(dtype)
    right = encoder._Encoder.encoder
    if is_wrong:
        monkeypatch.setattr(encoder._Encoder, "encoder", lambda *args: 1.05 * right(*args))
    verification = verify(pipe, call("i2v"))
    encoding = verification.encoding
    assert (encoding.block, encoding.step, encoding.dtype) == ("vae.encode", 3, dtype)
    assert [check.block for check in verification.failed] == ["vae.encode"] * is_wrong
    assert encoding.difference > 0
    assert f"{encoding.patched_error:.2e}" in verification_table(verification)
    assert verification.to_dict()["encoding"]["ok"] is not is_wrong
    assert "encode" not in vars(pipe.vae)


class TwoResults(torch.nn.Module):
    """Returns two results, as VACE's control blocks do: one for the model, or None, and one for the next block."""

    def __init__(self, first=True):
        super().__init__()
        self.linear, self.first = torch.nn.Linear(4, 4), first

    def forward(self, x):
        return (self.linear(x) if self.first else None), self.linear(x) + x


@pytest.mark.parametrize("first", [True, False])
def test_every_result_of_a_block_is_checked(first):
    block, x = TwoResults(first), torch.randn(2, 3, 4)
    with torch.no_grad():
        right = block(x)

    def check(patched):
        oracle = run_block_oracle(block, (x,), {})
        return check_outputs("b", 1, patched, right, oracle, EXACT.limits)

    assert check(right).ok
    wrong_second = (right[0], 1.01 * right[1])
    assert check(wrong_second).difference == pytest.approx(0.01, rel=1e-3)
    assert not check((right[0], right[1] * math.nan)).ok
    if first:
        assert check((1.02 * right[0], 1.01 * right[1])).difference == pytest.approx(0.02, rel=1e-3)
    else:
        with pytest.raises(ValueError, match="zip"):  # a result where there is none
            check((right[1], right[1]))


def test_blocks_of_control_models_are_named_too():
    model = tiny_family_transformer("vace")
    blocks = named_blocks(SimpleNamespace(transformer=model, transformer_2=None))
    assert blocks == {
        **{f"transformer.blocks.{index}": block for index, block in enumerate(model.blocks)},
        **{f"transformer.vace_blocks.{index}": block for index, block in enumerate(model.vace_blocks)},
    }
