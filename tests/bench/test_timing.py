import re
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import turbo_rcm_patch as trp
from tests.tiny_ltx2 import tiny_ltx2_call, tiny_ltx2_pipeline
from tests.tiny_wan import tiny_call, tiny_wan_pipeline
from turbo_rcm_patch.bench.report import timings_table
from turbo_rcm_patch.bench.timing import StageTimings, timed_generation
from turbo_rcm_patch.patching.families.vae.video_output import NOTE


@pytest.fixture
def slow_pipe(monkeypatch):
    """A pipeline whose text encoding, transformer, VAE decoding and output take 20, 40, 60 and 50 ms at least."""
    pipe = tiny_wan_pipeline()
    for owner, name, seconds in ((pipe.text_encoder, "forward", 0.02), (pipe.transformer, "forward", 0.04)):
        monkeypatch.setattr(owner, name, _delayed(getattr(owner, name), seconds))
    monkeypatch.setattr(pipe.vae, "decode", _delayed(pipe.vae.decode, 0.06))
    whole = pipe.video_processor.postprocess_video
    monkeypatch.setattr(pipe.video_processor, "postprocess_video", _delayed(whole, 0.05))
    return pipe


def _delayed(function, seconds):
    def delayed(*args, **kwargs):
        time.sleep(seconds)
        return function(*args, **kwargs)

    return delayed


def test_every_stage_is_timed_where_it_runs(slow_pipe):
    call = tiny_call(output_type="np", num_inference_steps=3, guidance_scale=1.0)
    timings = timed_generation(slow_pipe, **call).timings
    assert timings.text_encoding >= 0.02
    assert len(timings.steps) == 3
    assert all(step >= 0.04 for step in timings.steps)
    assert timings.vae_decode >= 0.06
    assert timings.output >= 0.05
    assert timings.total >= timings.text_encoding + sum(timings.steps) + timings.vae_decode + timings.output
    assert timings.peak_memory is None


def test_result_is_that_of_the_plain_call_and_nothing_stays_on_the_pipeline():
    pipe = tiny_wan_pipeline()
    call = tiny_call(output_type="np", guidance_scale=1.0)
    made = timed_generation(pipe, **call, generator=torch.Generator().manual_seed(1))
    assert "decode" not in vars(pipe.vae)
    assert not {"encode_prompt", "progress_bar"} & set(vars(pipe))
    assert "postprocess_video" not in vars(pipe.video_processor)
    expected = pipe(**call, generator=torch.Generator().manual_seed(1)).frames
    assert (made.frames == expected).all()
    call["output_type"] = "latent"
    assert torch.equal(made.latents, pipe(**call, generator=torch.Generator().manual_seed(1)).frames)


def test_latent_output_has_no_frames_and_no_decoding():
    made = timed_generation(tiny_wan_pipeline(), **tiny_call(guidance_scale=1.0))
    assert made.frames is None
    assert made.timings.vae_decode == made.timings.output == 0


def test_a_wrapped_method_of_the_user_survives_a_failing_call():
    pipe = tiny_wan_pipeline()

    def users_decode(*args, **kwargs):
        raise RuntimeError("decoder broke")

    pipe.vae.decode = users_decode
    with pytest.raises(RuntimeError, match="decoder broke"):
        timed_generation(pipe, **tiny_call(output_type="np"))
    assert pipe.vae.decode is users_decode


def test_medians_are_per_stage():
    runs = [
        StageTimings(1.0, (5.0, 1.0), 2.0, 0.3, 9.0, 10, 0.5),
        StageTimings(3.0, (1.0, 2.0), 1.0, 0.1, 7.0, 30, 0.7),
        StageTimings(2.0, (3.0, 9.0), 3.0, 0.2, 8.0, 20, 0.6),
    ]
    assert StageTimings.median(runs) == StageTimings(2.0, (3.0, 2.0), 2.0, 0.2, 8.0, 30, 0.6)


def test_the_table_ends_with_the_total():
    timings = StageTimings(1.0, (2.0, 3.0), 4.0, 5.0, 16.0, 2**30)

    def rows(*options):
        return [re.split(r"  +", line.strip()) for line in timings_table(timings, *options).splitlines()]

    stages = [["text encoding", "1.000 s"], ["2 steps, median 2.500 s", "5.000 s"], ["VAE decode", "4.000 s"]]
    stages += [["output", "5.000 s"]]
    assert rows() == [*stages, ["total", "16.000 s"], ["peak memory", "1.00 GiB"]]
    written = [["writing", "7.000 s"], ["total, to the finished file", "23.000 s"]]
    assert rows(7.0) == [*stages, *written, ["peak memory", "1.00 GiB"]]
    timings = replace(timings, steps=(2.0,))
    assert rows()[1] == ["1 step", "2.000 s"]
    timings = replace(timings, sound=1.5)
    assert rows()[3:6] == [["output", "5.000 s"], ["sound", "1.500 s"], ["total", "16.000 s"]]


@pytest.mark.parametrize("output_type", ["np", "pt"])
def test_a_patched_output_is_timed_and_stays_patched(output_type):
    pipe = tiny_wan_pipeline()
    with trp.patch(pipe) as patch:
        made = timed_generation(pipe, **tiny_call(output_type=output_type, guidance_scale=1.0))
        assert made.timings.output > 0
        assert NOTE in patch.summary()
    assert made.frames.shape == ((1, 5, 32, 48, 3) if output_type == "np" else (1, 5, 3, 32, 48))


def _ltx2_call():
    """A call whose output type is the pipeline's own."""
    call = tiny_ltx2_call(num_inference_steps=1)
    for name in ("output_type", "return_dict"):
        del call[name]
    return call


def test_frames_are_arrays_also_where_a_pipeline_gives_images():
    made = timed_generation(tiny_ltx2_pipeline(), **_ltx2_call())
    assert isinstance(made.frames, np.ndarray)
    assert made.frames.shape == (1, 5, 64, 96, 3)


def test_the_sound_is_a_stage_of_its_own(monkeypatch):
    """It is the work of two models. A call for latents makes none."""
    pipe = tiny_ltx2_pipeline()
    monkeypatch.setattr(pipe.audio_vae, "decode", _delayed(pipe.audio_vae.decode, 0.03))
    monkeypatch.setattr(pipe.vocoder, "forward", _delayed(pipe.vocoder.forward, 0.04))
    made = timed_generation(pipe, **_ltx2_call())
    assert made.sound is not None
    timings = made.timings
    assert timings.sound >= 0.07
    stages = (timings.text_encoding, *timings.steps, timings.vae_decode, timings.output, timings.sound)
    assert timings.total >= sum(stages)
    assert not pipe.vocoder._forward_hooks
    assert timed_generation(pipe, **_ltx2_call(), output_type="latent").timings.sound == 0
