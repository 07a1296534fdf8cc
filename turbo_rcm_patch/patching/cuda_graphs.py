"""CUDA graphs of a function: a kind of call runs eagerly once, is recorded when it comes again, and then is replayed.

A replay reads and writes the recorded addresses. It sees new contents of that memory and no other change. So the
caller's key must name everything else that the function depends on.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch
import torch.autograd.forward_ad as fwAD
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ..plain import is_autocast

logger = logging.getLogger(__name__)

Inputs = Sequence[torch.Tensor | None]
Output = torch.Tensor | tuple[torch.Tensor, ...]
Function = Callable[..., Output]  # from inputs

KINDS_KEPT = 4

# A process's progress with a call, in order. Processes that compute together do what the least advanced one can.
UNABLE, UNSEEN, SEEN, RECORDED = range(4)
Agree = Callable[[int], int]  # (this process's) -> the least of all


def alone(progress: int) -> int:
    """The `Agree` of a process that computes alone."""
    return progress


class Graphs:
    """The recorded calls of one function: at most KINDS_KEPT, the least recently used is dropped first.

    Attributes:
        replays: the number of replayed calls.
        eager: the number of other calls, by reason.
        failure: why recording failed, or None. After a failure nothing is recorded.
    """

    def __init__(self):
        self.replays, self.eager, self.failure = 0, Counter(), None
        self._recorder_type = CudaRecorder
        self._recorder: CudaRecorder | None = None
        self._recordings: OrderedDict[Hashable, CudaRecording | None] = OrderedDict()  # None: seen once
        self._lock = threading.RLock()

    @property
    def device_type(self) -> str:
        """The type of device whose calls can be recorded."""
        return self._recorder_type.device_type

    @property
    def kept(self) -> int:
        """The number of recordings."""
        with self._lock:
            return sum(recording is not None for recording in self._recordings.values())

    @property
    def reserved_bytes(self) -> int | None:
        """Memory that only the recordings can use, or None if the allocator does not tell."""
        recorder = self._recorder
        return recorder.reserved_bytes if recorder is not None else 0

    def run(
        self, key: Hashable, function: Function, inputs: Inputs, agree: Agree = alone, reason: str | None = None
    ) -> Output:
        """Return ``function(*inputs)``, replayed if the key has come before. The caller may keep the result.

        agree: asks all processes that compute together. Each of them must call this, in any state: collectives are
            recorded and replayed by all or by none.
        reason: why this process can neither record nor replay the call, or None.
        """
        with self._lock:
            reason = reason or self.failure
            own = UNABLE if reason is not None else self._progress(key)
            progress = agree(own)
            if progress < own:
                self._recordings.pop(key, None)
                if self.kept == 0:
                    self._release_pool()
            if progress == UNSEEN:
                return self._run_first(key, function, inputs)
            if progress == SEEN:
                self._record(key, function, inputs)
                if not agree(int(self.failure is None)) and self.failure is None:
                    self.clear()  # its own capture is whole, so its memory can go back
                    self._fail("recording failed on another GPU")
                reason = self.failure
            if progress == UNABLE or reason is not None:
                self.eager[reason or "another GPU runs without"] += 1
                return function(*inputs)
            self._recordings.move_to_end(key)
            self.replays += 1
            return self._recordings[key].replay(inputs)

    def _progress(self, key: Hashable) -> int:
        if key not in self._recordings:
            return UNSEEN
        return SEEN if self._recordings[key] is None else RECORDED

    def forget(self) -> None:
        """Drop all recordings, also one that a traceback holds. Wait for no GPU and no thread that waits for one."""
        for recording in filter(None, self._recordings.values()):
            recording.drop()
        self._recordings.clear()

    def clear(self) -> None:
        """Forget all recordings and give their memory back."""
        with self._lock:
            self._recordings.clear()
            self._release_pool()

    def _run_first(self, key: Hashable, function: Function, inputs: Inputs) -> Output:
        """Run eagerly, then note that the key was seen. Nothing is noted if the function raises."""
        output = function(*inputs)
        self.eager["not recorded yet"] += 1
        while len(self._recordings) >= KINDS_KEPT:
            self._recordings.popitem(last=False)
        if self.kept == 0:
            self._release_pool()
        self._recordings[key] = None
        return output

    def _release_pool(self) -> None:
        """Give the recordings' memory back. PyTorch does not allow a pool to be used again after its last graph."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.release()

    def _record(self, key: Hashable, function: Function, inputs: Inputs) -> None:
        """Record the call. If that fails, warn and set `failure`."""
        device = next(tensor.device for tensor in inputs if tensor is not None)
        try:
            if self._recorder is None:
                self._recorder = self._recorder_type(device)
            # Tensors made outside inference mode, so that the recording can also be replayed outside it.
            with torch.inference_mode(False), torch.no_grad(), _without_garbage_collection():
                self._recordings[key] = self._recorder.record(function, inputs)
        except Exception as error:
            # CUDA reports the end of a broken capture after its cause.
            cause = traceback.format_exception_only(error.__context__ or error)[0].partition("\n")[0]
            self._fail(f"recording failed ({cause})")

    def _fail(self, failure: str) -> None:
        """Forget everything, warn, and record nothing from now on."""
        self.failure = failure
        self._recordings.clear()
        self._recorder = None
        logger.warning(
            "No CUDA graphs from now on: %s. If PyTorch then reports errors of its allocator or random generator, "
            "restart the process and patch with cuda_graph='off'.",
            self.failure,
        )

    def __reduce__(self) -> tuple:
        """Copy and pickle as empty: a recording holds addresses of the copied modules."""
        return Graphs, ()


