import itertools
import multiprocessing
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from scripts.tools import compile_gate as gate
from scripts.tools import compile_without_gpu
from scripts.tools.compile_without_gpu import Inspection, describe, shared_memory_limit

ROOT = Path(__file__).resolve().parents[3]


def inspection(opcode, **changes):
    healthy = {"registers": 168, "spills": 0, "spills_matter": False, "shared": 1000, "warnings": ()}
    result = Inspection(**healthy | {"has_low_precision_dot": True} | changes, asm={})
    vars(result)["instructions"] = Counter({opcode: 4})
    return result


def test_the_page_names_the_gpus_that_kernels_are_compiled_for():
    (line,) = re.findall(r"All kernels compile for (.*)", " ".join((ROOT / "docs/start.md").read_text().split()))
    assert re.findall(r"sm_(\d+)", line.partition(". ")[0]) == [str(number) for number in gate.ARCHITECTURES]


@pytest.mark.parametrize("opcode", ["HGMMA.64x256x16.F32.BF16", "IGMMA.64x128x32.S8.S8", "QGMMA.64x64x32.F32.E4M3"])
def test_a_healthy_kernel_passes(opcode):
    assert gate.find_problems(inspection(opcode), (9, 0), 2000) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"spills": 8, "spills_matter": True}, "8 bytes of register spills"),
        ({"shared": 2001}, "2001 bytes of shared memory; a program may take 2000"),
        ({"warnings": ("(C7510) wgmma serialized",)}, "C7510"),
    ],
)
def test_each_fault_is_found(changes, problem):
    (found,) = gate.find_problems(inspection("HGMMA.64x64x16.F32", **changes), (9, 0), 2000)
    assert problem in found


def test_spills_that_do_not_matter_pass():
    assert gate.find_problems(inspection("HGMMA.64x64x16.F32", spills=8), (9, 0), 2000) == []


def test_wgmma_is_expected_of_matmuls_on_sm90_only():
    slow = inspection("HMMA.16816.F32.BF16")
    assert gate.find_problems(slow, (9, 0), 2000) == ["its matmul does not use wgmma"]
    assert gate.find_problems(slow, (9, 0), 2000, fits_no_wgmma=True) == []
    assert gate.find_problems(slow, (8, 0), 2000) == []
    assert gate.find_problems(inspection("FFMA", has_low_precision_dot=False), (9, 0), 2000) == []


def test_opcodes_count_with_their_modifiers():
    result = inspection("LDG.E.128")
    result.instructions["LDGSTS.E"] = 1
    assert [result.count(opcode) for opcode in ("LDG", "LDG.E", "LDG.E.128", "LDG.E.64")] == [4, 4, 4, 0]


def test_shared_memory_limits():
    assert [shared_memory_limit(c) for c in ((8, 0), (8, 9), (9, 0), (12, 0))] == [166912, 101376, 232448, 101376]


def test_a_job_that_dies_is_reported(monkeypatch):
    (report,) = gate.run_job(multiprocessing.get_context("fork"), "no_such_op", 90, 1, False)
    assert report["problems"] == ["the process ended early, after 0 cases"]
    monkeypatch.setattr(gate, "compile_cases", send_one_and_abort)
    report, failure = gate.run_job(multiprocessing.get_context("fork"), "some_op", 90, 1, False)
    assert report == {"name": "first"}
    assert failure == {"name": "some_op", "problems": ["the process ended early, after 1 cases"]}


def send_one_and_abort(op, architecture, one_in, gluon, sender):
    sender.send({"name": "first"})
    os._exit(0)


def test_a_lost_exit_code_is_no_failure(monkeypatch):
    class Process(multiprocessing.context.ForkProcess):
        exitcode = 255  # what another thread's start leaves to read

    monkeypatch.setattr(gate, "compile_cases", lambda op, architecture, one_in, gluon, sender: sender.send(gate.END))
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(context, "Process", Process, raising=False)
    assert gate.run_job(context, "some_op", 90, 1, False) == []


