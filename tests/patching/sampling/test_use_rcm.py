"""use_rcm on whole tiny pipelines against the published sampler, written out here on the bare transformer."""

import copy
import itertools
import logging
import math

import pytest
import torch
from diffusers import SkyReelsV2Pipeline, WanPipeline

import turbo_rcm_patch as trp
from tests.patching.sampled_videos import (
    LATENTS,
    a_servers_copy,
    assert_same_video,
    randn,
    record_calls,
    seeded,
    t2v_velocity,
    text,
)
from tests.tiny_wan import frames_of, tiny_call, tiny_wan_pipeline
from turbo_rcm_patch.scheduler import RCMScheduler


def published(velocity, noise, num_steps, generator, *, sigma_max=80.0, stochastic=True, dtype=torch.float32):
    """The published sampler on velocity(x in dtype, timestep), noise [B, ...] and one generator or one per sample."""
    angles = torch.tensor([math.atan(sigma_max), *[1.5, 1.4, 1.0][: num_steps - 1], 0], dtype=torch.float64)
    times = torch.sin(angles) / (torch.cos(angles) + torch.sin(angles))
    x = noise.to(torch.float64) * times[0]
    for t, t_next in itertools.pairwise(times):
        timestep = (1000 * t.float()).to(torch.bfloat16).float()
        v = velocity(x.to(dtype), timestep).to(torch.float64)
        x = (1 - t_next) * (x - t * v) + t_next * randn(x.shape, generator) if stochastic else x - (t - t_next) * v
    return x.float()


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_equals_the_published_sampler(steps, stochastic):
    pipe = tiny_wan_pipeline()
    trp.use_rcm(pipe, stochastic=stochastic)
    prompts, ours, theirs = ["a cat", "two dogs"], seeded(1), seeded(1)
    video = pipe(**tiny_call(prompt=prompts, num_inference_steps=steps, generator=ours)).frames
    noise = randn((2, *LATENTS), theirs)
    assert_same_video(video, published(t2v_velocity(pipe, prompts), noise, steps, theirs, stochastic=stochastic))
    assert torch.equal(ours.get_state(), theirs.get_state())


def test_equals_the_published_sampler_in_bf16():
    """The state must stay fp64 between the steps: one rounding more and bf16 inputs of the network flip."""
    pipe = tiny_wan_pipeline(dtype=torch.bfloat16)
    trp.use_rcm(pipe)
    theirs = seeded(1)
    video = frames_of(pipe, num_inference_steps=4, seed=1)
    velocity = t2v_velocity(pipe, tiny_call()["prompt"])
    assert_same_video(video, published(velocity, randn((1, *LATENTS), theirs), 4, theirs, dtype=torch.bfloat16))


def test_one_generator_per_sample():
    pipe = tiny_wan_pipeline()
    trp.use_rcm(pipe)
    prompts, theirs = ["a cat", "two dogs"], seeded(1, 2)
    video = pipe(**tiny_call(prompt=prompts, generator=seeded(1, 2))).frames
    noise = randn((2, *LATENTS), theirs)
    assert_same_video(video, published(t2v_velocity(pipe, prompts), noise, 2, theirs))
    alone = frames_of(pipe, prompt=prompts[1], seed=2)
    assert_same_video(video[1:], alone)


def test_image_to_video_equals_the_published_sampler():
    pipe = tiny_wan_pipeline("i2v")
    seen = record_calls(pipe.transformer)
    trp.use_rcm(pipe, 200.0, stochastic=False)
    video = frames_of(pipe, "i2v", num_inference_steps=3, seed=1)
    call = seen[0]
    condition = call["hidden_states"][:, 16:]
    assert all(torch.equal(later["hidden_states"][:, 16:], condition) for later in seen)  # only the latents are scaled

    @torch.no_grad()
    def velocity(x, timestep):
        inputs = {**call, "hidden_states": torch.cat([x, condition], 1), "timestep": timestep.expand(1)}
        return pipe.transformer(**inputs)[0]

    noise = randn((1, *LATENTS), seeded(1))
    assert_same_video(video, published(velocity, noise, 3, None, sigma_max=200.0, stochastic=False))


