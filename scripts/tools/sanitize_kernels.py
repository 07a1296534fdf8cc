"""Run every kernel once at small sizes under compute-sanitizer, and fail on its findings. Needs a GPU.

    python scripts/tools/sanitize_kernels.py --tool memcheck     # accesses outside of what was allocated
    python scripts/tools/sanitize_kernels.py --tool racecheck    # shared memory that threads use in no certain order

The kernels run in parts, side by side, because the tool spends most of the time on the CPU, where it rewrites kernels.
Each part runs first without the tool, because Triton would compile many times slower under it.

Racecheck reports hazards at the start of warp-specialised kernels, even if they compute nothing
(warp_specialized_probes.py). Triton's first warpgroup writes the role of each other warp to shared memory, a byte each,
and the others read theirs. At the end it writes "done" in the same place. In PTX all warps join barrier 1 between write
and read, and again between read and the next write. Each joins from its own place in the code, so racecheck does not
see one barrier. So a race is Triton's own if one side reads a role, which is the only 8-bit load from shared memory in
the compiled code. All other races fail. One of the probes has a real race, which must be reported: otherwise racecheck
would not find such races.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `scripts` can be imported

from scripts.tools.compile_without_gpu import disassemble
from scripts.tools.every_launch import launch_one_attention, without_gluon
from turbo_rcm_patch.kernels.attention import attention_sm90
from turbo_rcm_patch.kernels.attention.attention import _attention_backward, attention_to_e4m3
from turbo_rcm_patch.kernels.attention_8bit import attention_8bit_sm90
from turbo_rcm_patch.kernels.attention_8bit.attention_8bit import attention_8bit
from turbo_rcm_patch.kernels.attention_8bit.quantize_qkv import quantize_qkv
from turbo_rcm_patch.kernels.block_sparse.block_sparse_attention import (
    block_sparse_attention,
    block_sparse_attention_8bit,
)
from turbo_rcm_patch.kernels.coefficient import Runs
from turbo_rcm_patch.kernels.conv import conv_sm90
from turbo_rcm_patch.kernels.conv.conv_skip import conv_skip
from turbo_rcm_patch.kernels.dispatch import KERNEL_DTYPES, SM90, is_sm90
from turbo_rcm_patch.kernels.launch import compile_ahead
from turbo_rcm_patch.kernels.linear import gemm_sm90
from turbo_rcm_patch.kernels.linear.linear import linear_8bit, linear_low_rank
from turbo_rcm_patch.kernels.linear.linear_gelu import linear_gelu
from turbo_rcm_patch.kernels.linear.linear_qkv import linear_qkv
from turbo_rcm_patch.kernels.linear.linear_skip import linear_skip
from turbo_rcm_patch.kernels.linear.low_rank import RANK_STEP, LowRank
from turbo_rcm_patch.kernels.quantized import FP8, INT8, QuantizedWeight
from turbo_rcm_patch.kernels.rows.gelu import gelu
from turbo_rcm_patch.kernels.rows.layer_norm_modulate import layer_norm_modulate
from turbo_rcm_patch.kernels.rows.quantize_rows import quantize_rows
from turbo_rcm_patch.kernels.rows.rms_norm_rope import rms_norm_rope
from turbo_rcm_patch.kernels.rows.rms_norm_silu import rms_norm_silu
from turbo_rcm_patch.kernels.rows.skip import skip
from turbo_rcm_patch.kernels.sparse_linear import sparse_linear_sm90
from turbo_rcm_patch.kernels.sparse_linear.sparse_linear_attention import sparse_linear_attention

ROOT = Path(__file__).resolve().parents[2]

FP32, FP16, BF16 = KERNEL_DTYPES
OF_BOTH = ("--print-limit", "0", "--show-backtrace", "no", "--target-processes", "application-only")
# Each run waits for its program on one of these ports, and longer than 10 s, as imports take with all at once.
CONNECTION = ("--max-connections", "64", "--launch-timeout", "300")
OPTIONS = {
    "memcheck": ("--report-api-errors", "no"),
    # Left to itself it may count a kernel's mbarriers too low, and miss what they order.
    "racecheck": ("--racecheck-report", "analysis", "--num-cuda-barriers", "64"),
}
PROCESSES = 15  # parts that run at a time
CACHE = "cache"  # of compiled kernels, in the folder of the reports
PROBES = "probes"  # warp_specialized_probes.py, beside the parts below
RACY_KERNEL = "racy_kernel"  # in warp_specialized_probes.py
TRITONS_OWN, WANTED, UNEXPLAINED = "reads a warp's role", "it has a race", "UNEXPLAINED"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--tool", choices=OPTIONS, help="run the kernels under this tool, and judge its reports")
    action.add_argument("--launch", metavar="PART", choices=(*PARTS, PROBES), help="only run a part of the kernels")
    parser.add_argument("--portable", action="store_true", help="with --launch: those that other GPUs than sm_90 take")
    parser.add_argument("--logs", type=Path, help="folder for the tool's reports; default: runs/<the tool>")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA GPU.")
    if options.launch is not None:
        launch(options.launch, options.portable)
        return 0
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    if sanitizer is None:
        parser.error("compute-sanitizer, of the CUDA toolkit, is neither on the PATH nor in /usr/local/cuda/bin.")
    logs = options.logs or ROOT / "runs" / options.tool
    problems = check_all(sanitizer, options.tool, logs.resolve(), is_sm90(torch.device("cuda")))
    for problem in problems:
        print(f"FAILED {problem}")
    return int(bool(problems))


def check_all(sanitizer: str, tool: str, logs: Path, sm90: bool) -> list[str]:
    """Run each part under the tool, and return what is wrong."""
    shutil.rmtree(logs / CACHE, ignore_errors=True)  # other versions of the compiled kernels
    logs.mkdir(parents=True, exist_ok=True)
    jobs = [(part, portable) for part in PARTS for portable in ((False, True) if sm90 else (False,))]
    jobs += [(PROBES, False)] if sm90 else []
    command = (sanitizer, "--tool", tool, *OF_BOTH, *CONNECTION, *OPTIONS[tool])
    with ThreadPoolExecutor(PROCESSES) as pool:
        list(pool.map(lambda job: run_part("compile", (), logs, *job), jobs))
        runs = list(pool.map(lambda job: run_part(tool, command, logs, *job), jobs))
    role_reads = find_role_reads(logs / CACHE) if tool == "racecheck" else {}
    print(f"the reports are in {logs}")
    problems = []
    for (part, portable), (code, report) in zip(jobs, runs, strict=True):
        name = name_of(part, portable)
        print(f"\n{name}")
        found = judge_races(report, role_reads, part == PROBES) if tool == "racecheck" else judge_memory(report)
        found += [f"the program exited with {code}"] if code != 0 else []
        problems += [f"{name}: {problem}" for problem in found]
    return problems


def run_part(what: str, under: tuple[str, ...], logs: Path, part: str, portable: bool) -> tuple[int, str]:
    """Run a part under a command. Return the exit code and the output of both, which is also written to a log."""
    launch = (sys.executable, __file__, "--launch", part, *(("--portable",) if portable else ()))
    environment = os.environ | {"TRITON_CACHE_DIR": str(logs / CACHE), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    log = logs / f"{what}-{name_of(part, portable)}.log"
    start = time.perf_counter()
    with open(log, "w") as file:
        code = subprocess.run((*under, *launch), env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
    print(f"{what} {name_of(part, portable)}: {time.perf_counter() - start:.0f} s", flush=True)
    return code, log.read_text()


def name_of(part: str, portable: bool) -> str:
    return f"{part}-portable" if portable else part


# ---------------------------------------------------------------------------------------------------------------------
# Reports
# ---------------------------------------------------------------------------------------------------------------------


class Access(NamedTuple):
    """kind: "Read" or "Write". pc: the byte of the kernel's code. source: "file:line", or None."""

    kind: str
    kernel: str
    pc: int
    source: str | None


