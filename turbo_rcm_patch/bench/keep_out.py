"""Find a small set of parts to leave in the model's dtype, with which 8 bits stay within the limits on its own weights.

A part is a linear in 8 bits, or a self-attention in 8 bits. In the first and last step of a generation, or in all of up
to four steps, every block runs on the hidden states of the unpatched model:

1. Each part is measured alone: it runs in 8 bits, and the block's other parts in the model's dtype.
2. While the block or one of its sub-layers is above its limit, the part with the largest error leaves 8 bits.
3. Every part that left goes back, the one with the smallest error first, if the block stays within its limits.

Then the whole model runs on its inputs in these steps, and 2 and 3 are repeated with the limit of a step. The oracle of
the step runs each block in higher precision, and rounds its output to the model's dtype.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from diffusers import DiffusionPipeline
from torch import nn

from ..config import Quantized
from ..keep_list import ATTENTION, VERSION, is_of_attention, keeps_attention, keeps_weights
from ..patching import patch
from ..patching.apply import transformers_of
from ..patching.families import family_of
from ..patching.families.family import KEPT
from ..patching.journal import forward_below_hooks
from ..patching.steps.plan import STATE, state_of
from ..patching.weights.group_offload import update_groups
from ..patching.weights.linear_8bit import QuantizedLinear
from ..patching.weights.quantize_linears import convertible_linears
from ..tiers import ErrorLimits
from .metrics import relative_l2
from .ops import WithoutGraph, take_turns
from .oracle import (
    CheckedSteps,
    Output,
    first_call,
    run_block_oracle,
    run_unpatched,
    tensors_of,
    trace_in_fp32,
    weights_with,
)
from .parts import hidden_states_of, in_dtype, sub_layer_errors
from .verify import check_outputs, named_blocks

BLOCK, STEP = "block", "step"
# Entries of a model's config that tell one size from another. A family has some of them.
SIZES = ("num_layers", "num_attention_heads", "attention_head_dim", "ffn_dim", "num_heads", "dim")
FEW = 4  # steps, which are all measured
ROUNDS = 10  # timings of a block with a part in 8 bits, and as many without
Replacement = Callable[[nn.Module, tuple, dict], Output]


class Judged(NamedTuple):
    """An error and its limit. where: a block or a transformer. what: BLOCK, STEP or the name of a sub-layer."""

    where: str
    step: int
    what: str
    error: float
    allowed: float

    @property
    def ratio(self) -> float:
        """The error as a share of its limit: infinite if one of them is no number."""
        return self.error / self.allowed if math.isfinite(self.error) and self.allowed > 0 else math.inf

    @property
    def ok(self) -> bool:
        """True if the error is within its limit."""
        return self.ratio <= 1


class KeptPart(NamedTuple):
    """A part to leave in the model's dtype.

    alone: the error nearest its limit, or furthest beyond it, while the part alone of its block is in 8 bits.
    nbytes: the memory that the part takes in the model's dtype beyond that of its 8 bits.
    milliseconds: the time that it takes more in one call of the model, or None if it was not measured.
    """

    name: str
    alone: Judged
    nbytes: int
    milliseconds: float | None


class StepError(NamedTuple):
    """The relative L2 error of a transformer's output in a step, with all parts in 8 bits and with the list."""

    transformer: str
    step: int
    in_8_bits: float
    with_list: float
    allowed: float


@dataclass(frozen=True)
class KeepOut:
    """The parts to leave in the model's dtype, and what was measured.

    model, sizes: the transformers' class, and the entries of their config that tell one size from another.
    unmet: errors that are above their limits even if all parts leave 8 bits.
    """

    model: str
    sizes: Mapping[str, object]
    limits: ErrorLimits
    parts: tuple[KeptPart, ...]
    steps: tuple[StepError, ...]
    unmet: tuple[Judged, ...]

    @property
    def ok(self) -> bool:
        """True if every block and every step is within its limits with this list."""
        return not self.unmet

    @property
    def names(self) -> tuple[str, ...]:
        """The names for `keep`."""
        return tuple(part.name for part in self.parts)

    def to_dict(self) -> dict[str, object]:
        """Return the content of the file that `keep` takes (keep_list.py)."""
        return {
            "version": VERSION,
            "tier": Quantized.tier.name,
            "model": self.model,
            "sizes": dict(self.sizes),
            "limits": {name: getattr(self.limits, name) for name in ("block", "part", "step")},
            "steps": [step._asdict() for step in self.steps],
            "keep": [
                {"name": part.name, **part.alone._asdict(), "bytes": part.nbytes, "milliseconds": part.milliseconds}
                for part in self.parts
            ],
        }