def test_per_token_timesteps_equal_the_published_sampler():
    pipe = tiny_wan_pipeline("ti2v")
    seen = record_calls(pipe.transformer)
    trp.use_rcm(pipe)
    theirs = seeded(1)
    video = frames_of(pipe, "ti2v", num_inference_steps=4, seed=1)
    assert [call["timestep"].shape for call in seen] == [(1, 12)] * 4
    velocity = t2v_velocity(pipe, tiny_call()["prompt"])  # every token has the same time, so the same velocity
    assert_same_video(video, published(velocity, randn((1, *LATENTS), theirs), 4, theirs))


def test_ti2v_from_an_image_keeps_the_first_frame():
    pipe = tiny_wan_pipeline("ti2v_i2v")
    seen = record_calls(pipe.transformer)
    trp.use_rcm(pipe)
    theirs = seeded(1)
    video = frames_of(pipe, "ti2v_i2v", num_inference_steps=3, seed=1)
    first_frame = seen[0]["hidden_states"][:, :, :1]
    embeds = text(pipe, tiny_call()["prompt"])

    @torch.no_grad()
    def velocity(x, timestep):
        x = torch.cat([first_frame, x[:, :, 1:]], 2)
        timesteps = torch.cat([torch.zeros(1, 6), timestep.expand(1, 6)], 1)
        return pipe.transformer(x, timesteps, embeds, return_dict=False)[0]

    expected = published(velocity, randn((1, *LATENTS), theirs), 3, theirs)
    assert_same_video(video[:, :, 1:], expected[:, :, 1:])
    assert torch.equal(video[:, :, :1], first_frame)


def test_video_to_video_starts_at_its_strength():
    pipe = tiny_wan_pipeline("v2v")
    seen = record_calls(pipe.transformer)
    trp.use_rcm(pipe, stochastic=False)
    call = tiny_call("v2v", generator=seeded(1), num_inference_steps=4)
    pipe(**{**call, "strength": 0.5})
    assert [call["timestep"].item() for call in seen] == [852, 608]
    encoded = []
    pipe.scheduler.add_noise = lambda x, noise, timestep: encoded.append(x) or noise
    pipe(**{**call, "strength": 0.5})
    t = pipe.scheduler.sigmas[2]
    expected = (1 - t) * encoded[0] + t * randn((1, *LATENTS), seeded(1))
    torch.testing.assert_close(seen[0]["hidden_states"], expected.float())
    seen.clear()
    del pipe.scheduler.add_noise
    pipe(**{**call, "timesteps": [900, 500], "num_inference_steps": 2, "strength": 1.0})
    assert [call["timestep"].item() for call in seen] == [900, 500]


@pytest.mark.parametrize(
    ("boundary_ratio", "high_noise_calls"),
    [(0.99, 0), (0.9878, 0), (0.9875, 1), (0.875, 2), (0.9, 2), (0.8525, 3), (0.5, 4)],
)
def test_wan22_changes_experts_at_the_boundary(boundary_ratio, high_noise_calls):
    """The exact timesteps 987.65, 933.78, 852.90, 608.98 count. Rounded, 988 and 852 would cross 987.8 and 852.5."""
    pipe = tiny_wan_pipeline("wan22")
    pipe.register_to_config(boundary_ratio=boundary_ratio)
    high, low = record_calls(pipe.transformer), record_calls(pipe.transformer_2)
    trp.use_rcm(pipe)
    pipe(**tiny_call("wan22", num_inference_steps=4))
    assert (len(high), len(low)) == (high_noise_calls, 4 - high_noise_calls)


def test_no_guidance_unless_asked_for(caplog):
    pipe = tiny_wan_pipeline()
    calls = record_calls(pipe.transformer)
    with trp.use_rcm(pipe), caplog.at_level(logging.WARNING, logger="turbo_rcm_patch"):
        by_default = frames_of(pipe, seed=1)
        assert len(calls) == 2
        pipe(**tiny_call(generator=seeded(1)))
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "guidance_scale=1.0" in caplog.text
        caplog.clear()
        assert torch.equal(by_default, frames_of(pipe, guidance_scale=1.0, seed=1))
        assert not caplog.records
    calls.clear()
    with trp.use_rcm(pipe, classifier_free_guidance=True):
        guided = frames_of(pipe, guidance_scale=3.0, seed=1)
        assert len(calls) == 4
        assert not torch.equal(guided, by_default)