class Race(NamedTuple):
    severity: str
    first: Access
    second: Access
    hazards: int


_ACCESS = re.compile(r"(Read|Write) access at (.+?)(?=,? and (?:Read|Write) access at |$)")
# The forms that compute-sanitizer writes since CUDA 12, and before.
_PLACES = (
    re.compile(r"(?P<kernel>\S.*?)\+0x(?P<pc>[0-9a-f]+)(?: in (?P<source>\S+:\d+))?"),
    re.compile(r"0x(?P<pc>[0-9a-f]+) in (?:(?P<source>\S+:\d+):)?(?P<kernel>[^\s:]+)"),
)


def judge_memory(report: str) -> list[str]:
    """Return the problems in memcheck's report, and print what it found."""
    summary = re.search(r"ERROR SUMMARY: (\d+) error", report)
    if summary is None:
        return ["memcheck wrote no summary"]
    for line, count in Counter(line for line in _lines(report) if re.match(r"Invalid|at \S+\+0x", line)).items():
        print(f"{count:6} {line}")
    return [f"memcheck counts {summary[1]} errors"] if summary[1] != "0" else []


def judge_races(report: str, role_reads: dict[str, set[int]], with_probes: bool) -> list[str]:
    """Return the problems in racecheck's report, and print a table of its races.

    role_reads: from `find_role_reads`. with_probes: True if the probes ran. One of them has a race.
    """
    summary = re.search(r"RACECHECK SUMMARY: (\d+) hazard", report)
    if summary is None:
        return ["racecheck wrote no summary"]
    paragraphs = _find_paragraphs(report)
    races = [race for paragraph in paragraphs for race in read_races(paragraph)]
    problems = [f"unknown to this script: {paragraph}" for paragraph in paragraphs if not read_races(paragraph)]
    if not problems and int(summary[1]) != len(paragraphs):
        problems.append(f"racecheck counts {summary[1]} races, of which {len(paragraphs)} were found in its report")
    rows = Counter()
    for race in races:
        rows[_judge(race, role_reads), race.first.kernel, race.severity] += race.hazards
        if _judge(race, role_reads) == UNEXPLAINED:
            problems.append(f"{race.severity}: {race.first} / {race.second}, {race.hazards} hazards")
    for (verdict, kernel, severity), hazards in sorted(rows.items()):
        print(f"{verdict:20} {kernel}: {hazards} hazards ({severity})")
    if with_probes and not any(verdict == WANTED for verdict, *_ in rows):
        problems.append(f"racecheck does not see the race of {RACY_KERNEL}")
    return problems


