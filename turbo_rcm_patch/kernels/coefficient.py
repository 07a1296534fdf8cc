"""Skip coefficients as kernels see them: a tensor of shape [B|1, S|1, C|1], or None for the constant 1.

Every op that ends in the skip computes ``c_skip * residual + c_out * F`` in fp32 and rounds once. A coefficient's
shape says how it varies. So one epilogue serves a consistency block, with one value per sample, a Wan block, with a
gate per channel, and per-token timesteps, with a gate per token and channel.

Consecutive tokens often share their timestep. A coefficient that is constant within such runs of tokens is given as
`Runs`. Inside an op it is a tensor [R, 1, C], as if each run were a sample, beside the tensor of the runs' starts.
"""

from __future__ import annotations

from numbers import Real
from typing import NamedTuple

import torch
import triton
import triton.language as tl

ONE = 0  # no tensor: the constant 1
PER_SAMPLE = 1  # [B|1, 1, 1]
PER_CHANNEL = 2  # [B|1, 1, C]
PER_TOKEN = 3  # [B|1, S, C|1]
PER_RUN = 4  # [R, 1, C] with starts [R + 1]

MAX_RUNS = 32  # each run costs every tile of the sm_90 GEMM two loads


class Runs(NamedTuple):
    """A coefficient with a row of channels for each run of consecutive tokens. Tokens are counted over all samples.

    values: [R, C], R from 1 to MAX_RUNS. starts: [R + 1] int32 on the same device, ascending from 0 to B·S. Run r has
    the tokens from starts[r] up to, but not including, starts[r + 1]. A run may be empty. The values of starts are not
    checked: reading them would wait for the GPU.
    """

    values: torch.Tensor
    starts: torch.Tensor


Coefficient = float | int | torch.Tensor


def canonical_coefficient(
    name: str, value: Coefficient | None, batch: int, tokens: int, channels: int, device: torch.device
) -> torch.Tensor | None:
    """Return a user's coefficient in the shape [B|1, S|1, C|1] (a view if possible), or None for the constant 1.

    value: a number (NumPy's too), 0-d, per sample [B], per channel [C] or [B, 1, C], per token [B, S, C], or any 3-d
        shape whose dimensions are 1 or full.

    Raises ValueError for another type or shape, for complex values, for a 1-d
    shape that could mean both [B] and [C], and for a tensor on another device.
    """
    if isinstance(value, Runs):
        raise ValueError(f"{name} varies by run; only scale, shift and c_out may.")
    if value is not None and not isinstance(value, (int, float, torch.Tensor)):
        value = _number(name, value)
    if value is None or (isinstance(value, (int, float)) and value == 1):
        return None
    if isinstance(value, (int, float)):
        return torch.full((1, 1, 1), float(value), dtype=torch.float32, device=device)
    _check_real(name, value)
    if value.device != device and value.dim() > 0:
        raise ValueError(f"{name} is on {value.device} but the residual is on {device}; move it there first.")
    if value.dim() == 0:
        return value.to(device).reshape(1, 1, 1)
    if value.dim() == 1:
        return _canonical_1d(name, value, batch, channels)
    full = (batch, tokens, channels)
    if value.dim() != 3 or any(size not in (1, wanted) for size, wanted in zip(value.shape, full, strict=True)):
        raise ValueError(
            f"{name} has shape {list(value.shape)}; accepted are a number, [B], [C], [B, 1, C] and [B, S, C] "
            f"with B={batch}, S={tokens}, C={channels}."
        )
    return value


def _number(name: str, value: object) -> float:
    """Return a number of another type, such as NumPy's, as a float. Raises ValueError for anything else."""
    if isinstance(value, Real):
        return float(value)
    raise ValueError(
        f"{name} is of type {type(value).__name__}; accepted are a number, a tensor and None. torch.as_tensor makes a "
        "tensor of a list or an array."
    )


def _check_real(name: str, value: torch.Tensor) -> None:
    if value.is_complex():
        raise ValueError(f"{name} is complex ({value.dtype}); coefficients are real.")


def _canonical_1d(name: str, value: torch.Tensor, batch: int, channels: int) -> torch.Tensor:
    size = value.shape[0]
    if size == 1:
        return value.reshape(1, 1, 1)
    if size == batch == channels:
        raise ValueError(
            f"{name} has shape [{size}], which here is both the batch and the channel count; "
            f"give it as [B, 1, 1] or as [1, 1, C]."
        )
    if size == batch:
        return value.reshape(batch, 1, 1)
    if size == channels:
        return value.reshape(1, 1, channels)
    raise ValueError(
        f"{name} has shape [{size}]; a 1-d coefficient is per sample [B={batch}] or per channel [C={channels}]."
    )


