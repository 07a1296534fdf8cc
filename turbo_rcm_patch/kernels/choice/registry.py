"""The choice of an op's kernel: each op has an ordered list of kernels, and takes the first that can run.

A *spec* holds all that the choice depends on: shapes, dtypes, the device and the user's options. Each family of ops has
its own frozen dataclass, based on `Spec`. A kernel's ``why_not(spec)`` returns the reason why the kernel cannot or
should not run, or None. Nothing else decides. The patch picks once per plan. A launch falls back to the next kernel
only if operands are not aligned for TMA.

    pick = LINEAR_SKIP.pick(spec)
    pick.label                # "portable Triton (fewer tiles than multiprocessors)"
    pick.launch(*arguments)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.autograd.forward_ad as fwAD

from ...config import IMPLEMENTATIONS
from .. import dispatch
from ..quantized import FP8
from .measured import MEASURED_DTYPES, tuned_kernel

GLUON, PORTABLE, TRITON, REFERENCE = "sm_90 Gluon", "portable Triton", "Triton", "torch reference"
AUTOGRAD = "autograd"
ASKED_FOR_TRITON = (
    "implementation='triton' was asked for; use 'auto', an NVIDIA GPU of sm_80 or newer with fp32/fp16/bf16 tensors, "
    "or TRITON_INTERPRET=1 on the CPU with fp32/fp16 tensors"
)
# Reasons that begin like this are expected and not shown: the kernel is for another GPU or other operands, or only
# `turbo-rcm tune` may choose it.
EXPECTED = ("no GPU of", "not for", "not chosen by")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The fields that the choice of a kernel depends on in every op.

    dtype: the dtype of the main operand. others: the dtypes of the other operands. eight_bits: the 8-bit formats that
    operands may have. result: the dtype of the result, or None for the main operand's.
    implementation: "auto", "triton" or "torch".
    derivative: "backward" if autograd records the call, "forward" in forward mode or under another transform, else
    None.
    """

    device: torch.device
    dtype: torch.dtype
    others: tuple[torch.dtype, ...] = ()
    eight_bits: tuple[torch.dtype, ...] = ()
    result: torch.dtype | None = None
    implementation: str = "auto"
    derivative: str | None = None

    @property
    def has_backward(self) -> bool:
        """True if the op's own kernels have a backward for this call."""
        return False


@dataclass(frozen=True)
class Kernel:
    """One way to compute an op.

    why_not: returns the reason why it cannot or should not run for a spec, or None. launch: runs it; all kernels of an
    op take the same arguments. is_fused: False for PyTorch's kernels and the reference.
    by_tune: True if it runs only on a GPU where `turbo-rcm tune` found it the fastest.
    """

    name: str
    why_not: Callable[[Spec], str | None]
    launch: Callable
    is_fused: bool = True
    by_tune: bool = False


class Pick(NamedTuple):
    """The kernel that runs. reasons: the names of the kernels before it in the list, each with why it does not run."""

    kernel: Kernel
    reasons: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def launch(self) -> Callable:
        return self.kernel.launch

    @property
    def reason(self) -> str | None:
        """The reason why PyTorch computes the op, or None if a fused kernel does."""
        if self.kernel.is_fused or not self.reasons:
            return None
        return self._news() or self.reasons[0][1]

    @property
    def label(self) -> str:
        """The kernel's name. If an unexpected reason ruled out a kernel before it, the reason follows:
        "portable Triton (fewer tiles than multiprocessors)"."""
        news = self._news() if self.kernel.is_fused else None
        return self.kernel.name if news is None else f"{self.kernel.name} ({news})"

    def _news(self) -> str | None:
        return next((reason for _, reason in self.reasons[::-1] if not reason.startswith(EXPECTED)), None)


_trials: dict[Op, tuple[Kernel, list[Kernel]]] = {}  # the kernel that is being tried, and a list for its picks


