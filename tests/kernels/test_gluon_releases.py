"""The options that compile the kernels in Gluon, by the release of Triton."""

import re
import threading

import pytest
import triton
from triton.backends.nvidia import compiler

gluon_releases = pytest.importorskip("turbo_rcm_patch.kernels.gluon_releases")
from scripts.tools import compile_without_gpu  # noqa: E402
from turbo_rcm_patch.kernels.linear.gemm_sm90_kernel import gemm_kernel  # noqa: E402

RELEASE = tuple(map(int, re.findall(r"\d+", triton.__version__)[:2]))
since_3_9 = pytest.mark.skipif(RELEASE < (3, 9), reason="Triton takes the older ptxas by itself")


def ptxas_for_sm_90() -> str:
    return compiler.get_ptxas(90).version


@pytest.fixture
def kernel(monkeypatch):
    """A function that binds the GEMM for sm_90 to a compile function. It returns the function that compiles then."""
    for name in ("compile", "CompiledKernel", "ASTSource"):  # what binding sets
        monkeypatch.setattr(gemm_kernel, name, getattr(gemm_kernel, name, None), raising=False)

    def bind(compile):
        monkeypatch.setattr("triton.compiler.compile", compile)
        monkeypatch.setattr("triton.compiler.compiler.compile", compile)
        with compile_without_gpu._absent_gpu((9, 0)):
            gemm_kernel.create_binder()
        return gemm_kernel.compile

    return bind


@since_3_9
def test_kernels_are_compiled_with_the_older_ptxas(kernel):
    def compile(source, target):
        assert (source, target) == ("source", "sm_90")
        return ptxas_for_sm_90()

    assert int(ptxas_for_sm_90().split(".")[0]) >= 13
    assert kernel(compile)("source", target="sm_90").startswith("12.")
    assert int(ptxas_for_sm_90().split(".")[0]) >= 13


@since_3_9
def test_not_after_an_error(kernel):
    before = ptxas_for_sm_90()

    def compile():
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        kernel(compile)()
    assert ptxas_for_sm_90() == before


@since_3_9
def test_other_threads_take_their_own_meanwhile(kernel):
    """A kernel asks for the ptxas twice: for the version of PTX, and to assemble it."""
    before, seen = ptxas_for_sm_90(), {}

    def compile():
        other = threading.Thread(target=lambda: seen.update(other=ptxas_for_sm_90()))
        other.start()
        other.join()
        seen["own"] = ptxas_for_sm_90()

    kernel(compile)()
    assert seen["own"].startswith("12.")
    assert seen["other"] == before


@since_3_9
def test_the_keys_of_other_kernels_stay(kernel):
    """Triton remembers the version of ptxas that it saw first, and keeps all that it compiles under it."""
    compiler.get_ptxas_version.cache_clear()
    kernel(lambda: None)()
    assert ptxas_for_sm_90() in compiler.get_ptxas_version(90)


@pytest.mark.skipif(RELEASE >= (3, 9), reason="Triton takes the newer ptxas by itself")
def test_up_to_triton_3_8_nothing_is_changed():
    assert type(gemm_kernel) is gluon_releases.GluonJITFunction
