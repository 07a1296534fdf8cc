"""The schedulers against published values and literal algorithms, and as diffusers' pipelines use a scheduler."""

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from turbo_rcm_patch.recipes import RECIPES
from turbo_rcm_patch.scheduler import FewStepScheduler, RCMScheduler, scheduler_of
from turbo_rcm_patch.solvers import lcm_step, model_timesteps, rcm_times, sde_step

STEPS = (1, 2, 3, 4)


def velocity(x, t):
    """Stands for the network: some smooth function of state and time."""
    return torch.sin(3 * x) + t * x


def sample(scheduler, noise):
    """The loop of a pipeline: no generator for step, timesteps iterated."""
    x = scheduler.scale_initial_noise(noise)
    for t in scheduler.timesteps:
        x = scheduler.step(velocity(x.float(), t / 1000), t, x, return_dict=False)[0]
    return x


@pytest.mark.parametrize("steps", STEPS)
def test_what_pipelines_read(steps):
    scheduler = RCMScheduler()
    scheduler.set_timesteps(steps, device="cpu")
    assert scheduler.timesteps.shape == (steps,)
    assert scheduler.timesteps.dtype == torch.float32
    assert [float(sigma) for sigma in scheduler.sigmas] == rcm_times(steps).tolist()
    assert scheduler.order == 1
    assert scheduler.init_noise_sigma == pytest.approx(80 / 81)
    assert scheduler.config.num_train_timesteps == len(scheduler) == 1000
    x = torch.randn(2)
    assert scheduler.scale_model_input(x, scheduler.timesteps[0]) is x


@pytest.mark.parametrize("recipe", ["rcm", "lightning"])
def test_times_are_on_the_cpu_with_another_default_device(recipe):
    expected = scheduler_of(RECIPES[recipe])
    with torch.device("meta"):
        scheduler = scheduler_of(RECIPES[recipe])
    assert torch.equal(scheduler.sigmas, expected.sigmas)
    assert torch.equal(scheduler.timesteps, expected.timesteps)


def test_state_is_fp64_until_the_last_step_returns_the_first_samples_dtype():
    for dtype in (torch.float32, torch.bfloat16):
        scheduler = RCMScheduler(stochastic=False)
        scheduler.set_timesteps(3)
        x, dtypes = torch.randn(2, 3, dtype=dtype), []
        for t in scheduler.timesteps:
            x = scheduler.step(torch.randn(2, 3), t, x).prev_sample
            dtypes.append(x.dtype)
        assert dtypes == [torch.float64, torch.float64, dtype]


def test_generators():
    """step's own, the bound one, one per sample, else the global one; never a mixture."""
    x, v = torch.randn(2, 2, 5)

    def step(generator=None, bound=None, global_seed=0):
        torch.manual_seed(global_seed)
        scheduler = RCMScheduler()
        scheduler.set_timesteps(4)
        scheduler.bind_generator(bound)
        return scheduler.step(v, scheduler.timesteps[0], x, generator=generator).prev_sample

    def seeded(seed):
        return torch.Generator().manual_seed(seed)

    by_argument = step(generator=seeded(1))
    assert torch.equal(by_argument, step(bound=seeded(1), global_seed=5))
    assert torch.equal(by_argument, step(generator=seeded(1), bound=seeded(2)))
    assert not torch.equal(by_argument, step(generator=seeded(2)))
    assert torch.equal(step(global_seed=1), by_argument)
    assert not torch.equal(step(global_seed=2), by_argument)
    rows = step(bound=[seeded(1), seeded(2)])
    for row, seed in enumerate((1, 2)):
        noise = torch.randn(1, 5, generator=seeded(seed))[0]
        t, t_next = rcm_times(4)[:2].tolist()
        torch.testing.assert_close(rows[row], sde_step(x[row].double(), v[row].double(), t, t_next, noise))
    with pytest.raises(ValueError, match="3 generators for a batch of 2"):
        step(bound=[seeded(i) for i in range(3)])


def test_a_timestep_that_rounds_across_a_boundary_stays_on_its_side():
    scheduler = RCMScheduler(sigmas=[0.9, 0.8745], boundary_timestep=875.0)
    scheduler.set_timesteps(2)
    assert scheduler.timesteps.tolist() == [900, 872]
    assert RCMScheduler(sigmas=[0.9, 0.8745]).timesteps.tolist() == [900, 876]
    assert scheduler.sigmas.tolist() == [0.9, 0.8745, 0]  # the state's times are exact


