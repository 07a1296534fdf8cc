"""Check an op, then time it beside its rivals. The contests are in ops_exact.py, ops_quantized.py and so on.

A contest has several contenders for one result. Each is compared with an fp64 oracle on some rows. One of ours that is
less accurate than the rivals is not timed. The others take turns, so that a GPU that slows down as it warms up slows
down for all of them.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..kernels import QuantizedQKV
from ..kernels.quantized import Quantized
from ..tiers import EXACT, ErrorLimits, Tier
from .metrics import relative_l2
from .timing import in_turns

ORACLE_ROWS = 64
EPS = 1e-6
SDPA, COMPILED = "SDPA cuDNN", "torch + compiled"
COPY = "copy"  # the rival that moves as many bytes at the GPU's copy bandwidth

Contender = Callable[[], torch.Tensor | tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class WithoutGraph:
    """A contender that launches on the legacy default stream, which a CUDA graph does not capture."""

    run: Contender

    def __call__(self) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return self.run()


@dataclass(frozen=True)
class Contest:
    """Contenders for one op on one set of inputs.

    ours, rivals: by name, callables that return the result [B, S, ...], or parts of it along the last dimension.
    fallback: the contender that the patch runs if it does not choose ours, or None if it always chooses ours.
    alternatives: contenders that may run instead of the fallback. They are checked as ours are.
    partial: rivals that leave out a part of the op, which makes them faster, or that keep other key blocks near ties.
        Their errors are meaningless.
    oracle: the result in fp64 on the rows of S in `rows`.
    flops, bytes_moved: the op's FLOPs, and its unavoidable reads and writes. None if the figure is meaningless.
    kept: the share of key blocks that sparse attention keeps, or None for dense ops.
    limit: (errors of all contenders) -> the largest error allowed to ours. None: the tier's limit for an op.
    """

    ours: Mapping[str, Contender]
    rivals: Mapping[str, Contender]
    oracle: Callable[[torch.Tensor], torch.Tensor]
    tokens: int
    fallback: Contender | None = None
    alternatives: Mapping[str, Contender] = field(default_factory=dict)
    partial: Mapping[str, Contender] = field(default_factory=dict)
    flops: float | None = None
    bytes_moved: float | None = None
    kept: float | None = None
    limit: Callable[[Mapping[str, float]], float] | None = None


class OpKey(NamedTuple):
    """An op and the sizes that it runs at. Results files hold it as text: "linear_skip 32760×1536×1536"."""

    op: str
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.op} {'×'.join(map(str, self.shape))}" if self.shape else self.op

    @classmethod
    def parse(cls, text: str) -> OpKey:
        """Return the key that a results file holds as text."""
        op, _, sizes = text.partition(" ")
        return cls(op, tuple(map(int, sizes.split("×"))) if sizes else ())


@dataclass(frozen=True)
class OpCase:
    """A contest's name, the function that draws its inputs on a device, and the speed-up to reach over each rival.

    For COPY the speed-up is the share of the copy bandwidth. tier: the tier of ours. most: the milliseconds that ours
    may take, or None. least: the TFLOP/s that ours must reach, or None.
    """

    key: OpKey
    build: Callable[..., Contest]
    targets: Mapping[str, float]
    tier: Tier = EXACT
    most: float | None = None
    least: float | None = None

    @property
    def name(self) -> str:
        return str(self.key)


@dataclass(frozen=True)
class Timing:
    """A contender's time and error.

    milliseconds, quartiles: the median and the quartiles over the rounds. error: the relative L2 error to the oracle,
    or None if it would say nothing. refused: the reason why it was not timed, or None.
    """

    is_ours: bool
    error: float | None
    milliseconds: float | None = None
    quartiles: tuple[float, float] | None = None
    refused: str | None = None


@dataclass(frozen=True)
class OpResult:
    """A case's timings by contender. best: the name of the fastest of ours, or None if all were refused.

    speedups: the best's over every rival. COPY's own time is computed from the bandwidth. most, least: the case's.
    kept: the contest's.
    """

    case: str
    timings: dict[str, Timing]
    best: str | None
    speedups: dict[str, float] = field(default_factory=dict)
    targets: dict[str, float] = field(default_factory=dict)
    teraflops: float | None = None
    most: float | None = None
    least: float | None = None
    kept: float | None = None


def run_case(
    case: OpCase,
    device: torch.device,
    *,
    copy_bandwidth: float,
    rounds: int = 20,
    compile_rivals: bool = True,
) -> OpResult:
    """Check and time one case in bf16, with its tier's error limits.

    copy_bandwidth: bytes read and written per second by a large copy on this device (`measure_copy_bandwidth`).
    compile_rivals: True to compile the rivals, as real comparisons do.
    """
    torch.compiler.reset()  # it compiles at most 8 sizes of one function, and earlier cases count
    compiled = functools.partial(torch.compile, fullgraph=True, dynamic=False) if compile_rivals else lambda f: f
    contest = case.build(device, compiled)
    errors = measure_errors(contest)
    limit = error_limit(contest, errors, case.tier.limits)
    refused = {
        name: f"its error {errors[name]:.2e} is above the {limit:.2e} allowed"
        for name in (*contest.alternatives, *contest.ours)
        if not errors[name] <= limit
    }
    contenders = {**contest.rivals, **contest.partial, **contest.alternatives, **contest.ours}
    times = take_turns({name: run for name, run in contenders.items() if name not in refused}, device, rounds)
    timings = {}
    for name in contenders:
        low, median, high = statistics.quantiles(times[name], n=4) if name in times else (None, None, None)
        quartiles = (low, high) if name in times else None
        timings[name] = Timing(name in contest.ours, errors.get(name), median, quartiles, refused.get(name))
    return _result(case, contest, timings, copy_bandwidth)


def _result(case: OpCase, contest: Contest, timings: dict[str, Timing], copy_bandwidth: float) -> OpResult:
    ran = [name for name in contest.ours if timings[name].milliseconds is not None]
    asked = {"targets": dict(case.targets), "most": case.most, "least": case.least, "kept": contest.kept}
    if not ran:
        return OpResult(case.name, timings, None, **asked)
    best = min(ran, key=lambda name: timings[name].milliseconds)
    seconds = timings[best].milliseconds / 1e3
    rivals = {**contest.rivals, **contest.partial}
    speedups = {name: timings[name].milliseconds / timings[best].milliseconds for name in rivals}
    if COPY in case.targets:
        speedups[COPY] = contest.bytes_moved / copy_bandwidth / seconds
    teraflops = contest.flops and contest.flops / seconds / 1e12
    return OpResult(case.name, timings, best, speedups, teraflops=teraflops, **asked)


def measure_errors(contest: Contest) -> dict[str, float]:
    """Return every contender's relative L2 error to the oracle, on ORACLE_ROWS rows spread over the result."""
    with torch.no_grad():
        whole = {**contest.rivals, **contest.alternatives, **contest.ours}
        results = {name: _parts(run()) for name, run in whole.items()}
        device = next(iter(results.values()))[0].device
        rows = torch.linspace(0, contest.tokens - 1, min(ORACLE_ROWS, contest.tokens), device=device).long()
        expected = contest.oracle(rows)
        on_rows = {name: torch.cat([part[:, rows] for part in parts], dim=-1) for name, parts in results.items()}
        return {name: relative_l2(result.reshape(expected.shape), expected) for name, result in on_rows.items()}