def find_role_reads(cache: Path) -> dict[str, set[int]]:
    """Return, by kernel name, the places in compiled warp-specialised kernels where a warp reads its role.

    The role is the only byte that is read from shared memory. With several such reads there are no places, because the
    role's cannot be told from the others.
    """
    places: dict[str, set[int]] = {}
    for path in cache.rglob("*.cubin"):
        if "ttg.warp_specialize" in path.with_suffix(".ttgir").read_text():
            loads = re.findall(r"/\*([0-9a-f]+)\*/[^;]*\bLDS\.[US]8\b", "\n".join(disassemble(path.read_bytes())))
            places.setdefault(path.stem, set()).update(int(place, 16) for place in loads if len(loads) == 1)
    return places


def read_races(paragraph: str) -> list[Race]:
    """Return the races of one paragraph, between its first access and each other one, or [] if it has none."""
    heading = re.match(r"(\w+): *(?:\([^)]*\) *)?Race reported between ", paragraph)
    accesses = [_read_access(*match.groups()) for match in _ACCESS.finditer(paragraph)]
    if heading is None or len(accesses) < 2 or None in accesses:
        return []
    counts = [int(count) for count in re.findall(r"\[(\d+) hazards?\]", paragraph)]
    counts += [1] * (len(accesses) - 1 - len(counts))
    return [Race(heading[1], accesses[0], *other) for other in zip(accesses[1:], counts, strict=False)]