def test_user_times():
    scheduler = RCMScheduler(round_timesteps_to_bf16=False)
    scheduler.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25, 0.1, 0.01])
    assert scheduler.sigmas.tolist() == [1.0, 0.75, 0.5, 0.25, 0.1, 0.01, 0]
    assert scheduler.timesteps.tolist() == pytest.approx([1000, 750, 500, 250, 100, 10])
    assert scheduler.init_noise_sigma == 1.0
    scheduler.set_timesteps(timesteps=torch.tensor([900, 300]))
    assert scheduler.sigmas.tolist() == [0.9, 0.3, 0]
    scheduler.set_timesteps(num_inference_steps=1, timesteps=[400])
    assert scheduler.timesteps.tolist() == [400]
    configured = RCMScheduler(sigmas=torch.tensor([0.75, 0.5]))
    configured.set_timesteps(2)
    assert configured.sigmas.tolist() == [0.75, 0.5, 0]
    with pytest.raises(ValueError, match="pass num_inference_steps=2"):
        configured.set_timesteps(50)


@pytest.mark.parametrize("steps", [0, 5, 50, -1, None, 2.0, "4"])
def test_wrong_number_of_steps_says_what_to_do(steps):
    with pytest.raises(ValueError, match=f"num_inference_steps={steps!r}") as error:
        RCMScheduler().set_timesteps(steps)
    if isinstance(steps, int):
        assert "1 to 4" in str(error.value)
        assert "num_inference_steps=4, guidance_scale=1.0" in str(error.value)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({"sigmas": []}, "one or more"),
        ({"sigmas": 0.5}, "one or more"),
        ({"sigmas": ["a", "b"]}, r"sigmas=\['a', 'b'\]; give one or more numbers"),
        ({"sigmas": torch.eye(2)}, "give one or more numbers"),
        ({"timesteps": [10**400]}, "give one or more numbers"),
        ({"sigmas": [0.5, 0.5]}, "decrease strictly"),
        ({"sigmas": [0.5, 0.7]}, "decrease strictly"),
        ({"sigmas": [0.5, 0.0]}, "without the final 0"),
        ({"sigmas": [1.1, 0.5]}, r"give numbers in \(0, 1\]"),
        ({"sigmas": [math.nan]}, r"give numbers in \(0, 1\]"),
        ({"timesteps": [1001, 500]}, r"give numbers in \(0, 1000\]"),
        ({"timesteps": [0.9, 0.5]}, "pass those as sigmas"),
        ({"sigmas": [0.5], "timesteps": [500]}, "give one"),
        ({"num_inference_steps": 3, "sigmas": [0.5]}, "pass num_inference_steps=1"),
    ],
)
def test_bad_user_times(times, message):
    with pytest.raises(ValueError, match=message):
        RCMScheduler().set_timesteps(**times)


@pytest.mark.parametrize("sigma_max", [0, -1.0, math.nan, math.inf, "80"])
def test_bad_sigma_max(sigma_max):
    with pytest.raises(ValueError, match="sigma_max"):
        RCMScheduler(sigma_max=sigma_max)


def test_sigma_max_below_the_second_time_takes_one_step_only():
    scheduler = RCMScheduler(sigma_max=10.0)
    scheduler.set_timesteps(1)
    with pytest.raises(ValueError, match=r"sigma_max=10\.0: with 2 steps"):
        scheduler.set_timesteps(2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_train_timesteps": 0}, "num_train_timesteps=0; give a whole number above 0"),
        ({"num_train_timesteps": -1}, "num_train_timesteps=-1"),
        ({"num_train_timesteps": math.nan}, "num_train_timesteps=nan"),
        ({"boundary_timestep": math.nan}, "boundary_timestep=nan; give a finite timestep, 0 or more"),
        ({"boundary_timestep": -1.0}, r"boundary_timestep=-1\.0"),
        ({"boundary_timestep": math.inf}, "boundary_timestep=inf"),
        ({"boundary_timestep": "900"}, "boundary_timestep='900'"),
    ],
)
def test_timesteps_that_no_network_has(options, message):
    for build in (RCMScheduler, lambda **given: FewStepScheduler(sigmas=[1.0], **given)):
        with pytest.raises(ValueError, match=message):
            build(**options)


def test_positional_arguments_are_refused():
    """diffusers takes them for defaults: use_rcm and use_distilled, which build the scheduler anew, would lose them."""
    with pytest.raises(TypeError, match="positional"):
        RCMScheduler(1000, 200.0)
    with pytest.raises(TypeError, match="positional"):
        FewStepScheduler([1.0, 0.75, 0.5, 0.25])


