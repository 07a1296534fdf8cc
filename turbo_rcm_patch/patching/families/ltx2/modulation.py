"""The rows of modulation of an LTX-2 block: a table of the block plus what the timestep gives."""

from __future__ import annotations

import torch

from .sub_layers import Modulation


def rows_of(table: torch.Tensor, temb: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the rows table [n, C] + temb [B, 1|S, n·C], each [B, 1|S, C].

    One row for a sample is computed in fp32. Rows for every token stay in the model's dtype, as diffusers computes
    them: in fp32 they would take twice the memory.
    """
    temb = temb.unflatten(2, (len(table), -1))
    if temb.shape[1] == 1:
        temb = temb.to(torch.promote_types(temb.dtype, torch.float32))
    return (table.to(temb.device) + temb).unbind(2)


def stream_rows(table: torch.Tensor, temb: torch.Tensor) -> tuple[Modulation, Modulation, Modulation]:
    """Return a stream's modulation in its self-attention, its feed-forward, and its prompt attention (LTX-2.3)."""
    rows = rows_of(table, temb)
    return Modulation(*rows[:3]), Modulation(*rows[3:6]), Modulation(*rows[6:9])


def prompt_rows(table: torch.Tensor, temb: torch.Tensor | None, x: torch.Tensor) -> Modulation:
    """Return the modulation of a prompt (LTX-2.3). temb: [B, 1, 2·C], or None for one that no timestep changes."""
    if temb is not None:
        return Modulation(*rows_of(table, temb))
    return Modulation(*table[None, None].to(x.device, x.dtype).unbind(2))


def rows_between_streams(table: torch.Tensor, temb: torch.Tensor, gate: torch.Tensor) -> tuple[Modulation, ...]:
    """Return a stream's modulation in the attention from audio to video, and in that from video to audio.

    table [5, C], temb [B, 1|S, 4·C], gate [B, 1|S, C]. Both have the gate, which only the one that changes the stream
    uses.
    """
    a2v_scale, a2v_shift, v2a_scale, v2a_shift = rows_of(table[:4], temb)
    (gate,) = rows_of(table[4:], gate)
    return Modulation(a2v_shift, a2v_scale, gate), Modulation(v2a_shift, v2a_scale, gate)
