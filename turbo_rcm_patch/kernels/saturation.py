"""Saturation of fp16 results that are stored divided by a scale. They stop at ±65504 and set a flag, instead of
becoming infinite.

A scale other than 1 marks a value on its way between two ops, such as the residual within a block of a bf16 model.
Infinity there would become NaN in the next norm. A result of scale 1 overflows to infinity as PyTorch's would. NaN
stays NaN.

The flag is an int32 in the host's memory that GPUs can write. Reading it does not wait for the GPU, and replays of a
CUDA graph write it too. Each Saturation has its own flags, so that one model's do not report another's saturation.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from contextvars import ContextVar

import torch
import triton
import triton.language as tl

LARGEST = tl.constexpr(65504.0)


class Saturation:
    """A record of whether any op that ran within `listening` saturated. A copy starts empty, with flags of its own."""

    def __init__(self):
        self._flags: dict[torch.device, _Flags] = {}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Record saturation of this thread's ops within this context."""
        token = _listener.set(self)
        try:
            yield
        finally:
            _listener.reset(token)

    def happened(self) -> bool:
        """True if a result computed by now saturated.

        This reads eight bytes of host memory per device, without a synchronisation or a launch. The reference under
        torch.compile or a transform records nothing.
        """
        return any(ctypes.c_int64.from_address(flags.host.data_ptr()).value for flags in self._flags.values())

    def flags_of(self, device: torch.device) -> _Flags:
        """Return the flags that ops on a device write to."""
        if device not in self._flags:
            flags = _Flags(device)
            if device.type == "meta":
                return flags
            self._flags[device] = flags
        return self._flags[device]

    def __reduce__(self):
        return Saturation, ()


# The default serves ops that are called outside any `listening`.
_listener: ContextVar[Saturation] = ContextVar("listener", default=Saturation())  # noqa: B039


def saturates(dtype: torch.dtype, scale: float) -> bool:
    """True if a result of this dtype, divided by this scale, saturates instead of overflowing."""
    return dtype == torch.float16 and scale != 1


def flag_for(dtype: torch.dtype, scale: float, device: torch.device) -> torch.Tensor | None:
    """Return the int32 flag that a kernel sets to 1 when such a result saturates, or None if it overflows instead."""
    return _listener.get().flags_of(device).host if saturates(dtype, scale) else None


@triton.jit
def saturate(value, row_mask, flag):
    """Clamp value [M, N] fp32 to fp16's range. Set the flag if a row in the mask [M] was out of range."""
    beyond = tl.max(tl.abs(value), 1) > LARGEST
    tl.store(flag + tl.where(beyond, 0, 0), 1, mask=beyond & row_mask)
    value = tl.minimum(value, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(value, -LARGEST, propagate_nan=tl.PropagateNan.ALL)


def saturate_reference(value: torch.Tensor) -> torch.Tensor:
    """Do what `saturate` does in plain torch, for a value of any shape."""
    if not torch.compiler.is_compiling() and _may_tell(value):
        flags = _listener.get().flags_of(value.device)
        flags.own.logical_or_((value.detach().abs() > LARGEST.value).any())
        if flags.own.is_cuda:
            flags.host[1:].copy_(flags.own, non_blocking=True)
    return value.clamp(-LARGEST.value, LARGEST.value)


def _may_tell(value: torch.Tensor) -> bool:
    """True if the tensor holds real values, and a write to the flags would not become part of a trace or transform."""
    watched = torch._C._functorch.maybe_current_level() is not None or torch._C._len_torch_dispatch_stack()
    return type(value) is torch.Tensor and not (value.is_meta or watched or torch.jit.is_tracing())


class _Flags:
    """The flags of one device. host: [2] int32 in the host's memory, the kernels' flag and a copy of `own`."""

    @torch.inference_mode(False)
    def __init__(self, device: torch.device):
        self._device, on_gpu = device, device.type == "cuda"
        self.host = torch.zeros(2, dtype=torch.int32, pin_memory=on_gpu, device="cpu" if on_gpu else device)

    @functools.cached_property
    @torch.inference_mode(False)
    def own(self) -> torch.Tensor:
        """The reference's flag, [1] int32 on the device.

        It is created on first use: a kernel may run while torch.compile records CUDA graphs, and a tensor allocated on
        the GPU then must not outlive the recording.
        """
        return torch.zeros(1, dtype=torch.int32, device=self._device) if self.host.is_pinned() else self.host[1:]
