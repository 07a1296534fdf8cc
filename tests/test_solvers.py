"""The pure functions of the few-step samplers against published values and formulas written out."""

import pytest
import torch

from turbo_rcm_patch.solvers import euler_step, lcm_step, model_timesteps, rcm_times, sde_step


def test_published_times():
    times = rcm_times(4, 80.0)
    assert times.dtype == torch.float64
    assert times.tolist() == pytest.approx([0.9877, 0.9338, 0.8529, 0.6090, 0], abs=5e-5)
    assert rcm_times(4, 200.0)[0].item() == pytest.approx(200 / 201, rel=1e-15)
    for steps in (1, 2, 3, 4):
        assert torch.equal(rcm_times(steps, 80.0), torch.cat([times[:steps], times[-1:]]))


def test_model_timesteps_are_rounded_as_published():
    times = rcm_times(4, 80.0)[:-1]
    assert model_timesteps(times).tolist() == [988, 932, 852, 608]
    exact = model_timesteps(times, to_bf16=False)
    assert exact.tolist() == pytest.approx((1000 * times).tolist(), rel=1e-7)
    assert model_timesteps(times, num_train_timesteps=500, to_bf16=False).tolist() == pytest.approx(
        (500 * times).tolist(), rel=1e-7
    )


@pytest.mark.parametrize("boundary", [875.0, 900.0, 874.0, 610.0, 609.0, 988.0])
def test_rounding_never_crosses_the_experts_boundary(boundary):
    times = torch.linspace(0.999, 0.5, 4001, dtype=torch.float64)
    exact, rounded = times.float() * 1000, model_timesteps(times, boundary=boundary)
    assert torch.equal(rounded >= boundary, exact >= boundary)
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert (rounded - exact).abs().max() < 4  # the spacing of bf16 there
    free = model_timesteps(times)
    moved = rounded != free
    assert torch.equal(moved, (free >= boundary) != (exact >= boundary))


def test_pure_steps_of_every_solver():
    x, v, noise = torch.randn(3, 5, dtype=torch.float64)
    x0 = x - 0.8 * v
    torch.testing.assert_close(euler_step(x, v, 0.8, 0.3), 0.7 * x0 + 0.3 * (x0 + v))
    torch.testing.assert_close(sde_step(x, v, 0.8, 0.3, noise), 0.7 * x0 + 0.3 * noise)
    torch.testing.assert_close(sde_step(x, v, 0.8, 0.0, noise), x0)
    torch.testing.assert_close(lcm_step(x, v, 0.8, 0.3, noise), 0.7 * x0 + 0.3 * noise)
    torch.testing.assert_close(lcm_step(x, v, 0.8, 0.3, None), x0)
    half = [tensor.bfloat16() for tensor in (x, v, noise)]
    rounded = (half[0].double() - 0.8 * half[1].double()).bfloat16()
    assert torch.equal(lcm_step(half[0], half[1], 0.8, 0.3, None), rounded)
    assert torch.equal(
        lcm_step(half[0], half[1], 0.8, 0.3, half[2]), (0.7 * rounded.float() + 0.3 * half[2].float()).bfloat16()
    )