def find_keep_out(
    pipe: DiffusionPipeline, call: Mapping[str, object], *, seed: int = 0, config: Quantized | None = None
) -> KeepOut:
    """Run ``pipe(**call)`` once, and return the parts to leave in the model's dtype. The pipeline is as before.

    A part has one name in both experts of a pipeline, and leaves 8 bits in both. Parts that ``config.keep`` names are
    in the list from the start, so that a list can be extended with another prompt. Raises KeepError for a name in it
    that fits nothing.
    """
    config = Quantized() if config is None else config
    models = transformers_of(pipe)
    for model in models.values():
        family_of(model).check_keep(model, config)
    in_8_bits = replace(config, keep=(), restorable=True, cuda_graph="off", vae=False)
    parts = _parts_of(models.values(), in_8_bits)
    with patch(pipe, in_8_bits), torch.no_grad():
        search = _Search(pipe, in_8_bits.limits, parts)
        try:
            search.leave([name for name in parts if _is_named(name, config.keep)])
            search.run(call, seed)
            return search.result()
        finally:
            search.come_back(list(search.left))  # `restore` finds all as the patch left it


def _is_named(name: str, keep: Sequence[str]) -> bool:
    if is_of_attention(name):
        return keeps_attention(name.removesuffix(ATTENTION), keep)
    return keeps_weights(name, keep)


# ---------------------------------------------------------------------------------------------------------------------
# Parts, which leave 8 bits and come back
# ---------------------------------------------------------------------------------------------------------------------


class _Linear:
    """A linear that a patch converts. While it is away, the host keeps its weight in 8 bits.

    The same parameters come back, because group offloading knows them.
    """

    def __init__(self, linear: nn.Linear):
        self._linear, self._weight = linear, None

    def leave(self) -> None:
        self._weight = self._linear.quantized()
        QuantizedLinear.end(self._linear)
        self._move_weight(torch.device("cpu"))

    def come_back(self) -> None:
        self._move_weight(self._linear.weight.device)  # where offloading has moved the model
        QuantizedLinear.begin(self._linear, self._weight)
        self._linear._parameters.update(zip(self._linear.parts, self._weight, strict=True))
        self._weight = None

    def _move_weight(self, device: torch.device) -> None:
        for parameter in self._weight:
            parameter.data = parameter.data.to(device)

    def nbytes(self) -> int:
        """Return how much smaller the weight is in 8 bits. The linear is away."""
        return self._linear.weight.nbytes - sum(tensor.nbytes for tensor in self._weight)


class _Attention:
    """The self-attention of a patched block. It has the state that the patch set while it is away."""

    def __init__(self, block: nn.Module):
        self._block, self._state = block, None

    def leave(self) -> None:
        self._state = state_of(self._block)
        setattr(self._block, STATE, self._state._replace(exactly=KEPT))

    def come_back(self) -> None:
        setattr(self._block, STATE, self._state)
        self._state = None

    def nbytes(self) -> int:
        return 0


Parts = dict[str, list[_Linear | _Attention]]  # the parts by name; several if there are two experts


def _parts_of(models: Iterable[nn.Module], config: Quantized) -> Parts:
    """Return the parts of transformers that are not patched yet."""
    parts: Parts = {}
    for model in models:
        family = family_of(model)
        for path, linear in convertible_linears(model, family.linears(model), config).items():
            parts.setdefault(path, []).append(_Linear(linear))
        if config.in_8_bits("attention"):
            for blocks in family.blocks:
                for path, block in blocks.of(model):
                    parts.setdefault(f"{path}.{blocks.self_attention}{ATTENTION}", []).append(_Attention(block))
    return parts


# ---------------------------------------------------------------------------------------------------------------------
# The search
# ---------------------------------------------------------------------------------------------------------------------


