"""The hardware and versions that are kept beside every figure."""

import subprocess

import pytest

from turbo_rcm_patch.bench import environment


@pytest.mark.parametrize("command", [("no-such-program",), ("false",)])
def test_a_program_that_is_not_there_or_fails_has_no_answer(command):
    assert environment._first_line(*command) is None


def test_a_program_that_hangs_costs_no_figures(monkeypatch):
    """The environment is described after the measurements, and git may be slow on a network's disk."""

    def hang(command, *, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert environment._first_line("git", "describe") is None
