"""The devices and dtypes that Triton kernels can take, and launchers as custom ops."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Collection, Iterator

import torch
import triton

from .quantized import FP8, FP8_CAPABILITY

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MINIMUM_CAPABILITY = (8, 0)
SM90 = (9, 0)
SM90_DTYPES = (torch.bfloat16, torch.float16)
INTERPRETED_GPU = (9, 0), 4
WRONG_IN_BF16 = "bfloat16 in Triton's interpreter, which computes it wrongly"
_PLAIN = (torch.Tensor, torch.nn.Parameter)

NAMESPACE = "turbo_rcm_patch"  # of the custom ops; scripts/tools/export_kernels.py writes another
_meta_gpu = contextvars.ContextVar("turbo_rcm_patch_meta_gpu", default=None)


@contextlib.contextmanager
def meta_is_gpu(capability: tuple[int, int], multiprocessors: int) -> Iterator[None]:
    """Treat meta tensors, within this context, as tensors on a GPU with this compute capability and number of
    multiprocessors."""
    token = _meta_gpu.set((capability, multiprocessors))
    try:
        yield
    finally:
        _meta_gpu.reset(token)


def interpreting() -> bool:
    """True if Triton kernels run in its CPU interpreter: TRITON_INTERPRET=1 was set before the package's import."""
    from .coefficient import load_coefficient

    return not isinstance(load_coefficient, triton.runtime.JITFunction)


def why_not_triton_on(device: torch.device, dtype: torch.dtype, formats: Collection[torch.dtype] = ()) -> str | None:
    """Return the reason why Triton kernels cannot take tensors of this device and dtype, or None if they can.

    formats: the 8-bit formats (quantized.py) that the kernel also takes.
    """
    reason = why_not_device(device) or why_not_dtype(device, dtype, formats)
    return WRONG_IN_BF16 if reason is None and is_computed_wrongly(dtype, device) else reason


def why_not_device(device: torch.device) -> str | None:
    """Return the reason why Triton kernels cannot run on this device, or None if they can."""
    if is_gpu(device):
        if torch.version.hip is not None:
            return "AMD GPU"
        if device_capability(device) < MINIMUM_CAPABILITY:
            return f"GPU older than sm_{MINIMUM_CAPABILITY[0]}{MINIMUM_CAPABILITY[1]}"
    elif not (device.type == "cpu" and interpreting()):
        return f"{device.type} tensors"
    return None


def why_not_dtype(device: torch.device, dtype: torch.dtype, formats: Collection[torch.dtype] = ()) -> str | None:
    """Return the reason why Triton kernels cannot take this dtype on this device, or None if they can.

    formats: the 8-bit formats that the kernel also takes.
    """
    if dtype not in KERNEL_DTYPES and dtype not in formats:
        return f"{str(dtype).removeprefix('torch.')} tensors"
    if dtype == FP8 and is_gpu(device) and device_capability(device) < FP8_CAPABILITY:
        return f"fp8 on a GPU older than sm_{FP8_CAPABILITY[0]}{FP8_CAPABILITY[1]}"
    return None


def device_properties(device: torch.device) -> tuple[tuple[int, int], int]:
    """Return the compute capability and the number of multiprocessors."""
    if device.type == "cuda":
        return _gpu_properties(device)
    return _meta_gpu.get() if device.type == "meta" else INTERPRETED_GPU


@functools.lru_cache
def _gpu_properties(device: torch.device) -> tuple[tuple[int, int], int]:
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count


def is_sm90(device: torch.device) -> bool:
    """True if the device is an NVIDIA GPU of sm_90."""
    return is_gpu(device) and torch.version.hip is None and device_capability(device) == SM90


def is_gpu(device: torch.device) -> bool:
    """True if the device is a GPU, or the meta device while it stands for one (`meta_is_gpu`)."""
    return device.type == "cuda" or (device.type == "meta" and _meta_gpu.get() is not None)


def device_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability. torch.compile can trace this."""
    if device.type != "cuda":
        return _meta_gpu.get()[0]
    if device.index is None or torch.compiler.is_compiling():
        # Without an index the device is the current GPU, which can change. torch.compile warns about cached functions.
        return torch.cuda.get_device_capability(device)
    return _gpu_properties(device)[0]


def why_not_sm90(
    device: torch.device,
    dtype: torch.dtype,
    gluon_error: str | None,
    dtypes: tuple[torch.dtype, ...] = SM90_DTYPES,
) -> str | None:
    """Return the reason why a Gluon kernel for sm_90 that takes these dtypes cannot run on this device and dtype, or
    None if it can.

    gluon_error: the reason why the kernel cannot run with this release of Triton, or None. Gluon changes between
        releases.
    """
    if not is_sm90(device):
        return "no GPU of sm_90"
    if gluon_error is not None:
        return f"Gluon of Triton {triton.__version__}: {gluon_error}"
    if dtype not in dtypes:
        return f"{str(dtype).removeprefix('torch.')} tensors"
    return None


def is_rounded_wrongly(result: torch.dtype | None, device: torch.device) -> bool:
    """True if a result of this dtype is rounded wrongly on the device: e4m3 by Triton's interpreter."""
    return result == FP8 and device.type == "cpu"