def _read_access(kind: str, place: str) -> Access | None:
    match = next(filter(None, (pattern.match(place) for pattern in _PLACES)), None)
    return match and Access(kind, match["kernel"], int(match["pc"], 16), match["source"])


def _judge(race: Race, role_reads: dict[str, set[int]]) -> str:
    if race.first.kernel == RACY_KERNEL:
        return WANTED
    accesses = (race.first, race.second)
    own = any(access.kind == "Read" and access.pc in role_reads.get(access.kernel, ()) for access in accesses)
    return TRITONS_OWN if own else UNEXPLAINED


def _find_paragraphs(report: str) -> list[str]:
    """Return each error and warning of a report as one line."""
    paragraphs = []
    is_open = False
    for line in _lines(report):
        if re.match(r"(Error|Warning|Warn|Internal)\b", line, re.IGNORECASE):
            paragraphs.append(line)
            is_open = True
        elif not line or "SUMMARY" in line:
            is_open = False
        elif is_open:
            paragraphs[-1] += f" {line}"
    return paragraphs


def _lines(report: str) -> Iterator[str]:
    """Yield the tool's own lines."""
    for line in report.splitlines():
        if line.startswith("====="):
            yield line.lstrip("=").strip()


# ---------------------------------------------------------------------------------------------------------------------
# Launches
# ---------------------------------------------------------------------------------------------------------------------


def launch(part: str, portable: bool) -> None:
    """Launch a part of the kernels, or the probes. portable: True for the kernels that GPUs without sm_90 use."""
    if part == PROBES:
        from warp_specialized_probes import launch_probes

        launch_probes()
    else:
        with without_gluon() if portable else few_multiprocessors():
            compile_ahead(lambda: PARTS[part](torch.device("cuda")))
            PARTS[part](torch.device("cuda"))
    torch.cuda.synchronize()


@contextlib.contextmanager
def few_multiprocessors() -> Iterator[None]:
    """Let small work fill the GPU in this context: each program of the sm_90 kernels walks over several tiles."""
    few = (SM90, 4)
    with (
        mock.patch.object(gemm_sm90, "device_properties", return_value=few),
        mock.patch.object(attention_sm90, "device_properties", return_value=few),
        mock.patch.object(attention_8bit_sm90, "device_properties", return_value=few),
        mock.patch.object(sparse_linear_sm90, "device_properties", return_value=few),
        mock.patch.object(conv_sm90, "device_properties", return_value=few),
    ):
        yield


def values_on(device: torch.device) -> Callable[..., torch.Tensor]:
    """Return a function that draws a tensor of a shape and dtype, on the CPU: no other kernels run on the GPU."""
    return lambda *shape, dtype=BF16: torch.randn(shape).to(device, dtype)


def launch_linears(device: torch.device) -> None:
    values = values_on(device)
    batch, tokens, depth, channels = 2, 300, 392, 264
    runs, gate, modulation = coefficients_on(device, batch, tokens, channels)
    for dtype in KERNEL_DTYPES:
        a, weight, bias = (
            values(*shape, dtype=dtype) for shape in ((batch, tokens, depth), (channels, depth), (channels,))
        )
        residual = values(batch, tokens, channels, dtype=dtype)
        for c_out in (gate, modulation, runs[0]):
            linear_skip(a, weight, bias, residual, c_out=c_out)
        linear_skip(a, weight, bias, residual, c_skip=0.5, c_out=gate, dtype=FP16, result_scale=32.0)
        linear_gelu(a[0], weight, bias)
        linear_qkv(a, [weight] * 3, [bias] * 3)
        factors = LowRank(values(RANK_STEP, depth, dtype=dtype), values(channels, RANK_STEP, dtype=dtype))
        linear_skip(a, weight, bias, residual, c_out=gate, low_rank=factors)
        linear_low_rank(a, weight, bias, factors)


