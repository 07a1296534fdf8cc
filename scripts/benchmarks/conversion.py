"""Time and peak memory of loading and of storing a full-size file in TurboDiffusion's naming, with random weights.

    python scripts/benchmarks/conversion.py --config wan2.1-1.3b --json conversion.json

It writes two files to a new folder on the disk of --folder: one of bf16 weights, and one like TurboDiffusion's "-quant"
files. turbo-rcm converts each for a tier, and load_turbodiffusion loads it. Each run has a process of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import init_empty_weights
from diffusers import WanTransformer3DModel

from turbo_rcm_patch.bench.environment import describe_environment
from turbo_rcm_patch.checkpoints.whole import QUANTIZED_BLOCK
from turbo_rcm_patch.cli.files import json_file, write_json
from turbo_rcm_patch.patching.families.wan.cases import CASES
from turbo_rcm_patch.patching.families.wan.names import WAN_NAMES

INTERVAL = 0.02  # seconds between two readings of a process's memory
BLOCK_LINEARS = (".self_attn.", ".cross_attn.", ".ffn.")
LOAD = """
import sys, torch
from diffusers import WanTransformer3DModel
import turbo_rcm_patch as trp
from turbo_rcm_patch.patching.families.wan.cases import CASES
torch.set_default_dtype(torch.bfloat16)
model = WanTransformer3DModel(**CASES[sys.argv[2]].transformer)
trp.load_turbodiffusion(sys.argv[1], model, attention=sys.argv[3])
"""


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    with init_empty_weights():
        model = WanTransformer3DModel(**CASES[options.config].transformer)
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        for kind in ("bf16", "quant"):
            source = folder / f"TurboWan-{kind}.pth"
            torch.save(dict(random_weights(model, quantized=kind == "quant")), source)
            for preset in ("sparse", "exact"):
                command = [sys.executable, "-m", "turbo_rcm_patch.cli", "convert", source, folder / f"{kind}-{preset}"]
                rows.append(measured(f"{kind}: convert --preset {preset}", source, *command, "--preset", preset))
            for attention in ("sagesla", "sla"):
                command = [sys.executable, "-c", LOAD, source, options.config, attention]
                rows.append(measured(f"{kind}: load_turbodiffusion, attention={attention!r}", source, *command))
            source.unlink()
    figures = {
        "settings": {"config": options.config, "parameters": sum(p.numel() for p in model.parameters())},
        "environment": asdict(describe_environment(torch.device("cpu"))),
        "rows": rows,
    }
    if options.json is not None:
        write_json(options.json, figures)
    return 0


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="wan2.1-1.3b", choices=CASES, metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--folder", type=Path, help="where files of the model's size fit (default: the system's own)")
    parser.add_argument("--json", type=json_file, help="write the figures to this file")
    return parser.parse_args(argv)


def random_weights(model: WanTransformer3DModel, *, quantized: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a file's tensors by the names in it."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        part = name.rpartition(".")[2]
        key = WAN_NAMES.official_parameter(name)
        in_8_bits = quantized and part == "weight" and parameter.dim() == 2 and any(at in key for at in BLOCK_LINEARS)
        if in_8_bits:
            blocks = [-(-size // QUANTIZED_BLOCK) for size in parameter.shape]
            linear = key.removesuffix(".weight")
            yield f"{linear}.int8_weight", torch.randint(-127, 128, parameter.shape, generator=generator).to(torch.int8)
            yield f"{linear}.scale", torch.full(blocks, 2e-4)
        else:
            yield key, 0.02 * torch.randn(parameter.shape, generator=generator, dtype=torch.float32).bfloat16()
    size = model.config.attention_head_dim
    for number in range(len(model.blocks)):
        path = f"blocks.{number}.self_attn.attn_op.local_attn.proj_l"
        yield f"{path}.weight", torch.zeros(size, size)
        yield f"{path}.bias", torch.zeros(size)


def measured(what: str, source: Path, *command: object) -> dict[str, object]:
    """Run a command. Return its seconds, and its peak memory: its own, and that of the files that it mapped."""
    peak = {"RssAnon": 0, "RssFile": 0}
    start = time.perf_counter()
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL)
    watcher = threading.Thread(target=_watch, args=(process, peak))
    watcher.start()
    code = process.wait()
    seconds = time.perf_counter() - start
    watcher.join()
    if code != 0:
        raise SystemExit(f"{what} ended with code {code}.")
    row = {"what": what, "seconds": seconds, "file_bytes": source.stat().st_size, "own_peak_bytes": peak["RssAnon"]}
    row["mapped_peak_bytes"] = peak["RssFile"]
    gib = {name: f"{row[name] / 2**30:.2f} GiB" for name in ("file_bytes", "own_peak_bytes", "mapped_peak_bytes")}
    print(f"{what}: {seconds:.1f} s; file {gib['file_bytes']}, peak {gib['own_peak_bytes']} of its own")
    return row


def _watch(process: subprocess.Popen, peak: dict[str, int]) -> None:
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        try:
            lines = status.read_text(encoding="utf-8").splitlines()
        except OSError:
            return
        for line in lines:
            name, _, value = line.partition(":")
            if name in peak:
                peak[name] = max(peak[name], 1024 * int(value.split()[0]))
        time.sleep(INTERVAL)


if __name__ == "__main__":
    sys.exit(main())
