"""CUDA graphs of a function: a kind of call runs eagerly once, is recorded when it comes again, and replayed from then.

A replay reads and writes the addresses that were recorded, so it sees what was written to them since, and nothing else:
the caller's key must stand for everything but inputs and contents of memory that the function depends on.
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
Function = Callable[..., torch.Tensor]  # of inputs, to one tensor

KINDS_KEPT = 4

# Where so many keys in a row are lost to changes before they were replayed that often, it is faster without graphs.
MOST_LOST, REPLAYS_WORTH_RECORDING = 8, 2


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
        self._lost, self._replays_before = 0, 0
        self._lock = threading.RLock()

    @property
    def device_type(self) -> str:
        """The type of device whose calls can be recorded."""
        return self._recorder_type.device_type

    @property
    def kept(self) -> int:
        """How many recordings there are."""
        with self._lock:
            return sum(recording is not None for recording in self._recordings.values())

    @property
    def reserved_bytes(self) -> int | None:
        """Memory that only the recordings can use; None where the allocator does not tell."""
        recorder = self._recorder
        return recorder.reserved_bytes if recorder is not None else 0

    def run(self, key: Hashable, function: Function, inputs: Inputs) -> torch.Tensor:
        """``function(*inputs)``, replayed if the key has come before. The result is the caller's to keep."""
        with self._lock:
            if key not in self._recordings:
                return self._run_first(key, function, inputs)
            recording = self._recordings[key]
            if recording is None:
                try:
                    recording = self._recordings[key] = self._record(function, inputs)
                except Exception as error:
                    # CUDA reports the end of a broken capture after its cause.
                    cause = traceback.format_exception_only(error.__context__ or error)[0].partition("\n")[0]
            if recording is None:  # only here is the error gone, whose frames hold memory of the recording
                return self._run_instead(function, inputs, f"recording failed ({cause})")
            self._recordings.move_to_end(key)
            self.replays += 1
            return recording.replay(inputs)

    def clear(self) -> None:
        """Forget all recordings and give their memory back."""
        with self._lock:
            self._recordings.clear()
            self._release_pool()

    def record_anew(self) -> None:
        """Forget what was recorded, not that it came: the next call of each kind is recorded."""
        with self._lock:
            if self.kept > 0:
                self._recordings = OrderedDict.fromkeys(self._recordings)
                self._release_pool()

    def invalidate(self) -> None:
        """Forget all recordings, because what they recorded has changed; for good where they are hardly replayed."""
        with self._lock:
            if known := len(self._recordings):
                replays, self._replays_before = self.replays - self._replays_before, self.replays
                self._lost = self._lost + known if replays < REPLAYS_WORTH_RECORDING * known else 0
            self.clear()
            if self._lost >= MOST_LOST:
                self._give_up("modules or weights changed too often")

    def _run_first(self, key: Hashable, function: Function, inputs: Inputs) -> torch.Tensor:
        """An eager run, after which the key counts as seen; not where it raises."""
        output = function(*inputs)
        self.eager["not recorded yet"] += 1
        while len(self._recordings) >= KINDS_KEPT:
            self._recordings.popitem(last=False)
        if self.kept == 0:
            self._release_pool()
        self._recordings[key] = None
        return output

    def _release_pool(self) -> None:
        """Give the memory of recordings that are gone back. A pool may not be used again when all of its graphs are."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.release()

    def _run_instead(self, function: Function, inputs: Inputs, reason: str) -> torch.Tensor:
        """An eager run after a recording that failed. Nothing is recorded any more, unless this fails as well."""
        self.clear()
        output = function(*inputs)
        self._give_up(reason)
        self.eager[reason] += 1
        return output

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        logger.warning("No CUDA graphs from now on: %s.", reason)

    def _record(self, function: Function, inputs: Inputs) -> CudaRecording:
        device = next(tensor.device for tensor in inputs if tensor is not None)
        if self._recorder is None:
            self._recorder = self._recorder_type(device)
        # Ordinary tensors, so that a recording made in inference mode can also be replayed outside.
        with torch.inference_mode(False), torch.no_grad():
            return self._recorder.record(function, inputs)

    def __reduce__(self) -> tuple:
        """Copied and pickled empty: a recording holds the addresses of the modules that were copied from."""
        return Graphs, ()


class CudaRecorder:
    """Records CUDA graphs that share one memory pool, as they never run at the same time."""

    device_type = "cuda"

    def __init__(self, device: torch.device):
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._last_replay = torch.cuda.Event()
        self._broke = False

    @property
    def reserved_bytes(self) -> int | None:
        """Memory of the pool; None where the allocator, as cudaMallocAsync, does not tell."""
        try:
            segments = torch.cuda.memory_snapshot()
        except RuntimeError:
            return None
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
                self._end_broken_capture(graph)
                raise
        return CudaRecording(graph, static, output, self._last_replay)

    def release(self) -> None:
        """Give the pool's memory back to the GPU; its graphs must be gone."""
        self._last_replay.synchronize()  # expandable segments are unmapped without waiting for it
        if self._broke:
            gc.collect()  # the error's frames may hold tensors in a cycle
        torch.cuda.empty_cache()
        if self._broke and self.reserved_bytes:
            # PyTorch before its pull request 190348 counts a broken capture as a user of the pool for ever.
            torch._C._cuda_releasePool(self._device.index, self._pool)
            torch.cuda.empty_cache()

    def _end_broken_capture(self, graph: torch.cuda.CUDAGraph) -> None:
        """Tell the allocator and the random generator, which else believe for ever that a capture is under way."""
        self._broke = True
        graph.reset()
        with contextlib.suppress(RuntimeError):  # PyTorch since its pull request 180395 told the allocator
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
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
    """Whether calls of torch's functions run someone's code; a default device alone is a setting (see `_settings`)."""
    if torch._C._len_torch_dispatch_stack():
        return True
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


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
        cuda.matmul.allow_fp16_accumulation,
        cudnn.conv.fp32_precision,
        cudnn.enabled,
        cudnn.deterministic,
        cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        tuple(mode.device for mode in _get_current_function_mode_stack()),  # default devices
    )
