"""Measurements that compare each op's kernel with PyTorch's, by GPU.

measurements/ has one file per GPU, which scripts/tools/ship_measurements.py writes from a results file:
``{"gpu", "capability": [9, 0], "versions", "rows"}``. A row is
``{"op", "dtype", "shape", "ours", "rival", "rival_name"}`` with times in milliseconds; "ours" is null if the kernel was
too inaccurate to be timed, or failed. Results of `turbo-rcm tune` on this GPU (tuned.py) take precedence.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from .tuned import read_tuned

WORTHWHILE = 1.02  # how many times as fast as the usual kernel another one must be: more than noise
FOLDER = Path(__file__).parent / "measurements"
MEASURED_DTYPES = (torch.bfloat16, torch.float16)  # only bf16 is timed; fp16 takes the same instructions
OPS = ("attention", "linear_skip", "linear_gelu", "linear_qkv", "conv_skip")
ATTENTION_8BIT, LINEARS_8BIT = "8-bit attention", "8-bit linears"
SPARSE_LINEAR, BLOCK_SPARSE = "sparse-linear attention", "block-sparse attention"
# The ops of the less accurate tiers, each with the part of a block that it belongs to. `turbo-rcm tune` times them
# against the exact tier's. These timings only inform: the tier that a user chose always runs, which also saves memory.
TIER_OPS = {
    "attention_8bit": ATTENTION_8BIT,
    "linear_skip_8bit": LINEARS_8BIT,
    "linear_gelu_8bit": LINEARS_8BIT,
    "linear_qkv_8bit": LINEARS_8BIT,
    "sparse_linear_attention": SPARSE_LINEAR,
    "block_sparse_attention": BLOCK_SPARSE,
}


class Verdict(NamedTuple):
    """The measurements of an op on a compute capability.

    gpus: the GPUs it was measured on, or the origin of a result of `turbo-rcm tune` (tuned.py).
    ours, rival: milliseconds for all measured shapes together. ours is None if our kernel failed for one of them.
    """

    gpus: tuple[str, ...]
    ours: float | None
    rival: float

    @property
    def is_ours(self) -> bool:
        """True if our kernel is chosen: it passed its checks and is at least as fast."""
        return self.ours is not None and self.ours <= self.rival

    @property
    def speed(self) -> str:
        """Our speed relative to the rival's: "1.30x as fast", or "failed its check"."""
        return "failed its check" if self.ours is None else f"{self.rival / self.ours:.2f}x as fast"


class Tuned(NamedTuple):
    """The results of `turbo-rcm tune` on a GPU.

    verdicts: the verdict of every op.
    sdpa: the backend of PyTorch's attention that beats PyTorch's own choice, for cross-attention (True) and
        self-attention (False), where a backend does.
    tiers: the verdict of every part of a block in the less accurate tiers. The rival is the exact tier's.
    kernels: by op, the fastest kernel among those that only `turbo-rcm tune` may choose.
    """

    verdicts: dict[str, Verdict]
    sdpa: dict[bool, str]
    tiers: dict[str, Verdict]
    kernels: dict[str, str]


