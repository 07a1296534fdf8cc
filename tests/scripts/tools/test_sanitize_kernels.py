"""scripts/tools/sanitize_kernels.py: every kernel is launched, and what compute-sanitizer reports is judged rightly."""

import re

import pytest
import torch

from scripts.benchmarks import gpu_session
from scripts.tools import sanitize_kernels as sanitize
from scripts.tools import sanitizer_reports as reports
from scripts.tools.compile_without_gpu import record_launches
from scripts.tools.every_launch import LAUNCHES, without_gluon

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


def test_a_race_with_the_read_of_a_role_is_tritons_own(capsys):
    assert reports.judge_races(report(RACY, race("attention_kernel", hazards=7)), ROLE_READS, with_probes=True) == []
    assert "reads a warp's role  attention_kernel: 7 hazards (Error)" in capsys.readouterr().out


@pytest.mark.parametrize("severity", ["Error", "Warning", "WARN"])
@pytest.mark.parametrize(("kernel", "read"), [("attention_kernel", ELSEWHERE), ("gemm_kernel", ROLE)])
def test_other_races_fail(kernel, read, severity):
    (problem,) = reports.judge_races(report(RACY, race(kernel, read, severity)), ROLE_READS, with_probes=True)
    assert kernel in problem


def test_each_other_access_of_a_race_is_judged():
    both = (
        race("attention_kernel", ELSEWHERE)
        .replace("Read access", "Write access")
        .replace(
            "\n=========\n",
            f"\n=========     and Read access at attention_kernel+{ROLE:#x} in a.py:53 [5 hazards]\n=========\n",
        )
    )
    (problem,) = reports.judge_races(report(RACY, both), ROLE_READS, with_probes=True)
    assert "32 hazards" in problem


def test_a_write_is_no_read_of_a_role():
    written = race("attention_kernel").replace("Read access", "Write access")
    assert len(reports.judge_races(report(RACY, written), ROLE_READS, with_probes=True)) == 1


def test_the_reads_of_roles_are_found_in_the_compiled_kernels(tmp_path, monkeypatch):
    """A byte is not a role if the kernel has no roles, or reads several bytes."""
    load = "        /*{:04x}*/                   LDS.U8 R0, [R0+UR5+0x3814c] ;"
    kernels = {
        "attention_kernel": ("ttg.warp_specialize", [load.format(ROLE)]),
        "gemm_kernel": ("ttg.warp_specialize", [load.format(ROLE), load.format(ELSEWHERE)]),
        "_quantize_kv_kernel": ("ttg.local_load", [load.format(ROLE)]),
        "_skip_kernel": ("ttg.local_load", ["        /*0150*/                   LDS.128 R0, [R0] ;"]),
    }
    for name, (operation, _) in kernels.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.cubin").write_bytes(name.encode())
        (tmp_path / name / f"{name}.ttgir").write_text(f"module {{ {operation}() }}")
    monkeypatch.setattr(reports, "disassemble", lambda cubin: kernels[cubin.decode()][1])
    assert reports.find_role_reads(tmp_path) == {"attention_kernel": {ROLE}, "gemm_kernel": set()}


def test_racecheck_must_see_the_race_that_is_there():
    (problem,) = reports.judge_races(report(), {}, with_probes=True)
    assert "racy_kernel" in problem
    assert reports.judge_races(report(), {}, with_probes=False) == []


def test_broken_lines_are_read():
    broken = report(RACY, race("attention_kernel").replace("access at ", "access at\n=========     "))
    assert reports.judge_races(broken, ROLE_READS, with_probes=True) == []


def test_what_cannot_be_read_fails():
    overflow = "========= Warning: Detected overflow of tracked cuda::barrier structures.\n"
    (problem,) = reports.judge_races(overflow + report(RACY), {}, with_probes=True)
    assert "overflow" in problem
    short = report(RACY).replace("SUMMARY: 1", "SUMMARY: 2")
    (problem,) = reports.judge_races(short, {}, with_probes=True)
    assert "counts 2 races" in problem
    assert reports.judge_races("", {}, with_probes=True) == ["racecheck wrote no summary"]


