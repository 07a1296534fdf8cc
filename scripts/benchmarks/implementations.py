"""Attention with the consistency skip, computed in every way: checked against an fp64 oracle, then timed in turns.

All implementations are modules with one state_dict (modules/rcm_attention.py), on the same weights, input and
timesteps. The residual is the input. The weights are drawn so that a few keys stand out for every query. Otherwise
attention would average thousands of random values to almost nothing, and the residual would hide its errors.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from turbo_rcm_patch import coefficients, kernels
from turbo_rcm_patch.bench.coding import without_tf32
from turbo_rcm_patch.bench.environment import Environment, describe_environment
from turbo_rcm_patch.bench.metrics import relative_l2
from turbo_rcm_patch.bench.ops import take_turns
from turbo_rcm_patch.kernels.dispatch import why_not_triton_on
from turbo_rcm_patch.modules import FusedRCMAttention, TorchFusedRCMAttention, TwoPassRCMAttention
from turbo_rcm_patch.tiers import EXACT, QUANTIZED, ErrorLimits

FORWARD, FORWARD_BACKWARD = "forward", "forward+backward"
MODES = (FORWARD, FORWARD_BACKWARD)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TWO_PASS, TORCH_FUSED, TRITON_FUSED, NAIVE_SOFTMAX = "two_pass", "torch_fused", "triton_fused", "naive_softmax"
TRITON_QUANTIZED = "triton_quantized"
OK, REFUSED, LEFT_OUT = "ok", "refused", "left out"

# The naive softmax rounds the scores to the dtype, which SDPA keeps in fp32: at SCORE_SCALE that doubles its error.
NAIVE_LIMITS = replace(EXACT.limits, factor=3.0)
ERROR_CEILING = 5e-2  # a larger error is wrong, whatever two_pass's is (in bf16 about 1e-2)
NO_BACKWARD = "8 bits have no backward: with one it runs as triton_fused"
SCORE_SCALE = 3.0  # standard deviation of the scores that the weights are drawn for
NAIVE_SCORE_MATRICES = 4  # [B, H, N, N] at once: scores and probabilities, and in the backward the gradient of each

Step = Callable[[], list[torch.Tensor]]


class NaiveSoftmaxRCMAttention(TwoPassRCMAttention):
    """The two passes, with attention as a matmul, a softmax and a matmul: the scores [B, H, N, N] are in memory."""

    def _attend_project_skip(self, q, k, v, residual, c_skip, c_out):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        probabilities = (q * self.head_dim**-0.5 @ k.mT).softmax(-1)
        output = self.proj((probabilities @ v).transpose(1, 2).flatten(2))
        return kernels.skip(residual, output, c_skip=c_skip, c_out=c_out)


@dataclass(frozen=True)
class Implementation:
    """A module class and more arguments of its constructor.

    compiled: True if torch.compile compiles it. limits: how its error to the oracle is compared with two_pass's.
    """

    module_class: type[TwoPassRCMAttention]
    options: Mapping[str, object] = field(default_factory=dict)
    compiled: bool = False
    limits: ErrorLimits = EXACT.limits


# On a GPU the second pass of two_pass is one kernel, opaque to torch.compile. In torch_fused_compiled torch.compile can
# see the skip.
IMPLEMENTATIONS = {
    TWO_PASS: Implementation(TwoPassRCMAttention),
    TORCH_FUSED: Implementation(TorchFusedRCMAttention),
    "two_pass_compiled": Implementation(TwoPassRCMAttention, compiled=True),
    "torch_fused_compiled": Implementation(TorchFusedRCMAttention, compiled=True),
    TRITON_FUSED: Implementation(FusedRCMAttention, {"implementation": "triton"}),
    TRITON_QUANTIZED: Implementation(
        FusedRCMAttention, {"implementation": "triton", "preset": "quantized"}, limits=QUANTIZED.limits
    ),
    NAIVE_SOFTMAX: Implementation(NaiveSoftmaxRCMAttention, limits=NAIVE_LIMITS),
}


@dataclass(frozen=True)
class Row:
    """One implementation at one size, dtype and mode.

    status: "ok"; "refused" (wrong, and therefore not timed) or "left out" (not run), with the reason in `note`.
    Figures that were not measured are None.
    latency, spread: median and interquartile range over the repeats, in seconds.
    speedup: two_pass's latency over this one's.
    output_error, input_gradient_error: relative L2 against the fp64 oracle in the worst sample;
    weight_gradient_error: in the worst of the weights and biases.
    peak_memory: bytes that one call allocates at most beside its inputs and weights; only on a GPU.
    """

    B: int
    N: int
    C: int
    num_heads: int
    dtype: str
    mode: str
    implementation: str
    status: str = OK
    note: str = ""
    latency: float | None = None
    spread: float | None = None
    speedup: float | None = None
    output_error: float | None = None
    input_gradient_error: float | None = None
    weight_gradient_error: float | None = None
    peak_memory: int | None = None


@dataclass(frozen=True)
class ImplementationResults:
    """Rows in the order of dtypes, modes and IMPLEMENTATIONS. timing: what the latencies were measured with."""

    environment: Environment
    timing: str
    repeats: int
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, object]:
        """Return a dictionary for ``json.dump``: times in seconds, memory in bytes."""
        return asdict(self)


@dataclass(frozen=True)
class Problem:
    """The shared data of all implementations: x and the output's gradient [B, N, C], timesteps [B] in fp32, weights."""

    num_heads: int
    x: torch.Tensor
    timestep: torch.Tensor
    grad: torch.Tensor
    weights: Mapping[str, torch.Tensor]