def _parts(result: torch.Tensor | Quantized | QuantizedQKV | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    if isinstance(result, Quantized):
        return (result.dequantize(),)
    if isinstance(result, QuantizedQKV):
        return *result.dequantize_qk(), result.dequantize_v()
    return (result,) if isinstance(result, torch.Tensor) else result


def error_limit(contest: Contest, errors: Mapping[str, float], limits: ErrorLimits) -> float:
    """Return the largest error that ours may have.

    This is the contest's own limit, else a limit beside the most accurate rival, or beside bf16's rounding if there is
    no rival."""
    if contest.limit is not None:
        return contest.limit(errors)
    rounding = torch.finfo(torch.bfloat16).eps / 2
    return limits.allowed(min((errors[name] for name in contest.rivals), default=rounding), torch.bfloat16, "part")


def take_turns(contenders: Mapping[str, Contender], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of every contender in every round.

    On a GPU each one except a WithoutGraph is a CUDA graph, so that launches cost nothing. All have the same inputs.
    """
    with torch.no_grad():
        watches = {name: _stopwatch(run, device) for name, run in contenders.items()}
        times = {name: [] for name in contenders}
        for _, name in in_turns(watches, rounds):
            times[name].append(watches[name]())
    return times


def _stopwatch(run: Contender, device: torch.device) -> Callable[[], float]:
    if device.type != "cuda":
        return _cpu_stopwatch(run)
    return _event_stopwatch(run) if isinstance(run, WithoutGraph) else _graph_stopwatch(run)


def _graph_stopwatch(run: Contender) -> Callable[[], float]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return _event_stopwatch(graph.replay)


def _event_stopwatch(run: Callable[[], object]) -> Callable[[], float]:
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def watch() -> float:
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    return watch


def _cpu_stopwatch(run: Contender) -> Callable[[], float]:
    run()

    def watch() -> float:
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)

    return watch


def measure_copy_bandwidth(device: torch.device, nbytes: int = 1 << 30) -> float:
    """Return the bytes that a copy of nbytes reads and writes per second, the median of ten.

    On a GPU this is no CUDA graph: a graph's copy node has two thirds of a copy kernel's bandwidth.
    """
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    stopwatch = _event_stopwatch if device.type == "cuda" else _cpu_stopwatch
    watch = stopwatch(lambda: target.copy_(source))
    return 2 * nbytes / (statistics.median(watch() for _ in range(10)) / 1e3)


# --- what contests are made of


def attention_oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function of rows, which returns these rows of the attention of q, k, v [1, S, H, D] in fp64."""

    def oracle(rows: torch.Tensor) -> torch.Tensor:
        parts = []
        for head in range(q.shape[2]):
            queries, keys, values = (x[0, :, head].double() for x in (q[:, rows], k, v))
            parts.append(torch.softmax(queries @ keys.T * q.shape[3] ** -0.5, dim=1) @ values)
        return torch.stack(parts, dim=1)[None]

    return oracle


class Draws:
    """Seeded normal tensors in bf16 on a device."""

    def __init__(self, device: torch.device):
        self.generator = torch.Generator(device).manual_seed(0)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.generator.device, dtype=torch.bfloat16)


def op_case(
    contest: Callable,
    *sizes: int,
    tier: Tier = EXACT,
    targets: Mapping[str, float],
    most: float | None = None,
    least: float | None = None,
) -> OpCase:
    """Return the case of a contest at some sizes, named after both."""
    return OpCase(OpKey(contest.__name__, sizes), functools.partial(contest, *sizes), targets, tier, most, least)