class _BlockCall:
    """One call of a patched block, beside the unpatched one and the oracle."""

    def __init__(self, name: str, step: int, block: nn.Module, args: tuple, kwargs: dict, unpatched: Output):
        self.name, self._step, self._block, self._inputs = name, step, block, (args, kwargs)
        self._unpatched = unpatched
        self._oracle = run_block_oracle(block, args, kwargs)
        self._trace = trace_in_fp32(block, args, kwargs)

    def judge(self, limits: ErrorLimits) -> Judged:
        """Run the block as it is now, and return the error nearest its limit, of the block or a sub-layer."""
        args, kwargs = self._inputs
        patched = forward_below_hooks(self._block)(*args, **kwargs)
        block = check_outputs(self.name, self._step, patched, self._unpatched, self._oracle, limits)
        errors = sub_layer_errors(self._block, self._trace, args, kwargs)
        found = [Judged(self.name, self._step, what, error, limits.part) for what, error in errors.items()]
        found.append(Judged(self.name, self._step, BLOCK, block.judged_error, block.allowed))
        return max(found, key=lambda judged: judged.ratio)


class _ModelCall:
    """One call of a patched transformer, beside the unpatched one and the oracle."""

    def __init__(self, name: str, step: int, model: nn.Module, args: tuple, kwargs: dict):
        self.name, self.step, self.model = name, step, model
        self._inputs, self._oracle, self._allowed = (args, kwargs), [], []

    def run(self, replacement: Replacement | None = None) -> list[torch.Tensor]:
        """Return the transformer's outputs, with the output of every block replaced if a replacement is given."""
        args, kwargs = self._inputs
        update_groups(self.model)
        with contextlib.ExitStack() as hooks:
            if replacement is not None:
                for _, block in family_of(self.model).every_block(self.model):
                    hooks.enter_context(_replace_output(block, replacement))
            outputs = tensors_of(self.model(*args, **kwargs))
        # Wan-Animate-2 returns a list with a tensor for each sample.
        return [one for output in outputs for one in (output if isinstance(output, list) else [output])]

    def compare_with(self, limits: ErrorLimits) -> None:
        """Run the oracle and the unpatched transformer, which give the limit."""
        self._oracle = self.run(_rounded_oracle)
        unpatched = self.run(run_unpatched)
        errors = map(relative_l2, unpatched, self._oracle)
        self._allowed = [limits.allowed(e, one.dtype, "step") for e, one in zip(errors, unpatched, strict=True)]

    def judge(self) -> Judged:
        """Run the transformer as it is now, and return the error nearest its limit, of the video or of the sound."""
        errors = map(relative_l2, self.run(), self._oracle)
        found = [Judged(self.name, self.step, STEP, *each) for each in zip(errors, self._allowed, strict=True)]
        return max(found, key=lambda judged: judged.ratio)


def _replace_output(block: nn.Module, replacement: Replacement):
    def hook(block: nn.Module, args: tuple, kwargs: dict, _: Output) -> Output:
        with weights_with(block, args, kwargs):
            return replacement(block, args, kwargs)

    return block.register_forward_hook(hook, with_kwargs=True)


def _rounded_oracle(block: nn.Module, args: tuple, kwargs: dict) -> Output:
    """Return the output of a block's oracle in the dtype of its hidden states."""
    return in_dtype(run_block_oracle(block, args, kwargs), hidden_states_of(args, kwargs).dtype)


