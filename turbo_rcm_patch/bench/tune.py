"""Time kernels on this GPU at one model's shapes.

The times answer three questions. Which of our kernels are as fast as their fallbacks? Which backend of PyTorch's
attention is fastest? How fast are the other tiers (tune_tiers.py)? Every op is checked against its oracle before it is
timed (ops.py). kernels/choice/measured.py reads the rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.attention import sdpa_kernel

from ..kernels.attention.attention import ATTENTION, SDPA
from ..kernels.attention.sdpa import BACKENDS, MATH, chosen_backend
from ..kernels.attention_8bit.attention_8bit import ATTENTION_8BIT
from ..kernels.block_sparse.block_sparse_attention import BLOCK_SPARSE_ATTENTION_8BIT
from ..kernels.choice.measured import WORTHWHILE
from ..kernels.choice.registry import Op
from ..kernels.conv.conv_skip import CONV_SKIP, CONVOLUTION
from ..kernels.linear.linear_gelu import LINEAR_GELU, LINEAR_GELU_QUANTIZED
from ..kernels.linear.linear_qkv import LINEAR_QKV
from ..kernels.linear.linear_skip import LINEAR_SKIP
from ..kernels.linear.spec import LINEAR
from ..kernels.sparse_linear.sparse_linear_attention import SPARSE_LINEAR_ATTENTION
from ..latents import latent_channels, latent_size
from ..patching.families import CASES, SUPPORTED, family_named
from ..patching.families.family import Case, Family
from ..patching.families.vae.sizes import convolutions
from ..patching.weights.load import component_folders, read_config, read_vae_config
from ..tiers import BLOCK_SPARSE, EXACT, QUANTIZED, SPARSE, Tier
from ..wording import with_article
from . import ops, ops_conv, ops_exact, ops_sparse, trials, tune_tiers
from .ops import Contender, Contest, OpCase, OpKey, OpResult

ROUNDS, TIER_ROUNDS = 10, 4  # of the exact tier's ops, which the patch chooses by, and of the others
NO_RESULT = {"best": None, "timings": {}}  # of a case that failed
SDPA_BACKENDS = {f"{SDPA} ({name})": name for name in BACKENDS if name != MATH}  # contenders; math is never faster


@dataclass(frozen=True)
class Shapes:
    """The ops of one model at one video size.

    size: height, width and frames, such as "480x832x81". ops: the ops of the exact tier with more than one kernel to
    choose from.
    """

    model: str
    size: str
    ops: Sequence[OpKey]


Size = tuple[int | None, int | None, int | None]  # height, width and frames; None: the model's usual one


def shapes_of_case(name: str, size: Size = (None, None, None)) -> Shapes:
    """Return the shapes of a model of CASES."""
    case = CASES[name]
    return _shapes(name, family_named(case.transformer_class.__name__), case.transformer, case.vae, size, case)


def shapes_of_folder(folder: Path, size: Size = (None, None, None)) -> Shapes:
    """Return the shapes of a pipeline's or a transformer's folder, by its configs.

    The usual size is that of the first of CASES whose VAE makes latents with as many channels. Raises ValueError as
    `configs_of_folder`.
    """
    config, vae_config = configs_of_folder(folder)
    channels = latent_channels(vae_config)
    first = next(iter(CASES.values()))
    usual = next((case for case in CASES.values() if latent_channels(case.vae) == channels), first)
    return _shapes(str(folder), family_named(config["_class_name"]), config, vae_config, size, usual)


def configs_of_folder(folder: Path) -> tuple[dict, dict]:
    """Return the configs of the transformer in such a folder and of the VAE beside it, which is empty without one.

    Raises ValueError for a folder that holds no supported transformer, and for a config that lacks its sizes.
    """
    transformer = next(iter(component_folders(folder).values()))
    config, file = read_config(transformer), transformer / "config.json"
    family = family_named(config.get("_class_name"))
    if family is None:
        raise ValueError(f"{file} is of {with_article(config.get('_class_name'))}; supported: {SUPPORTED}.")
    missing = [name for name in family.blocks[0].sizes.needed if name not in config]
    if missing:
        raise ValueError(f"{file} has no {' and no '.join(missing)}.")
    return config, read_vae_config(transformer)


def _shapes(model: str, family: Family, transformer: Mapping, vae: Mapping, size: Size, usual: Case) -> Shapes:
    own = usual.height, usual.width, usual.frames
    video = tuple(default if given is None else given for given, default in zip(size, own, strict=True))
    sizes = family.blocks[0].sizes
    tokens = sizes.tokens(transformer, latent_size(vae, *video))
    blocks = [OpKey(*op) for op in sizes.ops(transformer, tokens)]
    decoder = [OpKey("conv_skip", shape) for shape in convolutions(vae)]
    return Shapes(model, "x".join(map(str, video)), [*blocks, *decoder])


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
    return replace(contest, alternatives={name: run for name, run in others.items() if trials.can_run(run)})


def _in_backend(name: str, attend: Contender) -> torch.Tensor:
    with sdpa_kernel(BACKENDS[name]):
        return attend()


class TunedOp(NamedTuple):
    """The contest in which an op is timed. lists: the lists of kernels that it picks from.

    rival: the name of what runs if the patch does not take our kernel. exact: the exact op in whose place a tier's op
    runs, or None for an op of the exact tier.
    """

    contest: Callable[..., Contest]
    lists: tuple[Op, ...]
    rival: str = tune_tiers.EXACT
    tier: Tier = EXACT
    exact: str | None = None


OPS = {
    "attention": TunedOp(attention, (ATTENTION,), SDPA),
    "linear_skip": TunedOp(ops_exact.linear_skip, (LINEAR_SKIP,), f"{LINEAR}, Triton skip"),
    "linear_gelu": TunedOp(ops_exact.linear_gelu, (LINEAR_GELU,), f"{LINEAR}, Triton GELU"),
    "linear_qkv": TunedOp(ops_exact.linear_qkv, (LINEAR_QKV,), LINEAR),
    "conv_skip": TunedOp(ops_conv.conv_skip, (CONV_SKIP,), CONVOLUTION),
    "linear_skip_8bit": TunedOp(tune_tiers.linear_skip_8bit, (LINEAR_SKIP,), tier=QUANTIZED, exact="linear_skip"),
    "linear_gelu_8bit": TunedOp(
        tune_tiers.linear_gelu_8bit, (LINEAR_GELU, LINEAR_GELU_QUANTIZED), tier=QUANTIZED, exact="linear_gelu"
    ),
    "linear_qkv_8bit": TunedOp(tune_tiers.linear_qkv_8bit, (LINEAR_QKV,), tier=QUANTIZED, exact="linear_qkv"),
    "attention_8bit": TunedOp(tune_tiers.attention_8bit, (ATTENTION_8BIT,), tier=QUANTIZED, exact="attention"),
    "sparse_linear_attention": TunedOp(
        ops_sparse.sparse_linear_attention, (SPARSE_LINEAR_ATTENTION,), tier=SPARSE, exact="attention"
    ),
    "block_sparse_attention": TunedOp(
        ops_sparse.block_sparse_attention, (BLOCK_SPARSE_ATTENTION_8BIT,), tier=BLOCK_SPARSE, exact="attention"
    ),
}


def cases(shapes: Shapes) -> Iterator[OpCase]:
    """The ops with more than one kernel to choose from, at these shapes: first the exact tier's, then the others'.

    An op of the others runs once, where it takes longest."""
    for op, sizes in shapes.ops:
        yield _case(op, sizes, functools.partial(_against_fallback, OPS[op].rival))
    for op, tuned in OPS.items():
        sizes = [tune_tiers.sizes_in_tier(exact) for exact in shapes.ops if exact.op == tuned.exact]
        if any(sizes):
            yield _case(op, max(filter(None, sizes), key=math.prod), tune_tiers.without_rivals)


def _case(op: str, sizes: tuple[int, ...], change: Callable[[Contest], Contest]) -> OpCase:
    """Return the case of an op's changed contest, with the kernels that only tune may choose."""
    tuned = OPS[op]
    case = ops.op_case(tuned.contest, *sizes, tier=tuned.tier, targets={})
    return replace(case, build=lambda *arguments: trials.with_trials(tuned.lists, change(case.build(*arguments))))