def test_a_share_of_none_is_refused(monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # which the command removes
    monkeypatch.setattr(sys, "argv", ["compile_gate.py", "--one-in", "0"])
    with pytest.raises(SystemExit, match="2"):
        gate.main()
    assert "--one-in 0: give 1 or more." in capsys.readouterr().err


def test_shares_of_the_cases():
    """Neighbours compile other cases. Every kernel is compiled for each generation, and for sm_90 in Gluon too."""
    launches = gate.launches_of("rms_norm_rope", (8, 0))
    every = list(dict.fromkeys(map(describe, launches)))
    shares = [list(map(describe, gate.some_of(launches, architecture, 3))) for architecture in (80, 86, 89)]
    assert shares[0][0] == every[0]
    assert sorted(itertools.chain(*shares)) == sorted(every)
    assert list(map(describe, gate.some_of(launches, 90, 1))) == every
    for op, architecture in itertools.product(("attention_8bit", "sparse_linear_attention"), (80, 90, 100, 120)):
        launches = gate.launches_of(op, divmod(architecture, 10))
        share = gate.some_of(launches, architecture, 40)
        assert {launch.kernel for launch in share} == {launch.kernel for launch in launches}
        assert len(share) <= len({launch.kernel for launch in launches}) + len(launches) // 40 + 1
    share = gate.some_of(gate.launches_of("attention", (9, 0)), 90, 40)
    assert {"_attention_kernel", "attention_kernel"} <= {launch.kernel.fn.__name__ for launch in share}  # one in Gluon


INSPECT_REAL_KERNELS = """
import re
from scripts.tools.compile_without_gpu import inspect, record_launches, shared_memory_limit
from scripts.tools.every_launch import launch_attention, launch_gelu, launch_linear_gelu, without_gluon
*_, launch = record_launches(launch_gelu, (9, 0))
few_registers = launch._replace(options=launch.options | {"num_warps": 2, "maxnreg": 24})
bad = inspect(few_registers, (9, 0))
assert bad.spills > 0 and bad.spills_matter and not bad.has_low_precision_dot
assert inspect(few_registers, (9, 0)) is None  # compiled already

with without_gluon():
    launches = record_launches(launch_linear_gelu, (9, 0))
small = next(launch for launch in launches if launch.options["COLUMNS"] == 128 and launch.options["DESCRIPTORS"])
portable = inspect(small, (9, 0))
assert portable.has_low_precision_dot and portable.count("HGMMA") > 0 and portable.count("UTMALDG") > 0
assert not portable.spills_matter

assert not any(launch.kernel.is_gluon() for launch in record_launches(launch_attention, (8, 0)))
launches = (launch for launch in record_launches(launch_attention, (9, 0)) if launch.kernel.is_gluon())
inspection = inspect(next(launch for launch in launches if launch.arguments[0].block_shape[-1] == 64), (9, 0))
assert inspection.has_low_precision_dot and not inspection.spills_matter and inspection.warnings == ()
assert 0 < inspection.registers <= 255
assert 0.45 * shared_memory_limit((9, 0)) < inspection.shared <= shared_memory_limit((9, 0))
version = tuple(map(int, re.search(r"\\.version (\\d+)\\.(\\d+)", inspection.asm["ptx"]).groups()))
assert version < (9, 0)  # of the ptxas of CUDA 12
# Three consumers, each with QK and PV in its loop: 4 and 8 wgmmas of depth 16, for 64 channels and 128 keys.
assert inspection.count("HGMMA") == 3 * (4 + 8)
assert all(inspection.count(opcode) > 0 for opcode in ("UTMALDG", "UTMASTG", "USETMAXREG", "BAR.ARV"))

import multiprocessing
import sys
from scripts.tools import compile_gate
fork = multiprocessing.get_context("fork")
multiprocessing.get_context = lambda method: fork  # a server would import everything again
fork.set_forkserver_preload = lambda modules: None
sys.argv = ["compile_gate.py", "--ops", "gelu", "--architectures", "90"]
assert compile_gate.main() == 0
sys.argv = ["compile_gate.py", "--ops", "linear_low_rank", "--architectures", "90", "--gluon"]  # one of five cases
assert compile_gate.main() == 0
sys.argv[4] = "80"  # which has none in Gluon
assert compile_gate.main() == 1
"""


def test_inspection_of_a_portable_kernel_that_spills_and_of_one_in_gluon_and_the_command_line():
    """A new process, without the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", INSPECT_REAL_KERNELS]
    process = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    rows = [line.split() for line in process.stdout.splitlines() if line.startswith("sm_90")]
    assert [row[:3] for row in rows] == [["sm_90", "gelu", "3"], ["sm_90", "linear_low_rank", "1"]]
    assert {row[-1] for row in rows} == {"ok"}
    assert process.stdout.splitlines()[-1] == "FAILED no case was compiled"


SASS = """
        /*0000*/                   STL [R1], R0 ;
.L_x_1:
        /*0010*/                   LDL R2, [R1] ;
.L_x_2:
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
.L_x_9:
        /*0028*/              @!P2 BRA `(.L_x_9) ;
        /*0030*/              @!P0 BRA `(.L_x_3) ;
        /*0040*/               @P0 BRA `(.L_x_2) ;
.L_x_3:
        /*0050*/              @!P1 BRA `(.L_x_1) ;
"""


@pytest.mark.parametrize(("line", "spills"), [("0020", True), ("0030", True), ("0010", False), ("0050", False)])
def test_spills_count_in_the_loop_around_a_product(line, spills):
    """One more spill is added in front of a line. Others stand before the loops and in the outer one."""
    where = f"        /*{line}*/"
    assert SASS.count(where) == 1
    sass = SASS.replace(where, f"        /*ffff*/   @P2 LDL.LU R4, [R1] ;\n{where}")
    assert compile_without_gpu._loops_spill(sass.splitlines()) is spills


@pytest.mark.parametrize(("line", "spills"), [("0020", True), ("0050", False)])
def test_a_product_in_the_outer_loop_makes_no_spill_there_count(line, spills):
    product = "        /*0048*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;\n"
    outside, where = SASS.replace(".L_x_3:\n", f".L_x_3:\n{product}"), f"        /*{line}*/"
    assert not compile_without_gpu._loops_spill(outside.splitlines())
    spilled = outside.replace(where, f"        /*ffff*/   LDL R4, [R1] ;\n{where}")
    assert compile_without_gpu._loops_spill(spilled.splitlines()) is spills


def test_code_behind_the_end_closes_no_loop():
    """A retry of a wait that jumps back to between the product and a spill."""
    behind = "        /*0060*/                   EXIT ;\n        /*0070*/                   BRA `(.L_x_2) ;\n"
    spill = SASS.replace(".L_x_3:", ".L_x_3:\n        /*0048*/   LDL R4, [R1] ;")
    assert not compile_without_gpu._loops_spill((spill + behind).splitlines())
    assert not compile_without_gpu._loops_spill(spill.splitlines())


def test_without_tensor_cores_spills_count_in_any_loop_that_multiplies():
    in_it, beside_it = SASS.replace("HGMMA.64x128x16.F32.BF16", "FFMA"), SASS.replace("HGMMA", "MOV")
    assert compile_without_gpu._loops_spill(in_it.replace("@P0 BRA `(.L_x_2)", "@P0 BRA `(.L_x_1)").splitlines())
    assert not compile_without_gpu._loops_spill(beside_it.splitlines())


def test_spills_count_where_no_loop_is_found():
    sass = [line for line in SASS.splitlines() if "BRA" not in line]
    assert compile_without_gpu._loops_spill(sass)


def test_an_architecture_may_have_no_cases():
    assert gate._row("attention", 80, [], []).split()[-2:] == ["none", "here"]
