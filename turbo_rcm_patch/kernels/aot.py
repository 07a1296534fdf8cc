"""Compile a Triton or Gluon kernel for a GPU that is not there, and read what it takes: registers, instructions.

Each kernel module lists what it launches on an architecture in ``aot_cases(capability) -> Iterator[AotCase]``;
scripts/compile_gate.py compiles them all. Needs no GPU, but the real compiler: TRITON_INTERPRET must be unset.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Bytes of shared memory one program may take (CUDA C programming guide, technical specifications per capability).
SHARED_MEMORY = {
    (8, 0): 163 << 10,
    (8, 7): 163 << 10,
    (9, 0): 227 << 10,
    (10, 0): 227 << 10,
    (10, 3): 227 << 10,
    (11, 0): 227 << 10,
}
SMALLEST_SHARED_MEMORY = 99 << 10  # (8, 6), (8, 9), (12, 0), (12, 1)
TRITON_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class AotCase:
    """One specialisation of a kernel, as the launcher would compile it.

    signature: every argument in order and its Triton type: "*bf16", "i32", "fp32", "constexpr",
    "tensordesc<bf16[128, 64]>". divisible_by_16: the pointers and integers that are multiples of 16.
    may_spill_outside_loops: a kernel of warps with roles keeps in memory what only some of them need, which costs
    nothing outside of the loops that multiply matrices.
    """

    name: str
    kernel: object
    signature: dict[str, str]
    constexprs: dict[str, object]
    divisible_by_16: tuple[str, ...]
    num_warps: int
    num_stages: int
    may_spill_outside_loops: bool = False


@dataclass(frozen=True)
class Inspection:
    """What the compiler made of a case. spills and shared are in bytes; loops_spill: whether spilled registers are read
    or written where matrices are multiplied; warnings are the lines of ptxas that name a performance loss."""

    registers: int
    spills: int
    loops_spill: bool
    shared: int
    warnings: tuple[str, ...]
    has_low_precision_dot: bool
    cubin: bytes = field(repr=False)

    @cached_property
    def instructions(self) -> Counter:
        """SASS opcodes with their modifiers ("LDG.E.128") and how often each occurs."""
        return Counter(opcode for opcode in map(_opcode, _disassemble(self.cubin)) if opcode)

    def count(self, opcode: str) -> int:
        """How many instructions have this opcode, or begin with it and a modifier: count("LDG"), count("LDG.E.128")."""
        return sum(n for name, n in self.instructions.items() if name == opcode or name.startswith(opcode + "."))


def shared_memory_limit(capability: tuple[int, int]) -> int:
    """Bytes of shared memory a program may take on this compute capability, as (9, 0)."""
    return SHARED_MEMORY.get(capability, SMALLEST_SHARED_MEMORY)


def inspect(case: AotCase, capability: tuple[int, int]) -> Inspection:
    """Compile the case for a compute capability, as (9, 0), and report on it."""
    compiled, log = _compile(case, capability)
    spills = sum(int(size) for size in re.findall(r"(\d+) bytes spill", log))
    return Inspection(
        registers=int(re.search(r"Used (\d+) registers", log)[1]),
        spills=spills,
        loops_spill=spills > 0 and _loops_spill(_disassemble(compiled.asm["cubin"])),
        shared=compiled.metadata.shared,
        warnings=tuple(line.strip() for line in log.splitlines() if re.search(r"C75\d\d|serializ", line)),
        has_low_precision_dot=_has_low_precision_dot(compiled.asm),
        cubin=compiled.asm["cubin"],
    )


def _has_low_precision_dot(asm) -> bool:
    """Whether the kernel multiplies matrices of 8 or 16 bits: in Triton's dialect, or for Gluon in that of the GPU."""
    dots = re.findall(r"(?:tt\.dot|warp_group_dot) .* : (.*) \* ", asm.get("ttir", asm["ttgir"]))
    return any(re.search(r"x(f16|bf16|i8|f8\w+)[>,]", operand) for operand in dots)


def _compile(case: AotCase, capability: tuple[int, int]):
    names = list(case.signature)
    source = _source_class(case.kernel)(
        fn=case.kernel,
        signature=case.signature,
        constexprs=case.constexprs,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in case.divisible_by_16},
    )
    major, minor = capability
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    log = io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True  # a cached binary has no ptxas log
        compiled = triton.compile(source, target=GPUTarget("cuda", 10 * major + minor, 32), options=options)
    return compiled, log.getvalue()


def _source_class(kernel) -> type[ASTSource]:
    if not kernel.is_gluon():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource  # experimental: only for kernels that use it

    return GluonASTSource


def _loops_spill(sass: list[str]) -> bool:
    """Whether a spilled register is read or written in the smallest loop around a matrix product, or there is none."""
    labels = {line.strip().rstrip(":"): index for index, line in enumerate(sass) if line.startswith(".L_")}
    opcodes = [_opcode(line) or "" for line in sass]
    loops = []
    for index, line in enumerate(sass):
        branch = re.search(r"\bBRA(?:\.\w+)* `\((\.L_\w+)\)", line)
        if branch and labels.get(branch[1], len(sass)) < index:
            loops.append(range(labels[branch[1]], index + 1))
    products = [index for index, opcode in enumerate(opcodes) if re.match(r"\w*MMA\b", opcode)]
    around = [min((loop for loop in loops if index in loop), key=len, default=range(len(sass))) for index in products]
    return any(opcodes[index].startswith(("STL", "LDL")) for loop in set(around) for index in loop)


def _opcode(line: str) -> str | None:
    """The opcode with its modifiers of a line of SASS, if it is an instruction."""
    instruction = re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line)
    return instruction and instruction[1]


def _disassemble(cubin: bytes) -> list[str]:
    """Lines of SASS: instructions, and labels such as ".L_x_3:"."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