class CudaRecorder:
    """Records CUDA graphs that share one memory pool. They never run at the same time."""

    device_type = "cuda"

    def __init__(self, device: torch.device):
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._last_replay = torch.cuda.Event()

    @property
    def reserved_bytes(self) -> int | None:
        """Memory of the pool, or None if the allocator, such as cudaMallocAsync, does not tell."""
        try:
            segments = torch.cuda.memory_snapshot()
        except RuntimeError:
            return None
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(self._pool))

    def record(self, function: Function, inputs: Inputs) -> CudaRecording:
        """Capture ``function`` on tensors like the inputs. Raises whatever the capture raises.

        PyTorch before 2.13 does not recover from a capture that CUDA broke, for example because an op waited for the
        GPU: its allocator and its random generator still believe that a capture is under way.
        """
        graph = torch.cuda.CUDAGraph()
        # If the capture breaks, torch.cuda.graph leaves its own stream current. The outer context resets it.
        with torch.cuda.stream(torch.cuda.current_stream(self._device)), _without_workspaces():
            try:
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    static = [None if tensor is None else torch.empty_like(tensor) for tensor in inputs]
                    output = function(*static)
            except Exception:
                graph.reset()
                raise
        return CudaRecording(graph, static, output, self._last_replay)

    def release(self) -> None:
        """Give the pool's memory back to the GPU. Its graphs must be gone."""
        self._last_replay.synchronize()  # expandable segments are unmapped without waiting for it
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _without_garbage_collection():
    """Keep Python from collecting garbage. Collecting a dropped model destroys its graph, and that breaks a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _without_workspaces():
    """Make cuBLAS allocate new workspaces: inside the context in the graph's pool, afterwards outside it."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class CudaRecording:
    """A captured call with the tensors that it reads its inputs from and writes its output to."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        inputs: list[torch.Tensor | None],
        output: Output,
        last_replay: torch.cuda.Event,
    ):
        self._graph, self._inputs, self._output, self._last_replay = graph, inputs, output, last_replay

    def replay(self, inputs: Inputs) -> Output:
        """Return the function's result for these inputs in new memory."""
        first = self._output[0] if isinstance(self._output, tuple) else self._output
        stream = torch.cuda.current_stream(first.device)
        stream.wait_event(self._last_replay)  # any recording's last replay may have run on another stream
        for static, tensor in zip(self._inputs, inputs, strict=True):
            if static is not None:
                static.copy_(tensor)
        self._graph.replay()
        output = copy_of(self._output)
        self._last_replay.record(stream)
        return output

    def drop(self) -> None:
        """Give the graph up. It cannot be replayed any more."""
        self._graph.reset()


def copy_of(output: Output) -> Output:
    """Return a function's result in new memory."""
    return tuple(map(torch.clone, output)) if isinstance(output, tuple) else output.clone()


def why_not_recorded(inputs: Inputs) -> str | None:
    """Return why a call with these inputs must run eagerly, or None if a recording can replace it."""
    if torch.is_grad_enabled():
        return "autograd"
    tensors = [tensor for tensor in inputs if tensor is not None]
    if any(type(tensor) not in (torch.Tensor, torch.nn.Parameter) for tensor in tensors):
        return "inputs of another class"
    if len({tensor.device for tensor in tensors}) > 1:
        return "inputs on different devices"
    if is_autocast(tensors[0].device):
        return "autocast"
    if torch._C._functorch.maybe_current_level() is not None or fwAD._current_level >= 0 or torch.jit.is_tracing():
        return "function transform"
    if _under_torch_mode():
        return "torch mode"
    if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return "capture under way"
    return None


def _under_torch_mode() -> bool:
    """True if a mode runs someone's code around torch's functions. A default device is a setting (see `_settings`)."""
    if torch._C._len_torch_dispatch_stack():
        return True
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


def call_key(inputs: Inputs) -> Hashable:
    """Return what a recording depends on besides the modules: the inputs' layouts and PyTorch's settings."""
    layouts = tuple(None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in inputs)
    return layouts, _settings()


def _settings() -> tuple:
    """Return PyTorch's settings that choose kernels, and its attention function, which some programs replace."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return (
        torch.nn.functional.scaled_dot_product_attention,
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.matmul.fp32_precision,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_fp16_accumulation,
        cudnn.conv.fp32_precision,
        cudnn.enabled,
        cudnn.deterministic,
        cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        tuple(mode.device for mode in _get_current_function_mode_stack()),  # default devices
    )
