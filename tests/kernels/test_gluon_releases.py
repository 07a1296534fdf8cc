"""What the kernels in Gluon are compiled with, by the release of Triton."""

import os
import re
import threading

import pytest
import triton
from triton import knobs

gluon_releases = pytest.importorskip("turbo_rcm_patch.kernels.gluon_releases")
from turbo_rcm_patch.kernels import aot  # noqa: E402
from turbo_rcm_patch.kernels.gemm_hopper_kernel import gemm_kernel  # noqa: E402

RELEASE = tuple(map(int, re.findall(r"\d+", triton.__version__)[:2]))
since_3_9 = pytest.mark.skipif(RELEASE < (3, 9), reason="Triton takes the older ptxas by itself")


def cuda_13() -> str:
    return knobs.nvidia.ptxas_blackwell.version


@pytest.fixture
def kernel(monkeypatch):
    """Binds the GEMM's as for a GPU of sm_90, with what is to compile it, and returns what then does."""
    for name in ("compile", "CompiledKernel", "ASTSource"):  # what binding sets
        monkeypatch.setattr(gemm_kernel, name, getattr(gemm_kernel, name, None), raising=False)

    def bind(compile):
        monkeypatch.setattr("triton.compiler.compile", compile)
        monkeypatch.setattr("triton.compiler.compiler.compile", compile)
        with aot._absent_gpu((9, 0)):
            gemm_kernel.create_binder()
        return gemm_kernel.compile

    return bind


@since_3_9
def test_kernels_are_compiled_with_the_older_ptxas(kernel):
    before, environment = cuda_13(), dict(os.environ)
    assert int(before.split(".")[0]) >= 13

    def compile(source, target):
        assert (source, target) == ("source", "sm_90")
        return cuda_13()

    assert kernel(compile)("source", target="sm_90").startswith("12.")
    assert cuda_13() == before
    assert dict(os.environ) == environment


@since_3_9
def test_it_is_put_back_after_an_error_and_to_the_users_own(kernel, monkeypatch):
    own = knobs.nvidia.ptxas.path
    monkeypatch.setitem(vars(knobs.nvidia), "ptxas_blackwell", own)

    def compile():
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        kernel(compile)()
    assert vars(knobs.nvidia)["ptxas_blackwell"] == own


@since_3_9
def test_the_last_of_several_threads_puts_it_back(kernel):
    before, started, go_on = cuda_13(), threading.Semaphore(0), {name: threading.Event() for name in "ab"}
    seen = {}

    def compile(name):
        started.release()
        assert go_on[name].wait(60)
        seen[name] = cuda_13()

    compile = kernel(compile)
    threads = {name: threading.Thread(target=compile, args=(name,)) for name in "ab"}
    for thread in threads.values():
        thread.start()
    for _ in threads:
        assert started.acquire(timeout=60)
    for name, thread in threads.items():
        go_on[name].set()
        thread.join()
        assert cuda_13().startswith("12.") == (name == "a")
    assert all(version.startswith("12.") for version in seen.values())
    assert cuda_13() == before


@since_3_9
def test_the_keys_of_other_kernels_stay(kernel):
    """Triton remembers the version of ptxas that it saw first, and keeps all that it compiles under it."""
    from triton.backends.nvidia.compiler import get_ptxas_version

    get_ptxas_version.cache_clear()
    kernel(lambda: None)()
    assert cuda_13() in get_ptxas_version(90)


@pytest.mark.skipif(RELEASE >= (3, 9), reason="Triton takes the newer ptxas by itself")
def test_up_to_triton_3_8_nothing_is_changed():
    assert type(gemm_kernel) is gluon_releases.GluonJITFunction
