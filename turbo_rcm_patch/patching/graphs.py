"""CUDA graphs of a function: a kind of call runs eagerly once, is recorded when it comes again, and replayed from then.

A replay reads and writes the addresses that were recorded, so it sees what was written to them since, and nothing else:
the caller's key must stand for everything but inputs and contents of memory that the function depends on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch
import torch.autograd.forward_ad as fwAD

logger = logging.getLogger(__name__)

Inputs = Sequence[torch.Tensor | None]
Function = Callable[..., torch.Tensor]  # of inputs, to one tensor

KINDS_KEPT = 4


class Graphs:
    """The recorded calls of one function, at most KINDS_KEPT; those not used for longest go first.

    Attributes:
        replays: how many calls were replayed.
        eager: how many were not, by reason.
        failure: why nothing is recorded any more; None while recording has not failed.
    """

    def __init__(self):
        self.replays, self.eager, self.failure = 0, Counter(), None
        self._recorder_type = CudaRecorder
        self._recorder: CudaRecorder | None = None
        self._recordings: OrderedDict[Hashable, CudaRecording | None] = OrderedDict()  # None: came once
        self._lock = threading.RLock()

    @property
    def device_type(self) -> str:
        """The type of device whose calls can be recorded."""
        return self._recorder_type.device_type

    @property
    def kept(self) -> int:
        """How many recordings there are."""
        return sum(recording is not None for recording in self._recordings.values())

    @property
    def reserved_bytes(self) -> int:
        """Memory that only the recordings can use."""
        return self._recorder.reserved_bytes if self._recorder is not None else 0

    def run(self, key: Hashable, function: Function, inputs: Inputs) -> torch.Tensor:
        """``function(*inputs)``, replayed if the key has come before. The result is the caller's to keep."""
        with self._lock:
            recording = self._recording(key, function, inputs)
            if recording is None:
                return function(*inputs)
            self.replays += 1
            return recording.replay(inputs)

    def clear(self) -> None:
        """Forget all recordings and give their memory back."""
        with self._lock:
            self._recordings.clear()
            recorder, self._recorder = self._recorder, None
            if recorder is not None:
                recorder.release()

    def _recording(self, key: Hashable, function: Function, inputs: Inputs) -> CudaRecording | None:
        """The recording of this key, made now if it comes the second time; None where there cannot be one."""
        if key not in self._recordings:
            self.eager["first of its shapes"] += 1
            while len(self._recordings) >= KINDS_KEPT:
                self._recordings.popitem(last=False)
            self._recordings[key] = None
            return None
        if self._recordings[key] is None:
            try:
                self._recordings[key] = self._record(function, inputs)
            except Exception as error:  # the eager run that follows raises what is the function's own
                self.failure = f"recording failed ({_first_line(error)})"
            if self.failure is not None:
                logger.warning("No CUDA graphs from now on: %s.", self.failure)
                self.eager[self.failure] += 1
                self.clear()
                return None
        self._recordings.move_to_end(key)
        return self._recordings[key]

    def _record(self, function: Function, inputs: Inputs) -> CudaRecording:
        device = next(tensor.device for tensor in inputs if tensor is not None)
        if self.kept == 0:  # a memory pool may not be used again when all of its graphs are gone
            self._recorder = self._recorder_type(device)
        # Ordinary tensors, so that a recording made in inference mode can also be replayed outside.
        with torch.inference_mode(False), torch.no_grad():
            return self._recorder.record(function, inputs)

    def __deepcopy__(self, memo) -> Graphs:
        """Empty: a recording holds the addresses of the modules that were copied from."""
        return Graphs()


def _first_line(error: BaseException) -> str:
    """What went wrong first: CUDA reports the end of a broken capture after its cause."""
    cause = error.__context__ or error
    return str(cause).strip().partition("\n")[0].rstrip(".") or type(cause).__name__


class CudaRecorder:
    """Records CUDA graphs that share one memory pool, as they never run at the same time."""

    device_type = "cuda"

    def __init__(self, device: torch.device):
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._last_replay = torch.cuda.Event()

    @property
    def reserved_bytes(self) -> int:
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(self._pool))

    def record(self, function: Function, inputs: Inputs) -> CudaRecording:
        """Capture ``function`` on tensors like the inputs. Raises whatever the capture raises."""
        graph = torch.cuda.CUDAGraph()
        # Where the capture breaks, torch.cuda.graph leaves its own stream current; the outer context does not.
        with torch.cuda.stream(torch.cuda.current_stream(self._device)), _without_workspaces():
            try:
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    static = [None if tensor is None else torch.empty_like(tensor) for tensor in inputs]
                    output = function(*static)
            except Exception:
                self._end_broken_capture()
                raise
        return CudaRecording(graph, static, output, self._last_replay)

    def release(self) -> None:
        """Give the pool's memory back to the GPU; its graphs must be gone."""
        torch.cuda.empty_cache()

    def _end_broken_capture(self) -> None:
        """Tell the allocator and the random generator, which else believe for ever that a capture is under way."""
        with contextlib.suppress(RuntimeError):  # the capture itself did end
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            torch._C._cuda_releasePool(self._device.index, self._pool)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream, capture_error_mode="thread_local"):
            torch.zeros((), device=self._device)


@contextlib.contextmanager
def _without_workspaces():
    """Make cuBLAS allocate its workspaces anew: inside in the graph's pool, and afterwards outside of it."""
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
        output: torch.Tensor,
        last_replay: torch.cuda.Event,
    ):
        self._graph, self._inputs, self._output, self._last_replay = graph, inputs, output, last_replay

    def replay(self, inputs: Inputs) -> torch.Tensor:
        """The function's result for these inputs, in memory of its own."""
        stream = torch.cuda.current_stream(self._output.device)
        stream.wait_event(self._last_replay)  # of any recording: it may have run on another stream
        for static, tensor in zip(self._inputs, inputs, strict=True):
            if static is not None:
                static.copy_(tensor)
        self._graph.replay()
        output = self._output.clone()
        self._last_replay.record(stream)
        return output


def why_not_recorded(inputs: Inputs) -> str | None:
    """Why a call with these inputs must run its own code now; None when a recording can stand for it."""
    if torch.is_grad_enabled():
        return "autograd"
    tensors = [tensor for tensor in inputs if tensor is not None]
    if any(type(tensor) not in (torch.Tensor, torch.nn.Parameter) for tensor in tensors):
        return "inputs of another class"
    if len({tensor.device for tensor in tensors}) > 1:
        return "inputs on different devices"
    if torch.is_autocast_enabled(tensors[0].device.type):
        return "autocast"
    if torch._C._functorch.maybe_current_level() is not None or fwAD._current_level >= 0 or torch.jit.is_tracing():
        return "function transform"
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        return "torch mode"
    if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return "capture under way"
    return None


def call_key(inputs: Inputs) -> Hashable:
    """What else a recording depends on, apart from the modules: the inputs' layouts and PyTorch's settings."""
    layouts = tuple(None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in inputs)
    return layouts, _settings()


def _settings() -> tuple:
    """PyTorch's choices of kernels, and its attention, which some programs replace."""
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
        cudnn.conv.fp32_precision,
        cudnn.enabled,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
    )
