"""The summary of a patch as a short table."""

from __future__ import annotations

from collections.abc import Callable

import torch
from diffusers.utils.torch_utils import get_module_execution_device

Rows = list[tuple[str, str, str, dict[str, int]]]
HEADER = ("sub-layer", "step", "kernel", "fused", "falls back because")
FOOTER = (
    "under autograd the norms, RoPE, QKV, GELU and on sm_90 attention run as torch ops, as QKV does for few tokens, "
    "and the residual keeps its dtype; under autocast blocks run diffusers' code"
)


def summary_table(
    transformers: dict[str, torch.nn.Module],
    plan_rows: Callable[[torch.nn.Module], Rows],
    notes: Callable[[torch.nn.Module], list[str]],
) -> str:
    """One table per transformer: a line per fused step with its kernel, blocks fused, and reasons for the others; then
    notes."""
    return "\n\n".join(_table(name, model, plan_rows(model), notes(model)) for name, model in transformers.items())


def _table(name: str, model: torch.nn.Module, rows: Rows, notes: list[str]) -> str:
    blocks = len(model.blocks)
    dtype = str(model.patch_embedding.weight.dtype).removeprefix("torch.")
    device = _device_name(get_module_execution_device(model))
    cells = [HEADER, *(_cells(blocks, *row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [" ".join(f"{cell:{width}} " for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    title = f"{name}: {type(model).__name__}, {blocks} blocks, {dtype} on {device}"
    return "\n  ".join([title, *lines, *notes, FOOTER])


def _cells(blocks: int, sub_layer: str, step: str, kernel: str, reasons: dict[str, int]) -> tuple[str, ...]:
    because = "; ".join(f"{reason} ({count})" for reason, count in reasons.items())
    return sub_layer, step, kernel, f"{blocks - sum(reasons.values())}/{blocks}", because


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
