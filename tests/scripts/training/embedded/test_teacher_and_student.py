"""The losses against networks whose optimum is known: a world of one point, and noise that is told."""

import math
from collections import Counter

import pytest
import torch
from diffusers import WanTransformer3DModel

from scripts.training.embedded import student, teacher
from scripts.training.embedded.progress import Run
from turbo_rcm_patch.solvers import model_timesteps, rcm_times

SHAPE = (3, 2, 2, 4, 4)
TINY = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "ffn_dim": 32,
    "in_channels": 2,
    "out_channels": 2,
    "text_dim": 8,
    "rope_max_seq_len": 8,
}


def to_point(point):
    """The exact rectified-flow network of a data set that is this point alone: v = (x − x_0)/t."""

    def network(x, timestep, text, return_dict):
        return ((x - point) / (timestep / 1000).view(-1, 1, 1, 1, 1),)

    return network


class PointTeacher:
    """Stands for GuidedTeacher; its flow leads to a point."""

    def __init__(self, point):
        self.network = to_point(point)

    def flow(self, x, t, text):
        return student.flow(self.network, x, t, text)


@pytest.fixture
def point():
    return torch.randn(SHAPE[1:], dtype=torch.float64)


@pytest.fixture
def text():
    return torch.zeros(SHAPE[0], 1, 1, dtype=torch.float64)


def test_flow_matching_loss_is_the_error_of_the_velocity():
    latents = torch.randn(SHAPE)
    times = torch.tensor([0.2, 0.5, 0.9])
    seen = {}

    def network(x, timestep, text, return_dict):
        t = (timestep / 1000).view(-1, 1, 1, 1, 1)
        noise = (x - (1 - t) * latents) / t
        seen.update(timestep=timestep, noise=noise)
        return (noise - latents + 0.5,)

    assert teacher.flow_matching_loss(network, latents, None, times).item() == pytest.approx(0.25, rel=1e-4)
    torch.testing.assert_close(seen["timestep"], 1000 * times)
    assert abs(seen["noise"].std().item() - 1) < 0.2


def test_times_of_the_teacher_lean_towards_noise():
    times = teacher.draw_times(20000, torch.device("cpu"))
    assert 0 < times.min() < times.max() < 1
    middle = teacher.FLOW_SHIFT / (1 + teacher.FLOW_SHIFT)
    assert times.median().item() == pytest.approx(middle, abs=0.01)