def benchmark_all_implementations(
    B: int,
    N: int,
    C: int,
    num_heads: int,
    *,
    device: torch.device | str,
    repeats: int,
    dtypes: Sequence[str] = tuple(DTYPES),
    modes: Sequence[str] = MODES,
    compile_rivals: bool = True,
) -> ImplementationResults:
    """Check every implementation at [B, N, C] against an fp64 oracle and time those that are right.

    dtypes: from DTYPES; modes: from MODES.
    repeats: timed calls of each, at least 2; on a GPU each is the replay of a CUDA graph.
    compile_rivals: False leaves out the compiled implementations. Otherwise torch.compile's caches are reset.
    Meanwhile fp32 matmuls run without TF32, as the kernels do.
    """
    device = torch.device(device)
    rows = []
    with without_tf32():
        for dtype in dtypes:
            problem = draw_problem(B, N, C, num_heads, DTYPES[dtype], device)
            rows += _benchmark(problem, dtype, modes, repeats, compile_rivals)
    timing = "replays of a CUDA graph" if device.type == "cuda" else "calls timed by perf_counter"
    return ImplementationResults(describe_environment(device), timing, repeats, tuple(rows))


def draw_problem(B: int, N: int, C: int, num_heads: int, dtype: torch.dtype, device: torch.device) -> Problem:
    """Return a seeded problem; scores have a standard deviation of SCORE_SCALE, timesteps run from 0.1 to 10."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=generator, device=device)).to(dtype)

    query_scale = SCORE_SCALE**0.5 * C**-0.5  # the scores' is its square: as much comes from the keys
    scales = torch.tensor([query_scale, query_scale, C**-0.5], device=device).repeat_interleave(C)[:, None]
    weights = {
        "qkv.weight": draw(3 * C, C, scale=scales),
        "qkv.bias": draw(3 * C, scale=0.1),
        "proj.weight": draw(C, C, scale=C**-0.5),
        "proj.bias": draw(C, scale=0.1),
    }
    timestep = torch.logspace(1, -1, B, device=device)  # one sample alone gets 10, which shows the attention
    return Problem(num_heads, draw(B, N, C).requires_grad_(), timestep, draw(B, N, C), weights)


def oracle(problem: Problem) -> list[torch.Tensor]:
    """Return the output [B, N, C] and the gradients of x and of the weights in their order, in fp64."""
    x = problem.x.detach().double().requires_grad_()
    weights = {name: weight.double().requires_grad_() for name, weight in problem.weights.items()}
    c_skip, c_out = (c.view(-1, 1, 1) for c in coefficients.edm(problem.timestep.double()))
    qkv = F.linear(x, weights["qkv.weight"], weights["qkv.bias"]).unflatten(-1, (3, problem.num_heads, -1))
    # One head at a time and again in the backward, because all the scores in fp64 would not fit.
    samples = [
        torch.stack([checkpoint(_attend, *head.unbind(1), use_reentrant=False) for head in sample.unbind(2)], dim=1)
        for sample in qkv.unbind(0)
    ]
    projected = F.linear(torch.stack(samples).flatten(2), weights["proj.weight"], weights["proj.bias"])
    output = c_skip * x + c_out * projected
    gradients = torch.autograd.grad(output, [x, *weights.values()], problem.grad.double())
    return [output.detach(), *gradients]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the attention of one head, [N, D]."""
    return torch.softmax(q @ k.T * q.shape[-1] ** -0.5, dim=-1) @ v


def _benchmark(problem: Problem, dtype: str, modes: Sequence[str], repeats: int, compile_rivals: bool) -> Iterator[Row]:
    impossible = {name: reason for name in IMPLEMENTATIONS if (reason := _why_left_out(name, problem, compile_rivals))}
    if compile_rivals:
        torch.compiler.reset()  # sizes, dtypes and modes would run into the limit of recompilations
    modules = {name: _build(name, problem) for name in IMPLEMENTATIONS if name not in impossible}
    expected = oracle(problem)
    for mode in modes:
        left_out = impossible if mode == FORWARD else {TRITON_QUANTIZED: NO_BACKWARD, **impossible}
        steps = {name: _step(module, problem, mode) for name, module in modules.items() if name not in left_out}
        measured = _check_and_time(steps, expected, problem.x.device, repeats)
        for name in IMPLEMENTATIONS:
            row = Row(*problem.x.shape, problem.num_heads, dtype, mode, name)
            if name in left_out:
                yield replace(row, status=LEFT_OUT, note=left_out[name])
            else:
                yield replace(row, **measured[name])


