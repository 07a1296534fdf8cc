"""scripts/tools/diffusers_suite.py: a test that sees the patch is shown, others are not."""

import multiprocessing
import os
import sys
from types import SimpleNamespace

import pytest

from scripts.tools import diffusers_suite

SUITE = """
import pytest
from diffusers import LTX2VideoTransformer3DModel

SIZES = {"num_attention_heads": 2, "attention_head_dim": 8, "cross_attention_dim": 16, "num_layers": 1}
SIZES |= {f"audio_{name}": value for name, value in SIZES.items() if name != "num_layers"} | {"caption_channels": 8}


def model():
    return LTX2VideoTransformer3DModel(**SIZES)


def test_that_has_no_forward_of_its_own():
    assert "forward" not in vars(model().transformer_blocks[0])


def test_of_a_weight():
    assert model().proj_in.weight.shape == (16, 128)


@pytest.mark.skip
def test_skipped():
    pass
"""


@pytest.fixture(autouse=True)
def _forked(monkeypatch):
    """Let forks of this process run the tests, because a new process imports diffusers for ten seconds."""

    def run(command, *, cwd, env, check):
        assert command[:3] == [sys.executable, "-m", "pytest"]
        process = multiprocessing.get_context("fork").Process(target=run_pytest, args=(command[3:], cwd, env))
        process.start()
        process.join()

    monkeypatch.setattr(diffusers_suite, "subprocess", SimpleNamespace(run=run))


def run_pytest(arguments, folder, environment):
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    pytest.main(arguments)


def test_tests_whose_outcome_differs_are_shown(tmp_path, capsys):
    (tmp_path / "test_ltx2.py").write_text(SUITE)
    assert diffusers_suite.main([str(tmp_path), "test_ltx2.py"]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown == [
        "test_ltx2.py::test_that_has_no_forward_of_its_own: unpatched passed, patched failed",
        "patched: 1 passed, 1 skipped, 1 failed; 1 differ from unpatched",
    ]


def test_nothing_that_ran_is_a_failure(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(diffusers_suite.subprocess, "run", lambda command, **_: None)
    assert diffusers_suite.main([str(tmp_path), "missing.py"]) == 1
    assert "patched: 0 passed, 0 skipped, 0 failed" in capsys.readouterr().out