class _Search:
    """The search on a patched pipeline. left: the names of the parts that are not in 8 bits now."""

    def __init__(self, pipe: DiffusionPipeline, limits: ErrorLimits, parts: Parts):
        self._pipe, self._limits, self._parts = pipe, limits, parts
        self.left: list[str] = []
        self._alone: dict[str, Judged] = {}
        self._calls: list[_ModelCall] = []
        self._in_8_bits: list[Judged] = []
        self._unmet: list[Judged] = []

    def leave(self, names: Sequence[str]) -> None:
        """Let parts leave 8 bits."""
        for name in names:
            for member in self._parts[name]:
                member.leave()
            self.left.append(name)

    def come_back(self, names: Sequence[str]) -> None:
        """Let parts that have left come back."""
        for name in names:
            for member in self._parts[name]:
                member.come_back()
            self.left.remove(name)

    def _let_only(self, names: Sequence[str], among: Collection[str]) -> list[str]:
        """Let these parts, and no others of `among`, be out of 8 bits. Return those of `among` that were out before."""
        before = [name for name in among if name in self.left]
        self.come_back([name for name in before if name not in names])
        self.leave([name for name in names if name not in before])
        return before

    def run(self, call: Mapping[str, object], seed: int) -> None:
        """Let parts leave until all blocks of a generation, and then its steps, are within their limits."""
        steps = CheckedSteps(self._pipe, FEW)
        self._update_groups()

        def check_block(name: str) -> Callable:
            def hook(block: nn.Module, args: tuple, kwargs: dict, _: Output) -> Output:
                with weights_with(block, args, kwargs):
                    unpatched = run_unpatched(block, args, kwargs)
                    if steps.is_checked:
                        self._check_block(_BlockCall(name, steps.now, block, args, kwargs, unpatched))
                self._update_groups()
                return unpatched

            return hook

        def note_call(name: str) -> Callable:
            def hook(model: nn.Module, args: tuple, kwargs: dict) -> None:
                if steps.is_checked:
                    self._calls.append(_ModelCall(name, steps.now, model, args, kwargs))

            return hook

        with contextlib.ExitStack() as hooks:
            for name, model in transformers_of(self._pipe).items():
                hooks.enter_context(model.register_forward_pre_hook(note_call(name), with_kwargs=True))
            for name, block in named_blocks(self._pipe).items():
                hooks.enter_context(block.register_forward_hook(check_block(name), with_kwargs=True))
            steps.run(call, seed, "latent")
        for model_call in self._calls:
            model_call.compare_with(self._limits)
        before = self._let_only([], self._parts)
        self._in_8_bits = [model_call.judge() for model_call in self._calls]
        self._let_only(before, self._parts)
        self._settle(list(self._alone), self._worst_step)

    def _update_groups(self) -> None:
        """Let group offloading move the weights that the transformers have now."""
        for model in transformers_of(self._pipe).values():
            update_groups(model)

    def _check_block(self, call: _BlockCall) -> None:
        path = call.name.partition(".")[2]
        own = [name for name in self._parts if name.startswith(f"{path}.")]
        before = self._let_only(own, own)
        for name in own:
            self.come_back([name])
            judged = call.judge(self._limits)
            if name not in self._alone or judged.ratio > self._alone[name].ratio:
                self._alone[name] = judged
            self.leave([name])
        self._let_only(before, own)
        self._settle(own, lambda: call.judge(self._limits))

    def _worst_step(self) -> Judged:
        """Return the first step that is above its limit, or the last one."""
        for call in self._calls:
            judged = call.judge()
            if not judged.ok:
                break
        return judged

    def _settle(self, names: Sequence[str], judge: Callable[[], Judged]) -> None:
        """Let parts leave, the worst first, until ``judge()`` is within its limit. Then bring back those that may."""
        names = sorted((name for name in names if name not in self.left), key=lambda name: self._alone[name].ratio)
        gone = []
        while not (judged := judge()).ok and len(gone) < len(names):
            gone.append(names[-1 - len(gone)])
            self.leave(gone[-1:])
        if not judged.ok:
            self._unmet.append(judged)
        for name in reversed(gone):
            self.come_back([name])
            if judged.ok and not judge().ok:
                self.leave([name])

    def result(self) -> KeepOut:
        """Return the list, with the cost of its parts."""
        model = next(iter(transformers_of(self._pipe).values()))
        ends = [call.judge() for call in self._calls]
        steps = [
            StepError(now.where, now.step, before.error, now.error, now.allowed)
            for before, now in zip(self._in_8_bits, ends, strict=True)
        ]
        return KeepOut(
            model=type(model).__name__,
            sizes={name: model.config[name] for name in SIZES if name in model.config},
            limits=self._limits,
            parts=tuple(self._kept_part(name) for name in sorted(self.left, key=list(self._parts).index)),
            steps=tuple(steps),
            unmet=tuple(self._unmet),
        )

    def _kept_part(self, name: str) -> KeptPart:
        nbytes = sum(member.nbytes() for member in self._parts[name])
        return KeptPart(name, self._alone[name], nbytes, self._milliseconds(name))

    def _milliseconds(self, name: str) -> float | None:
        """Return what a part that has left takes more in its block, or None without a GPU."""
        where = self._alone[name].where
        block = named_blocks(self._pipe)[where]
        call = next(call for call in self._calls if call.name == where.partition(".")[0])
        args, kwargs = first_call(block, call.run)
        device = hidden_states_of(args, kwargs).device
        if device.type != "cuda":
            return None
        run = WithoutGraph(lambda: forward_below_hooks(block)(*args, **kwargs))

        def time() -> float:
            return statistics.median(take_turns({name: run}, device, ROUNDS)[name])

        with weights_with(block, args, kwargs):
            left = time()
            self.come_back([name])
            in_8_bits = time()
            self.leave([name])
        return left - in_8_bits
