"""The summary of a patch as a short table."""

from __future__ import annotations

from collections.abc import Callable

import torch

Rows = list[tuple[str, str, str, dict[str, int]]]


def summary_table(transformers: dict[str, torch.nn.Module], plan_rows: Callable[[torch.nn.Module], Rows]) -> str:
    """One table per transformer: a line per fused step with its kernel, blocks fused, and reasons for the others."""
    return "\n\n".join(_table(name, model, plan_rows(model)) for name, model in transformers.items())


def _table(name: str, model: torch.nn.Module, rows: Rows) -> str:
    blocks = len(model.blocks)
    like = model.patch_embedding.weight
    lines = [
        f"{name}: {type(model).__name__}, {blocks} blocks, {_dtype_name(like.dtype)} on {_device_name(like.device)}"
    ]
    cells = [("sub-layer", "step", "kernel", "fused", "falls back because")]
    for sub_layer, step, kernel, reasons in rows:
        fused = blocks - sum(reasons.values())
        because = "; ".join(f"{reason} ({count})" for reason, count in reasons.items())
        cells.append((sub_layer, step, kernel, f"{fused}/{blocks}", because))
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    lines += [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    ]
    lines.append(
        "  under autograd the norms, RoPE and GELU run as torch ops; under autocast blocks run diffusers' code"
    )
    return "\n".join(lines)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