def test_restore_leaves_nothing():
    pipe = tiny_wan_pipeline()
    scheduler, attributes, config = pipe.scheduler, set(vars(pipe)), dict(pipe.config)
    before = frames_of(pipe, seed=1)
    attributes |= set(vars(pipe))  # a call leaves its own, such as _guidance_scale
    handle = trp.use_rcm(pipe)
    assert isinstance(pipe.scheduler, RCMScheduler)
    assert pipe.scheduler is handle.scheduler
    assert not torch.equal(frames_of(pipe, seed=1), before)
    handle.restore()
    assert pipe.scheduler is scheduler
    assert set(vars(pipe)) == attributes
    assert dict(pipe.config) == config
    assert torch.equal(frames_of(pipe, seed=1), before)
    with pytest.raises(RuntimeError, match="restored already"):
        handle.restore()


def test_a_prepare_latents_of_someone_else_is_used_and_put_back():
    pipe = tiny_wan_pipeline()
    original, noise = pipe.prepare_latents, torch.randn(1, *LATENTS)

    def theirs(*args, **kwargs):
        original(*args, **kwargs)
        return noise

    pipe.prepare_latents = theirs
    with trp.use_rcm(pipe):
        video = pipe(**tiny_call(num_inference_steps=1)).frames
        velocity = t2v_velocity(pipe, tiny_call()["prompt"])
        assert_same_video(video, published(velocity, noise, 1, None))
    assert pipe.prepare_latents is theirs


def test_with_restores_also_after_an_error_and_once():
    pipe = tiny_wan_pipeline()
    scheduler = pipe.scheduler
    with (
        pytest.raises(ValueError, match=r"num_inference_steps=50.*num_inference_steps=4, guidance_scale=1\.0"),
        trp.use_rcm(pipe),
    ):
        pipe(**tiny_call(num_inference_steps=50))
    assert pipe.scheduler is scheduler
    with trp.use_rcm(pipe) as handle:
        handle.restore()
    assert pipe.scheduler is scheduler


def test_errors_change_nothing():
    pipe = tiny_wan_pipeline()
    scheduler, attributes = pipe.scheduler, set(vars(pipe))
    with pytest.raises(ValueError, match="sigma_max"):
        trp.use_rcm(pipe, sigma_max=-1.0)
    with pytest.raises(ValueError, match="decrease strictly"):
        trp.use_rcm(pipe, sigmas=[0.5, 0.9])
    assert pipe.scheduler is scheduler
    assert set(vars(pipe)) == attributes
    handle = trp.use_rcm(pipe)
    with pytest.raises(RuntimeError, match="active on this pipeline"):
        trp.use_rcm(pipe)
    assert pipe.scheduler is handle.scheduler
    ours, pipe.scheduler = pipe.scheduler, scheduler
    with pytest.raises(RuntimeError, match="scheduler was replaced"):
        handle.restore()
    with pytest.raises(RuntimeError, match="scheduler was replaced"):
        pipe(**tiny_call())
    pipe.scheduler = ours
    handle.restore()


def test_unsupported_pipelines():
    parts = tiny_wan_pipeline().components
    shared = {name: parts[name] for name in ("tokenizer", "text_encoder", "vae", "scheduler")}
    with pytest.raises(TypeError, match="SkyReelsV2Pipeline; supported are WanPipeline, WanImageToVideoPipeline"):
        trp.use_rcm(SkyReelsV2Pipeline(**shared, transformer=None))
    with pytest.raises(TypeError, match="AutoencoderKLWan"):
        trp.use_rcm(parts["vae"])
    with pytest.raises(ValueError, match="no scheduler"):
        trp.use_rcm(WanPipeline(**{**parts, "scheduler": None}))


class Wrapped:
    """A scheduler as diffusers' example of a server wraps it."""

    def __init__(self, scheduler):
        self.scheduler = scheduler

    def __getattr__(self, name):
        return getattr(vars(self)["scheduler"], name)


def a_servers_copy_with_a_wrapped_scheduler(pipe):
    twin = copy.copy(pipe)
    twin.scheduler = Wrapped(copy.deepcopy(pipe.scheduler))
    return twin


