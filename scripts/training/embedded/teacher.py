"""Stage 2: the rectified-flow teacher and its text encoder. ``x_t = (1 − t)·x_0 + t·ε``; the target is ``ε − x_0``."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLWan, WanPipeline

from .data import LatentPool, token_ids
from .models import build_pipeline, build_text_encoder, build_transformer, compile_blocks, train_tokenizer
from .optimizers import Learner, Rates
from .progress import Average, GraphedStep, Run, Stage
from .text import embed

BATCH = 128
RATES = Rates(muon=2e-3, adamw=8e-4)
NO_CAPTION = 0.1  # how often the caption is left out, for classifier-free guidance
# The shift of the training times and the sampler's. Large plain shapes show through a lot of noise, so their motion is
# decided at times of 0.88 to 0.97. Wan's own shift of 3 would put one training step in six there; this shift puts 37 %.
FLOW_SHIFT = 6.0


def train_teacher(run: Run, vae: AutoencoderKLWan, pool: LatentPool, num_steps: int) -> WanPipeline:
    """Train it, or load it where ``teacher/`` is written already. Returns a pipeline in fp32."""
    folder = run.folder / "teacher"
    if folder.exists():
        return WanPipeline.from_pretrained(folder).to(run.device)
    torch.manual_seed(run.seed)
    tokenizer = train_tokenizer()
    models = torch.nn.ModuleDict({"transformer": build_transformer(), "text_encoder": build_text_encoder(tokenizer)})
    torch.nn.init.zeros_(models.transformer.proj_out.weight)
    models.to(run.device)
    average = Average(models, 0.999)
    compile_blocks(models.transformer)
    if run.device.type == "cuda":
        models.text_encoder.compile()
    learner = Learner(run, models, RATES, num_steps, warmup=500, momentum=0.95, betas=(0.9, 0.98), clip=1.0)
    no_caption = token_ids(tokenizer, [""]).to(run.device)

    def update(latents: torch.Tensor, captions: torch.Tensor) -> tuple[torch.Tensor]:
        dropped = torch.rand(BATCH, 1, device=run.device) < NO_CAPTION
        with run.accelerator.autocast():
            text = embed(models.text_encoder, torch.where(dropped, no_caption, captions))
            loss = flow_matching_loss(models.transformer, latents, text, draw_times(BATCH, run.device))
        learner.learn(loss)
        return (loss.detach(),)

    stage = Stage(run, "teacher", num_steps, models=models, average=average, learner=learner)
    graphed_update = GraphedStep(update)
    for step in stage.steps():
        (loss,) = graphed_update(*pool.draw(BATCH))
        learner.advance()
        average.update(models, step)
        stage.record(loss=loss)
    trained = average.module.eval()
    pipe = build_pipeline(vae, trained.transformer, trained.text_encoder, tokenizer, FLOW_SHIFT)
    run.save(pipe, "teacher")
    return pipe


def draw_times(count: int, device: torch.device) -> torch.Tensor:
    """Return rectified-flow times [count]: logit-normal, shifted towards noise like Wan's sampler."""
    return shift_times(torch.randn(count, device=device).sigmoid())


def shift_times(u: torch.Tensor) -> torch.Tensor:
    """Return times in (0, 1), shifted towards noise as in the sampler."""
    return FLOW_SHIFT * u / (1 + (FLOW_SHIFT - 1) * u)


def flow_matching_loss(transformer, latents: torch.Tensor, text: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of the velocity, for latents [B, 16, f, h, w] at times [B] in (0, 1)."""
    noise = torch.randn_like(latents)
    t = times.view(-1, 1, 1, 1, 1)
    velocity = transformer((1 - t) * latents + t * noise, 1000 * times, text, return_dict=False)[0]
    return (velocity.float() - (noise - latents)).square().mean()
