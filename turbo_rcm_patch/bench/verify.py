"""Check every patched block and the VAE's decoder, on a generation's inputs, against the unpatched errors."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from diffusers import DiffusionPipeline
from torch import nn
from torch.overrides import TorchFunctionMode

from ..checkpoints.files import COMPONENTS
from ..config import Exact, PatchConfig, resolve_config
from ..patching import patch
from ..patching.families import family_of
from ..patching.families.vae import vae_state
from ..patching.weights.convert import is_quantized
from ..patching.weights.linear_8bit import QuantizedLinear
from ..tiers import EXACT, ErrorLimits, is_low_precision
from .decoding import decode_oracle, decoded, latents_for, without_tf32
from .kept import KeptShare, kept_share_of
from .metrics import relative_l2
from .parts import CHOICE, SUB_LAYERS, Trace, dtype_of, part_errors, self_attention_inputs, trace_of, upcast
from .sparse import best_choice, by_reference, sparse_self_attention

_PACKED_LINEAR = "GGUFLinear"  # diffusers' linear for GGUF files. Its weight is a tensor of bytes.
DECODER = "vae.decode"  # checked like a block, but once

Output = torch.Tensor | tuple[torch.Tensor | None, ...]


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


@dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    It has the checks in the order of the blocks' calls, the blocks that no checked step reached, and what was patched.
    A tier other than exact adds checks of the blocks' parts, a patched VAE the check of its decoding, and block-sparse
    attention the shares that it keeps.
    """

    checks: tuple[BlockCheck, ...]
    unreached: tuple[str, ...]
    patch_summary: str
    parts: tuple[PartCheck, ...] = ()
    decoding: BlockCheck | None = None
    kept: tuple[KeptShare, ...] = ()

    @property
    def all_checks(self) -> tuple[BlockCheck, ...]:
        """The checks of the blocks, then the check of the decoding."""
        return self.checks if self.decoding is None else (*self.checks, self.decoding)

    @property
    def failed(self) -> tuple[BlockCheck, ...]:
        return tuple(check for check in self.all_checks if not check.ok)

    @property
    def failed_parts(self) -> tuple[PartCheck, ...]:
        return tuple(check for check in self.parts if not check.ok)

    @property
    def ok(self) -> bool:
        """True if every block was reached and every block, part and the decoding are within their limits."""
        return not self.failed and not self.failed_parts and not self.unreached

    def to_dict(self) -> dict[str, object]:
        """Return what ``json.dump`` takes: one summary of all blocks, one of each part, and what each block keeps."""
        names = dict.fromkeys(part.part for part in self.parts)
        return {
            "ok": self.ok,
            "blocks": _summary_of_blocks(self.checks) if self.checks else None,
            "decoding": None if self.decoding is None else _as_dict(self.decoding),
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
    """Patch, run ``pipe(**call)`` once, and check every block at the first and last step, and a patched VAE's decoding.

    A hook on each block compares its patched output with its unpatched one, and passes the unpatched one on. So all
    other blocks get the hidden states of an unpatched generation. The oracle is the block's class, run in fp32 (fp64
    for an fp32 block) on the same inputs. The configuration has the limits. In the sparse tier the unpatched block and
    the oracle are sparse too, by the reference. All three then keep the key blocks that the oracle chooses. Afterwards
    the pipeline is as it was before.
    """
    config = resolve_config(config)
    if not config.restorable:  # the checks need the weights
        config = replace(config, restorable=True)
    limits = config.limits
    checks: list[BlockCheck] = []
    parts: list[PartCheck] = []
    kept: list[KeptShare] = []
    step = 1

    def on_step_end(_pipe, index, _timestep, _tensors):
        nonlocal step
        step = index + 2
        return {}

    def keep_the_oracles_blocks(block: nn.Module, args: tuple, kwargs: dict) -> None:
        attn = sparse_self_attention(block)
        if step in (1, pipe.num_timesteps) and attn is not None:
            q, k, _ = self_attention_inputs(_trace(block, args, kwargs))
            attn.processor.block_map = best_choice(attn.processor, q, k)

    def check_block(name: str) -> Callable:
        def hook(block: nn.Module, args: tuple, kwargs: dict, patched: Output) -> Output:
            unpatched = type(block).forward(_plain_twin(block), *args, **kwargs)
            if step in (1, pipe.num_timesteps):
                checks.append(_check(name, step, block, args, kwargs, patched, unpatched, limits))
                if not isinstance(config, Exact):
                    trace = _trace(block, args, kwargs)
                    parts.extend(_check_parts(name, step, block, trace, args, kwargs, limits))
                    kept.extend(_kept(name, step, block, trace))
            if (attn := sparse_self_attention(block)) is not None:
                attn.processor.block_map = None
            return unpatched

        return hook

    blocks = named_blocks(pipe)
    vae = getattr(pipe, "vae", None)
    with patch(pipe, config) as applied, contextlib.ExitStack() as hooks:
        decodes = vae is not None and vae_state(vae) is not None
        latents = hooks.enter_context(latents_for(vae)) if decodes else []
        for name, block in blocks.items():
            hooks.callback(block.register_forward_pre_hook(keep_the_oracles_blocks, with_kwargs=True).remove)
            hooks.callback(block.register_forward_hook(check_block(name), with_kwargs=True).remove)
        generator = torch.Generator(pipe._execution_device).manual_seed(seed)
        output_type = "pt" if decodes else "latent"
        pipe(**{**call, "output_type": output_type}, generator=generator, callback_on_step_end=on_step_end)
        summary = applied.summary()
        with without_tf32():
            samples = [decoded(vae, z) for z in latents[:1]]
    decoding = _check_decoding(vae, latents[0], samples[0], pipe.num_timesteps) if samples else None
    reached = {check.block for check in checks}
    unreached = tuple(name for name in blocks if name not in reached)
    return Verification(tuple(checks), unreached, summary, tuple(parts), decoding, tuple(kept))


def named_blocks(pipe: DiffusionPipeline) -> dict[str, nn.Module]:
    """Return the blocks of a pipeline's transformers by name, such as "transformer.blocks.0"."""
    transformers = {name: getattr(pipe, name, None) for name in COMPONENTS}
    return {
        f"{name}.{path}": block
        for name, transformer in transformers.items()
        if transformer is not None and (family := family_of(transformer)) is not None
        for path, block in family.every_block(transformer)
    }


def _check(
    name: str,
    step: int,
    block: nn.Module,
    args: tuple,
    kwargs: Mapping[str, object],
    patched: Output,
    unpatched: Output,
    limits: ErrorLimits,
) -> BlockCheck:
    """Return the check of the block's result, or of the worst of its results."""
    patched, unpatched = _tensors(patched), _tensors(unpatched)
    oracle_dtype = torch.float32 if is_low_precision(unpatched[0].dtype) else torch.float64
    oracles = _tensors(run_oracle(block, args, kwargs, oracle_dtype))
    checks = [
        BlockCheck(
            block=name,
            step=step,
            dtype=plain.dtype,
            unpatched_error=relative_l2(plain, oracle),
            patched_error=relative_l2(ours, oracle),
            difference=relative_l2(ours, plain),
            limits=limits,
        )
        for ours, plain, oracle in zip(patched, unpatched, oracles, strict=True)
    ]
    return max(checks, key=lambda check: (not check.ok, check.judged_error - check.allowed))


def _check_decoding(vae: nn.Module, z: torch.Tensor, patched: torch.Tensor, step: int) -> BlockCheck:
    """Check the decoding by the exact tier's limits, because every tier decodes in the VAE's precision."""
    oracle = decode_oracle(vae, z, torch.float32 if is_low_precision(z.dtype) else torch.float64)
    with without_tf32():
        unpatched = decoded(vae, z)
    return BlockCheck(
        block=DECODER,
        step=step,
        dtype=z.dtype,
        unpatched_error=relative_l2(unpatched, oracle),
        patched_error=relative_l2(patched, oracle),
        difference=relative_l2(patched, unpatched),
    )


def _check_parts(
    name: str,
    step: int,
    block: nn.Module,
    trace: Trace,
    args: tuple,
    kwargs: Mapping[str, object],
    limits: ErrorLimits,
) -> Iterator[PartCheck]:
    dtype = dtype_of(args, kwargs)
    for part, error in part_errors(block, trace, args, kwargs).items():
        allowed = (
            limits.allowed_choice(torch.finfo(dtype).eps / 2)
            if part == CHOICE
            else limits.part
            if part in SUB_LAYERS
            else None
        )
        yield PartCheck(name, step, part, error, allowed or None)


def _kept(name: str, step: int, block: nn.Module, trace: Trace) -> Iterator[KeptShare]:
    share = kept_share_of(block, trace)
    if share is not None:
        yield KeptShare(name, step, share)


def _trace(block: nn.Module, args: tuple, kwargs: Mapping[str, object]) -> Trace:
    """Return a run of the block without the patch, in fp32 on the device of its inputs."""
    return trace_of(_class_copy(block).to(_device_of(args, kwargs), torch.float32), args, kwargs)


def _tensors(output: Output) -> list[torch.Tensor]:
    """Return a block's output as a list, without the None entries."""
    outputs = [output] if isinstance(output, torch.Tensor) else output
    return [one for one in outputs if one is not None]


def first_call(module: nn.Module, run: Callable[[], object]) -> tuple[tuple, dict]:
    """Return the arguments of a module's first call while something runs."""
    seen: list[tuple[tuple, dict]] = []
    handle = module.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    try:
        with torch.no_grad():
            run()
    finally:
        handle.remove()
    return seen[0]


def run_oracle(block: nn.Module, args: tuple, kwargs: Mapping[str, object], dtype: torch.dtype) -> Output:
    """Return the block's class run in `dtype`, fp64 or fp32 without TF32, on upcast weights and inputs."""
    oracle = _class_copy(block).to(_device_of(args, kwargs), dtype)
    args, kwargs = upcast(args, dtype), upcast(kwargs, dtype)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad(), _WidenedFloat(dtype):
            return type(oracle).forward(oracle, *args, **kwargs)
    finally:
        torch.set_float32_matmul_precision(precision)


class _WidenedFloat(TorchFunctionMode):
    """Lets ``.float()``, with which blocks widen bf16, keep an fp64 oracle in fp64."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].to(self._dtype)
        return func(*args, **(kwargs or {}))


def _class_copy(block: nn.Module) -> nn.Module:
    """Return a copy of parameters, buffers and submodules with the forwards of their classes.

    Other instance attributes, such as what a patch keeps on a module, are shared rather than copied. A sparse attention
    runs by the reference.
    """
    copied = ("_parameters", "_buffers", "_modules")
    shared = [value for module in block.modules() for name, value in vars(module).items() if name not in copied]
    twin = copy.deepcopy(block, {id(value): value for value in shared} | _unpacked(block))
    for module in twin.modules():
        if type(module).__name__ == _PACKED_LINEAR:
            module.__class__ = nn.Linear
        for name in [name for name in vars(module) if callable(getattr(type(module), name, None))]:
            del module.__dict__[name]  # what a patch binds in place of the class's methods
        if is_quantized(module):
            QuantizedLinear.forget(module)
    if (attn := sparse_self_attention(twin)) is not None:
        attn.processor = by_reference(attn.processor)
    return twin


def _unpacked(block: nn.Module) -> dict[int, nn.Parameter]:
    """Return plain copies of the weights of diffusers' GGUF linears, by the weights' ids."""
    packed = [module.weight for module in block.modules() if type(module).__name__ == _PACKED_LINEAR]
    if not packed:
        return {}
    from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor  # needs the package gguf

    return {id(weight): nn.Parameter(dequantize_gguf_tensor(weight), requires_grad=False) for weight in packed}


def _plain_twin(block: nn.Module) -> nn.Module:
    """Return the block, or a copy of it on its inputs' device where the patch changed more of it than forwards."""
    if not any(map(is_quantized, block.modules())) and sparse_self_attention(block) is None:
        return block
    return _class_copy(block).to(next(block.parameters()).device)


def _device_of(args: tuple, kwargs: Mapping[str, object]) -> torch.device:
    return next(value.device for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
