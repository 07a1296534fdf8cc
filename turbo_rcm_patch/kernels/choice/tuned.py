"""The results of `turbo-rcm tune` on this machine: files like those of measurements/, in the user's cache folder.

A file belongs to one GPU and to the versions of torch, Triton and this package. With other versions it is not used. Its
rows may also cover the other tiers' ops; their rival is the exact tier. A row of attention may have "sdpa": the backend
of PyTorch's attention that beats PyTorch's own choice.
"""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path

import torch
import triton

from ... import __version__
from ..attention.sdpa import BACKENDS

logger = logging.getLogger(__name__)

CACHE = "TURBO_RCM_PATCH_CACHE"  # environment variable that names another folder
BY_TUNE = "by turbo-rcm tune"


def tuned_folder() -> Path:
    """Return the folder of the files: tuned/ in TURBO_RCM_PATCH_CACHE, else in turbo_rcm_patch in the user's caches."""
    # Path.expanduser raises if the home folder is unknown, as in some containers.
    caches = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.environ.get(CACHE) or Path(caches, "turbo_rcm_patch"), "tuned")


def versions() -> dict[str, str]:
    """Return the versions that a measurement made now holds for."""
    return {"torch": torch.__version__, "triton": triton.__version__, "turbo_rcm_patch": __version__}


def tuned_file(gpu: str) -> Path:
    """Return the path of a GPU's file for the current versions."""
    return tuned_folder() / f"{re.sub(r'[^a-z0-9.+]+', '-', '-'.join([gpu, *versions().values()]).lower())}.json"


def origin_of(measured: dict) -> str:
    """Return a description of a file's content: "NVIDIA H200 by turbo-rcm tune, of wan2.1-1.3b at 480x832x81"."""
    size = f" at {measured['size']}" if "size" in measured else ""  # older files have no size
    return f"{measured['gpu']} {BY_TUNE}, of {measured['model']}{size}"


def read_tuned() -> dict[str, tuple[str, list[dict]]]:
    """Return, by GPU, the origin and the rows of the measurements made with the current versions. A file that cannot be
    read is skipped with a warning."""
    found = {}
    for path in sorted(tuned_folder().glob("*.json")):
        try:
            measured = json.loads(path.read_text(encoding="utf-8"))
            if measured["versions"] == versions():
                found[measured["gpu"]] = origin_of(measured), list(map(_row, measured["rows"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s is left out, because it cannot be read (%r); run turbo-rcm tune again.", path, error)
    return found


def _row(row: dict) -> dict:
    """Return the fields of a row that measured.py uses. Raises ValueError if the row is invalid."""
    op, ours, rival = row["op"], row["ours"], row["rival"]
    sdpa, crossing = row.get("sdpa"), False
    kernels = dict(row.get("kernels", {}))  # older files have none
    times = (ours, rival, *kernels.values())
    are_times = all(time is None or isinstance(time, (int, float)) for time in times)
    if not (isinstance(op, str) and are_times and sdpa in (None, *BACKENDS)):
        raise ValueError(f"{row} is not a row of measurements")
    if sdpa is not None:
        _, queries, keys, _ = row["shape"]
        crossing = queries != keys
    return {"op": op, "ours": ours, "rival": rival, "sdpa": sdpa, "crossing": crossing, "kernels": kernels}


def forget_tuned() -> list[Path]:
    """Remove the results of all versions, and return the removed files. Raises OSError if a file cannot be removed."""
    files = sorted(tuned_folder().glob("*.json"))
    for path in files:
        path.unlink()
    return files
