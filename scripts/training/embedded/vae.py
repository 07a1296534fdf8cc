"""Stage 1: the video autoencoder. L1 and squared error on the shapes' videos, and latents with a fixed small noise.

The posterior is N(mean, NOISE²) with the same deviation everywhere. A learned deviation starts near 1, and the noise
then drowns the latents for hundreds of steps. Only the penalty on the mean's square is left of the KL term.

Clips have a video's full length, because the caches of the causal convolutions change with every latent frame. They are
cropped in space. Only the last steps take whole frames, for the attention in the middle.
"""

from __future__ import annotations

import math

import torch
from diffusers import AutoencoderKLWan

from .data import VideoPool, draw_videos, encode, is_foreground, latent_statistics
from .models import build_vae, channels_last, compile_norms
from .optimizers import adamw, warmup_and_cosine
from .progress import Average, GraphedStep, Run, Stage
from .whole_clips import decode_clip, encode_clip, take_whole_clips

BATCH = 8
CROP = 96  # pixels of its side
CROPPED = 0.93  # of all steps
OBJECT_WEIGHT = 3.0  # of a pixel that is not background
NOISE = 0.1
MEAN_WEIGHT = 1e-3
LEARNING_RATE = 1e-3


def train_vae(run: Run, num_steps: int, videos: int) -> AutoencoderKLWan:
    """Train it, or load it where ``vae/`` is written already. Returns the average of its weights, normalisation set."""
    folder = run.folder / "vae"
    if folder.exists():
        return AutoencoderKLWan.from_pretrained(folder).to(run.device)
    torch.manual_seed(run.seed)
    vae = fix_posterior_deviation(build_vae()).to(run.device)
    average = Average(vae, 0.998)
    model = NoisyAutoencoder(vae)
    channels_last(model)
    compile_norms(model)
    optimizer = adamw(model.parameters(), LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = warmup_and_cosine(optimizer, num_steps, warmup=300)

    def update(video: torch.Tensor, background: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, decoded = in_bf16(model, video.contiguous(memory_format=torch.channels_last_3d))
        error = decoded.float() - video
        weight = 1 + (OBJECT_WEIGHT - 1) * is_foreground(video, background)
        reconstruction = (weight * (error.abs() + error.square())).mean()
        penalty = 0.5 * mean.float().square().mean()
        run.accelerator.backward(reconstruction + MEAN_WEIGHT * penalty)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return error.detach().abs().mean(), penalty.detach()

    update_on_crops, update_on_frames = GraphedStep(update), GraphedStep(update)
    stage = Stage(run, "vae", num_steps, model=model, average=average, optimizer=optimizer, schedule=schedule)
    pool = VideoPool(run, videos)
    for step in stage.steps():
        cropped = step < CROPPED * num_steps
        learn = update_on_crops if cropped else update_on_frames
        l1, penalty = learn(*pool.draw(BATCH, CROP if cropped else None))
        schedule.step()
        average.update(model.vae, step)
        stage.record(l1=l1, penalty=penalty)
    trained = average.module.eval()
    _set_normalisation(trained, run.device)
    run.log("autoencoder", psnr_db=reconstruction_psnr(trained, run.device))
    run.save(trained, "vae")
    return trained


class NoisyAutoencoder(torch.nn.Module):
    """The autoencoder with noise on its latents: videos [B, 3, F, H, W] to latent means and decoded videos."""

    def __init__(self, vae: AutoencoderKLWan):
        super().__init__()
        self.vae = take_whole_clips(vae)

    def forward(self, video: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = encode_clip(self.vae, video)
        return mean, decode_clip(self.vae, mean + NOISE * torch.randn_like(mean))


def in_bf16(model: torch.nn.Module, video: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the model's output computed all in bf16. Autocast would norm in fp32, where most of the time goes."""
    weights = {name: weight.bfloat16() for name, weight in model.named_parameters()}
    return torch.func.functional_call(model, weights, video.bfloat16())


def fix_posterior_deviation(vae: AutoencoderKLWan) -> AutoencoderKLWan:
    """Make the second half of quant_conv's output the constant ln NOISE²; nothing in the loss depends on it."""
    with torch.no_grad():
        vae.quant_conv.weight[vae.config.z_dim :] = 0
        vae.quant_conv.bias[vae.config.z_dim :] = 2 * math.log(NOISE)
    return vae


def _set_normalisation(vae: AutoencoderKLWan, device: torch.device) -> None:
    mean, std = latent_statistics(vae, device)
    std = std.clamp(min=0.1 * std.max())  # else a channel without information would be amplified
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())


@torch.no_grad()
def reconstruction_psnr(vae: AutoencoderKLWan, device: torch.device) -> float:
    """Return the PSNR in dB of 32 unseen videos through the autoencoder, for values in [0, 1]."""
    video = draw_videos(32, 999_999, device)[1]
    decoded = vae.decode(encode(vae, video)).sample
    return -10 * torch.log10((decoded - video).square().mean() / 4).item()
