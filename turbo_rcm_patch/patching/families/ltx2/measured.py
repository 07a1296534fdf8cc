"""Measurements of `verify` within LTX-2's blocks: each sub-layer's contribution, and the self-attention's inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from ...steps.layers import by_token
from ...steps.residual import Storage
from ..family import Outputs
from ..wan.measured import on_the_norm_of
from .forward import Arguments
from .rope import rotate
from .sub_layers import SUB_LAYERS, BlockPlan, Inputs, Whole

MODULES = {
    "video_self": "attn1",
    "audio_self": "audio_attn1",
    "video_text": "attn2",
    "audio_text": "audio_attn2",
    "audio_to_video": "audio_to_video_attn",
    "video_to_audio": "video_to_audio_attn",
    "video_ff": "ff",
    "audio_ff": "audio_ff",
}
BETWEEN = ("audio_to_video", "video_to_audio")
OF_AUDIO = ("audio_self", "audio_text", "video_to_audio", "audio_ff")  # sub-layers that change the audio
FIRST, LAST = ("video_self", "audio_self"), ("video_ff", "audio_ff")  # of their streams


def sub_layer_terms(
    block: nn.Module, plan: BlockPlan, inputs: Inputs, outputs: Outputs
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the name of each sub-layer, what the plan's adds to its stream, and what the oracle's adds.

    outputs: of the oracle's modules. A sub-layer that is called as a whole is left out.
    """
    kept = [inputs.x.float(), inputs.audio.float()]
    sources, seen = {"video_text": inputs.context, "audio_text": inputs.audio_context}, {}
    for name, stream, group in SUB_LAYERS:
        sub_layer, given = getattr(plan, name), getattr(inputs, name)
        if sub_layer is None:
            continue
        own = int(name in OF_AUDIO)
        if not seen and name in BETWEEN:
            seen["audio_to_video"], seen["video_to_audio"] = plan.seen_between(*map(_stored, kept, plan.residual))
            sources["video_to_audio"], sources["audio_to_video"] = seen["audio_to_video"], seen["video_to_audio"]
        gate = 1.0 if given.own.gate is None else by_token(given.own.gate, kept[own])
        added = gate * outputs[MODULES[name]].view(kept[own].shape)
        if not isinstance(sub_layer, Whole):
            held = plan.residual[own]
            stored = (inputs.x, inputs.audio)[own] if name in FIRST else _stored(kept[own], held)
            source = (sources[name],) if name in sources else ()
            twin = on_the_norm_of(seen.get(name, stored), sub_layer)
            result = twin.run(torch.zeros_like(stored), given, *source)
            yield f"{stream} {group}", result.float() * (1.0 if name in LAST else held.scale), added
        kept[own] = kept[own] + added


def _stored(x: torch.Tensor, storage: Storage) -> torch.Tensor:
    return (x / storage.scale).to(storage.dtype)


def self_attention_qkv(
    oracle: nn.Module, args: tuple, kwargs: Mapping[str, object], outputs: Outputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the q, k and v [B, S, H, D] of the oracle's video self-attention, after norms and rotation."""
    attn = oracle.attn1
    q, k, v = (outputs[f"attn1.{name}"].unflatten(2, (attn.heads, -1)) for name in ("norm_q", "norm_k", "to_v"))
    rotary = Arguments(*args, **kwargs).video_rotary_emb
    return (q, k, v) if rotary is None else (rotate(attn, q, rotary), rotate(attn, k, rotary), v)
