"""The comparisons of benchmarks: what errs more than its tier may is not timed."""

import math

import pytest
import torch

from scripts.benchmarks import comparison as module
from scripts.benchmarks.comparison import compare_checked
from tests.bench.damage import damage_block
from tests.tiny_ltx2 import tiny_ltx2_call, tiny_ltx2_pipeline
from tests.tiny_wan import rcm_pipeline, tiny_call
from turbo_rcm_patch.bench import compare
from turbo_rcm_patch.bench import variants as variants_module
from turbo_rcm_patch.bench.cases import build_pipeline, install_few_steps, random_inputs
from turbo_rcm_patch.bench.report import comparison_table
from turbo_rcm_patch.config import Exact
from turbo_rcm_patch.patching.families import CASES
from turbo_rcm_patch.patching.families.vae import decoder, forward
from turbo_rcm_patch.tiers import EXACT

CALL = tiny_call(output_type="np", guidance_scale=1.0)


@pytest.fixture
def pipe():
    return rcm_pipeline()


def test_a_step_of_every_variant_is_compared_with_fp32(pipe):
    pipe.transformer.to(torch.bfloat16)
    comparison = compare_checked(pipe, CALL, repeats=1, warmups=0)
    unpatched, patched = comparison.variants
    assert 1e-4 < patched.step_error <= EXACT.limits.factor * unpatched.step_error < 0.05
    assert "a step: relative L2 to fp32" in comparison_table(comparison)


def test_what_every_variant_decodes_is_compared_with_fp32(pipe, monkeypatch):
    pipe.register_modules(vae=build_pipeline(CASES["tiny"], torch.float32, torch.device("cpu")).vae.to(torch.bfloat16))
    call = {**CALL, "num_inference_steps": 1, "height": 16, "width": 32}
    comparison = compare_checked(pipe, call, repeats=1, warmups=0)
    unpatched, patched = comparison.variants
    assert 1e-4 < patched.decode_error <= EXACT.limits.factor * unpatched.decode_error < 0.1
    assert "decoding: relative L2 to fp32" in comparison_table(comparison)
    steps_alone = compare_checked(pipe, {**call, "output_type": "latent"}, repeats=1, warmups=0)
    assert all(variant.decode_error is None for variant in steps_alone.variants)
    assert "decoding" not in comparison_table(steps_alone)

    monkeypatch.setattr(module, "ORACLE_LATENTS", 1)
    right = decoder.decoded
    later = lambda *args: (part if i == 0 else 1.05 * part for i, part in enumerate(right(*args)))  # noqa: E731
    monkeypatch.setattr(forward, "decoded", later)
    with pytest.raises(RuntimeError, match=r"the patched VAE's frames are .* apart .* in the first 1 frames allow"):
        compare_checked(pipe, {**call, "num_frames": 9}, config=Exact(vae_chunk=1))

    monkeypatch.setattr(forward, "decoded", lambda *args: (1.05 * part for part in right(*args)))
    with pytest.raises(RuntimeError, match=r"the patched VAE errs more.*nothing was timed"):
        compare_checked(pipe, call)


@pytest.mark.parametrize("expert", [0, 1])
def test_both_experts_are_judged(monkeypatch, expert):
    """The second one runs in the third step."""
    pipe = build_pipeline(CASES["tiny-experts"], torch.float32, torch.device("cpu"))
    install_few_steps(pipe)
    name = ("transformer", "transformer_2")[expert]
    call = {**random_inputs(pipe), "height": 16, "width": 32, "num_frames": 5, "guidance_scale": 1.0}
    call |= {"num_inference_steps": 3, "output_type": "latent"}
    options = {"repeats": 1, "warmups": 0}
    unpatched, patched = compare_checked(pipe, call, **options).variants
    assert max(unpatched.step_error, patched.step_error) < 1e-5
    compare_checked(pipe, {**call, "num_inference_steps": 1}, **options)  # runs the first one alone
    damage_block(monkeypatch, variants_module, f"{name}.blocks.1", lambda output: output + 0.01 * output.roll(1, -1))
    with pytest.raises(RuntimeError, match=rf"^the patched {name} errs more"):
        compare_checked(pipe, call, **options)


def test_a_sound_that_is_nan_is_not_timed(monkeypatch):
    """It is the second output."""
    call = tiny_ltx2_call()
    del call["generator"], call["return_dict"]
    damage_block(monkeypatch, variants_module, "transformer.transformer_blocks.1", lambda y: (y[0], y[1] * math.nan))
    with pytest.raises(RuntimeError, match=r"^the patched transformer errs more than it may: a relative L2 of nan"):
        compare_checked(tiny_ltx2_pipeline(), call)


@pytest.mark.parametrize(("config", "what"), [("exact", "the patched"), ("quantized", "the exactly patched")])
def test_a_patch_that_errs_more_is_not_timed(pipe, monkeypatch, config, what):
    """The damage is small for 8 bits. So beside these the exact tier is judged too."""
    damage_block(
        monkeypatch, variants_module, "transformer.blocks.1", lambda output: output + 0.01 * output.roll(1, -1)
    )
    monkeypatch.setattr(compare, "timed_generation", _one_generation(compare.timed_generation))
    with pytest.raises(RuntimeError, match=rf"^{what} transformer errs.*nothing was timed.*turbo-rcm verify"):
        compare_checked(pipe, CALL, config=config)
    assert "forward" not in vars(pipe.transformer.blocks[1])


def _one_generation(generate):
    """Return ``generate``, which fails at its second call. The first call shows the oracle its inputs."""
    left = [generate]
    return lambda *args, **kwargs: left.pop()(*args, **kwargs)