def split_runs(
    name: str, value: Coefficient | Runs | None, batch: int, tokens: int, channels: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return a coefficient and the starts of its runs: Runs as values [R, 1, C] and starts [R + 1], any other value as
    `canonical_coefficient` gives it and None.

    Raises ValueError as `canonical_coefficient` does, and for Runs with other shapes, with starts that are not int32,
    or on another device.
    """
    if not isinstance(value, Runs):
        return canonical_coefficient(name, value, batch, tokens, channels, device), None
    check_runs(name, value, channels, device)
    return value.values[:, None], value.starts.contiguous()


def values_and_starts(value: torch.Tensor | Runs | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Do what `split_runs` does for a coefficient that is already canonical or Runs, without any check."""
    return (value.values[:, None], value.starts) if isinstance(value, Runs) else (value, None)


def check_runs(name: str, runs: Runs, channels: int, device: torch.device) -> None:
    """Raise ValueError unless the values are real [R, C] and the starts [R + 1] int32, both on the device."""
    values, starts = runs
    _check_real(name, values)
    fits = values.dim() == 2 and 1 <= values.shape[0] <= MAX_RUNS and values.shape[1] == channels
    if not fits or starts.shape != (values.shape[0] + 1,) or starts.dtype != torch.int32:
        raise ValueError(
            f"{name} has values {list(values.shape)} and starts {list(starts.shape)} {starts.dtype}; runs have values "
            f"[R, C={channels}] with R from 1 to {MAX_RUNS}, and starts [R + 1] int32."
        )
    for tensor in runs:
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device} but the other tensors are on {device}; move it there.")


def search_steps(starts: torch.Tensor | None) -> int:
    """Return the number of bisection steps that `find_runs` needs for R runs: 0 for R = 1, and without runs."""
    return 0 if starts is None else max(0, starts.shape[0] - 2).bit_length()


def count_runs(starts: torch.Tensor | None) -> int:
    """Return the number of runs R, or 0 without runs."""
    return 0 if starts is None else starts.shape[0] - 1


def coefficient_kind(value: torch.Tensor | None, starts: torch.Tensor | None = None) -> int:
    """Return how a canonical coefficient varies: ONE, PER_SAMPLE, PER_CHANNEL, PER_TOKEN or, with starts, PER_RUN."""
    if starts is not None:
        return PER_RUN
    if value is None:
        return ONE
    if value.shape[1] > 1:
        return PER_TOKEN
    return PER_CHANNEL if value.shape[2] > 1 else PER_SAMPLE


def coefficient_strides(value: torch.Tensor | None) -> tuple[int, int, int]:
    """Return the element strides of a canonical coefficient over (sample or run, token, channel).

    The stride is 0 along a dimension in which the coefficient is constant."""
    if value is None:
        return 0, 0, 0
    (samples, tokens, channels), (by_sample, by_token, by_channel) = value.shape, value.stride()
    return 0 if samples == 1 else by_sample, 0 if tokens == 1 else by_token, 0 if channels == 1 else by_channel


def kind_and_strides(
    value: torch.Tensor | None, starts: torch.Tensor | None = None
) -> tuple[int, tuple[int, int, int]]:
    """Return `coefficient_kind` and `coefficient_strides`."""
    return (ONE, (0, 0, 0)) if value is None else (coefficient_kind(value, starts), coefficient_strides(value))


@triton.jit
def load_coefficient(
    pointer, sample, rows, columns, row_mask, column_mask, stride_b, stride_s, stride_c, KIND: tl.constexpr
):
    """Load a coefficient for the tile (sample, rows [M], columns [N]) as fp32 [1,1], [1,N] or [M,N] by KIND. For
    a coefficient that varies by run, ``sample`` holds the run of each row [M]."""
    base = pointer + sample.to(tl.int64) * stride_b
    if KIND == 1:
        value = tl.load(base).to(tl.float32)[None, None]
    elif KIND == 2:
        value = tl.load(base + columns * stride_c, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    else:
        if KIND == 3:
            base += rows.to(tl.int64) * stride_s
        mask = row_mask[:, None] & column_mask[None, :]
        value = tl.load(base[:, None] + columns[None, :] * stride_c, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def find_runs(tokens, starts, runs, STEPS: tl.constexpr):
    """Return the run of each token [M]: the last run that starts at or before it, by bisection in STEPS
    (`search_steps`)."""
    found = tl.zeros_like(tokens)
    for step in tl.static_range(STEPS):
        later = found + (1 << (STEPS - 1 - step))
        found = tl.where(tokens >= tl.load(starts + tl.minimum(later, runs)), later, found)  # starts[runs] = B·S
    return tl.minimum(found, runs - 1)  # stay in bounds for tokens past the last one