def is_computed_wrongly(dtype: torch.dtype | None, device: torch.device) -> bool:
    """True if kernels on the device compute wrongly with tensors of this dtype: Triton's interpreter truncates bf16
    instead of rounding it, and multiplies matrices of its bits as integers."""
    return dtype == torch.bfloat16 and device.type == "cpu"


def check_result(op: str, dtype: torch.dtype | None, own: torch.dtype, **scales: float) -> None:
    """Raise ValueError if an op cannot give a result of this dtype or scale. own: the dtype that None stands for."""
    if dtype not in (None, own, *KERNEL_DTYPES):
        accepted = ", ".join(str(known).removeprefix("torch.") for known in KERNEL_DTYPES)
        raise ValueError(f"{op}: dtype={dtype}; accepted are {accepted} and None for {own}.")
    for name, scale in scales.items():
        if not 0 < scale < math.inf:
            raise ValueError(f"{op}: {name}={scale}; it must be positive and finite.")


class KernelLaunch:
    """A launcher as a custom op, without the custom op's cost when a plain call will do.

    torch.compile, autograd, tracers, modes and tensor subclasses see the custom op (``op``). All other calls go
    straight to the launcher, because the dispatcher and its checks can take longer than the kernel.

    leading: further arguments of the custom op, before the launcher's.
    """

    def __init__(self, launcher: Callable, op: Callable, *leading: str):
        self.op, self._launcher, self._leading = op, launcher, leading

    def __call__(self, *arguments):
        is_seen = torch.compiler.is_dynamo_compiling() or torch._C._is_tracing()
        if not (is_seen or torch._C._len_torch_dispatch_stack() > 0):
            recording = torch.is_grad_enabled()
            for argument in arguments:
                if type(argument) in _PLAIN:
                    if recording and argument.requires_grad:
                        break
                elif isinstance(argument, torch.Tensor):
                    break
            else:
                return self._launcher(*arguments)
        return self.op(*self._leading, *arguments)


class KernelOp(KernelLaunch):
    """An op with one kernel: its launcher as the custom op ``turbo_rcm_patch::name``.

    mutates_args: the names of the arguments that it changes.
    """

    def __init__(self, name: str, launcher: Callable, mutates_args: tuple[str, ...] = ()):
        op = torch.library.custom_op(f"{NAMESPACE}::{name}", launcher, mutates_args=mutates_args)
        super().__init__(launcher, op)
        self.register_fake, self.register_autograd = self.op.register_fake, self.op.register_autograd


class KernelsOp:
    """Several kernels of one op as the custom op ``turbo_rcm_patch::name``, whose first argument is a kernel's name.

    fake: the op's result on fake tensors. All launchers have its signature.
    """

    def __init__(self, name: str, fake: Callable):
        schema = torch.library.infer_schema(fake, mutates_args=()).replace("(", "(str kernel, ", 1)
        self.op = torch.library.custom_op(f"{NAMESPACE}::{name}", self._run, mutates_args=(), schema=schema)
        self.op.register_fake(lambda kernel, *arguments: fake(*arguments))
        self.register_autograd = self.op.register_autograd
        self._launchers: dict[str, Callable] = {}

    def launch(self, kernel: str, launcher: Callable) -> KernelLaunch:
        """Register a kernel's launcher; return a callable that runs it, directly or through the custom op."""
        self._launchers[kernel] = launcher
        return KernelLaunch(launcher, self.op, kernel)

    def _run(self, kernel: str, *arguments):
        return self._launchers[kernel](*arguments)


def kernels_op(name: str) -> Callable[[Callable], KernelsOp]:
    """Return a decorator that turns a fake into the KernelsOp of this name."""
    return functools.partial(KernelsOp, name)


def kernel_op(name: str, mutates_args: tuple[str, ...] = ()) -> Callable[[Callable], KernelOp]:
    """Return a decorator that turns a launcher into the KernelOp of this name, which changes these arguments."""
    return functools.partial(KernelOp, name, mutates_args=mutates_args)
