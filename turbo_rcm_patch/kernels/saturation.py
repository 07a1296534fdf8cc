"""fp16 results that are stored divided by a scale: they saturate at ±65504, and say so, instead of becoming infinite.

A scale other than 1 marks a value on its way between two ops, as the residual within a block of a bf16 model: infinity
would become NaN in the next norm. A result of scale 1 overflows to infinity like PyTorch's own. NaN stays NaN.

That it happened is one int32 in the host's memory, which GPUs write as well: reading it waits for nothing, and replays
of a CUDA graph write it too. Each Saturation has its own, so that one model's says nothing of another's.
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
    """Whether a result saturated, of the ops that ran within `listening`. A copy hears for itself."""

    def __init__(self):
        self._flags: dict[torch.device, _Flags] = {}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within it, ops of this thread tell it."""
        token = _listener.set(self)
        try:
            yield
        finally:
            _listener.reset(token)

    def happened(self) -> bool:
        """Of the results that are computed by now. It reads eight bytes of the host per device: no synchronisation, no
        launch. The reference under torch.compile or a transform tells nothing."""
        return any(ctypes.c_int64.from_address(flags.host.data_ptr()).value for flags in self._flags.values())

    def flags_of(self, device: torch.device) -> _Flags:
        """What ops on a device write to."""
        if device not in self._flags:
            flags = _Flags(device)
            if device.type == "meta":
                return flags
            self._flags[device] = flags
        return self._flags[device]

    def __reduce__(self):
        return Saturation, ()


# The default is for ops that are called by themselves.
_listener: ContextVar[Saturation] = ContextVar("listener", default=Saturation())  # noqa: B039


def saturates(dtype: torch.dtype, scale: float) -> bool:
    """Whether a result of this dtype, divided by this scale, saturates."""
    return dtype == torch.float16 and scale != 1


def flag_for(dtype: torch.dtype, scale: float, device: torch.device) -> torch.Tensor | None:
    """Where a kernel on the device writes 1 when such a result saturates, int32; None for one that does not."""
    return _listener.get().flags_of(device).host if saturates(dtype, scale) else None


@triton.jit
def saturate(value, row_mask, flag):
    """value [M, N] fp32 within what fp16 holds. The flag is set if a row in the mask [M] had anything beyond."""
    beyond = tl.max(tl.abs(value), 1) > LARGEST
    tl.store(flag + tl.where(beyond, 0, 0), 1, mask=beyond & row_mask)
    value = tl.minimum(value, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(value, -LARGEST, propagate_nan=tl.PropagateNan.ALL)


def saturate_reference(value: torch.Tensor) -> torch.Tensor:
    """`saturate` in plain torch, for a value of any shape."""
    if not torch.compiler.is_compiling() and _may_tell(value):
        flags = _listener.get().flags_of(value.device)
        flags.own.logical_or_((value.detach().abs() > LARGEST.value).any())
        if flags.own.is_cuda:
            flags.host[1:].copy_(flags.own, non_blocking=True)
    return value.clamp(-LARGEST.value, LARGEST.value)


def _may_tell(value: torch.Tensor) -> bool:
    """Whether these are values, and writing elsewhere would not become a part of what is traced or transformed."""
    watched = torch._C._functorch.maybe_current_level() is not None or torch._C._len_torch_dispatch_stack()
    return type(value) is torch.Tensor and not (value.is_meta or watched or torch.jit.is_tracing())


class _Flags:
    """host: [2] int32 in the host's memory, what kernels wrote and what `own` was."""

    @torch.inference_mode(False)
    def __init__(self, device: torch.device):
        self._device, on_gpu = device, device.type == "cuda"
        self.host = torch.zeros(2, dtype=torch.int32, pin_memory=on_gpu, device="cpu" if on_gpu else device)

    @functools.cached_property
    @torch.inference_mode(False)
    def own(self) -> torch.Tensor:
        """[1] int32 on the device, what the reference wrote. A kernel may run first where torch.compile records CUDA
        graphs, which bear no tensor on the GPU that stays."""
        return torch.zeros(1, dtype=torch.int32, device=self._device) if self.host.is_pinned() else self.host[1:]
