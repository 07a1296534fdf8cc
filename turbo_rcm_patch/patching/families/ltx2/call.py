"""The facts about LTX-2's blocks and their calls that decide the steps of the sub-layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from diffusers.models.normalization import RMSNorm
from torch import nn

from ...steps.layers import layer_norm, layer_norm_by_module
from ...steps.plan import Call, Step, Stream
from ...steps.residual import Storage
from ..wan.block import NOT_ASKED

NEEDS_PERTURBATION = "perturbation mask"
TOPK = 0.3  # the share of key blocks that TurboT2AV's sparse attention keeps
FRAME_RATE = 24  # of the videos that LTX-2 was made for; the sound is as long as they are
TOKENS, AUDIO_TOKENS, TEXT_TOKENS = 6144, 126, 1024  # a video of 121 frames at 768×512 with its sound, and a prompt

Norm = Callable[[torch.dtype | None], Step]  # from the 8-bit format that the next step takes


class Prompt(NamedTuple):
    """The sizes of a prompt: samples, and tokens of each."""

    samples: int
    tokens: int


class LTX2Call(NamedTuple):
    """One kind of call of an LTX-2 block.

    stream, audio: of the video and of the audio. prompt, audio_prompt: what they attend to.
    gate_of_video, gate_of_audio: what has a row of the gate of the attention from the other stream: "sample", "token"
        or "run", or None if that attention does not run.
    masked: the sub-layers whose attention has a mask.
    whole: (sub-layer, reason) of those whose inputs need their module to be called as a whole.
    """

    call: Call
    stream: Stream
    audio: Stream
    prompt: Prompt
    audio_prompt: Prompt
    gate_of_video: str | None = "sample"
    gate_of_audio: str | None = "sample"
    masked: tuple[str, ...] = ()
    whole: tuple[tuple[str, str], ...] = ()

    def why_not_asked(self, group: str) -> str | None:
        """Return a reason if a group of sub-layers is not in ``PatchConfig.fuse``, or None."""
        return None if group in self.call.config.fuse else NOT_ASKED


def usual_call(call: Call) -> LTX2Call:
    """Return the call of a video of 121 frames at 768×512 with one prompt."""
    prompt = Prompt(1, TEXT_TOKENS)
    return LTX2Call(call, Stream(1, TOKENS), Stream(1, AUDIO_TOKENS), prompt, prompt)


class Place(NamedTuple):
    """A sub-layer's place in the block: its name, its stream, and the storage of the residual before and after it."""

    name: str
    stream: Stream
    stored: Storage
    result: Storage


def norm_of(module: nn.Module, stored: Storage, call: Call, asked: str | None) -> Norm:
    """Return the norm of a stored residual, by its module if asked, the reason for that, is given."""
    if asked is not None:
        return lambda takes: layer_norm_by_module(module, stored, call, asked)
    return partial(_fused_norm, module, stored, call)


def _fused_norm(module: nn.Module, stored: Storage, call: Call, takes: torch.dtype | None) -> Step:
    return layer_norm(module, stored, call, takes, RMSNorm)
