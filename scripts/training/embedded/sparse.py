"""Sparse-linear attention (SLA) for the few-step student: a difference of its weights, distilled from the model itself.

The model with SLA takes the sampler's steps from noise. At each of its states the dense model gives the velocity and
the self-attentions' results to learn. Few parameters learn: SLA's own projection proj_l, which starts at 0, the weights
of the attentions' q and k norms, and a low-rank change of their four linears.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator

import torch
from diffusers import WanPipeline, WanTransformer3DModel
from peft import LoraConfig

import turbo_rcm_patch as trp
from turbo_rcm_patch.embedded import SLA_BLOCKS
from turbo_rcm_patch.modules import SparseLinearAttention
from turbo_rcm_patch.shapes.grammar import draw_scene

from .data import token_ids
from .optimizers import adamw, warmup_and_cosine
from .progress import Run, Stage
from .text import embed
from .trajectory import trajectory

BATCH = 8
LEARNING_RATE = 2e-3
KEPT = (0.1, 0.15, 0.2, 0.3)  # shares of key blocks that the updates learn for, in turns
RANK = 16
LINEARS = ("to_q", "to_k", "to_v", "to_out.0")
ATTENTION_WEIGHT = 0.3  # of the attentions' error beside the velocity's


def train_sparse(run: Run, pipe: WanPipeline, latent_shape: tuple[int, ...], num_steps: int) -> dict[str, torch.Tensor]:
    """Train for num_steps updates, and return the learned `difference`.

    pipe: the dense model, in fp32 on the run's device. It is not changed. latent_shape: [C, f, h, w].
    """
    torch.manual_seed(run.seed)
    teacher = pipe.transformer
    student = to_sparse(copy.deepcopy(teacher))
    learned = [parameter for parameter in student.parameters() if parameter.requires_grad]
    optimizer = adamw(learned, LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = warmup_and_cosine(optimizer, num_steps, warmup=10)
    stage = Stage(run, "sparse", num_steps, student=student, optimizer=optimizer, schedule=schedule)
    config = trp.Sparse(quantize=(), blocks=SLA_BLOCKS)
    with trp.patch(student, config), _attention_of(student) as attended, _attention_of(teacher) as wanted:
        for step in stage.steps():
            for block in student.blocks:
                block.attn1.processor.topk = KEPT[step % len(KEPT)]
            generator = random.Random(run.seed_of("captions", step))
            captions = [str(draw_scene(generator, held_out=False)) for _ in range(BATCH)]
            with torch.no_grad():
                text = embed(pipe.text_encoder, token_ids(pipe.tokenizer, captions).to(run.device))
            for velocity, expected in trajectory(student, teacher, text, text, latent_shape):
                error = _relative(velocity, expected)
                attention = sum(map(_relative, attended, wanted)) / len(wanted)
                (error + ATTENTION_WEIGHT * attention).backward()
                stage.record(velocity=error, attention=attention)
            torch.nn.utils.clip_grad_norm_(learned, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return difference(student, teacher)


def to_sparse(transformer: WanTransformer3DModel) -> WanTransformer3DModel:
    """Add the parameters that learn to a transformer, and freeze all others."""
    transformer.requires_grad_(False)
    transformer.add_adapter(
        LoraConfig(r=RANK, lora_alpha=RANK, target_modules=[f"attn1.{linear}" for linear in LINEARS])
    )
    for block in transformer.blocks:
        attn, head_dim = block.attn1, transformer.config.attention_head_dim
        attn.proj_l = SparseLinearAttention(head_dim).proj_l.to(transformer.device)
        for module in (attn.proj_l, attn.norm_q, attn.norm_k):
            module.requires_grad_(True)
    return transformer


def difference(student: WanTransformer3DModel, teacher: WanTransformer3DModel) -> dict[str, torch.Tensor]:
    """Return the learned ``NAME.lora_A.weight``, ``NAME.lora_B.weight``, ``NAME.diff`` of norms, and proj_l's own."""
    found = {}
    for name, parameter in student.named_parameters():
        if not parameter.requires_grad:
            continue
        value = parameter.detach()
        if ".norm_" in name:
            found[name.replace(".weight", ".diff")] = value - teacher.get_parameter(name)
        else:
            found[name.replace(".default.", ".")] = value.clone()
    return found


@contextlib.contextmanager
def _attention_of(transformer: WanTransformer3DModel) -> Iterator[list[torch.Tensor]]:
    """Collect, in this context, the self-attentions' results of the transformer's latest forward, block by block."""
    results: list[torch.Tensor] = [None] * len(transformer.blocks)

    def keep(index: int):
        def hook(_module, _inputs, output: torch.Tensor) -> None:
            results[index] = output

        return hook

    with contextlib.ExitStack() as hooks:
        for index, block in enumerate(transformer.blocks):
            hooks.callback(block.attn1.to_out[0].register_forward_hook(keep(index)).remove)
        yield results


def _relative(value: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the squared relative L2 error."""
    return (value - expected).square().sum() / expected.square().sum()