@pytest.mark.parametrize("was_called", [False, True])
@pytest.mark.parametrize("make", [copy.copy, a_servers_copy, a_servers_copy_with_a_wrapped_scheduler])
def test_copies_sample_by_their_own_generator_and_without_guidance(make, was_called):
    pipe = tiny_wan_pipeline()
    handle = trp.use_rcm(pipe)
    expected = frames_of(pipe, seed=1)
    if not was_called:
        handle.restore()
        handle = trp.use_rcm(pipe)
    twin, state = make(pipe), torch.get_rng_state()
    assert torch.equal(frames_of(twin, seed=1), expected)
    assert not torch.equal(frames_of(twin, seed=2), expected)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(RuntimeError, match=r"a copy of a pipeline that use_rcm was called on"):
        trp.use_rcm(twin)
    handle.restore()
    with pytest.raises(RuntimeError, match="restored on the pipeline that this is a copy of"):
        twin(**tiny_call())


@pytest.mark.parametrize("make", [lambda pipe: WanPipeline(**pipe.components), WanPipeline.from_pipe])
@pytest.mark.parametrize(
    ("install", "caller"),
    [
        (trp.use_rcm, "use_rcm"),
        (lambda pipe: trp.use_rcm(pipe, stochastic=False), "use_rcm"),
        (lambda pipe: trp.use_distilled(pipe, recipe="lightning"), "use_distilled"),
    ],
)
def test_another_pipeline_with_the_same_parts_is_refused_until_it_has_the_sampler_too(install, caller, make):
    pipe = tiny_wan_pipeline()
    install(pipe)
    steps = len(pipe.scheduler.timesteps) if caller == "use_distilled" else 2
    expected = frames_of(pipe, num_inference_steps=steps, seed=1)
    other = make(pipe)
    other.set_progress_bar_config(disable=True)
    with pytest.raises(RuntimeError, match=f"another one, on which {caller} was called.* Call {caller} on this pipe"):
        other(**tiny_call(num_inference_steps=steps, generator=seeded(1)))
    with getattr(trp, caller)(other):
        assert torch.equal(frames_of(other, num_inference_steps=steps, seed=1), expected)
    assert torch.equal(frames_of(pipe, num_inference_steps=steps, seed=1), expected)


def test_a_saved_sampler_is_refused_without_use_rcm():
    pipe = tiny_wan_pipeline()
    pipe.scheduler = RCMScheduler()
    with pytest.raises(RuntimeError, match=r"draws noise, but no generator was given. In a pipeline, call use_rcm"):
        pipe(**tiny_call(generator=seeded(1)))


@pytest.mark.parametrize("install", [trp.use_rcm, lambda pipe: trp.use_distilled(pipe, recipe="lightning")])
def test_steps_without_a_transformer_are_refused(install):
    pipe = tiny_wan_pipeline("wan22")
    low = WanPipeline(**{**pipe.components, "transformer": None}, boundary_ratio=0.875)
    with pytest.raises(ValueError, match="belongs to the high-noise transformer, which this pipeline does not have"):
        install(low)
    high = WanPipeline(**{**pipe.components, "transformer_2": None}, boundary_ratio=0.875)
    calls = record_calls(high.transformer)
    with install(high), pytest.raises(ValueError, match="belongs to the low-noise transformer_2"):
        high(**tiny_call(num_inference_steps=4))
    assert not calls


def test_the_low_noise_expert_alone():
    pipe = tiny_wan_pipeline("wan22")
    low = WanPipeline(**{**pipe.components, "transformer": None}, boundary_ratio=1.0)
    low.set_progress_bar_config(disable=True)
    scheduler = low.scheduler
    with pytest.raises(ValueError, match=r"timestep 1000 .* call pipe\.register_to_config\(boundary_ratio=1\.001\)"):
        trp.use_distilled(low, recipe="lightning")
    assert low.scheduler is scheduler
    calls = record_calls(low.transformer_2)
    with trp.use_rcm(low):  # it begins at 988
        low(**tiny_call(num_inference_steps=4))
    low.register_to_config(boundary_ratio=1.001)
    with trp.use_distilled(low, recipe="lightning"):
        low(**tiny_call(num_inference_steps=4))
    assert len(calls) == 8