def _why_left_out(name: str, problem: Problem, compile_rivals: bool) -> str | None:
    x, (B, N, _) = problem.x, problem.x.shape
    if IMPLEMENTATIONS[name].compiled and not compile_rivals:
        return "torch.compile is switched off"
    if name in (TRITON_FUSED, TRITON_QUANTIZED) and (reason := why_not_triton_on(x.device, x.dtype)):
        return f"no Triton kernel takes these tensors: {reason}"
    if name == TRITON_QUANTIZED and (reason := _why_exact(problem)):
        return f"it does not run in 8 bits: {reason}"
    if name == NAIVE_SOFTMAX:
        needed = NAIVE_SCORE_MATRICES * B * problem.num_heads * N * N * x.element_size()
        free = _free_memory(x.device)
        if needed > free:
            return f"its score matrices take {needed / 1e9:.1f} GB, of {free / 1e9:.1f} GB that are free"
    return None


@torch.no_grad()
def _why_exact(problem: Problem) -> str | None:
    return _build_eager(IMPLEMENTATIONS[TRITON_QUANTIZED], problem).why_exact(problem.x, problem.timestep)


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _build(name: str, problem: Problem) -> torch.nn.Module:
    implementation = IMPLEMENTATIONS[name]
    module = _build_eager(implementation, problem)
    return torch.compile(module, fullgraph=True, dynamic=False) if implementation.compiled else module


def _build_eager(implementation: Implementation, problem: Problem) -> torch.nn.Module:
    module = implementation.module_class(problem.x.shape[-1], problem.num_heads, **implementation.options)
    module.to(problem.x.device, problem.x.dtype).load_state_dict(problem.weights)
    return module


def _step(module: torch.nn.Module, problem: Problem, mode: str) -> Step:
    """Return a call that returns the output and, for a backward, the gradients in the order of `oracle`."""
    leaves = [problem.x, *module.parameters()]

    def forward() -> list[torch.Tensor]:
        with torch.no_grad():
            return [module(problem.x, problem.timestep)]

    def forward_backward() -> list[torch.Tensor]:
        with torch.enable_grad():
            output = module(problem.x, problem.timestep)
            return [output.detach(), *torch.autograd.grad(output, leaves, problem.grad)]

    return forward if mode == FORWARD else forward_backward


def _check_and_time(
    steps: Mapping[str, Step], expected: Sequence[torch.Tensor], device: torch.device, repeats: int
) -> dict[str, dict[str, object]]:
    """Return the fields of the rows by implementation. two_pass must be among the steps."""
    rows = {name: errors_of(step(), expected) for name, step in steps.items()}
    refused = {name: note for name in rows if (note := _why_refused(name, rows[name], rows[TWO_PASS]))}
    right = {name: step for name, step in steps.items() if name not in refused}
    peaks = {name: _peak_memory(step, device) for name, step in right.items()}
    times = take_turns(right, device, repeats)
    medians = {name: statistics.median(times[name]) / 1e3 for name in right}
    for name in right:
        low, _, high = statistics.quantiles(times[name], n=4)
        rows[name] |= {"latency": medians[name], "spread": (high - low) / 1e3, "peak_memory": peaks[name]}
        rows[name]["speedup"] = medians[TWO_PASS] / medians[name] if TWO_PASS in right else None
    for name, note in refused.items():
        rows[name] |= {"status": REFUSED, "note": note}
    return rows


def errors_of(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> dict[str, float]:
    """Return a row's errors: of the output and, where the results have gradients, of the gradients."""
    errors = {"output_error": _worst(results[0], expected[0])}
    if len(results) > 1:
        errors["input_gradient_error"] = _worst(results[1], expected[1])
        errors["weight_gradient_error"] = _worst(results[2:], expected[2:])
    return errors


def _worst(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest relative L2 error of all pairs; NaN if one is."""
    return torch.tensor([relative_l2(*pair) for pair in zip(results, expected, strict=True)]).max().item()


def error_limit(implementation: str, two_pass_error: float) -> float:
    """Return the largest error allowed beside two_pass's error. If that is NaN, so is the limit, and nothing passes."""
    sums = torch.float32  # of bf16 values too
    return min(IMPLEMENTATIONS[implementation].limits.allowed(two_pass_error, sums, "part"), ERROR_CEILING)


def _why_refused(name: str, errors: Mapping[str, float], two_pass_errors: Mapping[str, float]) -> str:
    limits = {key: error_limit(name, error) for key, error in two_pass_errors.items()}
    return ", ".join(
        f"its {key.replace('_', ' ')} {error:.2e} is above the {limits[key]:.2e} allowed"
        for key, error in errors.items()
        if not error <= limits[key]
    )


def _peak_memory(step: Step, device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    return torch.cuda.max_memory_allocated(device) - before
