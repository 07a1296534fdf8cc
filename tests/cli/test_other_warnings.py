"""Other packages' warnings stay off stderr, unless --verbose is given; errors and our own warnings stay on it.

Importing everything touches no GPU: a new process takes ten seconds to import all, so that one shows both.
"""

import logging
import subprocess
import sys
import warnings

import pytest

from tests.cli.running import CAPTION, TINY
from turbo_rcm_patch.cli import commands, main
from turbo_rcm_patch.cli.quiet_imports import quiet_imports

RUN_COMMANDS_AND_IMPORT_ALL = """
import importlib, pkgutil, sys, traceback

touched = []

def start_cuda():  # without a GPU it raises, which an import could catch
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(None) if frame.f_code.co_name == "<module>"]
    touched.extend(file for file in files if file != "<string>")
    return start_up()

def watch(event, arguments):
    global start_up
    now = vars(sys.modules.get("torch.cuda", sys)).get("_lazy_init", start_cuda)
    if event == "import" and now is not start_cuda:
        start_up, sys.modules["torch.cuda"]._lazy_init = now, start_cuda

sys.addaudithook(watch)
import turbo_rcm_patch as trp
from turbo_rcm_patch.cli import main
codes = [main(argv) for argv in COMMANDS]
from turbo_rcm_patch.cli.quiet_imports import quiet_imports
with quiet_imports():
    from diffusers import WanImageToVideoPipeline
    for module in pkgutil.walk_packages(trp.__path__, "turbo_rcm_patch."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in trp.__all__:
        getattr(trp, name)
assert sys.modules["torch.cuda"]._lazy_init is start_cuda
print(codes, touched)
"""


def test_a_new_process_prints_its_own_errors_and_warnings_alone_and_no_import_touches_the_gpu(tmp_path):
    """It runs two commands, then imports all modules. Importing torch and diffusers would print warnings."""
    wrong = ["info", "--device", "cuda:99"]
    warns = ["generate", CAPTION, "-o", str(tmp_path / "circle.mp4"), *TINY]
    code = f"COMMANDS = {[wrong, warns]}" + RUN_COMMANDS_AND_IMPORT_ALL
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[2, 0] []"
    error, warning = done.stderr.splitlines()
    assert error.startswith("turbo-rcm info: --device cuda:99: ")
    assert warning.startswith("turbo-rcm generate: warning: the embedded model has learned videos of")


@pytest.fixture
def noisy_info(monkeypatch):
    """`turbo-rcm info`, during which other packages and this one have something to say."""
    loggers = [
        logging.getLogger(name) for name in ("diffusers", "diffusers.models", "torch._dynamo", "turbo_rcm_patch")
    ]
    levels = [logger.level for logger in loggers]

    def talk(arguments):
        warnings.warn("warned of", stacklevel=1)
        for name in ("diffusers.models.attention", "torch._dynamo", "a_new_package"):
            logging.getLogger(name).warning("%s chatters", name)
            logging.getLogger(name).error("%s failed", name)
        logging.getLogger("turbo_rcm_patch.patching.sampling.use_rcm").warning("our own warning")
        return 0

    monkeypatch.setattr(commands, "run", talk)
    yield "info"
    assert [logger.level for logger in loggers] == levels


@pytest.fixture
def said():
    """Collect the messages of all loggers, also of diffusers' and torch's, which do not reach the root logger."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    heard = [logging.getLogger(name) for name in (None, "diffusers", "torch._dynamo")]
    for logger in heard:
        logger.addHandler(handler)
    yield messages
    for logger in heard:
        logger.removeHandler(handler)


def test_errors_and_our_own_log_stay(noisy_info, said):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert main([noisy_info]) == 0
    assert warned == []
    failed = [f"{name} failed" for name in ("diffusers.models.attention", "torch._dynamo", "a_new_package")]
    assert list(dict.fromkeys(said)) == [*failed, "our own warning"]


@pytest.mark.parametrize("option", ["-v", "--verbose"])
def test_verbose_hides_nothing(noisy_info, said, option):
    with pytest.warns(UserWarning, match="warned of"):
        assert main([noisy_info, option]) == 0
    assert {"torch._dynamo chatters", "a_new_package chatters", "our own warning"} < set(said)


@pytest.mark.parametrize("verbose", [False, True])
def test_imports_are_quiet_unless_verbose(said, verbose):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with quiet_imports(verbose):
            warnings.warn("warned of", stacklevel=1)
            logging.getLogger("a_new_package").warning("chatters")
    assert (len(warned), said) == ((1, ["chatters"]) if verbose else (0, []))