def test_flow_is_the_state_s_derivative_and_denoised_the_clean_sample():
    clean, noise = torch.randn(2, *SHAPE, dtype=torch.float64)
    t = torch.tensor([0.1, 0.8, 1.5], dtype=torch.float64)
    cos, sin = t.cos().view(-1, 1, 1, 1, 1), t.sin().view(-1, 1, 1, 1, 1)
    x = cos * clean + sin * noise

    def network(state, timestep, text, return_dict):
        torch.testing.assert_close(timestep, 1000 * t.sin() / (t.cos() + t.sin()))
        torch.testing.assert_close(state, x / (cos + sin))
        return (noise - clean,)

    flow = student.flow(network, x, t, None)
    torch.testing.assert_close(flow, cos * noise - sin * clean, check_dtype=False, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(student.denoised(x, t, flow), clean, check_dtype=False, rtol=1e-5, atol=1e-5)


def test_the_tangent_is_the_derivative_along_the_teacher_s_flow():
    network = WanTransformer3DModel(**TINY)
    text = torch.randn(SHAPE[0], 5, 8)
    x, velocity = torch.randn(SHAPE), torch.randn(SHAPE)
    t = torch.tensor([0.3, 0.9, 1.4])
    scale = t.cos() * t.sin()

    def along(step):
        moved = x + step * scale.view(-1, 1, 1, 1, 1) * velocity
        return student.flow(network, moved, t + step * scale, text)

    tangent = student.student_tangent(network, x, t, text, velocity)
    with torch.no_grad():
        difference = (along(1e-3) - along(-1e-3)) / 2e-3
    assert (tangent - difference).norm() / difference.norm() < 0.01
    assert not tangent.requires_grad


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_consistency_loss_of_a_consistent_student(point, text, strength):
    """The exact consistency function has no loss at full strength. Warm-up leaves a part of the tangent."""
    latents = point.expand(SHAPE)
    loss = student.consistency_loss(to_point(point), PointTeacher(point), latents, text, torch.tensor(strength))
    assert (loss < 1e-6) if strength == 1 else (loss > 0.05)


@pytest.mark.parametrize("slope", [-1.0, 1.0])
def test_consistency_loss_flattens_a_student_whose_prediction_moves_with_time(point, text, slope):
    """The student predicts x_0 + slope·t at time t; the loss pulls the slope to 0, with tangents of a norm below 1."""
    slope = torch.tensor(slope, dtype=torch.float64, requires_grad=True)
    exact = to_point(point)

    def network(x, timestep, text, return_dict):
        return (exact(x, timestep, text, return_dict)[0] - slope,)

    loss = student.consistency_loss(network, PointTeacher(point), point.expand(SHAPE), text, torch.tensor(1.0))
    loss.backward()
    assert loss <= 1
    assert slope.grad * slope.detach() > 0.1


def test_matching_loss_pulls_the_sample_from_the_fake_score_to_the_teacher(point, text):
    source = torch.zeros_like(point).requires_grad_()
    for simulated in (1, 2, 3, 4):
        source.grad = None
        fake, real = to_point(torch.zeros_like(point)), PointTeacher(torch.ones_like(point))
        student.matching_loss(to_point(source), fake, real, SHAPE, text, simulated).backward()
        assert (source.grad < 0).all()
        source.grad = None
        student.matching_loss(to_point(source), to_point(point), PointTeacher(point), SHAPE, text, simulated).backward()
        assert source.grad.abs().max() < 1e-4


def test_fake_score_learns_the_student_s_samples(point, text):
    right = student.fake_score_loss(to_point(point), to_point(point), SHAPE, text, 3)
    wrong = student.fake_score_loss(to_point(point), to_point(point + 1), SHAPE, text, 3)
    assert right < 1e-2 < 1 < wrong  # rounded timesteps move the samples off the point by about 1 part in 500


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_simulation_gives_the_network_the_sampler_s_timesteps(point, text, num_steps):
    timesteps = []

    def network(x, timestep, text, return_dict):
        timesteps.append(timestep[0].item())
        assert torch.is_grad_enabled() == (len(timesteps) == num_steps)
        # In the state the time is exact; to_point divides by it.
        exact = rcm_times(num_steps)[len(timesteps) - 1]
        return to_point(point)(x, 1000 * exact.expand(len(x)), text, return_dict)

    sample = student.simulate(network, SHAPE, text, num_steps, with_grad=True)
    assert timesteps == model_timesteps(rcm_times(num_steps)[:-1]).tolist()
    torch.testing.assert_close(sample, point.expand(SHAPE), check_dtype=False, rtol=1e-3, atol=1e-3)


def test_turns():
    """First the student alone; then both, from samples of one to four steps each."""
    turns = [student.turn(step) for step in range(student.TANGENT_WARMUP + 64)]
    warmup, later = turns[: student.TANGENT_WARMUP], turns[student.TANGENT_WARMUP :]
    assert warmup == [("student", step, 0) for step in range(student.TANGENT_WARMUP)]
    assert [name for name, _, _ in later].count("student") == 64 / student.STUDENT_EVERY
    for name, first in (("student", student.TANGENT_WARMUP), ("fake", 0)):
        updates = [(update, simulated) for who, update, simulated in later if who == name]
        assert [update for update, _ in updates] == list(range(first, first + len(updates)))
        counts = Counter(simulated for _, simulated in updates[: 2 * len(student.SIMULATED)])
        assert counts == {1: 4, 2: 8, 3: 2, 4: 2}


def test_times_of_the_student():
    device = torch.device("cpu")
    t = student.consistency_times(20000, device)
    assert t.tan().log().mean().item() == pytest.approx(1.7, abs=0.05)
    assert t.tan().log().std().item() == pytest.approx(1.6, abs=0.05)
    rectified = student.score_times(20000, device)
    rectified = rectified.sin() / (rectified.sin() + rectified.cos())
    half = torch.tensor(0.5)
    assert rectified.median().item() == pytest.approx(teacher.shift_times(half).item(), abs=0.01)


def test_guidance_leads_away_from_the_flow_without_text(point, text):
    guided = object.__new__(student.GuidedTeacher)
    guided.transformer = lambda x, timestep, text, return_dict: (text.mean(dim=(1, 2)).view(-1, 1, 1, 1, 1) + 0 * x,)
    guided._no_text = torch.full((1, 1, 1), 2.0)
    t = torch.full((SHAPE[0],), math.pi / 4)
    flow = guided.flow(torch.zeros(SHAPE), t, torch.full((SHAPE[0], 1, 1), 3.0))
    expected = (2 + student.GUIDANCE * (3 - 2)) / math.sqrt(2)
    torch.testing.assert_close(flow, torch.full(SHAPE, expected))


def test_every_weight_learns_although_the_first_simulated_steps_need_no_gradient(tmp_path, text):
    run = Run(tmp_path, seed=0)
    network = WanTransformer3DModel(**TINY)
    text = torch.randn(SHAPE[0], 5, 8)
    with run.accelerator.autocast():
        sample = student.simulate(network, SHAPE, text, 3, with_grad=True)
    sample.square().sum().backward()
    assert [name for name, weight in network.named_parameters() if weight.grad is None] == []
