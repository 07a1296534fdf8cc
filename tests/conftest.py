"""Devices of the tests: a CUDA GPU if there is one, else Triton's CPU interpreter, switched on before any import."""

import gc
import logging
import os
import sys

# pytest's workers share the cores. With more threads than cores they wait for each other and take three times as long.
# PyTorch and NumPy, in which the interpreter computes, read this when they are imported.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    gc.disable()  # until all is imported
    threads = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ["OMP_NUM_THREADS"] = str(max(1, threads))
    # Each worker has another GPU first. It sees the others too, for tests of several.
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    first = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % len(gpus)
    if len(gpus) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])

import torch

os.environ["TURBO_RCM_PATCH_CACHE"] = os.devnull  # nothing that `turbo-rcm tune` chose on this machine
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    # PyTorch's own writes down three stacks each time, for the GPUs that may come later.
    torch.manual_seed = torch.default_generator.manual_seed

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.interpreter import speed_up

    speed_up()

gc.set_threshold(20_000, 20, 20)  # by default the collector takes a tenth of the tests' time


def pytest_collection_modifyitems(items):
    """Skip tests marked gpu without a GPU, and tests on the device "interpreter" where a GPU runs the kernels."""
    has_gpu = torch.cuda.is_available()
    for item in items:
        if not has_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        callspec = getattr(item, "callspec", None)
        if has_gpu and callspec and callspec.params.get("device") == "interpreter":
            item.add_marker(pytest.mark.skip(reason="the kernels run on the GPU here"))


def pytest_collection_finish():
    """Spare the collector what is there now, and start what forks processes for tests of several."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch"):  # pytest looks for loggers that do not propagate six times in a test; torch has 70
            logger.propagate = True
    gc.freeze()
    gc.enable()
    if "tests.ranks" in sys.modules:
        sys.modules["tests.ranks"].fork_before_tests()


def pytest_unconfigure():
    """Let the collector free everything at the end, else nanobind reports leaks."""
    gc.unfreeze()


def pytest_generate_tests(metafunc):
    """A kernel test takes ``device``: "interpreter" (a CPU tensor, interpreted kernel) and "cuda" (marked gpu)."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", ["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give each of pytest's workers files that follow each other, so that it alone builds their fixtures. A worker that
    has nothing left takes half of what another one still has to do."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """With ``-n auto``, start 16 workers for each GPU."""
    return 16 * torch.cuda.device_count() or None


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _memory_for_the_other_workers():
    """Free the GPU memory of a file's tests, which PyTorch would keep for this process."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