def _against_fallback(rival: str, contest: Contest) -> Contest:
    return replace(contest, rivals={rival: contest.fallback}, partial={})


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
        tuned = OPS[case.key.op]
        try:
            result = asdict(measure(case))
            if tuned.exact is None:
                rows.append(row_of(case.key, result))
            else:
                exact = tune_tiers.exact_milliseconds(tuned.exact, case.key, result["timings"], rows)
                rows.append(_row(case.key, result, exact, tuned.rival))
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:  # Triton raises many kinds for a GPU that it does not know
            report(f"{case.name}: {type(error).__name__}: {error}")
            rows.append(_row(case.key, NO_RESULT, None, tuned.rival))
    return rows


def row_of(key: OpKey, result: dict) -> dict:
    """Return the row of an exact op from its OpResult as a dictionary.

    The rival is the fastest one that computes all of the op, and so has an error. "sdpa" is in the row if the rival is
    a backend that PyTorch's attention should be told to take."""
    timings = result["timings"]
    by_tune = {kernel.name for _, kernel in trials.kernels_by_tune(OPS[key.op].lists)}
    others = {name: t for name, t in timings.items() if name not in by_tune and not t["is_ours"]}
    whole = {name: t for name, t in others.items() if None not in (t["error"], t["milliseconds"])}
    rivals = {name: timing["milliseconds"] for name, timing in whole.items()}
    rival = min(rivals, key=rivals.get)
    row = _row(key, result, rivals[rival], rival)
    is_worthwhile = rival in SDPA_BACKENDS and rivals[SDPA] > WORTHWHILE * rivals[rival]
    return {**row, "sdpa": SDPA_BACKENDS[rival]} if is_worthwhile else row


def _row(key: OpKey, result: dict, rival: float | None, rival_name: str) -> dict:
    timings = result["timings"]
    ours = None if result["best"] is None else timings[result["best"]]["milliseconds"]
    times = {"ours": ours and round(ours, 4), "rival": rival and round(rival, 4)}
    row = {"op": key.op, "dtype": "bfloat16", "shape": list(key.shape), **times, "rival_name": rival_name}
    kernels = trials.times_of_trials(OPS[key.op].lists, timings)
    return {**row, "kernels": kernels} if kernels else row