@torch.compiler.assume_constant_result  # torch.compile must not trace the reading of files
def why_torch(op: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why PyTorch's own kernels run for an op (one of OPS) on this device and dtype.

    Return None if ours was measured to be at least as fast on a GPU of this compute capability, and on the CPU, where
    the measurements choose nothing.
    """
    if device.type != "cuda":
        return None
    if torch.version.hip is not None:
        return "not measured on AMD GPUs"
    if dtype not in MEASURED_DTYPES:
        return f"not measured in {str(dtype).removeprefix('torch.')}"
    major, minor = torch.cuda.get_device_capability(device)
    verdict = _verdict_on(op, device)
    if verdict is None:
        return f"not measured on sm_{major}{minor}"
    if verdict.ours is None:
        return f"failed its check on {', '.join(verdict.gpus)}"
    return None if verdict.is_ours else f"PyTorch's was faster on {', '.join(verdict.gpus)}"


def why_torch_at(op: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why PyTorch's own kernels run for an op at a shape, or None if a GPU of this name was not timed
    at it, or ours was not slower.

    `why_torch` judges all shapes and all GPUs of a compute capability together. `turbo-rcm tune` on this GPU replaces
    what this function knows.
    """
    if device.type != "cuda" or torch.version.hip is not None or dtype not in MEASURED_DTYPES:
        return None
    tuned, gpu = _tuned_on(device), torch.cuda.get_device_name(device)
    if (tuned is not None and op in tuned.verdicts) or shape not in slower_shapes().get((gpu, op), ()):
        return None
    return f"PyTorch's was faster at this size on {gpu}"


def measured_on(op: str, device: torch.device) -> str | None:
    """Return where an op was measured, or None if nowhere.

    This is the GPU itself, "NVIDIA H200 by turbo-rcm tune, of MODEL at SIZE", or else the GPUs of its compute
    capability, "NVIDIA H100 80GB HBM3, NVIDIA H200".
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    verdict = _verdict_on(op, device)
    return None if verdict is None else ", ".join(verdict.gpus)


def tuned_sdpa(device: torch.device, dtype: torch.dtype, *, crossing: bool) -> str | None:
    """Return the backend of PyTorch's attention (sdpa.py) that beat PyTorch's own choice on this GPU, or None.

    `turbo-rcm tune` measures it. crossing: True for cross-attention.
    """
    if device.type != "cuda" or dtype not in MEASURED_DTYPES:
        return None
    return _sdpa_on(device, True) if crossing else _sdpa_on(device, False)


@torch.compiler.assume_constant_result
def _sdpa_on(device: torch.device, crossing: bool) -> str | None:
    tuned = _tuned_on(device)
    return None if tuned is None else tuned.sdpa.get(crossing)


@torch.compiler.assume_constant_result
def tuned_kernel(op: str, device: torch.device) -> str | None:
    """Return the name of an op's kernel that only `turbo-rcm tune` may choose, and chose on this GPU, or None."""
    tuned = _tuned_on(device) if device.type == "cuda" else None
    return None if tuned is None else tuned.kernels.get(op)


def tuned_tiers(device: torch.device) -> dict[str, Verdict]:
    """Return what `turbo-rcm tune` found about the less accurate tiers on this GPU, by part of a block (TIER_OPS). The
    result is empty if it never ran here."""
    tuned = _tuned_on(device) if device.type == "cuda" else None
    return {} if tuned is None else tuned.tiers


def _verdict_on(op: str, device: torch.device) -> Verdict | None:
    tuned = _tuned_on(device)
    if tuned is not None and op in tuned.verdicts:
        return tuned.verdicts[op]
    return shipped().get((op, tuple(torch.cuda.get_device_capability(device))))


def _tuned_on(device: torch.device) -> Tuned | None:
    found = all_tuned()
    return found.get(torch.cuda.get_device_name(device)) if found else None


@functools.cache
def shipped() -> dict[tuple[str, tuple[int, int]], Verdict]:
    """Return the verdicts that ship with the package. The files are read once, when first asked for."""
    return read_verdicts(FOLDER.glob("*.json"))


@functools.cache
def slower_shapes() -> dict[tuple[str, str], set[tuple[int, ...]]]:
    """Return by GPU and op the shapes at which our kernel is slower than PyTorch's by more than noise."""
    return read_slower_shapes(FOLDER.glob("*.json"))


@functools.cache
def all_tuned() -> dict[str, Tuned]:
    """Return what `turbo-rcm tune` found on this machine, by GPU. The files are read once, when first asked for."""
    return {
        gpu: Tuned(verdicts_of(origin, rows), _sdpa_of(rows), tier_verdicts_of(origin, rows), kernels_of(rows))
        for gpu, (origin, rows) in read_tuned().items()
    }


def verdicts_of(origin: str, rows: Iterable[dict]) -> dict[str, Verdict]:
    """Return the verdict of every op (one of OPS) in the rows of `turbo-rcm tune`. origin: from tuned.py."""
    return _tuned_verdicts(origin, rows, {op: op for op in OPS})


def tier_verdicts_of(origin: str, rows: Iterable[dict]) -> dict[str, Verdict]:
    """Return the verdict of every part of a block in the less accurate tiers. Rows in which the exact tier's op failed
    are left out."""
    return _tuned_verdicts(origin, (row for row in rows if row["rival"] is not None), TIER_OPS)


def _tuned_verdicts(origin: str, rows: Iterable[dict], names: Mapping[str, str]) -> dict[str, Verdict]:
    by_name: dict[str, list[tuple[str, dict]]] = {}
    for row in rows:
        if row["op"] in names:
            by_name.setdefault(names[row["op"]], []).append((origin, row))
    return {name: _verdict(known) for name, known in by_name.items()}


def kernels_of(rows: Iterable[dict]) -> dict[str, str]:
    """Return, by op, the fastest of the kernels that only `turbo-rcm tune` may choose, if it is worthwhile.

    Its time over all shapes of the op must beat the time of the op's usual kernel by more than noise, and so PyTorch's,
    which runs no tier's op.
    """
    by_op: dict[str, list[dict]] = {}
    for row in rows:
        by_op.setdefault(row["op"], []).append(row)
    found = {
        op: _fastest_kernel(of_op, ("ours",) if op in TIER_OPS else ("ours", "rival")) for op, of_op in by_op.items()
    }
    return {op: name for op, name in found.items() if name is not None}


def _fastest_kernel(rows: list[dict], others: Sequence[str]) -> str | None:
    """Return the fastest kernel that only tune may choose, if it beats the others, which are keys of a row's times."""
    timed = [row.get("kernels", {}) for row in rows]
    totals = {name: _total(times.get(name) for times in timed) for name in timed[0]}
    totals = {name: total for name, total in totals.items() if total is not None}
    usual = [_total(row[who] for row in rows) for who in others]
    best = min(totals, key=totals.get, default=None)
    beats = best is not None and all(total is None or WORTHWHILE * totals[best] < total for total in usual)
    return best if beats else None


def _total(times: Iterable[float | None]) -> float | None:
    """Return the sum of times, or None if one of them is missing."""
    times = list(times)
    return None if None in times else sum(times)


def _sdpa_of(rows: Iterable[dict]) -> dict[bool, str]:
    return {row["crossing"]: row["sdpa"] for row in rows if row["sdpa"] is not None}


def read_verdicts(files: Iterable[Path]) -> dict[tuple[str, tuple[int, int]], Verdict]:
    """Return the verdict of every op on every compute capability in the files.

    A verdict adds up the times of all shapes, so that large shapes, which take most of a step, weigh most.
    """
    rows: dict[tuple[str, tuple[int, int]], list[tuple[str, dict]]] = {}
    for file in sorted(files):
        measured = json.loads(file.read_text(encoding="utf-8"))
        for row in measured["rows"]:
            rows.setdefault((row["op"], tuple(measured["capability"])), []).append((measured["gpu"], row))
    return {key: _verdict(known) for key, known in rows.items()}


def read_slower_shapes(files: Iterable[Path]) -> dict[tuple[str, str], set[tuple[int, ...]]]:
    """Return, by GPU and op, the shapes at which our kernel was slower in the files."""
    found: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    for file in files:
        measured = json.loads(file.read_text(encoding="utf-8"))
        for row in measured["rows"]:
            if row["ours"] is not None and row["ours"] > WORTHWHILE * row["rival"]:
                found.setdefault((measured["gpu"], row["op"]), set()).add(tuple(row["shape"]))
    return found


def _verdict(rows: list[tuple[str, dict]]) -> Verdict:
    ours = [row["ours"] for _, row in rows]
    gpus = tuple(dict.fromkeys(gpu for gpu, _ in rows))
    return Verdict(gpus, None if None in ours else sum(ours), sum(row["rival"] or 0.0 for _, row in rows))
