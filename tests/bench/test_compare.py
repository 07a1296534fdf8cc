import dataclasses
import json
import weakref

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from tests.bench.damage import damage_block
from tests.tiny_wan import rcm_pipeline, tiny_call
from turbo_rcm_patch.bench import compare as module
from turbo_rcm_patch.bench import variants as variants_module
from turbo_rcm_patch.bench.coding import decode_flops
from turbo_rcm_patch.bench.compare import compare
from turbo_rcm_patch.bench.report import NO_SPEED_UPS, comparison_table, plot
from turbo_rcm_patch.bench.timing import StageTimings, TimedGeneration
from turbo_rcm_patch.embedded import load_embedded_pipeline
from turbo_rcm_patch.patching import Patch, use_rcm

CALL = tiny_call(output_type="np", guidance_scale=1.0)
LATENTS = torch.ones(1, 16, 1, 1, 1)  # of generations that are not run


@pytest.fixture
def pipe():
    return rcm_pipeline()


def test_variants_share_the_seed_and_agree(pipe):
    comparison = compare(pipe, CALL, seed=3, repeats=1, warmups=0, settings={"model": "tiny"})
    unpatched, patched = comparison.variants
    assert (unpatched.name, patched.name) == ("unpatched", "patched")
    assert unpatched.latents is None
    assert patched.latents.relative_l2 <= 1e-5
    assert patched.frames.relative_l2 <= 1e-5
    expected = pipe(**CALL, generator=torch.Generator().manual_seed(3)).frames[0]
    assert np.array_equal(unpatched.video, expected)
    assert comparison.settings == {"model": "tiny", "seed": 3}
    assert unpatched.total_speedup == unpatched.steps_speedup == 1
    assert patched.total_speedup == pytest.approx(unpatched.timings.total / patched.timings.total)


def test_the_flops_of_decoding_are_counted(pipe):
    """Twice the height and width take four times as many FLOPs, except in the attention."""
    call = {**CALL, "num_inference_steps": 1}
    comparison = compare(pipe, call, repeats=1, warmups=0)
    assert comparison.to_dict()["decode_flops"] == comparison.decode_flops > 0
    few, many = (decode_flops(pipe.vae, (1, pipe.vae.config.z_dim, 2, size, size)) for size in (4, 8))
    assert 4 * few < many < 5 * few
    assert compare(pipe, {**call, "output_type": "latent"}, repeats=1, warmups=0).decode_flops is None


def test_a_difference_made_by_the_patch_is_reported(pipe, monkeypatch):
    damage_block(
        monkeypatch, variants_module, "transformer.blocks.1", lambda output: output + 0.01 * output.roll(1, -1)
    )
    patched = compare(pipe, CALL, repeats=1, warmups=0).variants[-1]
    assert patched.latents.relative_l2 > 1e-4
    assert patched.frames.relative_l2 > 1e-4
    assert patched.frames.psnr_db is not None
    assert 0.9 < patched.frames.ssim <= 1


@pytest.mark.parametrize(("recorded", "generations"), [(0, 3), (2, 9)])
def test_graphs_are_recorded_before_the_measurement(pipe, monkeypatch, recorded, generations):
    """Each generation after the patch records one graph, until there are as many as ``recorded``."""
    made, before = [], {}

    def counted(pipe, **call):
        made.append("forward" in vars(pipe.transformer.blocks[0]))
        return generate(pipe, **call)

    generate = module.timed_generation
    monkeypatch.setattr(module, "timed_generation", counted)

    def graph_count(patch):
        return min(recorded, len(made) - before.setdefault(patch, len(made) - 1))

    monkeypatch.setattr(Patch, "graph_count", property(graph_count))
    _, patched = compare(pipe, CALL, repeats=2).variants
    assert (made.count(False), made.count(True)) == (3, generations)
    assert patched.latents.relative_l2 <= 1e-5  # from the same seed all the same


def pretend(monkeypatch, total, peak):
    """Let no generation run. total, peak: functions that return its seconds and its peak of memory."""

    def generation(pipe, **call):
        return TimedGeneration(np.ones((1, 1, 2, 2, 3)), LATENTS, StageTimings(0, (1.0,), 0, 0, total(), peak()))

    monkeypatch.setattr(module, "timed_generation", generation)


def test_turns_go_there_and_back_and_warmups_are_not_in_the_medians(pipe, monkeypatch):
    """So each variant also runs after another one than in the turn before. The first turn is the warm-up."""
    totals = iter([100.0, 50.0, 2.0, 4.0, 6.0, 3.0])  # unpatched, patched, and back
    pretend(monkeypatch, lambda: next(totals), lambda: None)
    unpatched, patched = compare(pipe, CALL, warmups=1, repeats=2).variants
    assert (unpatched.timings.total, patched.timings.total) == (5.0, 2.5)
    assert patched.total_speedup == 2.0


def test_memory_of_graphs_counts(pipe, monkeypatch):
    pretend(monkeypatch, lambda: 1.0, lambda: 100)
    monkeypatch.setattr(Patch, "graph_memory", 7)
    unpatched, patched = compare(pipe, CALL).variants
    assert (unpatched.timings.peak_memory, patched.timings.peak_memory) == (100, 107)


