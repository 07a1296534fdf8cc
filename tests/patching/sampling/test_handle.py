"""Each recipe on whole tiny pipelines against its authors' sampler, written out here on the bare transformer."""

import itertools

import pytest
import torch

import turbo_rcm_patch as trp
from tests.patching.sampled_videos import LATENTS, assert_same_video, randn, record_calls, seeded, t2v_velocity, text
from tests.patching.sampling.test_use_rcm import published as rcm
from tests.tiny_wan import frames_of, tiny_call, tiny_wan_pipeline
from turbo_rcm_patch.recipes import recipes_for, shifted
from turbo_rcm_patch.scheduler import FewStepScheduler

NOISE = (1, *LATENTS)
TEXT_RECIPES = recipes_for(sound=False, image=False)


def record(states):
    """A callback of a call that keeps the state after each step."""
    return lambda pipe, i, t, kwargs: states.append(kwargs["latents"]) or {}


def followed(x, states, i):
    """The state after step i: x, or the recorded one, which must be x but for some roundings to bf16.

    fp32 rounds otherwise in another order of additions; where that tips a rounding to bf16, the network answers
    otherwise from there on. So a sampler in bf16 is checked step by step.
    """
    if states is None:
        return x
    ours, theirs = states[i].float(), x.float()
    assert torch.equal(ours, ours.bfloat16().float())
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-4)
    assert (ours != theirs).float().mean() < 0.02
    return ours.to(x.dtype)


def lightx2v(velocity, x, dtype=torch.float32, shift=5.0, states=None):
    """Four steps of 1000 on a shifted line of sigmas in fp32; the state is bf16 whenever the network sees it."""
    sigmas = torch.linspace(1.0, 0.0, 1001)[:-1]
    sigmas = shift * sigmas / (1 + (shift - 1) * sigmas)
    index = [1000 - step for step in (1000, 750, 500, 250)]
    timesteps, sigmas = (sigmas * 1000)[index], sigmas[index]
    for i in range(4):
        x = x.bfloat16()
        v = velocity(x.to(dtype), timesteps[i]).float()
        sigma_next = sigmas[i + 1].item() if i < 3 else 0.0
        x = followed((x.float() + (sigma_next - sigmas[i].item()) * v).bfloat16(), states, i)
    return x.float()


def lightning(velocity, x, dtype=torch.float32):
    """Euler in fp32 on the same sigmas."""
    sigmas = [1.0, 5 * 0.75 / 4, 5 * 0.5 / 3, 5 * 0.25 / 2, 0.0]
    for sigma, sigma_next in itertools.pairwise(sigmas):
        v = velocity(x.to(dtype), torch.tensor(1000 * sigma, dtype=torch.float32)).float()
        x = x + (sigma_next - sigma) * v
    return x


def dmd(velocity, x, generator, dtype=torch.float32, states=None):
    """FastVideo's and CausVid's: x_0 in fp64, rounded to the model's dtype, and noise in that dtype, frames first."""
    line = torch.arange(1000, 0, -1) / 1000
    table = 8 * line / (1 + 7 * line)
    steps = [1000, 757, 522]
    sigmas = [table[(1000 * table - step).abs().argmin()].view(1, 1, 1, 1, 1) for step in steps]
    x = x.to(dtype)
    for i, step in enumerate(steps):
        v = velocity(x, torch.tensor(float(step)))
        x0 = (x.double() - sigmas[i].double() * v.double()).to(dtype)
        if i == 2:
            return followed(x0, states, i).float()
        frames_first = x0.permute(0, 2, 1, 3, 4)
        noise = torch.randn(frames_first.shape, generator=generator, dtype=dtype)
        x = ((1 - sigmas[i + 1]) * frames_first + sigmas[i + 1] * noise).to(dtype).permute(0, 2, 1, 3, 4)
        x = followed(x, states, i)
    raise AssertionError


def causvid_lora(velocity, x, steps):
    timesteps = [1000, 934, 862, 756, 603, 410, 250, 140, 74][:steps]
    sigmas = [*(t / 1000 for t in timesteps), 0.0]
    for i, t in enumerate(timesteps):
        x = x + velocity(x, torch.tensor(float(t))) * (sigmas[i + 1] - sigmas[i])
    return x


DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", ["lightx2v", "lightning"])
def test_euler_recipes(recipe, dtype):
    pipe = tiny_wan_pipeline(dtype=dtype)
    with trp.use_distilled(pipe, recipe=recipe):
        assert pipe.scheduler.timesteps.tolist() == pytest.approx([1000, 937.5, 2500 / 3, 625], rel=1e-7)
        ours, theirs, states = seeded(1), seeded(1), []
        call = tiny_call(num_inference_steps=4, generator=ours, callback_on_step_end=record(states))
        video = pipe(**call).frames
        noise, velocity = randn(NOISE, theirs), t2v_velocity(pipe, call["prompt"])
        if recipe == "lightning":
            assert_same_video(video, lightning(velocity, noise, dtype))
        else:
            assert_same_video(video, lightx2v(velocity, noise, dtype, states=states))
        assert torch.equal(ours.get_state(), theirs.get_state())  # the first noise is the only draw


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", ["fastwan", "causvid"])
@pytest.mark.parametrize("variant", ["t2v", "ti2v"])
def test_dmd_recipes(recipe, variant, dtype):
    pipe = tiny_wan_pipeline(variant, dtype=dtype)
    with trp.use_distilled(pipe, recipe=recipe):
        assert pipe.scheduler.timesteps.tolist() == [1000, 757, 522]
        prompts, ours, theirs, states = ["a cat", "two dogs"], seeded(1), seeded(1), []
        call = tiny_call(variant, prompt=prompts, num_inference_steps=3, generator=ours)
        video = pipe(**call, callback_on_step_end=record(states)).frames
        noise = randn((2, *LATENTS), theirs)
        states = None if dtype == torch.float32 else states
        assert_same_video(video, dmd(t2v_velocity(pipe, prompts), noise, theirs, dtype, states))
        assert torch.equal(ours.get_state(), theirs.get_state())  # no draw for the last step


@pytest.mark.parametrize("steps", [1, 4, 9])
def test_causvid_lora(steps):
    pipe = tiny_wan_pipeline()
    with trp.use_distilled(pipe, recipe="causvid-lora"):
        video = frames_of(pipe, num_inference_steps=steps, seed=1)
        noise = randn(NOISE, seeded(1))
        assert_same_video(video, causvid_lora(t2v_velocity(pipe, tiny_call()["prompt"]), noise, steps))


@pytest.mark.parametrize("variant", ["wan22", "ti2v", "v2v"])
def test_rcm_is_use_rcm_bit_for_bit(variant):
    pipe = tiny_wan_pipeline(variant)
    videos = []
    for install in (trp.use_rcm, lambda pipe: trp.use_distilled(pipe, recipe="rcm")):
        with install(pipe):
            videos.append(frames_of(pipe, variant, num_inference_steps=4, seed=1))
    assert torch.equal(*videos)


def experts_velocity(pipe, prompt, seen, boundary):
    """The two transformers of Wan 2.2 from an image, given each step's sigma in thousandths."""
    embeds, condition = text(pipe, prompt), seen[0]["hidden_states"][:, 16:]
    high, low = pipe.transformer, pipe.transformer_2

    @torch.no_grad()
    def velocity(x, timestep):
        model = high if timestep >= 1000 * boundary else low
        return model(torch.cat([x, condition], 1), timestep.expand(len(x)), embeds, return_dict=False)[0]

    return velocity


@pytest.mark.parametrize(("recipe", "own"), [("rcm", 0.9), ("turbowan", None), ("rcm-i2v", 0.5)])
def test_rcm_image_to_video_with_two_experts(recipe, own):
    pipe = tiny_wan_pipeline("wan22_i2v")
    pipe.register_to_config(boundary_ratio=own)
    high, low = record_calls(pipe.transformer), record_calls(pipe.transformer_2)
    with trp.use_distilled(pipe, recipe=recipe) as handle:
        assert pipe.config.boundary_ratio == 0.9
        assert str(handle).startswith(f"{recipe.removesuffix('-i2v')}-i2v (as asked for): 4 steps (euler)")
        call = tiny_call("wan22_i2v", num_inference_steps=4, generator=seeded(1))
        video = pipe(**call).frames
        assert [c["timestep"].item() for c in high] == [996, 932]
        assert [c["timestep"].item() for c in low] == [852, 608]
        noise = randn(NOISE, seeded(1))
        velocity = experts_velocity(pipe, call["prompt"], high, 0.9)
        assert_same_video(video, rcm(velocity, noise, 4, None, sigma_max=200.0, stochastic=False))
    assert pipe.config.boundary_ratio == own


@pytest.mark.parametrize("variant", ["wan22", "wan22_i2v"])
@pytest.mark.parametrize("recipe", ["lightx2v", "lightning"])
def test_four_steps_are_two_of_each_expert(recipe, variant):
    pipe = tiny_wan_pipeline(variant)
    own = pipe.config.boundary_ratio
    high, low = record_calls(pipe.transformer), record_calls(pipe.transformer_2)
    with trp.use_distilled(pipe, recipe=recipe):
        assert pipe.config.boundary_ratio == own  # it splits the steps as the recipe's does
        pipe(**tiny_call(variant, num_inference_steps=4))
    assert [c["timestep"].item() for c in high] == [1000, 937.5]
    assert [c["timestep"].item() for c in low] == pytest.approx([2500 / 3, 625])
    pipe.register_to_config(boundary_ratio=0.7)
    with trp.use_distilled(pipe, recipe=recipe):
        assert pipe.config.boundary_ratio == 0.875
    assert pipe.config.boundary_ratio == 0.7


