"""`turbo-rcm info`: the GPU, versions and kernels, for people, as JSON, or as Markdown for an issue."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform
import re
from dataclasses import asdict

from ..bench.environment import describe_environment
from ..embedded import load_embedded_pipeline
from ..kernels import tuned_tiers
from ..patching import patch
from ..patching.summary import beside_exact
from ..tables import table
from ..versions import unknown_pair_note, untested_note
from .files import write_json
from .model_memory import memory_of_model
from .pipelines import choose_device, choose_dtype

OTHER_PACKAGES = ("accelerate", "huggingface_hub", "numpy", "safetensors", "peft", "torchao", "gguf", "kernels")
# Variables that change what runs. Others are left out of a report, because they may be private.
SETTINGS = ("TRITON_INTERPRET", "TRITON_DEFAULT_FP_FUSION", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES")
TINY_MODEL = "Kernels of the tiny model that the package includes:"
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{8,}")


def info(arguments: argparse.Namespace) -> int:
    """Print the environment, after the memory that --model takes, and the kernels of the included model.

    With --model the kernels are left out, except from the report and the JSON file, or with --verbose. Returns 1 if
    --vram is given and nothing that was asked for fits.
    """
    device = choose_device(arguments)
    memory, plans = ([], []) if arguments.model is None else memory_of_model(arguments)
    environment = asdict(describe_environment(device))
    notes = list(filter(None, [untested_note(), unknown_pair_note() if device.type == "cuda" else None]))
    shown = {name: value for name, value in environment.items() if value is not None}
    with patch(load_embedded_pipeline(choose_dtype(arguments, device), device)) as applied:
        kernels, rows = [applied.summary(), *beside_exact(tuned_tiers(device))], applied.rows()
    if arguments.report:
        print(_report(shown, notes, plans, kernels))
    else:
        lines = "\n".join(f"{name:16}{value}" for name, value in shown.items())
        titled = [TINY_MODEL, *kernels] if arguments.model is None or arguments.verbose else []
        print(*plans, lines, *notes, *titled, sep="\n\n")
    if arguments.json is not None:
        by_step = {f"{row.sub_layer}: {row.step}": row.kernel for row in rows}
        write_json(arguments.json, {"environment": environment, "kernels": by_step, "memory": memory})
    return 1 if memory and all("error" in plan for plan in memory) else 0


def _report(environment: dict[str, object], notes: list[str], plans: list[str], kernels: list[str]) -> str:
    """Return the environment, notes, plans and kernels as Markdown, without what is private."""
    rows = {**environment, "system": platform.platform()}
    for name in OTHER_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            rows[name] = importlib.metadata.version(name)
    rows |= {name: os.environ[name] for name in SETTINGS if name in os.environ}
    cells = [("what", "here"), *((name, str(value)) for name, value in rows.items())]
    parts = ["### turbo-rcm info", table(cells, markdown=True), *notes]
    for title, paragraphs in (("Memory of the model:", plans), (TINY_MODEL, kernels)):
        if paragraphs:
            parts += [title, *(f"```\n{text}\n```" for text in paragraphs)]
    return without_private("\n\n".join(parts))


def without_private(text: str) -> str:
    """Return a text with the user's home folder as ~, and Hugging Face's tokens left out."""
    home = os.path.expanduser("~")  # Path.home raises if the home folder is unknown
    if home not in ("~", "/", ""):
        text = re.sub(rf"{re.escape(home.rstrip('/'))}(?=/|\s|$|[\"'`:,;)])", "~", text)
    return _TOKEN.sub("hf_...", text)
