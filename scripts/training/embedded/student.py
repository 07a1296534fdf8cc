"""Stage 3: rCM (Score-Regularized Continuous-Time Consistency, Zheng et al. 2025), the teacher distilled to 1-4 steps.

TrigFlow with sigma_data = 1: ``x_t = cos t·x_0 + sin t·ε`` for t in [0, π/2], and F is dx_t/dt along the flow. Around
the rectified-flow network v, with s = cos t + sin t: ``F = ((cos t − sin t)·x_t + v(x_t/s, sin t/s))/s``.

The student minimises two losses. One is a continuous-time consistency loss. Its tangent is a forward-mode derivative of
the student along the teacher's guided flow (sCM, Lu & Song 2024). The other is the distribution-matching loss DMD2 on
the student's own samples. It needs the score of these samples. A third network, the fake score, learns it between the
student's updates.

The model is small, so some settings differ from those published for Wan:

- the weights of the two losses, the guidance, the optimizers, how often the student learns, and clipped gradients
- the consistency loss takes a quarter of the samples
- samples are simulated at the sampler's own times, not random ones, most of them with one or two steps
- times are nearer to noise, where this model's videos are decided (teacher.py)
"""

from __future__ import annotations

import copy
import functools
import math

import torch
from diffusers import WanPipeline
from torch.nn.attention import SDPBackend, sdpa_kernel

from turbo_rcm_patch.solvers import INTERMEDIATE_ANGLES

from .data import LatentPool, token_ids
from .models import compile_blocks
from .optimizers import Learner, Rates
from .progress import Average, GraphedStep, Run, Stage
from .teacher import shift_times
from .text import embed

BATCH = 64
RATES = Rates(muon=2e-3, adamw=5e-4)
GUIDANCE = 2.0  # of the teacher, distilled into the student
TANGENT_WARMUP = 100  # first steps: the student learns alone, from the consistency loss, its tangent growing to full
STUDENT_EVERY = 2  # steps after that; the fake score learns in the others
SIMULATED = (1, 2, 2, 3, 1, 2, 2, 4)  # steps of a sample, update by update; all samples need the first of them
CONSISTENCY_WEIGHT, MATCHING_WEIGHT = 20.0, 1.0
CONSISTENCY_BATCH = 16  # of a batch's samples: with 32 the derivative in fp32 takes as long as all of the matching loss
SIGMA_MAX = 80.0  # where the sampler starts
MAX_STEPS = 1 + len(INTERMEDIATE_ANGLES)


def train_student(run: Run, teacher: WanPipeline, pool: LatentPool, num_steps: int) -> WanPipeline:
    """Distil the teacher. Returns the same pipeline with the average of the student's weights as its transformer."""
    torch.manual_seed(run.seed)
    networks = torch.nn.ModuleDict({"student": copy.deepcopy(teacher.transformer).train()})
    networks["fake"] = copy.deepcopy(networks.student)
    networks.requires_grad_(True)
    teacher.transformer.requires_grad_(False)
    average = Average(networks.student, 0.995)
    for network in (teacher.transformer, networks.student, networks.fake):
        compile_blocks(network)
    guided = GuidedTeacher(teacher, run.device)
    names = [turn(step)[0] for step in range(num_steps)]
    student_learner, fake_learner = (
        Learner(run, networks[name], RATES, names.count(name), warmup=50, momentum=0.9, betas=(0.0, 0.999), clip=10.0)
        for name in ("student", "fake")
    )

    def update_student(simulated: int, latents: torch.Tensor, text: torch.Tensor, strength: torch.Tensor):
        matching = torch.zeros((), device=run.device)
        with run.accelerator.autocast():
            some = slice(CONSISTENCY_BATCH)
            consistency = consistency_loss(networks.student, guided, latents[some], text[some], strength)
            if simulated:
                matching = matching_loss(networks.student, networks.fake, guided, latents.shape, text, simulated)
        student_learner.learn(CONSISTENCY_WEIGHT * consistency + MATCHING_WEIGHT * matching)
        return consistency.detach(), matching.detach()

    def update_fake(simulated: int, latents: torch.Tensor, text: torch.Tensor):
        with run.accelerator.autocast():
            loss = fake_score_loss(networks.student, networks.fake, latents.shape, text, simulated)
        fake_learner.learn(loss)
        return (loss.detach(),)

    # One graph per number of simulated steps, 0 for none.
    student_updates = [GraphedStep(functools.partial(update_student, n)) for n in range(MAX_STEPS + 1)]
    fake_updates = [GraphedStep(functools.partial(update_fake, n)) for n in range(MAX_STEPS + 1)]
    parts = {"networks": networks, "average": average, "student_learner": student_learner, "fake_learner": fake_learner}
    stage = Stage(run, "student", num_steps, **parts)
    for step in stage.steps():
        name, update, simulated = turn(step)
        latents, captions = pool.draw(BATCH)
        text = guided.embed(captions)
        if name == "student":
            strength = torch.tensor(min(1.0, step / TANGENT_WARMUP), device=run.device)
            consistency, matching = student_updates[simulated](latents, text, strength)
            student_learner.advance()
            average.update(networks.student, update)
            stage.record(consistency=consistency, matching=matching)
        else:
            (loss,) = fake_updates[simulated](latents, text)
            fake_learner.advance()
            stage.record(fake_score=loss)
    teacher.transformer = average.module.eval()
    return teacher


