"""Measure the error of attention in 8 bits on three kinds of values, beside FlashAttention-3's in fp8."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import torch
from diffusers.models.transformers import transformer_wan

from scripts.benchmarks.contests.quantized import structured_qkv
from turbo_rcm_patch import embedded, kernels
from turbo_rcm_patch.bench.metrics import cosine, relative_l1, relative_l2
from turbo_rcm_patch.bench.ops import Draws
from turbo_rcm_patch.bench.ops_quantized import ATTENTION_ERROR
from turbo_rcm_patch.kernels import reference
from turbo_rcm_patch.kernels.quantized import FP8
from turbo_rcm_patch.patching import use_rcm

NORMAL, STRUCTURED, CAPTURED = "N(0, 1)", "structured", "the embedded model's"
STEPS = 4  # of the generation whose attentions are captured
LEAST_COSINE, MOST_L1, MOST_BESIDE_RIVAL = 0.9995, 0.03, 0.5  # for values like a model's

QKV = Sequence[torch.Tensor]  # three [B, S, H, D]


@dataclass(frozen=True)
class AttentionError:
    """The worst figures of `count` attentions over one kind of values.

    They are the cosine and relative errors to fp64, the largest error of FlashAttention-3 in fp8, and the largest ratio
    of our error to it.
    """

    values: str
    count: int
    cosine: float
    relative_l1: float
    relative_l2: float
    rival_l2: float
    beside_rival: float

    def missed(self) -> list[str]:
        """Return the names of the figures that exceed the quantized tier's limits."""
        if self.values == NORMAL:
            limits = {"relative_l2": self.relative_l2 <= ATTENTION_ERROR}
        else:
            limits = {
                "cosine": self.cosine >= LEAST_COSINE,
                "relative_l1": self.relative_l1 <= MOST_L1,
                "beside_rival": self.beside_rival <= MOST_BESIDE_RIVAL,
            }
        return [name for name, holds in limits.items() if not holds]


def measure(device: torch.device, tokens: int, heads: int, head_dim: int) -> Iterator[AttentionError]:
    """Yield the errors for each kind of values. The drawn kinds have these sizes."""
    draw = Draws(device)
    yield error_of(NORMAL, [[draw(1, tokens, heads, head_dim) for _ in range(3)]])
    yield error_of(STRUCTURED, [structured_qkv(draw, heads, tokens, head_dim)])
    yield error_of(CAPTURED, captured_qkv(device))


def error_of(values: str, attentions: Sequence[QKV]) -> AttentionError:
    """Return the worst attention's errors: of our kernel in bf16 on a GPU, else of the torch reference in fp32."""
    cosines, *errors = torch.tensor(list(map(_errors, attentions)), dtype=torch.float64).T
    _, l2, rival_l2 = errors
    largest = (error.max().item() for error in (*errors, l2 / rival_l2))  # NaN is the largest, and the least
    return AttentionError(values, len(cosines), cosines.min().item(), *largest)


def _errors(qkv: QKV) -> tuple[float, float, float, float]:
    qkv = [x.to(torch.bfloat16 if x.is_cuda else torch.float32) for x in qkv]
    exact = _attention(*(x.double() for x in qkv))
    quantized = kernels.quantize_qkv(*(x.flatten(2) for x in qkv), heads=qkv[0].shape[2])
    ours, rival = kernels.attention_8bit(quantized), flash_attention_in_fp8(*qkv)
    return cosine(ours, exact), relative_l1(ours, exact), relative_l2(ours, exact), relative_l2(rival, exact)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return reference.attention(q, k, v, None, None, None, q.shape[-1] ** -0.5)


def flash_attention_in_fp8(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend with the roundings of FlashAttention-3 (Shah et al. 2024) in fp8 with unit scales, in torch.

    q, k, v and the softmax's weights are in e4m3, all else in fp32. The weights are rounded before they are divided,
    and reach up to 256, so that few underflow."""
    q, k, v = (_in_e4m3(x).transpose(1, 2) for x in (q, k, v))
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    weights = 256 * (scores - scores.amax(-1, keepdim=True)).exp()
    return (_in_e4m3(weights) @ v / weights.sum(-1, keepdim=True)).transpose(1, 2)


def _in_e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.to(FP8).float()


def captured_qkv(device: torch.device) -> list[QKV]:
    """Return q, k and v of every self-attention in a generation of the embedded model, after norms and RoPE."""
    pipe, found = embedded.load_embedded_pipeline(torch.float32).to(device), []
    use_rcm(pipe)
    pipe.set_progress_bar_config(disable=True)
    attend = transformer_wan.dispatch_attention_fn

    def watched(q, k, v, **options):
        if q.shape[1] == k.shape[1]:
            found.append((q, k, v))
        return attend(q, k, v, **options)

    size = {"height": embedded.HEIGHT, "width": embedded.WIDTH, "num_frames": embedded.FRAMES}
    options = {"num_inference_steps": STEPS, "guidance_scale": 1.0, "output_type": "latent"}
    with mock.patch.object(transformer_wan, "dispatch_attention_fn", watched):
        pipe("a red circle moves right", **size, **options, generator=torch.Generator().manual_seed(0))
    return found
