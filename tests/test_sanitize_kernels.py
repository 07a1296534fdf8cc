"""scripts/sanitize_kernels.py: every kernel is launched, and what compute-sanitizer reports is judged rightly."""

from pathlib import Path

import pytest
import torch

from turbo_rcm_patch.kernels.aot import record_launches
from turbo_rcm_patch.kernels.every_launch import LAUNCHES, without_gluon

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def sanitize(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import sanitize_kernels

    return sanitize_kernels


ROLE, ELSEWHERE = 0x150, 0x5B0
ROLE_READS = {"attention_kernel": {ROLE}}


def race(kernel, read=ROLE, severity="Error", hazards=32):
    return (
        f"========= {severity}: Race reported between Read access at {kernel}+{read:#x} in a.py:53\n"
        f"=========     and Write access at {kernel}+0xeeb0 in a.py:75 [{hazards} hazards]\n"
        "=========\n"
    )


def report(*races):
    count = len(races)
    header = "========= COMPUTE-SANITIZER\nsome output of the program\n"
    return (
        f"{header}{''.join(races)}========= RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)\n"
    )


RACY = race("racy_kernel")


def test_a_race_with_the_read_of_a_role_is_tritons_own(sanitize, capsys):
    assert sanitize.judge_races(report(RACY, race("attention_kernel", hazards=7)), ROLE_READS, hopper=True) == []
    assert "reads a warp's role  attention_kernel: 7 hazards (Error)" in capsys.readouterr().out


@pytest.mark.parametrize("severity", ["Error", "Warning", "WARN"])
@pytest.mark.parametrize(("kernel", "read"), [("attention_kernel", ELSEWHERE), ("gemm_kernel", ROLE)])
def test_other_races_fail(sanitize, kernel, read, severity):
    (problem,) = sanitize.judge_races(report(RACY, race(kernel, read, severity)), ROLE_READS, hopper=True)
    assert kernel in problem


def test_each_other_access_of_a_race_is_judged(sanitize):
    both = (
        race("attention_kernel", ELSEWHERE)
        .replace("Read access", "Write access")
        .replace(
            "\n=========\n",
            f"\n=========     and Read access at attention_kernel+{ROLE:#x} in a.py:53 [5 hazards]\n=========\n",
        )
    )
    (problem,) = sanitize.judge_races(report(RACY, both), ROLE_READS, hopper=True)
    assert "32 hazards" in problem


def test_a_write_is_no_read_of_a_role(sanitize):
    written = race("attention_kernel").replace("Read access", "Write access")
    assert len(sanitize.judge_races(report(RACY, written), ROLE_READS, hopper=True)) == 1


def test_the_reads_of_roles_are_found_in_the_compiled_kernels(sanitize, tmp_path, monkeypatch):
    for name in ("attention_kernel", "_skip_kernel"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.cubin").write_bytes(name.encode())
    sass = {
        b"attention_kernel": ["        /*0150*/                   LDS.U8 R0, [R0+UR5+0x3814c] ;"],
        b"_skip_kernel": ["        /*0150*/                   LDS.128 R0, [R0] ;"],
    }
    monkeypatch.setattr(sanitize, "disassemble", sass.get)
    assert sanitize.find_role_reads(tmp_path) == {"attention_kernel": {ROLE}, "_skip_kernel": set()}


def test_racecheck_must_see_the_race_that_is_there(sanitize):
    (problem,) = sanitize.judge_races(report(), {}, hopper=True)
    assert "racy_kernel" in problem
    assert sanitize.judge_races(report(), {}, hopper=False) == []


def test_the_older_format_and_broken_lines_are_read(sanitize):
    old = (
        "Warning: Race reported between Write access at 0x5b0 in /a/file.py:53:some_kernel"
        " and Read access at 0x150 in /a/file.py:54:some_kernel [4 hazards]"
    )
    (found,) = sanitize.read_races(old)
    first, second = ("Write", "some_kernel", 0x5B0, "/a/file.py:53"), ("Read", "some_kernel", 0x150, "/a/file.py:54")
    assert found == ("Warning", first, second, 4)
    broken = report(RACY, race("attention_kernel").replace("access at ", "access at\n=========     "))
    assert sanitize.judge_races(broken, ROLE_READS, hopper=True) == []


def test_what_cannot_be_read_fails(sanitize):
    overflow = "========= Warning: Detected overflow of tracked cuda::barrier structures.\n"
    (problem,) = sanitize.judge_races(overflow + report(RACY), {}, hopper=True)
    assert "overflow" in problem
    short = report(RACY).replace("SUMMARY: 1", "SUMMARY: 2")
    (problem,) = sanitize.judge_races(short, {}, hopper=True)
    assert "counts 2 races" in problem
    assert sanitize.judge_races("", {}, hopper=True) == ["racecheck wrote no summary"]


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
