"""Find which of our kernels are as fast as their fallbacks on this GPU at one model's shapes, which backend of
PyTorch's attention is fastest, and how fast the other tiers are (tune_tiers.py).

Every op is checked against its oracle before it is timed (ops.py). The rows are those of kernels/choice/measured.py.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch.nn.attention import sdpa_kernel

from ..kernels.attention.attention import ATTENTION, SDPA
from ..kernels.attention.sdpa import BACKENDS, MATH, chosen_backend
from ..kernels.choice.measured import WORTHWHILE
from ..kernels.choice.registry import Kernel
from ..kernels.conv.conv_skip import CONV_SKIP, CONVOLUTION
from ..kernels.linear.linear_gelu import LINEAR_GELU
from ..kernels.linear.linear_qkv import LINEAR_QKV
from ..kernels.linear.linear_skip import LINEAR_SKIP
from ..kernels.linear.spec import LINEAR
from ..patching.weights.load import component_folders, read_config
from ..tiers import EXACT
from . import ops, ops_conv, ops_exact, tune_tiers
from .cases import CASES, TEXT_TOKENS, Case
from .ops import Contender, Contest, OpCase, OpKey, OpResult

ROUNDS, TIER_ROUNDS = 10, 4  # of the exact tier's ops, which the patch chooses by, and of the others
FALLBACKS = {
    "attention": SDPA,
    "linear_skip": f"{LINEAR}, Triton skip",
    "linear_gelu": f"{LINEAR}, Triton GELU",
    "linear_qkv": LINEAR,
    "conv_skip": CONVOLUTION,
}  # what the patch runs in place of our kernels
LISTS = {op.name: op for op in (ATTENTION, LINEAR_SKIP, LINEAR_GELU, LINEAR_QKV, CONV_SKIP)}
SDPA_BACKENDS = {f"{SDPA} ({name})": name for name in BACKENDS if name != MATH}  # contenders; math is never faster


@dataclass(frozen=True)
class Shapes:
    """Tensor shapes of one model at one video size.

    size: height, width and frames, such as "480x832x81". ffn: inner channels of the feed-forward. convolutions: rows
    like those of ops_conv.SIZES_WAN."""

    model: str
    size: str
    heads: int
    head_dim: int
    ffn: int
    tokens: int
    convolutions: Sequence[tuple[int, ...]]


Size = tuple[int | None, int | None, int | None]  # height, width and frames; None: the model's usual one


def shapes_of_case(name: str, size: Size = (None, None, None)) -> Shapes:
    """The shapes of a model of cases.CASES."""
    case = CASES[name]
    return _shapes(name, case.transformer, case.vae, size, case)


def shapes_of_folder(folder: Path, size: Size = (None, None, None)) -> Shapes:
    """The shapes of a pipeline's or a transformer's folder, by its configs; the usual size is that of Wan 2.1 1.3B, or
    with a VAE of TI2V-5B's kind that model's. Raises ValueError as `configs_of_folder`."""
    config, vae_config = configs_of_folder(folder)
    usual = CASES["wan2.2-5b" if _is_5b(vae_config) else "wan2.1-1.3b"]
    return _shapes(str(folder), config, vae_config, size, usual)


def configs_of_folder(folder: Path) -> tuple[dict, dict]:
    """The configs of the transformer in such a folder and of the VAE beside it, which is empty where there is none.
    Raises ValueError for a folder that holds no transformer, or not one of Wan's kind."""
    transformer = next(iter(component_folders(folder).values()))
    config = read_config(transformer)
    missing = [name for name in ("num_attention_heads", "ffn_dim") if name not in config]
    if missing:
        raise ValueError(f"{transformer / 'config.json'} has no {' and no '.join(missing)}, as those of Wan models do.")
    vae = transformer.parent / "vae"
    return config, read_config(vae) if (vae / "config.json").is_file() else {}


def _is_5b(vae: Mapping) -> bool:
    return vae.get("z_dim") == 48