def launch_elementwise(device: torch.device) -> None:
    """Launch the skips, norms and GELU."""
    values = values_on(device)
    batch, tokens, channels, heads, head_dim = 2, 300, 264, 3, 80
    runs, gate, modulation = coefficients_on(device, batch, tokens, channels)
    for dtype in KERNEL_DTYPES:
        residual, bias = values(batch, tokens, channels, dtype=dtype), values(channels, dtype=dtype)
        for c_out in (gate, modulation, runs[0]):
            skip(residual, residual, c_out=c_out)
        skip(residual, residual, c_out=gate, dtype=FP16, result_scale=32.0)
        gelu(residual)
        layer_norm_modulate(residual, weight=bias, bias=bias)
        layer_norm_modulate(residual, scale=modulation, shift=modulation)
        layer_norm_modulate(residual, scale=runs[0], shift=runs[1])
        x, weight = values(batch, tokens, heads * head_dim, dtype=dtype), values(heads * head_dim, dtype=dtype)
        angles = values(tokens, head_dim, dtype=FP32)  # as diffusers' tables, with every value twice
        rms_norm_rope(x, weight, heads=heads, eps=1e-6)
        rms_norm_rope(x, weight, heads=heads, eps=1e-6, cos=angles[:, 0::2], sin=angles[:, 1::2])
        frames, gain = values(batch, 3, 7, 11, 96, dtype=dtype), values(96, dtype=dtype)
        rms_norm_silu(frames, gain)
        rms_norm_silu(frames, gain, silu=False)


