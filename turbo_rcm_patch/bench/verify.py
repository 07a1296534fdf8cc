"""Check every patched block and the VAE, on a generation's inputs, against the unpatched errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch
from diffusers import DiffusionPipeline
from torch import nn

from ..config import Exact, PatchConfig, resolve_config
from ..patching import patch
from ..patching.apply import transformers_of
from ..patching.families import family_of
from ..patching.families.vae import vae_state
from ..tiers import EXACT, ErrorLimits, is_low_precision
from .coding import coded, coding_oracle, inputs_of, refuse_tiny_vae, without_tf32
from .metrics import relative_l2
from .oracle import CheckedSteps, Output, run_block_oracle, run_unpatched, tensors_of, trace_in_fp32, weights_with
from .parts import CHOICE, SUB_LAYERS, hidden_states_of, kept_share, part_errors, self_attention_inputs
from .sparse import best_choice, sparse_self_attention

CODING = ("encode", "decode")  # the VAE's methods, each checked like a block, but once


@dataclass(frozen=True)
class BlockCheck:
    """One block at one step, counted from 1.

    Errors are relative L2: of the unpatched and the patched block against the oracle, and, as the difference, of the
    patched against the unpatched block. If a block returns several tensors, the errors are the worst one's.
    """

    block: str
    step: int
    dtype: torch.dtype
    unpatched_error: float
    patched_error: float
    difference: float
    limits: ErrorLimits = EXACT.limits

    @property
    def judged(self) -> str:
        """The figure that is limited: the difference in fp32 and wider, the patched error in lower precision."""
        return "patched error" if is_low_precision(self.dtype) else "difference"

    @property
    def judged_error(self) -> float:
        return self.patched_error if self.judged == "patched error" else self.difference

    @property
    def allowed(self) -> float:
        reference_error = self.unpatched_error if self.judged == "patched error" else 0.0
        return self.limits.allowed(reference_error, self.dtype, "block")

    @property
    def ok(self) -> bool:
        """True if the block is within its limit. A NaN never is."""
        return self.judged_error <= self.allowed


@dataclass(frozen=True)
class PartCheck:
    """The error of a part of a block by itself at one step (parts.py). allowed: None if the part has no limit."""

    block: str
    step: int
    part: str
    error: float
    allowed: float | None

    @property
    def ok(self) -> bool:
        return self.allowed is None or self.error <= self.allowed


class KeptShare(NamedTuple):
    """The share of key blocks that a block's block-sparse attention keeps at one step."""

    block: str
    step: int
    share: float


@dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    It has the checks in the order of the blocks' calls, the blocks that no checked step reached, and what was patched.
    A tier other than exact adds checks of the blocks' parts, a patched VAE the checks of its decoding and, if the
    pipeline encodes, of its encoding, and block-sparse attention the shares that it keeps.
    """

    checks: tuple[BlockCheck, ...]
    unreached: tuple[str, ...]
    patch_summary: str
    parts: tuple[PartCheck, ...] = ()
    decoding: BlockCheck | None = None
    encoding: BlockCheck | None = None
    kept: tuple[KeptShare, ...] = ()

    @property
    def all_checks(self) -> tuple[BlockCheck, ...]:
        """The checks of the blocks, then those of the VAE."""
        return *self.checks, *filter(None, (self.encoding, self.decoding))

    @property
    def failed(self) -> tuple[BlockCheck, ...]:
        return tuple(check for check in self.all_checks if not check.ok)

    @property
    def failed_parts(self) -> tuple[PartCheck, ...]:
        return tuple(check for check in self.parts if not check.ok)

    @property
    def ok(self) -> bool:
        """True if every block was reached and every block, part and the VAE are within their limits."""
        return not self.failed and not self.failed_parts and not self.unreached

    def to_dict(self) -> dict[str, object]:
        """Return what ``json.dump`` takes: one summary of all blocks, one of each part, and what each block keeps."""
        names = dict.fromkeys(part.part for part in self.parts)
        return {
            "ok": self.ok,
            "blocks": _summary_of_blocks(self.checks) if self.checks else None,
            "decoding": None if self.decoding is None else _as_dict(self.decoding),
            "encoding": None if self.encoding is None else _as_dict(self.encoding),
            "unreached": self.unreached,
            "patch_summary": self.patch_summary,
            "parts": [_summary_of_part([part for part in self.parts if part.part == name]) for name in names],
            "kept": _kept_by_block(self.kept),
        }


def _as_dict(check: BlockCheck) -> dict[str, object]:
    dtype = str(check.dtype).removeprefix("torch.")
    fields = {**asdict(check), "dtype": dtype, "allowed": check.allowed, "ok": check.ok}
    del fields["limits"]
    return fields


def _summary_of_blocks(checks: Sequence[BlockCheck]) -> dict[str, object]:
    """Return how many checks there are, how many failed, their errors, and the check that comes nearest its limit."""
    worst = max(checks, key=lambda check: (not check.ok, check.judged_error - check.allowed))
    kinds = ("unpatched_error", "patched_error", "difference")
    return {
        "count": len(checks),
        "failed": sum(not check.ok for check in checks),
        **{kind: _spread([getattr(check, kind) for check in checks]) for kind in kinds},
        "worst": _as_dict(worst),
    }


def _summary_of_part(checks: Sequence[PartCheck]) -> dict[str, object]:
    """Return the same for the checks of one part in all blocks and steps."""
    worst = max(checks, key=lambda check: (not check.ok, check.error))
    return {
        "part": worst.part,
        "count": len(checks),
        "failed": sum(not check.ok for check in checks),
        "error": _spread([check.error for check in checks]),
        "allowed": worst.allowed,
        "worst": {"block": worst.block, "step": worst.step},
    }


def _spread(errors: Sequence[float]) -> dict[str, float]:
    values = torch.tensor(errors, dtype=torch.float64)  # one NaN makes all three NaN
    return {"mean": values.mean().item(), "median": values.quantile(0.5).item(), "largest": values.max().item()}


def _kept_by_block(kept: Sequence[KeptShare]) -> dict[str, dict[int, float]]:
    """Return the shares by block and step."""
    shares: dict[str, dict[int, float]] = {}
    for one in kept:
        shares.setdefault(one.block, {})[one.step] = one.share
    return shares


def verify(
    pipe: DiffusionPipeline, call: dict[str, object], *, seed: int = 0, config: PatchConfig | str = "exact"
) -> Verification:
    """Patch, run ``pipe(**call)`` once, and check every block at the first and last step, and a patched VAE.

    A hook on each block compares its patched output with its unpatched one, and passes the unpatched one on. So all
    other blocks get the hidden states of an unpatched generation. The oracle is the block's class, run in fp32 (fp64
    for an fp32 block) on the same inputs. The configuration has the limits. In the sparse tier the unpatched block and
    the oracle are sparse too, by the reference. All three then keep the key blocks that the oracle chooses. Afterwards
    the pipeline is as it was before.
    """
    refuse_tiny_vae(pipe)
    config = resolve_config(config)
    if not config.restorable:  # the checks need the weights
        config = replace(config, restorable=True)
    limits = config.limits
    checks: list[BlockCheck] = []
    parts: list[PartCheck] = []
    kept: list[KeptShare] = []
    steps = CheckedSteps(pipe)

    def keep_the_oracles_blocks(block: nn.Module, args: tuple, kwargs: dict) -> None:
        attn = sparse_self_attention(block)
        if steps.is_checked and attn is not None:
            with weights_with(block, args, kwargs):
                q, k, _ = self_attention_inputs(trace_in_fp32(block, args, kwargs))
            attn.processor.block_map = best_choice(attn.processor, q, k)

    def check_parts(name: str, block: nn.Module, args: tuple, kwargs: dict) -> None:
        trace, dtype = trace_in_fp32(block, args, kwargs), hidden_states_of(args, kwargs).dtype
        for part, error in part_errors(block, trace, args, kwargs).items():
            parts.append(PartCheck(name, steps.now, part, error, _allowed(part, dtype, limits)))
        if (share := kept_share(block, trace)) is not None:
            kept.append(KeptShare(name, steps.now, share))

    def check_block(name: str) -> Callable:
        def hook(block: nn.Module, args: tuple, kwargs: dict, patched: Output) -> Output:
            with weights_with(block, args, kwargs):
                unpatched = run_unpatched(block, args, kwargs)
                if steps.is_checked:
                    oracle = run_block_oracle(block, args, kwargs)
                    checks.append(check_outputs(name, steps.now, patched, unpatched, oracle, limits))
                    del oracle  # the parts need the memory
                    if not isinstance(config, Exact):
                        check_parts(name, block, args, kwargs)
            if (attn := sparse_self_attention(block)) is not None:
                attn.processor.block_map = None
            return unpatched

        return hook

    vae = getattr(pipe, "vae", None)
    with patch(pipe, config) as applied, contextlib.ExitStack() as hooks:
        blocks = named_blocks(pipe)
        is_checked = vae is not None and vae_state(vae) is not None
        inputs = {method: hooks.enter_context(inputs_of(vae, method)) for method in CODING if is_checked}
        for name, block in blocks.items():
            hooks.enter_context(block.register_forward_pre_hook(keep_the_oracles_blocks, with_kwargs=True))
            hooks.enter_context(block.register_forward_hook(check_block(name), with_kwargs=True))
        steps.run(call, seed, "pt" if is_checked else "latent")
        summary = applied.summary()
        with without_tf32():
            results = {method: coded(vae, method, seen[0]) for method, seen in inputs.items() if seen}
    of_vae = {
        method: _check_coding(vae, method, inputs[method][0], patched, pipe.num_timesteps, config)
        for method, patched in results.items()
    }
    reached = {check.block for check in checks}
    unreached = tuple(name for name in blocks if name not in reached)
    return Verification(
        tuple(checks), unreached, summary, tuple(parts), of_vae.get("decode"), of_vae.get("encode"), tuple(kept)
    )


def named_blocks(pipe: DiffusionPipeline) -> dict[str, nn.Module]:
    """Return the blocks of a pipeline's transformers by name, such as "transformer.blocks.0"."""
    return {
        f"{name}.{path}": block
        for name, transformer in transformers_of(pipe).items()
        for path, block in family_of(transformer).every_block(transformer)
    }