@dataclass(frozen=True)
class Op:
    """An op and its kernels, the preferred one first.

    name_in_8_bits: its name in the rows of `turbo-rcm tune` for 8-bit operands, or None if that is `name` too.
    """

    name: str
    kernels: tuple[Kernel, ...]
    name_in_8_bits: str | None = None

    def pick(self, spec: Spec) -> Pick:
        """Return the first kernel that can run. Raises ValueError with all reasons if none can."""
        reasons = []
        tried, picked = _trials.get(self, (None, [])) if _trials else (None, [])
        for kernel in self.kernels if tried is None else (tried,):
            reason = kernel.why_not(spec) or (None if tried else self._why_not_by_tune(kernel, spec))
            if reason is None:
                picked.append(kernel)
                return Pick(kernel, tuple(reasons))
            reasons.append((kernel.name, reason))
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons)
        raise ValueError(f"{self.name}: no kernel can run ({listed}).")

    def _why_not_by_tune(self, kernel: Kernel, spec: Spec) -> str | None:
        if not kernel.by_tune:
            return None
        in_8_bits = spec.dtype.itemsize == 1
        name = self.name_in_8_bits if in_8_bits and self.name_in_8_bits else self.name
        is_measured = in_8_bits or spec.dtype in MEASURED_DTYPES
        is_chosen = is_measured and tuned_kernel(name, spec.device) == kernel.name
        return None if is_chosen else "not chosen by turbo-rcm tune"

    @contextlib.contextmanager
    def trying(self, kernel: Kernel) -> Iterator[list[Kernel]]:
        """Pick only this kernel, as `turbo-rcm tune` does to time it. Yield a list that gets it at every pick."""
        picked: list[Kernel] = []
        _trials[self] = kernel, picked
        try:
            yield picked
        finally:
            del _trials[self]

    def why_not_fused(self, spec: Spec) -> str | None:
        """Return the reason why no fused kernel can run, or None if one can. Never raises."""
        reasons = []
        for kernel in self.kernels:
            if kernel.is_fused:
                reason = kernel.why_not(spec) or self._why_not_by_tune(kernel, spec)
                if reason is None:
                    return None
                reasons.append((kernel.name, reason))
        return Pick(self.kernels[-1], tuple(reasons)).reason

    def named(self, name: str) -> Kernel:
        """Return the kernel of this name. Raises ValueError if there is none."""
        for kernel in self.kernels:
            if kernel.name == name:
                return kernel
        raise ValueError(f"{self.name} has no kernel {name!r}; it has {', '.join(k.name for k in self.kernels)}.")


def why_not_ours(spec: Spec) -> str | None:
    """Return the reason why no Triton kernel can run for a spec, or None if one can."""
    if spec.implementation == "torch":
        return "implementation='torch'"
    if spec.derivative == "forward" or (spec.derivative == "backward" and not spec.has_backward):
        return AUTOGRAD
    reason = dispatch.why_not_device(spec.device) or _why_not_dtypes(spec)
    if reason is not None:
        return reason
    if spec.implementation == "auto" and spec.device.type == "cpu":
        return "cpu tensors"  # the interpreter runs only if it is asked for
    if dispatch.is_rounded_wrongly(spec.result, spec.device):
        return "e4m3 from Triton's interpreter, which rounds it wrongly"
    if any(dispatch.is_computed_wrongly(dtype, spec.device) for dtype in (spec.dtype, spec.result, *spec.others)):
        return dispatch.WRONG_IN_BF16
    return None


def _why_not_dtypes(spec: Spec) -> str | None:
    formats = (*spec.eight_bits, FP8) if spec.result == FP8 else spec.eight_bits
    for dtype in (spec.dtype, *spec.others, *formats):
        reason = dispatch.why_not_dtype(spec.device, dtype, formats)
        if reason is not None:
            return reason
    return None


def why_not_reference(spec: Spec) -> str | None:
    """Return the reason why the reference does not run, or None if it does. It does not run if Triton's kernels were
    asked for and no derivative prevents them."""
    if spec.implementation != "triton" or why_not_ours(spec) == AUTOGRAD:
        return None
    return ASKED_FOR_TRITON


def check_operands(implementation: str, operands: Iterable[torch.Tensor]) -> None:
    """Raise ValueError for an unknown implementation, and for operands on different devices."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} is unknown; accepted are {', '.join(IMPLEMENTATIONS)}.")
    devices = {operand.device for operand in operands}
    if len(devices) > 1:
        raise ValueError(f"tensors are on different devices: {', '.join(sorted(map(str, devices)))}.")


def spec_of(
    implementation: str, *operands: torch.Tensor | None, kind: type[Spec] | None = None, **fields: object
) -> Spec:
    """Return the spec of a call with these operands, the main one first. fields: further fields of this kind of spec.

    Raises ValueError for an unknown implementation, and for operands on different devices.
    """
    present = [operand for operand in operands if operand is not None]
    check_operands(implementation, present)
    first, kind = present[0], Spec if kind is None else kind  # a default that is a class would stop torch.compile
    return kind(
        device=first.device,
        dtype=first.dtype,
        others=tuple(dict.fromkeys(operand.dtype for operand in present if operand.dtype != first.dtype)),
        implementation=implementation,
        derivative=derivative_of(present),
        **fields,
    )


def triton_or_reference(name: str, launch: Callable, reference: Callable) -> Op:
    """Return an op that has one Triton kernel and a reference with the same arguments."""
    return Op(
        name,
        (
            Kernel(TRITON, why_not_ours, launch),
            Kernel(REFERENCE, why_not_reference, reference, is_fused=False),
        ),
    )


def derivative_of(operands: Iterable[torch.Tensor]) -> str | None:
    """Return `Spec.derivative` for a call with these operands."""
    if fwAD._current_level >= 0 and any(fwAD.unpack_dual(operand).tangent is not None for operand in operands):
        return "forward"
    recorded = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
    return "backward" if recorded else None