def coefficients_on(device: torch.device, batch: int, tokens: int, channels: int) -> tuple:
    """Return coefficients of runs, of a sample and of each token."""
    values = values_on(device)
    starts = torch.tensor([0, tokens // 3, tokens + 50, batch * tokens], dtype=torch.int32).to(device)
    runs = [Runs(values(3, channels, dtype=FP32), starts) for _ in range(2)]
    return runs, values(1, 1, channels, dtype=FP32), values(batch, tokens, channels, dtype=FP32)


def launch_attention(device: torch.device) -> None:
    values = values_on(device)
    tokens = 300
    for dtype, head_dim in ((FP32, 64), (FP16, 128), (BF16, 64), (BF16, 128)):
        q, k, v = (values(1, tokens, 3, head_dim, dtype=dtype) for _ in range(3))
        long = values(1, 4000, 3, head_dim, dtype=dtype)
        c_out = values(1, 1, 3 * head_dim, dtype=FP32)
        launch_one_attention(q, k, v, None, None, None, 0.1, False)
        launch_one_attention(q, k, v, q, None, c_out, 0.1, False)
        launch_one_attention(q, long, long, None, None, None, 0.1, False)  # in parts
        launch_one_attention(q, long, long, None, None, None, 0.1, True)
        for keys in (k, long):
            attention_to_e4m3(q, keys, keys, scale=0.1)
        out, raw_out, lse = launch_one_attention(q, k, v, None, None, None, 0.1, True)
        _attention_backward(out, q, k, v, raw_out, lse, 0.1, True, True)


def launch_convolutions(device: torch.device) -> None:
    values = values_on(device)
    for dtype, (channels, columns) in product(KERNEL_DTYPES, ((96, 96), (64, 192), (64, 256), (20, 3))):
        x, weight = values(1, 4, 13, 21, channels, dtype=dtype), values(columns, 3, 3, 3, channels, dtype=dtype)
        residual, bias = values(1, 2, 13, 21, columns, dtype=dtype), values(columns, dtype=dtype)
        conv_skip(x, weight, bias, residual)
        as_in_module = weight.permute(0, 4, 1, 2, 3).contiguous()
        conv_skip(x, as_in_module.permute(0, 2, 3, 4, 1), bias, residual)
        conv_skip(x[:, 2:], weight, bias, residual, front=x[:, :2])
        conv_skip(x, weight[:, :1], bias, upsample=True)
        conv_skip(x[:, :3], weight[:, :1], bias, residual, upsample=True)  # which counts twice in every dimension
        conv_skip(x, weight[:, :, :1, :1].repeat(2, 1, 1, 1, 1), None, interleave=2)


def launch_linears_of_8_bits(device: torch.device) -> None:
    values = values_on(device)
    batch, tokens, depth, channels = 2, 300, 400, 272
    x, residual, bias = values(batch, tokens, depth), values(batch, tokens, channels), values(channels)
    gate = values(1, 1, channels, dtype=FP32)

    def weight_of(rows: int, format: torch.dtype) -> QuantizedWeight:
        row_norm, whole_norm = values(rows, dtype=FP32).abs() + 1, values(1, dtype=FP32).abs()[0] + 1
        return QuantizedWeight(quantize_rows(values(rows, depth), format).values, row_norm, whole_norm)

    for format in (INT8, FP8):
        a, normed = quantize_rows(x, format, with_norm=True), layer_norm_modulate(x, quantized=format)
        weight = weight_of(channels, format)
        linear_8bit(a, weight, bias)
        linear_skip(normed, weight, bias, residual, c_out=gate)
        linear_qkv(a, [weight] * 3, [bias] * 3)
        linear_gelu(a, weight, bias, result=FP8)
        factors = LowRank(weight_of(RANK_STEP, format), values(channels, RANK_STEP), values(1, dtype=FP32).abs()[0])
        linear_skip(normed, weight, bias, residual, c_out=gate, low_rank=factors)
        linear_gelu(a, weight, bias, result=FP8, low_rank=factors)


def launch_attention_of_8_bits(device: torch.device) -> None:
    """Launch dense and sparse attention in 8 bits, which read the same operands."""
    values = values_on(device)
    tokens = 300
    for head_dim in (64, 128):
        q, k, v = (values(1, tokens, 3 * head_dim) for _ in range(3))
        norm, angles = values(3 * head_dim), values(tokens, head_dim // 2, dtype=FP32)
        turned = {"norm_q": norm, "norm_k": norm, "cos": angles, "sin": angles}
        quantized = quantize_qkv(q, k, v, heads=3, **turned)
        attention_8bit(quantized)
        attention_8bit(quantized, result=FP8)
        attention_8bit(quantized, residual=values(1, tokens, 3, head_dim), c_skip=0.5)
        for block_q, block_k in ((128, 64), (64, 128), (192, 128)):
            block_sparse_attention_8bit(quantized, mass=0.5, block_q=block_q, block_k=block_k)


def launch_sparse_attention(device: torch.device) -> None:
    values = values_on(device)
    tokens = 300
    for head_dim, (block_q, block_k) in product((64, 128), ((128, 64), (64, 128))):
        q, k, v = (values(1, tokens, 3, head_dim) for _ in range(3))
        block_sparse_attention(q, k, v, mass=0.5, block_q=block_q, block_k=block_k)
        for eight_bits in (False, True):
            options = {"block_q": block_q, "block_k": block_k, "quantized": eight_bits}
            sparse_linear_attention(q, k, v, values(head_dim, head_dim), topk=0.5, **options)


PARTS = {
    "linears": launch_linears,
    "elementwise": launch_elementwise,
    "attention": launch_attention,
    "convolutions": launch_convolutions,
    "linears-8-bit": launch_linears_of_8_bits,
    "attention-8-bit": launch_attention_of_8_bits,
    "sparse-attention": launch_sparse_attention,
}


if __name__ == "__main__":
    sys.exit(main())