def test_image_to_video_with_lightx2v():
    pipe = tiny_wan_pipeline("i2v")
    seen = record_calls(pipe.transformer)
    states = []
    with trp.use_distilled(pipe, recipe="lightx2v"):
        call = tiny_call("i2v", generator=seeded(1), num_inference_steps=4, callback_on_step_end=record(states))
        video = pipe(**call).frames
    call = seen[0]

    @torch.no_grad()
    def velocity(x, timestep):
        hidden = torch.cat([x, call["hidden_states"][:, 16:]], 1)
        return pipe.transformer(**{**call, "hidden_states": hidden, "timestep": timestep.expand(1)})[0]

    assert_same_video(video, lightx2v(velocity, randn(NOISE, seeded(1)), states=states))


def test_a_recipe_of_ones_own():
    """lightx2v's first-and-last-frame models run at shift 16."""
    mine = trp.Recipe("shift 16", "euler", sigmas=shifted((1, 0.75, 0.5, 0.25), 16.0), state_dtype="bfloat16")
    pipe = tiny_wan_pipeline()
    with trp.use_distilled(pipe, recipe=mine) as handle:
        assert "shift 16 (as asked for)" in str(handle)
        states = []
        call = tiny_call(num_inference_steps=4, generator=seeded(1), callback_on_step_end=record(states))
        video = pipe(**call).frames
        velocity = t2v_velocity(pipe, call["prompt"])
        assert_same_video(video, lightx2v(velocity, randn(NOISE, seeded(1)), shift=16.0, states=states))


@pytest.mark.parametrize(
    ("recipe", "steps", "takes"),
    [("rcm", 4, "1 to 4"), ("fastwan", 3, "3"), ("lightning", 4, "4"), ("causvid-lora", 9, "1 to 9")],
)
def test_another_number_of_steps_is_an_error_that_gives_the_right_one(recipe, steps, takes):
    pipe = tiny_wan_pipeline()
    with trp.use_distilled(pipe, recipe=recipe):
        for wrong in (50, 0, 2.5) if recipe in ("rcm", "causvid-lora") else (50, 2, 2.5):
            with pytest.raises(ValueError, match=f"num_inference_steps={wrong}") as error:
                pipe(**tiny_call(num_inference_steps=wrong))
            if isinstance(wrong, int):
                assert f"takes {takes} steps. Pass num_inference_steps={steps}, guidance_scale=1.0" in str(error.value)


def test_more_steps_than_the_recipes():
    pipe = tiny_wan_pipeline("wan22_i2v")
    high, low = record_calls(pipe.transformer), record_calls(pipe.transformer_2)
    call = tiny_call("wan22_i2v", num_inference_steps=8)
    with (
        trp.use_distilled(pipe, recipe="lightning"),
        pytest.raises(ValueError, match="such as 6 or 8, at the same spacing, call use_distilled with steps="),
    ):
        pipe(**call)
    with trp.use_distilled(pipe, recipe="lightning", steps=8) as handle:
        assert "lightning (as asked for): 8 steps (euler)" in str(handle)
        pipe(**call)
        assert pipe.config.boundary_ratio == 0.9  # the pipeline's own, as its authors run it
    assert [c["timestep"].item() for c in high] == pytest.approx([1000, 35000 / 36, 937.5])
    assert [c["timestep"].item() for c in low] == pytest.approx([25000 / 28, 2500 / 3, 750, 625, 1250 / 3])
    for recipe in ("rcm", "fastwan", "turbowan"):
        with pytest.raises(ValueError, match="steps=8: "):
            trp.use_distilled(pipe, recipe=recipe, steps=8)
    pipe.scheduler = FewStepScheduler(sigmas=[1.0, 0.5])
    with pytest.raises(ValueError, match="num_inference_steps=8: this sampler takes 2 steps"):
        trp.use_distilled(pipe, steps=8)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", TEXT_RECIPES)
def test_gpu_a_generator_on_the_cpu_gives_the_video_of_the_cpu(recipe):
    """A generator on the GPU decides the video there, with and without a patch."""
    pipe = tiny_wan_pipeline()
    with trp.use_distilled(pipe, recipe=recipe):
        steps = len(pipe.scheduler.timesteps)
        expected = frames_of(pipe, num_inference_steps=steps, seed=1)
        pipe.to("cuda")
        found = frames_of(pipe, num_inference_steps=steps, seed=1)
        assert found.device.type == "cuda"
        assert (found.cpu() - expected).norm() < 0.02 * expected.norm()
        with trp.patch(pipe):
            ours = [torch.Generator("cuda").manual_seed(seed) for seed in (3, 3, 4)]
            videos = [pipe(**tiny_call(num_inference_steps=steps, generator=one)).frames for one in ours]
    assert torch.equal(videos[0], videos[1])
    assert not torch.equal(videos[0], videos[2])