def test_integer_latents_are_refused():
    """The last step would round the video to the first noise's dtype."""
    scheduler, x, whole = RCMScheduler(stochastic=False), torch.randn(2, 3), torch.ones(2, 3, dtype=torch.int64)
    scheduler.set_timesteps(1)
    for call in (
        lambda: scheduler.scale_initial_noise(whole),
        lambda: scheduler.step(x, scheduler.timesteps[0], whole),
        lambda: scheduler.step(whole, scheduler.timesteps[0], x),
        lambda: scheduler.add_noise(whole, x, scheduler.timesteps[:1]),
        lambda: scheduler.add_noise(x, whole, scheduler.timesteps[:1]),
    ):
        with pytest.raises(TypeError, match=r"is int64; give a floating-point tensor"):
            call()


@pytest.mark.parametrize("name", ["rcm", "fastwan"])
def test_a_generation_never_draws_from_the_last_ones_generator(name):
    scheduler, x = scheduler_of(RECIPES[name]), torch.randn(1, 2, 3, 4, 4)
    scheduler.bind_generator(torch.Generator().manual_seed(1))
    scheduler.set_timesteps(RECIPES[name].steps)
    assert scheduler.generator is None
    with pytest.raises(RuntimeError, match=r"no generator was given. In a pipeline, call use_rcm"):
        scheduler.step(x, scheduler.timesteps[0], x)
    scheduler.bind_generator(None)
    torch.manual_seed(5)
    drawn = scheduler.step(x, scheduler.timesteps[0], x).prev_sample
    scheduler.set_timesteps(RECIPES[name].steps)
    given = scheduler.step(x, scheduler.timesteps[0], x, generator=torch.Generator().manual_seed(5)).prev_sample
    assert torch.equal(drawn, given)


def test_steps_are_found_by_timestep_or_begin_index_and_run_out():
    scheduler = RCMScheduler(stochastic=False)
    scheduler.set_timesteps(4)
    x, v = torch.randn(2, 2, 3, dtype=torch.float64)
    times = rcm_times(4).tolist()
    for timestep in (scheduler.timesteps[2], float(scheduler.timesteps[2])):  # video to video begins in the middle
        scheduler.set_timesteps(4)
        assert scheduler.step_index is None
        expected = x - (times[2] - times[3]) * v  # in fp64, and so must the state be
        torch.testing.assert_close(scheduler.step(v, timestep, x)[0], expected, rtol=1e-14, atol=1e-14)
        assert scheduler.step_index == 3
    scheduler.set_timesteps(4)
    scheduler.set_begin_index(1)
    assert scheduler.begin_index == 1
    torch.testing.assert_close(scheduler.step(v, scheduler.timesteps[0], x)[0], x - (times[1] - times[2]) * v)
    for _ in range(2):
        scheduler.step(v, scheduler.timesteps[0], x)
    with pytest.raises(ValueError, match="all 4 steps are taken"):
        scheduler.step(v, scheduler.timesteps[0], x)
    scheduler.set_timesteps(4)
    with pytest.raises(ValueError, match=r"timestep 987\.0 occurs 0 times"):
        scheduler.step(v, 987.0, x)


def test_ambiguous_rounded_timesteps_need_a_begin_index():
    scheduler = RCMScheduler(stochastic=False)
    scheduler.set_timesteps(sigmas=[0.901, 0.9])
    x = torch.randn(2, 3)
    with pytest.raises(ValueError, match="occurs 2 times"):
        scheduler.step(x, scheduler.timesteps[0], x)
    scheduler.set_begin_index(0)
    scheduler.step(x, scheduler.timesteps[0], x)


def test_add_noise_is_the_rectified_flow_at_the_exact_time():
    scheduler = RCMScheduler()
    scheduler.set_timesteps(4)
    x, noise = torch.randn(2, 2, 3, 4)
    timestep = scheduler.timesteps[[1, 3]]
    t = rcm_times(4)[[1, 3]].view(2, 1, 1)
    expected = ((1 - t) * x + t * noise).float()
    assert scheduler.add_noise(x, noise, timestep).dtype == x.dtype
    torch.testing.assert_close(scheduler.add_noise(x, noise, timestep), expected)
    torch.testing.assert_close(scheduler.scale_noise(x, timestep, noise), expected)


def test_save_and_load(tmp_path):
    scheduler = RCMScheduler(
        sigma_max=200.0, stochastic=False, round_timesteps_to_bf16=False, sigmas=[0.9, 0.5], boundary_timestep=875.0
    )
    scheduler.bind_generator(torch.Generator())
    scheduler.save_pretrained(tmp_path)
    for loaded in (RCMScheduler.from_pretrained(tmp_path), RCMScheduler.from_config(scheduler.config)):
        assert loaded.generator is None
        for name in ("sigma_max", "stochastic", "round_timesteps_to_bf16", "sigmas", "boundary_timestep"):
            assert loaded.config[name] == scheduler.config[name]
        assert torch.equal(loaded.timesteps, scheduler.timesteps)


