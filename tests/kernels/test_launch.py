"""Kernels compiled ahead: not launched there, launched as ever afterwards, and nothing of the mode left behind."""

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
from triton import knobs
from triton.runtime import _async_compile

from tests.oracle import torch_device
from turbo_rcm_patch import kernels
from turbo_rcm_patch.kernels.launch import compile_ahead, launch_kernel
from turbo_rcm_patch.kernels.rows.layer_norm_modulate import _layer_norm_modulate_kernel
from turbo_rcm_patch.kernels.rows.skip import _skip_kernel

X = torch.zeros(1)


class Kernel:
    """Stands in for a kernel in `launch_kernel`, and records the calls."""

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.calls.append(("run", grid, arguments, options))

    def warmup(self, *arguments, grid, **options):
        self.calls.append(("compile", grid, arguments, options))


def test_a_kernel_is_compiled_within_and_run_outside():
    kernel = Kernel()
    compile_ahead(lambda: launch_kernel(kernel, (2, 1), X, num_warps=4))
    launch_kernel(kernel, (2, 1), X, num_warps=4)
    given = ((2, 1), (X,), {"num_warps": 4})
    assert kernel.calls == [("compile", *given), ("run", *given)]


def test_threads_beside_it_run_their_kernels():
    kernel = Kernel()

    def run_beside():
        thread = threading.Thread(target=launch_kernel, args=(kernel, (1,), X))
        thread.start()
        thread.join()

    compile_ahead(run_beside)
    assert kernel.calls == [("run", (1,), (X,), {})]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("compiling", [False, True])
def test_an_error_or_interrupt_comes_out_and_ends_the_mode(error, compiling, monkeypatch):
    def fail(*_):
        raise error

    if compiling:  # while waiting for the compiler
        monkeypatch.setattr(_async_compile, "as_completed", fail)
    with pytest.raises(error):
        compile_ahead((lambda: None) if compiling else fail)
    assert _async_compile.active_mode.get() is None
    kernel = Kernel()
    launch_kernel(kernel, (1,), X)
    assert kernel.calls[0][0] == "run"


def test_it_works_within_anothers_compiling_mode():
    kernel = Kernel()
    with ThreadPoolExecutor() as executor, triton.AsyncCompileMode(executor) as mode:
        compile_ahead(lambda: launch_kernel(kernel, (1,), X))
        assert _async_compile.active_mode.get() is mode
    assert kernel.calls == [("compile", (1,), (X,), {})]


class Compiled(Kernel):
    """A kernel that compiles in the mode as Triton's do, to what ``compile`` returns."""

    def __init__(self, compile):
        super().__init__()
        self.device_caches, self.compile = {}, compile

    def warmup(self, *arguments, grid, **options):
        submit = _async_compile.active_mode.get().submit
        callbacks = [lambda _: None] * (len(inspect.signature(submit).parameters) - 2)  # one; since Triton 3.9 two
        future = submit(self, self.compile, *callbacks)
        self.device_caches[0] = future
        return future


def test_a_kernel_that_does_not_compile_is_left_to_its_launch():
    broken, sound = Compiled(lambda: 1 / 0), Compiled(lambda: "kernel")

    def run():
        launch_kernel(broken, (1,), X)
        launch_kernel(sound, (1,), X)

    compile_ahead(run)
    assert not broken.device_caches
    assert sound.device_caches[0].result() == "kernel"
    assert _async_compile.active_mode.get() is None


def test_an_op_within_leaves_its_result_unwritten(device, monkeypatch):
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    x, output = torch.ones(2, 5, 24).to(torch_device(device)), torch.full((2, 5, 24), 2.0).to(torch_device(device))
    results = []

    def run():
        results.append(kernels.skip(x, output, c_out=0.5, implementation="triton"))

    compile_ahead(run)
    run()
    assert torch.equal(results[0], torch.zeros_like(x))
    assert torch.equal(results[1], torch.full_like(x, 2.0))


@pytest.mark.gpu
def test_what_was_compiled_ahead_is_not_compiled_again(tmp_path, monkeypatch):
    compiled = []
    listener = lambda *, metadata, cache_hit, **_: compiled.append((metadata["name"], cache_hit))  # noqa: E731
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(knobs.compilation, "listener", listener)
    for kernel in (_skip_kernel, _layer_norm_modulate_kernel):
        kernel.device_caches.clear()
    x = torch.randn(2, 7, 48, device="cuda")

    def run():
        return kernels.skip(kernels.layer_norm_modulate(x), x)

    compile_ahead(run)
    assert sorted(compiled) == [("_layer_norm_modulate_kernel", False), ("_skip_kernel", False)]
    result = run()
    assert len(compiled) == 2
    expected = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=1e-6) + x
    torch.testing.assert_close(result, expected)