def _shapes(model: str, transformer: Mapping, vae: Mapping, size: Size, usual: Case) -> Shapes:
    own = usual.height, usual.width, usual.frames
    height, width, frames = (default if given is None else given for given, default in zip(size, own, strict=True))
    spatial, temporal = vae.get("scale_factor_spatial") or 8, vae.get("scale_factor_temporal") or 4
    patch = transformer.get("patch_size") or (1, 2, 2)
    latent = (frames - 1) // temporal + 1, height // spatial, width // spatial
    tokens = math.prod(length // edge for length, edge in zip(latent, patch, strict=True))
    return Shapes(
        model,
        f"{height}x{width}x{frames}",
        transformer["num_attention_heads"],
        transformer.get("attention_head_dim") or 128,
        transformer["ffn_dim"],
        tokens,
        ops_conv.SIZES_5B if _is_5b(vae) else ops_conv.SIZES_WAN,
    )


def cases(shapes: Shapes) -> Iterator[OpCase]:
    """Every op that there is a choice for, at these shapes, then those of the other tiers."""
    C = shapes.heads * shapes.head_dim
    yield _case(attention, shapes.heads, shapes.tokens, shapes.tokens, shapes.head_dim)
    yield _case(attention, shapes.heads, shapes.tokens, TEXT_TOKENS, shapes.head_dim)
    yield _case(ops_exact.linear_skip, shapes.tokens, C, C)
    yield _case(ops_exact.linear_skip, shapes.tokens, C, shapes.ffn)
    yield _case(ops_exact.linear_gelu, shapes.tokens, shapes.ffn, C)
    yield _case(ops_exact.linear_qkv, shapes.tokens, C, C)
    for sizes in shapes.convolutions:
        yield _case(ops_conv.conv_skip, *sizes)
    yield from tune_tiers.tier_cases(shapes.heads, shapes.head_dim, shapes.ffn, shapes.tokens)


def attention(heads: int, tokens: int, keys: int, head_dim: int, device: torch.device, compiled: Callable) -> Contest:
    """ops_exact.attention, with those backends of PyTorch's that it does not take by itself."""
    contest = ops_exact.attention(heads, tokens, keys, head_dim, device, compiled)
    q, k = (torch.empty(1, n, heads, head_dim, dtype=torch.bfloat16, device=device) for n in (tokens, keys))
    chosen = chosen_backend(*(x.transpose(1, 2) for x in (q, k, k)))
    others = {
        contender: functools.partial(_in_backend, name, contest.fallback)
        for contender, name in SDPA_BACKENDS.items()
        if name != chosen
    }
    return replace(contest, alternatives={name: run for name, run in others.items() if _runs(run)})


def _in_backend(name: str, attend: Contender) -> torch.Tensor:
    with sdpa_kernel(BACKENDS[name]):
        return attend()


def _runs(run: Contender) -> bool:
    """True if a backend or kernel accepts these tensors. Errors after which the GPU cannot go on are raised."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's, of why not
            run()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception:  # Triton raises many kinds for a GPU that it does not know
        return False
    return True


def _case(contest: Callable[..., Contest], *sizes: int) -> OpCase:
    case = ops.op_case(contest, *sizes, targets={})
    return replace(case, build=functools.partial(_against_fallback, contest.__name__, case.build))


def _against_fallback(op: str, build: Callable[..., Contest], *arguments: object) -> Contest:
    contest = build(*arguments)
    (ours,) = contest.ours.values()
    trials = {kernel.name: functools.partial(_trying, op, kernel, ours) for kernel in kernels_by_tune(op)}
    alternatives = {**contest.alternatives, **{name: run for name, run in trials.items() if _runs(run)}}
    return replace(contest, rivals={FALLBACKS[op]: contest.fallback}, alternatives=alternatives, partial={})


def kernels_by_tune(op: str) -> list[Kernel]:
    """Return the kernels of an op that only `turbo-rcm tune` may choose."""
    return [kernel for kernel in LISTS[op].kernels if kernel.by_tune]


def _trying(op: str, kernel: Kernel, run: Contender) -> torch.Tensor:
    with LISTS[op].trying(kernel):
        return run()


def measure(case: OpCase, device: torch.device) -> OpResult:
    """Check and time one case."""
    rounds = ROUNDS if case.tier == EXACT else TIER_ROUNDS
    result = ops.run_case(case, device, copy_bandwidth=math.nan, rounds=rounds, compile_rivals=False)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def rows_of(
    cases: Iterator[OpCase] | Sequence[OpCase], measure: Callable[[OpCase], OpResult], report: Callable[[str], None]
) -> list[dict]:
    """Return a row for each case from `measure`. If our kernel fails, report it and leave out its time.

    Raises torch.OutOfMemoryError, and torch.AcceleratorError, after which the GPU cannot be used any more.
    """
    rows = []
    for case in cases:
        try:
            result = asdict(measure(case))
            rows.append(row_of(case.key, result) if case.tier == EXACT else _tier_row_of(case.key, result, rows))
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:  # Triton raises many kinds for a GPU that it does not know
            report(f"{case.name}: {type(error).__name__}: {error}")
            rows.append(_row(case.key, None, None, FALLBACKS.get(case.key.op, tune_tiers.EXACT)))
    return rows


def row_of(key: OpKey, result: dict) -> dict:
    """Return the row of an exact op from its OpResult as a dictionary.

    The rival is the fastest one that computes all of the op, and so has an error. "sdpa" is in the row if the rival is
    a backend that PyTorch's attention should be told to take."""
    timings = result["timings"]
    by_tune = {kernel.name for kernel in kernels_by_tune(key.op)}
    kernels = {
        name: round(t["milliseconds"], 4) for name, t in timings.items() if name in by_tune and t["milliseconds"]
    }
    others = {name: t for name, t in timings.items() if name not in by_tune and not t["is_ours"]}
    whole = {name: t for name, t in others.items() if None not in (t["error"], t["milliseconds"])}
    rivals = {name: timing["milliseconds"] for name, timing in whole.items()}
    rival = min(rivals, key=rivals.get)
    ours = None if result["best"] is None else timings[result["best"]]["milliseconds"]
    row = _row(key, ours, rivals[rival], rival) | ({"kernels": kernels} if kernels else {})
    is_worthwhile = rival in SDPA_BACKENDS and rivals[SDPA] > WORTHWHILE * rivals[rival]
    return {**row, "sdpa": SDPA_BACKENDS[rival]} if is_worthwhile else row


def _tier_row_of(key: OpKey, result: dict, rows: Sequence[dict]) -> dict:
    """Return the row of a tier's op, timed against the exact tier by the earlier rows."""
    timings = result["timings"]
    ours = None if result["best"] is None else timings[result["best"]]["milliseconds"]
    exact = tune_tiers.exact_milliseconds(key, timings, rows)
    return _row(key, ours, exact, tune_tiers.EXACT)


def _row(key: OpKey, ours: float | None, rival: float | None, rival_name: str) -> dict:
    times = {"ours": ours and round(ours, 4), "rival": rival and round(rival, 4)}
    return {"op": key.op, "dtype": "bfloat16", "shape": list(key.shape), **times, "rival_name": rival_name}
