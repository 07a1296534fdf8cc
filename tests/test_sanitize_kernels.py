"""scripts/sanitize_kernels.py: every kernel is launched, and what compute-sanitizer reports is judged rightly."""

from pathlib import Path

import pytest
import torch

from turbo_rcm_patch.kernels.aot import record_launches
from turbo_rcm_patch.kernels.every_launch import LAUNCHES, without_gluon

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "turbo_rcm_patch/kernels"
PROBES = ROOT / "scripts/warp_specialized_probes.py"


@pytest.fixture
def sanitize(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import sanitize_kernels

    return sanitize_kernels


def line_of(path, text):
    """ "file:line" of the first line with this text."""
    lines = path.read_text().splitlines()
    return f"{path.name}:{next(i for i, line in enumerate(lines, 1) if text in line)}"


def race(kernel, first, second, severity="Error", hazards=32):
    return (
        f"========= {severity}: Race reported between Write access at {kernel}+0x5b0 in {first}\n"
        f"=========     and Read access at {kernel}+0x150 in {second} [{hazards} hazards]\n"
        "=========\n"
    )


def report(*races):
    count = len(races)
    header = "========= COMPUTE-SANITIZER\nsome output of the program\n"
    return (
        f"{header}{''.join(races)}========= RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)\n"
    )


EMPTY = race("empty_attention", line_of(PROBES, "gl.warp_specialize("), line_of(PROBES, "def empty_attention"))
RACY = race("racy_kernel", line_of(PROBES, "memory.store("), line_of(PROBES, "memory.load("))
ATTENTION = KERNELS / "attention_hopper_kernel.py"
START = line_of(ATTENTION, "gl.warp_specialize("), line_of(ATTENTION, "def attention_kernel")


def test_a_race_as_in_an_empty_kernel_is_tritons_own(sanitize, capsys):
    assert sanitize.judge_races(report(EMPTY, RACY, race("attention_kernel", *START, hazards=7)), hopper=True) == []
    printed = capsys.readouterr().out
    assert "as in an empty kernel  attention_kernel" in printed
    assert "7 hazards (Error)" in printed


@pytest.mark.parametrize("severity", ["Error", "Warning", "WARN"])
def test_without_it_in_an_empty_kernel_the_race_fails(sanitize, severity):
    (problem,) = sanitize.judge_races(report(RACY, race("attention_kernel", *START, severity)), hopper=True)
    assert problem.startswith("attention_kernel: Read at def / Write at gl.warp_specialize")


def test_a_race_elsewhere_fails(sanitize):
    elsewhere = line_of(ATTENTION, "tma.store_wait(0)"), START[1]
    (problem,) = sanitize.judge_races(report(EMPTY, RACY, race("attention_kernel", *elsewhere)), hopper=True)
    assert problem.startswith("attention_kernel: Read at def / Write at tma.store_wait")


def test_each_other_access_of_a_race_is_judged(sanitize):
    both = race("attention_kernel", *START).replace(
        "\n=========\n",
        f"\n=========     and Write access at attention_kernel+0x20 in {START[0]} [5 hazards]\n=========\n",
    )
    (problem,) = sanitize.judge_races(report(EMPTY, RACY, both), hopper=True)
    assert problem.startswith("attention_kernel: Write at gl.warp_specialize / Write at gl.warp_specialize, 5 hazards")


def test_a_race_without_lines_is_never_explained(sanitize):
    def bare(kernel):
        return race(kernel, "x", "x").replace(" in x", "")

    problems = sanitize.judge_races(report(bare("empty_attention"), RACY, bare("attention_kernel")), hopper=True)
    assert len(problems) == 2


def test_racecheck_must_see_the_race_that_is_there(sanitize):
    (problem,) = sanitize.judge_races(report(), hopper=True)
    assert "racy_kernel" in problem
    assert sanitize.judge_races(report(), hopper=False) == []


def test_the_older_format_and_broken_lines_are_read(sanitize):
    old = (
        "Warning: Race reported between Write access at 0x5b0 in /a/file.py:53:some_kernel"
        " and Read access at 0x150 in /a/file.py:54:some_kernel [4 hazards]"
    )
    (found,) = sanitize.read_races(old)
    first, second = ("Write", "some_kernel", 0x5B0, "/a/file.py:53"), ("Read", "some_kernel", 0x150, "/a/file.py:54")
    assert found == ("Warning", first, second, 4)
    broken = report(EMPTY, RACY, race("attention_kernel", *START).replace("access at ", "access at\n=========     "))
    assert sanitize.judge_races(broken, hopper=True) == []


def test_what_cannot_be_read_fails(sanitize):
    overflow = "========= Warning: Detected overflow of tracked cuda::barrier structures.\n"
    (problem,) = sanitize.judge_races(overflow + report(RACY), hopper=True)
    assert "overflow" in problem
    short = report(RACY).replace("SUMMARY: 1", "SUMMARY: 2")
    (problem,) = sanitize.judge_races(short, hopper=True)
    assert "counts 2 races" in problem
    assert sanitize.judge_races("", hopper=True) == ["racecheck wrote no summary"]


def test_memcheck(sanitize, capsys):
    assert sanitize.judge_memory("========= ERROR SUMMARY: 0 errors\n") == []
    invalid = "========= Invalid __global__ read of size 4 bytes\n=========     at gemm_kernel+0x40 in gemm.py:3\n"
    assert sanitize.judge_memory(f"{invalid}========= ERROR SUMMARY: 1 error\n") == ["memcheck counts 1 errors"]
    assert "gemm_kernel+0x40" in capsys.readouterr().out
    assert sanitize.judge_memory("Killed") == ["memcheck wrote no summary"]


@pytest.mark.parametrize(("tool", "code", "result"), [("memcheck", 0, 0), ("memcheck", 3, 1), ("racecheck", 0, 1)])
def test_the_tool_is_run_and_its_report_kept(sanitize, tmp_path, monkeypatch, capsys, tool, code, result):
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\necho run with $*\necho '========= ERROR SUMMARY: 0 errors'\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(sanitize.sys, "executable", "/bin/true")
    monkeypatch.setattr(sanitize.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitize, "is_hopper", lambda device: True)
    assert sanitize.main(["--tool", tool, "--logs", str(tmp_path / "logs")]) == result
    log = (tmp_path / f"logs/{tool}.log").read_text()
    assert log.startswith(f"run with --tool {tool} ")
    assert f"exited with {code}" in capsys.readouterr().out or code == 0


def test_both_tools_are_steps_of_the_session(sanitize):
    import gpu_session

    steps = {name: command for name, command in gpu_session.CHECKS.items() if "sanitize" in command[0]}
    assert steps == {tool: ("scripts/sanitize_kernels.py", "--tool", tool) for tool in sanitize.OPTIONS}


def test_every_kernel_is_launched(sanitize):
    def names(call):
        launches = record_launches(call, (9, 0))
        with without_gluon():
            return {launch.kernel.fn.__name__ for launch in launches + record_launches(call, (9, 0))}

    def everything():
        for launch in LAUNCHES.values():
            launch()

    with sanitize.few_multiprocessors():
        launched = names(lambda: sanitize.launch_kernels(torch.device("meta")))
    assert launched == names(everything)