@pytest.mark.parametrize("foreign", [UniPCMultistepScheduler, FlowMatchEulerDiscreteScheduler])
def test_from_another_schedulers_config_and_back(foreign, tmp_path):
    other = foreign(num_train_timesteps=500)
    other.save_pretrained(tmp_path)
    for config in (other.config, foreign.load_config(tmp_path)):  # a loaded one spells out its defaults
        scheduler = RCMScheduler.from_config(config)
        assert scheduler.config.num_train_timesteps == 500
        assert scheduler.config.sigma_max == 80.0
        scheduler.set_timesteps(4)
        assert scheduler.timesteps.tolist() == model_timesteps(rcm_times(4)[:-1], 500).tolist()
        assert foreign.from_config(scheduler.config).config.num_train_timesteps == 500


@pytest.mark.parametrize(
    ("name", "dtypes"), [("lightx2v", "bfloat16"), ("lightning", "float32"), ("fastwan", "float16")]
)
def test_the_state_is_stored_as_the_recipe_says(name, dtypes):
    scheduler = scheduler_of(RECIPES[name])
    scheduler.bind_generator(None)
    x, found = scheduler.scale_initial_noise(torch.randn(1, 2, 3, 4, 4)), []
    for t in scheduler.timesteps:
        x = scheduler.step(torch.randn(1, 2, 3, 4, 4).half(), t, x).prev_sample
        found.append(str(x.dtype).removeprefix("torch."))
    assert found == [*[dtypes] * (len(found) - 1), "float32"]  # at last as the first noise


def test_noise_of_lcm_is_drawn_by_frame_for_each_sample():
    scheduler = scheduler_of(RECIPES["fastwan"])
    x, v = torch.randn(2, 2, 4, 3, 5, 6)
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    found = scheduler.step(v, scheduler.timesteps[0], x, generator=generators).prev_sample
    t, t_next = RECIPES["fastwan"].sigmas[:2]
    for row, seed in enumerate((1, 2)):
        noise = torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(seed)).transpose(0, 1)
        torch.testing.assert_close(found[row], lcm_step(x[row], v[row], t, t_next, noise))
    with pytest.raises(ValueError, match="3 generators for a batch of 2"):
        scheduler.step(v, scheduler.timesteps[1], x, generator=[torch.Generator() for _ in range(3)])


def test_few_steps_and_own_times():
    scheduler = scheduler_of(RECIPES["causvid-lora"])
    assert scheduler.timesteps.tolist() == [1000, 934, 862, 756, 603, 410, 250, 140, 74]
    scheduler.set_timesteps(3)
    assert scheduler.sigmas.tolist() == [1, 0.934, 0.862, 0]
    dmd = scheduler_of(RECIPES["fastwan"])
    dmd.set_timesteps(sigmas=[0.9, 0.5])
    assert dmd.timesteps.tolist() == pytest.approx([900, 500])
    dmd.set_timesteps(3)
    assert dmd.timesteps.tolist() == [1000, 757, 522]
    dmd.set_timesteps()
    assert len(dmd.timesteps) == 3
    for wrong in (0, 2, 4):
        with pytest.raises(
            ValueError, match=f"num_inference_steps={wrong}: fastwan takes 3 steps. Pass num_inference_s"
        ):
            dmd.set_timesteps(wrong)
    for wrong in (0, 10):
        with pytest.raises(ValueError, match="causvid-lora takes 1 to 9 steps"):
            scheduler.set_timesteps(wrong)


def test_wrong_few_step_schedulers():
    """A scheduler checks its options as a recipe does (test_recipes.py)."""
    for options, message in (
        ({"sigmas": [0.5, 0.7]}, "decrease strictly"),
        ({"sigmas": [1.0], "timesteps": [math.inf]}, "above 0, finite"),
        ({"sigmas": [1.0], "solver": "heun"}, "solver='heun'"),
        ({"sigmas": [1.0], "state_dtype": "int8"}, "state_dtype='int8'"),
    ):
        with pytest.raises(ValueError, match=message):
            FewStepScheduler(**options)


def test_rcm_is_the_few_step_sampler_at_its_own_times():
    """Bit for bit."""
    noise = torch.randn(2, 3, 4)
    rcm = RCMScheduler()
    rcm.set_timesteps(4)
    general = FewStepScheduler(
        sigmas=rcm.sigmas[:-1], solver="sde", state_dtype="float64", round_timesteps_to_bf16=True, fewer_steps=True
    )
    assert isinstance(rcm, FewStepScheduler)
    outputs = []
    for scheduler in (rcm, general):
        scheduler.bind_generator(torch.Generator().manual_seed(3))
        outputs.append(sample(scheduler, noise))
    assert torch.equal(*outputs)
