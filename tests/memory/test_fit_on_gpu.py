"""`fit` on a GPU: what stays there, the peak against the prediction, and the same video as without."""

import gc

import pytest
import torch

import turbo_rcm_patch as trp
from tests.bench.test_keep_out import key_channel
from tests.tiny_wan import tiny_wan_pipeline
from turbo_rcm_patch.bench.compare import compare
from turbo_rcm_patch.bench.keep_out import find_keep_out
from turbo_rcm_patch.bench.memory import checking_stages, searching_stages
from turbo_rcm_patch.bench.verify import verify
from turbo_rcm_patch.memory import fit_with
from turbo_rcm_patch.memory import plan as plan_module
from turbo_rcm_patch.memory.choose import Placement
from turbo_rcm_patch.memory.stages import Video, unpatched_stages

pytestmark = pytest.mark.gpu
SIZE = {"height": 480, "width": 832, "num_frames": 5}
DEVICE = torch.device("cuda")


def large_pipeline():
    """A pipeline whose transformer has 24 blocks of 33 MB in bf16."""
    wide = {"heads": 16, "layers": 24, "ffn_dim": 4096, "rope_max_seq_len": 1024}
    pipe = tiny_wan_pipeline(dtype=torch.bfloat16, **wide)
    pipe.vae.to(torch.bfloat16)
    return pipe


def video_of(pipe):
    generator = torch.Generator(DEVICE).manual_seed(0)
    return pipe("a fox", **SIZE, num_inference_steps=3, output_type="pt", generator=generator).frames.float().cpu()


@pytest.mark.parametrize("tier", ["exact", "quantized"])
def test_a_transformer_that_does_not_fit_streams(tier):
    pipe = large_pipeline()
    trp.patch(pipe, trp.Quantized(restorable=False) if tier == "quantized" else "exact")
    pipe.to(DEVICE)
    expected = video_of(pipe)
    pipe.vae.enable_tiling()
    in_tiles = video_of(pipe)
    pipe.vae.disable_tiling()
    pipe.to("cpu")
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()

    plan = None
    whole = sum(parameter.nbytes for parameter in pipe.transformer.parameters())
    for megabytes in range(700, 4000, 50):  # the least that a plan takes
        try:
            plan = trp.fit(pipe, f"{megabytes} MB", **SIZE)
            break
        except trp.DoesNotFit:
            continue
    assert "transformer" in plan.placement.streaming
    component = next(c for c in plan.components if c.name == "transformer")
    video_of(pipe)  # the first call learns the order of the blocks
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    like = in_tiles if plan.placement.tiles else expected
    assert (video_of(pipe) - like).abs().max() == 0
    resting = torch.cuda.memory_allocated() - before
    stays = sum(map(plan.placement.on_gpu, plan.components))
    assert resting <= stays + 2 * component.largest + 2**25
    assert resting < whole / 2
    assert torch.cuda.max_memory_allocated() - before <= max(plan.peaks.values())

    plan.undo()
    assert all(parameter.device.type == "cpu" for parameter in pipe.transformer.parameters())
    assert not any(parameter.is_pinned() for parameter in pipe.transformer.parameters())
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() - before < 2**26
    pipe.to(DEVICE)
    assert (video_of(pipe) - expected).abs().max() == 0


@pytest.mark.parametrize("tier", ["exact", "quantized"])
def test_variants_of_a_comparison_stay_within_the_plan(tier):
    pipe = large_pipeline()
    call = {"prompt": "a fox", **SIZE, "num_inference_steps": 2}
    pipe.to(DEVICE)
    expected = compare(pipe, call, config=tier, with_compile=False, repeats=1)
    pipe.to("cpu")
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    plan = least_plan(pipe, tier, unpatched_stages, both_ways=True)
    comparison = compare(pipe, call, config=tier, with_compile=False, repeats=1)
    for variant, resident in zip(comparison.variants, expected.variants, strict=True):
        assert variant.timings.peak_memory - before <= max(plan.peaks.values())
        assert variant.name == resident.name
        assert plan.placement.tiles or variant.latents == resident.latents
    plan.undo()


@pytest.mark.parametrize("tier", ["exact", "quantized"])
def test_a_verification_stays_within_the_plan_and_finds_the_same(tier):
    pipe = large_pipeline()
    call = {"prompt": "a fox", **SIZE, "num_inference_steps": 2}
    pipe.to(DEVICE)
    expected = verify(pipe, call, config=tier).to_dict()
    pipe.to("cpu")
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    plan = least_plan(pipe, tier, checking_stages)
    torch.cuda.reset_peak_memory_stats()
    found = verify(pipe, call, config=tier).to_dict()
    assert torch.cuda.max_memory_allocated() - before <= max(plan.peaks.values())
    assert found["blocks"] == expected["blocks"]
    assert found["parts"] == expected["parts"]
    plan.undo()


def test_a_search_stays_within_the_plan_and_finds_the_same():
    pipe, config = large_pipeline(), trp.Quantized(vae=False)
    with torch.no_grad():
        key_channel(pipe.transformer)
    call = {"prompt": "a fox", **SIZE, "num_inference_steps": 2}
    pipe.to(DEVICE)
    expected = find_keep_out(pipe, call, config=config)
    pipe.to("cpu")
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    plan = least_plan(pipe, config, searching_stages, both_ways=True)
    torch.cuda.reset_peak_memory_stats()
    found = find_keep_out(pipe, call, config=config)
    assert torch.cuda.max_memory_allocated() - before <= max(plan.peaks.values())
    assert found.names == expected.names
    assert found.steps == expected.steps
    assert all(parameter.device.type == "cpu" for block in pipe.transformer.blocks for parameter in block.parameters())
    plan.undo()


def least_plan(pipe, tier, beside, **options):
    """Fit a pipeline into the least memory that a command takes with it."""
    for megabytes in range(700, 9000, 50):
        try:
            plan = fit_with(pipe, f"{megabytes} MB", Video(480, 832, 5), tier, DEVICE, beside, **options)
        except trp.DoesNotFit:
            continue
        assert "transformer" in plan.placement.streaming
        return plan
    return None


def test_everything_streams(monkeypatch):
    pipe = tiny_wan_pipeline(dtype=torch.bfloat16, rope_max_seq_len=1024)
    pipe.vae.to(torch.bfloat16)
    pipe.to(DEVICE)
    expected = video_of(pipe)
    pipe.to("cpu")
    monkeypatch.setattr(
        plan_module,
        "choose",
        lambda components, *_: Placement(frozenset(c.name for c in components if c.blocks), tiles=False),
    )
    plan = trp.fit(pipe, **SIZE)
    assert plan.placement.streaming == {"text_encoder", "transformer"}
    assert pipe.text_encoder.shared.weight.device.type == "cpu"
    assert (video_of(pipe) - expected).abs().max() == 0


def test_what_fits_stays():
    pipe = large_pipeline()
    trp.patch(pipe)
    plan = trp.fit(pipe, **SIZE)
    assert not plan.placement.streaming
    assert not plan.placement.tiles
    assert all(p.is_cuda for name in ("transformer", "vae", "text_encoder") for p in getattr(pipe, name).parameters())
    assert video_of(pipe).isfinite().all()
    plan.undo()
    assert all(not p.is_cuda for name in ("transformer", "vae") for p in getattr(pipe, name).parameters())
