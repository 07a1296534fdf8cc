"""`turbo-rcm tune`: measure on this GPU, and keep the results for `patch`."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from datetime import date
from functools import partial

import torch
from tqdm import tqdm

from ..bench.ops import OpCase, OpResult
from ..bench.tune import Shapes, cases, configs_of_folder, measure, rows_of, shapes_of_case, shapes_of_folder
from ..kernels.choice.measured import Verdict, kernels_of, tier_verdicts_of, verdicts_of
from ..kernels.choice.tuned import forget_tuned, origin_of, tuned_file, versions
from ..patching.families import CASES, SIZES
from ..tables import table
from .arguments import spelled
from .errors import CommandError
from .files import write_json
from .pipelines import choose_device
from .sizes import size_rules

DEFAULT_CONFIG = "wan2.1-1.3b"


def tune(arguments: argparse.Namespace) -> int:
    """Measure, show and keep the results, or with --reset delete them. Raises CommandError without a GPU."""
    if arguments.reset:
        for name in ("height", "width", "frames", "device"):
            if getattr(arguments, name) is not None:
                raise CommandError(f"--reset deletes all measurements; leave {spelled(name)} out.")
        try:
            lines = [f"removed {path}" for path in forget_tuned()]
        except OSError as error:
            raise CommandError(f"--reset: {error}; remove it by hand, or change who may write there.") from error
        print(*lines, "the patch chooses by the measurements that ship with the package", sep="\n")
        return 0
    shapes = _shapes(arguments)
    if not torch.cuda.is_available() or torch.version.hip is not None:
        raise CommandError("tune times kernels on an NVIDIA GPU, and PyTorch finds none here; check the driver.")
    device = choose_device(arguments)
    if device.type != "cuda":
        raise CommandError(f"--device {device}: tune times kernels on an NVIDIA GPU; leave it out.")
    gpu, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    keep(shapes, gpu, capability, partial(measure, device=device))
    return 0


def keep(
    shapes: Shapes, gpu: str, capability: tuple[int, int], measure: Callable[[OpCase], OpResult]
) -> dict[str, Verdict]:
    """Measure every case, print the results, and write them to the file of this GPU and these versions.

    The file names the model and size that were measured.

    measure: how a case is checked and timed. Returns the verdict of every op.
    """
    path = tuned_file(gpu)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):  # before minutes of measuring
            pass
    except OSError as error:
        raise CommandError(
            f"cannot write in {path.parent}: {error}; set TURBO_RCM_PATCH_CACHE to another folder."
        ) from error
    print(f"tune for {shapes.model} at {shapes.size}")
    bar = tqdm(list(cases(shapes)), desc="tune", unit="case")
    rows = rows_of(bar, measure, report=bar.write)
    made = {"model": shapes.model, "size": shapes.size, "date": date.today().isoformat()}
    content = {"gpu": gpu, "capability": list(capability), "versions": versions(), **made, "rows": rows}
    write_json(path, content)
    origin = origin_of(content)
    verdicts = verdicts_of(origin, rows)
    tables = (
        _rows_table(rows),
        _verdicts_table(verdicts, kernels_of(rows)),
        _tiers_table(tier_verdicts_of(origin, rows)),
    )
    print(*tables, f"kept in {path}; turbo-rcm tune --reset forgets it", sep="\n\n")
    return verdicts


def _shapes(arguments: argparse.Namespace) -> Shapes:
    size = arguments.height, arguments.width, arguments.frames
    if arguments.model is None:
        config = arguments.config or DEFAULT_CONFIG
        if config not in CASES:
            raise CommandError(f"--config {config} is unknown; accepted are {SIZES}.")
        case = CASES[config]
        size_rules(case.vae, case.transformer).check(*size)
        return shapes_of_case(config, size)
    if not arguments.model.is_dir():
        raise CommandError(
            f"--model {arguments.model}: no such folder; give the downloaded folder of a diffusers pipeline or of a "
            f"transformer, or leave it out for --config, one of {SIZES}."
        )
    try:
        transformer, vae = configs_of_folder(arguments.model)
        size_rules(vae, transformer).check(*size)
        return shapes_of_folder(arguments.model, size)
    except ValueError as error:
        raise CommandError(f"--model: {error}") from error


def _rows_table(rows: list[dict]) -> str:
    lines = [["op", "shape", "ours, ms", "otherwise", "ms"]]
    for row in rows:
        times = [_milliseconds(row[name]) for name in ("ours", "rival")]
        lines.append([row["op"], "x".join(map(str, row["shape"])), times[0], row["rival_name"], times[1]])
    return table(lines)


def _verdicts_table(verdicts: dict[str, Verdict], kernels: dict[str, str]) -> str:
    lines = [["op", "ours, ms", "otherwise, ms", "the patch takes"]]
    for op, verdict in verdicts.items():
        taken = kernels.get(op, "ours" if verdict.is_ours else "PyTorch's")
        rival = verdict.rival or None  # 0 is the sum of no shapes' times
        lines.append([op, _milliseconds(verdict.ours), _milliseconds(rival), taken])
    return table(lines)


def _tiers_table(verdicts: dict[str, Verdict]) -> str:
    lines = [["of the other tiers", "ms", "exact tier, ms", "speed"]]
    for part, verdict in verdicts.items():
        lines.append([part, _milliseconds(verdict.ours), _milliseconds(verdict.rival), verdict.speed])
    return table(lines)


def _milliseconds(time: float | None) -> str:
    return "failed" if time is None else f"{time:.3f}"