def test_memory_that_one_variant_keeps_is_not_counted_for_another(pipe, monkeypatch):
    """Everything that was ever allocated stays: 5 bytes of an unpatched generation, 30 of a patched one."""
    kept = [1000]

    def peak():
        kept[0] += (more := 30 if "forward" in vars(pipe.transformer.blocks[0]) else 5)
        return kept[0] - more + 100

    pretend(monkeypatch, lambda: 1.0, peak)
    monkeypatch.setattr(module, "allocated", lambda device: kept[0])
    unpatched, patched = compare(pipe, CALL, warmups=1, repeats=2).variants
    assert unpatched.timings.peak_memory == 1100 + 2 * 5  # its own of the two turns before
    assert patched.timings.peak_memory == 1100 + 2 * 30


def test_what_was_left_before_is_freed_before_the_first_turn(pipe):
    cycle, freed = {"tensor": torch.ones(1)}, []
    weakref.finalize(cycle["tensor"], freed.append, True)
    cycle["itself"] = cycle
    del cycle

    def stop():
        raise InterruptedError

    with pytest.raises(InterruptedError):
        module.take_turns(pipe, None, module.Variants({"one": stop}), 0, 1, torch.device("cpu"))
    assert freed


def test_reports(pipe, tmp_path):
    comparison = compare(pipe, CALL, repeats=1, warmups=0)
    table = comparison_table(comparison)
    for label in ("text encoding", "step 2", "VAE decode", "total", "relative L2", "cosine", "PSNR"):
        assert label in table
    for gpu in (None, "a GPU"):
        environment = dataclasses.replace(comparison.environment, gpu=gpu)
        table = comparison_table(dataclasses.replace(comparison, environment=environment))
        assert ("speed-up of the total" in table, NO_SPEED_UPS in table) == (gpu is not None, gpu is None)
    assert json.loads(json.dumps(comparison.to_dict()))["variants"][1]["frames"]["cosine"] == pytest.approx(1.0)
    difference, gain = comparison.difference()
    first, second = (variant.video for variant in comparison.variants)
    assert np.array_equal(difference, gain * np.abs(second - first))
    assert 0.5 < difference.max() <= 1
    assert comparison.to_dict()["difference_gain"] == gain > 1
    equal = dataclasses.replace(comparison, variants=comparison.variants[:1] * 2)
    difference, gain = equal.difference()
    assert (difference.max(), gain) == (0, 1)
    broken = dataclasses.replace(comparison.variants[1], video=np.where(first > 0.5, np.nan, first))
    difference, gain = dataclasses.replace(comparison, variants=(comparison.variants[0], broken)).difference()
    assert np.array_equal(difference, first > 0.5)
    assert gain == 1
    plot(comparison, tmp_path / "stages.png")
    assert (tmp_path / "stages.png").read_bytes().startswith(b"\x89PNG")


def test_the_plot_has_a_part_for_each_stage_and_all_steps_in_one(pipe, monkeypatch, tmp_path):
    shown = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: shown.append(figure))
    plot(compare(pipe, CALL, repeats=1, warmups=0), tmp_path / "x.png")
    (figure,) = shown
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["text encoding", "2 steps", "VAE decode", "output"]
    assert "better" in figure.axes[0].get_xlabel()


def test_progress_bar_settings_of_the_user_come_back(pipe):
    pipe.set_progress_bar_config(disable=True, desc="mine")
    compare(pipe, tiny_call(guidance_scale=1.0), repeats=1, warmups=0)
    assert pipe._progress_bar_config == {"disable": True, "desc": "mine"}


@pytest.mark.gpu
def test_a_gpu_adds_torch_compile_and_memory():
    pipe = load_embedded_pipeline(torch.bfloat16, "cuda")
    use_rcm(pipe)
    comparison = compare(pipe, CALL, repeats=1)
    assert [variant.name for variant in comparison.variants] == ["unpatched", "torch.compile", "patched"]
    assert comparison.environment.gpu
    for variant in comparison.variants:
        timings = variant.timings
        assert timings.peak_memory > 0
        assert min(timings.text_encoding, *timings.steps, timings.vae_decode, timings.output) > 0
        assert timings.total >= timings.text_encoding + sum(timings.steps) + timings.vae_decode + timings.output
    assert all(variant.latents.cosine > 0.99 for variant in comparison.variants[1:])
    assert "peak memory" in comparison_table(comparison)


def test_a_failing_variant_leaves_the_pipeline_unpatched(pipe, monkeypatch):
    real, calls = module.timed_generation, []

    def failing_second(pipe, **call):
        calls.append(call)
        if len(calls) == 2:
            raise RuntimeError("broke while patched")
        return real(pipe, **call)

    monkeypatch.setattr(module, "timed_generation", failing_second)
    with pytest.raises(RuntimeError, match="broke while patched"):
        compare(pipe, CALL)
    assert not any("forward" in vars(submodule) for submodule in pipe.transformer.modules())
