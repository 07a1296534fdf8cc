"""The hardware and versions that a measurement ran on, which are kept beside every figure."""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import __version__

COMMIT = "TURBO_RCM_PATCH_COMMIT"  # environment variable with the commit, for a checkout without history
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Environment:
    """Hardware and versions. gpu, capability, gpu_memory (bytes), driver and cuda are None for a run on the CPU.

    commit: the commit of the checkout that ran, with "-dirty" if files differ from it, or None without a checkout.
    """

    gpu: str | None
    capability: str | None
    gpu_memory: int | None
    driver: str | None
    cuda: str | None
    cpu: str
    python: str
    torch: str
    triton: str
    diffusers: str
    transformers: str
    turbo_rcm_patch: str
    commit: str | None = None


def describe_environment(device: torch.device | str) -> Environment:
    """Return the environment of a run on `device`."""
    device = torch.device(device)
    # Not importlib.metadata.version: triton-windows and PyTorch's nightly builds of Triton have other names there.
    versions = {name: importlib.import_module(name).__version__ for name in ("triton", "diffusers", "transformers")}
    return Environment(
        **_describe_gpu(device),
        cpu=f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
        python=platform.python_version(),
        torch=torch.__version__,
        turbo_rcm_patch=__version__,
        commit=os.environ.get(COMMIT) or _commit(ROOT),
        **versions,
    )


def _describe_gpu(device: torch.device) -> dict[str, object]:
    if device.type != "cuda":
        return dict.fromkeys(("gpu", "capability", "gpu_memory", "driver", "cuda"))
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "capability": f"sm_{properties.major}{properties.minor}",
        "gpu_memory": properties.total_memory,
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
    }


def _commit(root: Path) -> str | None:
    if not (root / ".git").exists():
        return None
    return _first_line("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*")


def _first_line(*command: str) -> str | None:
    """Return the first line that a program prints, or None if it is not there, fails or takes too long."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.split("\n")[0].strip()