def test_memcheck(capsys):
    assert reports.judge_memory("========= ERROR SUMMARY: 0 errors\n") == []
    invalid = "========= Invalid __global__ read of size 4 bytes\n=========     at gemm_kernel+0x40 in gemm.py:3\n"
    assert reports.judge_memory(f"{invalid}========= ERROR SUMMARY: 1 error\n") == ["memcheck counts 1 errors"]
    assert "gemm_kernel+0x40" in capsys.readouterr().out
    assert reports.judge_memory("Killed") == ["memcheck wrote no summary"]


CLEAN = {
    "memcheck": "echo '========= ERROR SUMMARY: 0 errors'",
    "racecheck": "echo '========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)'",
}


def fake_programs(monkeypatch, tmp_path, part: str, lines: str, others: str) -> None:
    """Shell scripts that replace compute-sanitizer, with lines for what is run with `part` and for all others, and
    of Python."""
    tool, python = tmp_path / "compute-sanitizer", tmp_path / "python"
    tool.write_text(f'#!/bin/sh\necho run with $*\ncase "$*" in\n*"{part}") {lines};;\n*) {others};;\nesac\n')
    python.write_text('#!/bin/sh\ntouch "$TRITON_CACHE_DIR.filled"\necho alone with $*\n')
    for program in (tool, python):
        program.chmod(0o755)
    monkeypatch.setattr(sanitize.sys, "executable", str(python))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(sanitize.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitize, "is_sm90", lambda device: True)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_every_part_is_compiled_then_run_under_the_tool_and_its_report_kept(tmp_path, monkeypatch, capsys, tool):
    of_probes = (
        "\n".join(f"echo '{line}'" for line in report(RACY).splitlines()) if tool == "racecheck" else CLEAN[tool]
    )
    fake_programs(monkeypatch, tmp_path, "probes", of_probes, CLEAN[tool])
    logs = tmp_path / "logs"
    stale = logs / "cache/of/an/older/kernel.cubin"
    stale.parent.mkdir(parents=True)
    stale.touch()
    assert sanitize.main(["--tool", tool, "--logs", str(logs)]) == 0
    assert not stale.exists()
    names = {sanitize.name_of(part, portable) for part in sanitize.PARTS for portable in (False, True)} | {"probes"}
    printed = capsys.readouterr().out
    for what, command in (("compile", "alone with "), (tool, f"run with --tool {tool} ")):
        assert set(re.findall(rf"^{what} (\S+): \d+ s$", printed, re.MULTILINE)) == names
        assert {log.name for log in logs.glob(f"{what}-*.log")} == {f"{what}-{name}.log" for name in names}
        for name in names:
            line = (logs / f"{what}-{name}.log").read_text().splitlines()[0]
            assert line.startswith(command)
            part, portable = name.removesuffix("-portable"), " --portable" * name.endswith("-portable")
            assert line.endswith(f"--launch {part}{portable}")
            # The tool's own limits are 10 runs at a time, whose programs start within 10 s.
            assert what == "compile" or "--max-connections 64 --launch-timeout 300" in line
    assert (logs / "cache.filled").exists()


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (f"{CLEAN['memcheck']}; exit 3", "the program exited with 3"),
        (CLEAN["memcheck"].replace("0", "2"), "memcheck counts 2 errors"),
        ("exit 0", "memcheck wrote no summary"),
    ],
)
def test_one_bad_part_fails_all(tmp_path, monkeypatch, capsys, lines, problem):
    fake_programs(monkeypatch, tmp_path, "convolutions --portable", lines, CLEAN["memcheck"])
    assert sanitize.main(["--tool", "memcheck", "--logs", str(tmp_path / "logs")]) == 1
    failures = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
    assert failures == [f"FAILED convolutions-portable: {problem}"]


def test_both_tools_are_steps_of_the_session():
    steps = {name: command for name, command in gpu_session.CHECKS.items() if "sanitize" in command[0]}
    assert steps == {tool: ("scripts/tools/sanitize_kernels.py", "--tool", tool) for tool in sanitize.OPTIONS}


def test_every_kernel_is_launched():
    def names(call):
        launches = record_launches(call, (9, 0))
        with without_gluon():
            return {launch.kernel.fn.__name__ for launch in launches + record_launches(call, (9, 0))}

    def everything():
        for launch in LAUNCHES.values():
            launch()

    def parts():
        for launch in sanitize.PARTS.values():
            launch(torch.device("meta"))

    with sanitize.few_multiprocessors():
        launched = names(parts)
    assert launched == names(everything)
