"""The LoRA rows: random adapters, the variants beside them, and the script that the GPU session starts."""

import json

import pytest
import torch
from triton import knobs

from scripts.benchmarks import end_to_end
from scripts.benchmarks.comparison import COMPILED_AFTER_A_CHANGE, compare_checked
from scripts.benchmarks.lora import ALONE, RESCALED, SWITCHED, WITHOUT, add_random_lora, lora_variants, rescaled_once
from tests.oracle import relative_error
from turbo_rcm_patch.bench.cases import build_pipeline, random_inputs
from turbo_rcm_patch.bench.compilations import compilations
from turbo_rcm_patch.bench.variants import COMPILED
from turbo_rcm_patch.config import Exact
from turbo_rcm_patch.patching import patch, use_rcm
from turbo_rcm_patch.patching.families import CASES

CALL = {"height": 32, "width": 48, "num_frames": 5, "num_inference_steps": 2, "guidance_scale": 1.0}


def latents_of(pipe):
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    return pipe(**CALL, **random_inputs(pipe), generator=generator, output_type="latent").frames


def latents_with_adapters(pipe, names):
    """Return the unpatched pipeline's latents with one adapter in each step."""
    names, forward = iter(names), pipe.transformer.forward

    def switch_and_run(*args, **options):
        pipe.transformer.set_adapters([next(names)])
        return forward(*args, **options)

    pipe.transformer.forward = switch_and_run
    try:
        return latents_of(pipe)
    finally:
        del pipe.transformer.forward
        pipe.transformer.set_adapters(["random_0", "random_1"])


def test_the_compiled_rival_compiles_anew_after_a_change(monkeypatch):
    pipe = build_pipeline(CASES["tiny"], torch.float32, torch.device("cpu"), layers=1)
    use_rcm(pipe)
    pipe.set_progress_bar_config(disable=True)
    add_random_lora(pipe.transformer, [4])
    before = latents_of(pipe)
    (block,) = pipe.transformer.blocks
    torch.compiler.reset()
    monkeypatch.setattr(pipe.transformer, "compile_repeated_blocks", lambda: block.compile(backend="eager"))
    call = {**CALL, **random_inputs(pipe), "output_type": "latent"}
    beside = {RESCALED: lora_variants(pipe, Exact())[RESCALED]}
    changed = lambda: rescaled_once(pipe)  # noqa: E731
    options = {"with_oracle": False, "repeats": 1, "changed": changed}
    comparison = compare_checked(pipe, call, with_compile=True, beside=beside, **options)
    compiled = {variant.name: variant.compiled for variant in comparison.variants}
    assert compiled.pop(COMPILED_AFTER_A_CHANGE) >= 1
    assert compiled == {"unpatched": 0, COMPILED: 0, "patched": 0, RESCALED: 0}
    last = comparison.variants[-1]
    assert last.name == COMPILED_AFTER_A_CHANGE
    assert last.latents.relative_l2 > 1e-3
    assert torch.equal(latents_of(pipe), before)
    once = call | {"num_inference_steps": 1}
    without = compare_checked(pipe, once, with_compile=False, warmups=0, **options)
    assert [variant.name for variant in without.variants] == ["unpatched", "patched"]


def test_kernels_that_triton_compiles_are_counted(monkeypatch):
    seen = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **options: seen.append(options))
    with compilations() as count:
        assert count() == 0
        knobs.runtime.jit_post_compile_hook(key="a kernel")
        assert count() == 1
    knobs.runtime.jit_post_compile_hook(key="another")
    assert (count(), seen) == (1, [{"key": "a kernel"}, {"key": "another"}])


def test_variants_are_what_they_are_called():
    pipe = build_pipeline(CASES["tiny"], torch.float32, torch.device("cpu"), layers=1)
    use_rcm(pipe)
    without = latents_of(pipe)
    add_random_lora(pipe.transformer, [4, 7])
    with_lora = latents_of(pipe)
    assert relative_error(with_lora, without) > 0.01
    config = Exact()
    switches = lora_variants(pipe, config)
    with switches[WITHOUT]():
        assert relative_error(latents_of(pipe), without) <= 1e-5
    with switches[RESCALED]():
        assert relative_error(latents_of(pipe), with_lora) > 1e-3
    with switches[RESCALED]():  # by other scales than before
        again = latents_of(pipe)
    with switches[RESCALED]():
        assert relative_error(latents_of(pipe), again) > 1e-3
    alone = latents_with_adapters(pipe, ["random_0", "random_0"])
    with switches[ALONE]():
        assert relative_error(latents_of(pipe), alone) <= 1e-5
    in_turns = latents_with_adapters(pipe, ["random_0", "random_1"])
    assert relative_error(in_turns, alone) > 1e-3
    with switches[SWITCHED]():
        assert relative_error(latents_of(pipe), in_turns) <= 1e-5
    with patch(pipe, config):
        assert relative_error(latents_of(pipe), with_lora) <= 1e-5
    assert torch.equal(latents_of(pipe), with_lora)


def test_script(tmp_path, capsys):
    path = tmp_path / "lora.json"
    options = ["--config", "tiny", "--layers", "1", "--steps", "2", "--repeats", "1"]
    options += ["--no-compile", "--lora", "4", "4"]
    assert end_to_end.main([*options, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["settings"]["lora_ranks"] == [4, 4]
    assert [v["name"] for v in result["variants"]] == ["unpatched", "patched", WITHOUT, RESCALED, ALONE, SWITCHED]
    assert all(len(v["timings"]["steps"]) == 2 for v in result["variants"])
    assert "+ LoRA" in result["patch_summary"]
    with pytest.raises(SystemExit):
        end_to_end.main([*options, "--ulysses", "2"])
    assert "leave --ulysses out" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        end_to_end.main([*options, "--steps", "1"])
    assert "must be 2 at least" in capsys.readouterr().err