def turn(step: int) -> tuple[str, int, int]:
    """Return the network that learns in a step, its earlier updates, and the steps of its samples (0: no samples)."""
    if step < TANGENT_WARMUP:
        return "student", step, 0
    update, waiting = divmod(step - TANGENT_WARMUP, STUDENT_EVERY)
    if waiting == 0:
        return "student", TANGENT_WARMUP + update, SIMULATED[update % len(SIMULATED)]
    update = step - TANGENT_WARMUP - update - 1
    return "fake", update, SIMULATED[update % len(SIMULATED)]


class GuidedTeacher:
    """The frozen teacher: its text encoder, and its prediction with classifier-free guidance."""

    def __init__(self, pipe: WanPipeline, device: torch.device):
        self.transformer, self.text_encoder = pipe.transformer, pipe.text_encoder
        self._no_text = self.embed(token_ids(pipe.tokenizer, [""]).to(device))

    @torch.no_grad()
    def embed(self, captions: torch.Tensor) -> torch.Tensor:
        return embed(self.text_encoder, captions).float()

    @torch.no_grad()
    def flow(self, x: torch.Tensor, t: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Return F [B, ...] with guidance."""
        both = torch.cat([text, self._no_text.expand_as(text)])
        asked, free = flow(self.transformer, x.repeat(2, 1, 1, 1, 1), t.repeat(2), both).chunk(2)
        return free + GUIDANCE * (asked - free)


def flow(network, x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, *, rounded: bool = False) -> torch.Tensor:
    """Return F of a rectified-flow network at TrigFlow states x [B, C, f, h, w] and angles t [B], in fp32.

    rounded: give the network bf16 timesteps, as RCMScheduler does.
    """
    c_in = 1 / (t.cos() + t.sin())
    timestep = 1000 * t.sin() * c_in
    if rounded:
        timestep = timestep.bfloat16().float()
    v = network(_wide(c_in) * x, timestep, text, return_dict=False)[0]
    return _wide(c_in) * (_wide(t.cos() - t.sin()) * x + v.float())


def denoised(x: torch.Tensor, t: torch.Tensor, flow: torch.Tensor) -> torch.Tensor:
    """Return the prediction of x_0 that belongs to F: ``cos t·x − sin t·F``."""
    return _wide(t.cos()) * x - _wide(t.sin()) * flow


def consistency_loss(student, teacher: GuidedTeacher, latents, text, strength: torch.Tensor) -> torch.Tensor:
    """Return the mean sCM loss with normalised tangents. strength (0-d, in [0, 1]) warms the tangent up."""
    t = consistency_times(len(latents), latents.device)
    cos, sin = _wide(t.cos()), _wide(t.sin())
    x = cos * latents + sin * torch.randn_like(latents)
    teacher_flow = teacher.flow(x, t, text)
    tangent = student_tangent(student, x, t, text, teacher_flow)
    student_flow = flow(student, x, t, text)
    fixed = student_flow.detach()
    g = -cos * (1 - (strength * sin) ** 2).sqrt() * (fixed - teacher_flow) - strength * cos * sin * x - tangent
    g = g / (g.flatten(1).norm(dim=1).view(-1, 1, 1, 1, 1) + 0.1)
    return (student_flow - fixed - g).square().flatten(1).sum(dim=1).mean()


def student_tangent(student, x, t, text, teacher_flow) -> torch.Tensor:
    """Return ``cos t·sin t·dF/dt`` along the teacher's flow: forward mode, in fp32 (TF32 products on a GPU)."""
    scale = (t.cos() * t.sin()).to(x)
    context = torch.autocast(x.device.type, enabled=False)
    with torch.no_grad(), context, sdpa_kernel(SDPBackend.MATH), torch.compiler.set_stance("force_eager"):
        return torch.func.jvp(
            lambda x, t: flow(student, x, t, text), (x, t), (_wide(scale) * teacher_flow, scale.to(t))
        )[1]


def matching_loss(student, fake, teacher: GuidedTeacher, shape, text, simulated: int) -> torch.Tensor:
    """Return DMD2's loss. Its gradient at the student's sample is the normalised difference of two denoised samples."""
    sample = simulate(student, shape, text, simulated, with_grad=True)
    t = score_times(len(sample), sample.device)
    with torch.no_grad():
        x = _wide(t.cos()) * sample + _wide(t.sin()) * torch.randn_like(sample)
        real = denoised(x, t, teacher.flow(x, t, text))
        gradient = denoised(x, t, flow(fake, x, t, text)) - real
        gradient /= (sample - real).abs().mean(dim=(1, 2, 3, 4), keepdim=True).clamp(min=1e-5)
    return (sample - (sample - gradient).detach()).square().flatten(1).sum(dim=1).mean()


def fake_score_loss(student, fake, shape, text, simulated: int) -> torch.Tensor:
    """Return the flow-matching loss of the fake score on the student's samples."""
    sample = simulate(student, shape, text, simulated, with_grad=False)
    t = score_times(len(sample), sample.device)
    noise = torch.randn_like(sample)
    x = _wide(t.cos()) * sample + _wide(t.sin()) * noise
    target = _wide(t.cos()) * noise - _wide(t.sin()) * sample
    return (flow(fake, x, t, text) - target).square().flatten(1).sum(dim=1).mean()


def simulate(student, shape, text, num_steps: int, *, with_grad: bool) -> torch.Tensor:
    """Return the student's sample after num_steps of its own sampler; gradients flow through the last step alone."""
    x = torch.zeros(shape, device=text.device)
    angles = [math.atan(SIGMA_MAX), *INTERMEDIATE_ANGLES][:num_steps]
    for index, angle in enumerate(angles, start=1):
        t = torch.full((shape[0],), angle, device=text.device)
        x = math.cos(angle) * x + math.sin(angle) * torch.randn_like(x)
        with torch.set_grad_enabled(with_grad and index == num_steps):
            x = denoised(x, t, flow(student, x, t, text, rounded=True))
    return x


def consistency_times(count: int, device: torch.device) -> torch.Tensor:
    """Return angles [count] whose tangent, the noise level, is log-normal(1.7, 1.6)."""
    return torch.atan(torch.exp(1.7 + 1.6 * torch.randn(count, device=device)))


def score_times(count: int, device: torch.device) -> torch.Tensor:
    """Return the angles [count] of uniform rectified-flow times, shifted like the teacher's."""
    rectified = shift_times(torch.rand(count, device=device))
    return torch.atan2(rectified, 1 - rectified)


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.view(-1, 1, 1, 1, 1)
