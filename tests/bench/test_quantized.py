"""verify and compare of the quantized tier: the limits are its own, every part is checked, and nothing wrong passes."""

import functools
import json

import pytest
import torch

from scripts.benchmarks.comparison import compare_checked
from tests.tiny_wan import rcm_pipeline, tiny_call
from turbo_rcm_patch.bench import variants as variants_module
from turbo_rcm_patch.bench.compare import compare
from turbo_rcm_patch.bench.parts import PV, QK, SUB_LAYERS
from turbo_rcm_patch.bench.report import comparison_table, verification_table
from turbo_rcm_patch.bench.verify import verify
from turbo_rcm_patch.config import Quantized
from turbo_rcm_patch.patching import patch
from turbo_rcm_patch.patching.weights.quantize_linears import quantized_linears
from turbo_rcm_patch.tiers import QUANTIZED

LINEARS = {
    *(f"attn{i}.{name}" for i in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0")),
    "ffn.net.0.proj",
    "ffn.net.2",
}
CONFIG = Quantized(vae=False)  # test_verify.py checks the VAE
VARIANTS_AND_DTYPES = [
    ("t2v", torch.float32),
    ("i2v", torch.bfloat16),
    ("ti2v", torch.bfloat16),
    ("wan22", torch.float32),
]


def call(variant="t2v", **overrides):
    """Return the arguments of a call that runs each of the pipeline's transformers."""
    steps = 3 if variant == "wan22" else 1
    return tiny_call(variant, **{"guidance_scale": 1.0, "num_inference_steps": steps, **overrides})


@pytest.mark.parametrize(("variant", "dtype"), VARIANTS_AND_DTYPES)
def test_every_block_and_every_part_of_it_is_within_the_limits(variant, dtype):
    pipe = rcm_pipeline(variant, dtype)
    verification = verify(pipe, call(variant), config=CONFIG)
    assert verification.ok, verification_table(verification)
    assert all(1e-3 < check.judged_error <= check.allowed == QUANTIZED.limits.block for check in verification.checks)
    of_image = {"attn2.add_k_proj", "attn2.add_v_proj"} if variant == "i2v" else set()
    expected = {*SUB_LAYERS, *LINEARS, *of_image, QK, PV}
    parts = {}
    for part in verification.parts:
        parts.setdefault((part.block, part.step), set()).add(part.part)
        assert 1e-4 < part.error < 0.1
        assert part.allowed == (QUANTIZED.limits.part if part.part in SUB_LAYERS else None)
    assert set(parts) == {(check.block, check.step) for check in verification.checks}
    assert all(found == expected for found in parts.values())
    assert not quantized_linears(pipe.transformer)


def test_parts_are_those_that_are_in_8_bits():
    for quantize, expected in (("attention", {QK, PV}), ("linears", LINEARS)):
        config = Quantized(quantize=[quantize], vae=False)
        verification = verify(rcm_pipeline(), call(), config=config)
        assert verification.ok
        assert {part.part for part in verification.parts} == {*SUB_LAYERS, *expected}
    kept = Quantized(keep=["*.ffn.*"], fuse=["self_attention", "feed_forward"], vae=False)
    parts = {part.part for part in verify(rcm_pipeline(), call(), config=kept).parts}
    assert parts == {"self_attention", "feed_forward", QK, PV, *(name for name in LINEARS if name.startswith("attn1"))}


def test_exact_blocks_have_no_parts():
    assert verify(rcm_pipeline(), call()).parts == ()


def test_exact_steps_are_checked_as_they_run():
    """Attention is exact in the first of two steps."""
    verification = verify(rcm_pipeline(), call(num_inference_steps=2), config=Quantized(exact_steps=(1, 0), vae=False))
    assert verification.ok
    assert {part.step for part in verification.parts if part.part == QK} == {2}


def test_to_dict_has_the_parts():
    result = json.loads(json.dumps(verify(rcm_pipeline(), call(), config=CONFIG).to_dict()))
    assert result["ok"]
    parts = {part["part"]: part for part in result["parts"]}
    assert set(parts["self_attention"]["error"]) == {"mean", "median", "largest"}
    assert parts["self_attention"]["allowed"] == QUANTIZED.limits.part
    assert "linears in 8 bits" in result["patch_summary"]


def test_weights_that_were_to_be_freed_are_kept_for_the_checks():
    pipe = rcm_pipeline()
    before = {name: value.clone() for name, value in pipe.transformer.state_dict().items()}
    config = Quantized(restorable=False, vae=False)
    assert verify(pipe, call(), config=config).ok
    assert all(torch.equal(value, before[name]) for name, value in pipe.transformer.state_dict().items())
    for submodule in pipe.transformer.modules():
        assert "forward" not in vars(submodule)


# compare

GENERATION = tiny_call(output_type="np", guidance_scale=1.0)


def names(comparison):
    return [variant.name for variant in comparison.variants]


def test_variants_and_how_far_each_is_from_the_unpatched_one():
    pipe = rcm_pipeline()
    comparison = compare_checked(pipe, GENERATION, config="quantized", repeats=1, warmups=0)
    assert names(comparison) == ["unpatched", "patched exactly", "patched"]
    unpatched, exact, patched = comparison.variants
    assert exact.latents.relative_l2 <= 1e-5 < 1e-3 < patched.latents.relative_l2
    assert max(unpatched.step_error, exact.step_error) <= 1e-5 < 1e-3 < patched.step_error <= QUANTIZED.limits.step
    assert "8 bits" in comparison.patch_summary
    assert "patched exactly" in comparison_table(comparison)
    assert not quantized_linears(pipe.transformer)


def test_the_bytes_of_weights_are_those_that_the_model_has_meanwhile():
    pipe = rcm_pipeline()
    with patch(pipe, "quantized"):
        saved = sum(3 * linear.weight.numel() for linear in quantized_linears(pipe.transformer))  # of fp32
    unpatched, exact, patched = compare(pipe, GENERATION, config="quantized", repeats=1, warmups=0).variants
    tensors = *pipe.transformer.parameters(), *pipe.transformer.buffers()
    assert unpatched.weights == exact.weights == sum(tensor.nbytes for tensor in tensors)
    assert 0.9 * saved < unpatched.weights - patched.weights < saved  # less the scales


def test_torch_compile_takes_part_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(variants_module, "_has_torchao", lambda: False)
    pipe, calls = rcm_pipeline(), []

    def compiled_call(block, *args):
        calls.append(quantized_linears(block))
        return type(block).forward(block, *args)

    def compile_repeated_blocks():
        for block in pipe.transformer.blocks:
            block._compiled_call_impl = functools.partial(compiled_call, block)

    monkeypatch.setattr(pipe.transformer, "compile_repeated_blocks", compile_repeated_blocks)
    monkeypatch.setattr(pipe.vae.decoder, "compile", lambda: None)  # takes a minute
    comparison = compare(pipe, GENERATION, config="quantized", with_compile=True, repeats=1, warmups=1)
    assert names(comparison) == ["unpatched", "torch.compile", "patched exactly", "patched"]
    assert len(calls) == 2 * 2 * GENERATION["num_inference_steps"]  # turns, blocks
    assert not any(calls)  # the 8-bit weights of another turn are not left