def check_outputs(
    name: str, step: int, patched: Output, unpatched: Output, oracle: Output, limits: ErrorLimits
) -> BlockCheck:
    """Return the check of a block's result, or of the worst of its results."""
    results = zip(*map(tensors_of, (patched, unpatched, oracle)), strict=True)
    checks = [
        BlockCheck(
            block=name,
            step=step,
            dtype=plain.dtype,
            unpatched_error=relative_l2(plain, expected),
            patched_error=relative_l2(ours, expected),
            difference=relative_l2(ours, plain),
            limits=limits,
        )
        for ours, plain, expected in results
    ]
    return max(checks, key=lambda check: (not check.ok, check.judged_error - check.allowed))


def _check_coding(
    vae: nn.Module, method: str, x: torch.Tensor, patched: torch.Tensor, step: int, config: PatchConfig
) -> BlockCheck:
    """Check a decoding or an encoding by the exact tier's limits, or those of a decoder in 8 bits."""
    oracle = coding_oracle(vae, method, x, torch.float32 if is_low_precision(x.dtype) else torch.float64)
    with without_tf32():
        unpatched = coded(vae, method, x)
    limits = config.decode_limits if method == "decode" else EXACT.limits
    return check_outputs(f"vae.{method}", step, patched, unpatched, oracle, limits)


def _allowed(part: str, dtype: torch.dtype, limits: ErrorLimits) -> float | None:
    """Return the largest error that a part of a block may have, or None if it has no limit."""
    if part == CHOICE:
        return limits.allowed_choice(torch.finfo(dtype).eps / 2)
    is_sub_layer = part.rpartition(" ")[2] in SUB_LAYERS  # perhaps after the name of a stream
    return limits.part or None if is_sub_layer else None
