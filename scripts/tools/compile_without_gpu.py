"""Compile the launches of a call for a GPU that is not there, and read their registers and instructions.

The call runs with meta tensors, and its launches are recorded. Each launch is then compiled as Triton does on its way
to a GPU. every_launch.py has the calls, and compile_gate.py compiles them all. This needs no GPU, but the real
compiler: TRITON_INTERPRET must be unset.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from turbo_rcm_patch.kernels.dispatch import meta_is_gpu
from turbo_rcm_patch.kernels.launch import Launch, recorded

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
MULTIPROCESSORS = 100  # of a GPU that is not there


@dataclass(frozen=True)
class Inspection:
    """The compiler's result for a launch. spills and shared are in bytes.

    spills_matter: True if spilled registers are read or written in an innermost loop that multiplies matrices, or
    anywhere in a kernel without one. warnings: the lines of ptxas that name a performance loss.
    """

    registers: int
    spills: int
    spills_matter: bool
    shared: int
    warnings: tuple[str, ...]
    has_low_precision_dot: bool
    asm: dict[str, object] = field(repr=False)

    @cached_property
    def instructions(self) -> Counter:
        """SASS opcodes with their modifiers ("LDG.E.128") and how often each occurs."""
        return Counter(opcode for opcode in map(_opcode, disassemble(self.asm["cubin"])) if opcode)

    def count(self, opcode: str) -> int:
        """Count the instructions with this opcode, with or without modifiers: count("LDG"), count("LDG.E.128")."""
        return sum(n for name, n in self.instructions.items() if name == opcode or name.startswith(opcode + "."))


def shared_memory_limit(capability: tuple[int, int]) -> int:
    """Return the bytes of shared memory that a program may take on a compute capability such as (9, 0)."""
    return SHARED_MEMORY.get(capability, SMALLEST_SHARED_MEMORY)


def record_launches(call: Callable[[], object], capability: tuple[int, int]) -> list[Launch]:
    """Return the launches of ``call()`` with meta tensors on a GPU of this compute capability, such as (9, 0)."""
    launches = []
    with meta_is_gpu(capability, MULTIPROCESSORS), recorded(launches.append):
        call()
    return launches


def inspect(launch: Launch, capability: tuple[int, int]) -> Inspection | None:
    """Compile the launch for a compute capability and report on it. Return None if the kernel was compiled before."""
    log = io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), _absent_gpu(capability), contextlib.redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True  # a binary of an earlier process has no ptxas log
        compiled = launch.compile()
    log = log.getvalue()
    if not log:
        return None
    dots = _dot_operands(compiled.asm)
    spills = sum(int(size) for size in re.findall(r"(\d+) bytes spill", log))
    return Inspection(
        registers=int(re.search(r"Used (\d+) registers", log)[1]),
        spills=spills,
        spills_matter=spills > 0 and (not dots or _loops_spill(disassemble(compiled.asm["cubin"]))),
        shared=compiled.metadata.shared,
        warnings=tuple(line.strip() for line in log.splitlines() if re.search(r"C75\d\d|serializ", line)),
        has_low_precision_dot=any(re.search(r"x(f16|bf16|i8|f8\w+)[>,]", operand) for operand in dots),
        asm=compiled.asm,
    )


def describe(launch: Launch) -> str:
    """Return the kernel's name and arguments in one line: tensors and descriptors as "bf16[2, 64]"."""
    arguments = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False)) | launch.options
    return f"{launch.kernel.fn.__name__}({', '.join(f'{name}={_short(x)}' for name, x in arguments.items())})"


def _short(argument: object) -> str:
    tensor = getattr(argument, "base", argument)
    if not isinstance(tensor, torch.Tensor):
        return str(argument)
    shape = tensor.shape if tensor is argument else argument.block_shape
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(shape)}"


class _AbsentGPU:
    """The driver's answers that Triton needs to compile: the target, and numbers of the device and its stream."""

    def __init__(self, capability: tuple[int, int]):
        major, minor = capability
        self._target = GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch  # kernels are kept per device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def _absent_gpu(capability: tuple[int, int]) -> Iterator[None]:
    driver.set_active(_AbsentGPU(capability))
    try:
        yield
    finally:
        driver.set_active(None)  # as before the first kernel


def _dot_operands(asm: dict[str, object]) -> list[str]:
    """Return the types of the multiplied matrices, from Triton's dialect, or for Gluon from the GPU's."""
    return re.findall(r"(?:tt\.dot|warp_group_dot) .* : (.*) \* ", asm.get("ttir", asm["ttgir"]))


def _loops_spill(sass: list[str]) -> bool:
    """True if the smallest loop around a matrix product accesses a spilled register, or if there is no such loop.

    A loop that contains such a loop of another product does not count: a product after the loop over keys runs once
    per tile. Without tensor cores every loop with a multiply-add counts as one.
    """
    labels = {line.strip().rstrip(":"): index for index, line in enumerate(sass) if line.startswith(".L_")}
    opcodes = [_opcode(line) or "" for line in sass]
    loops = []
    for index, line in enumerate(sass):
        branch = re.search(r"\bBRA(?:\.\w+)* `\((\.L_\w+)\)", line)
        start = labels.get(branch[1], index) if branch else index
        # Code behind the kernel's end, such as retries of waits, jumps back without closing a loop.
        if start < index and not any(re.search(r"\*/\s+EXIT\b", x) for x in sass[start:index]):
            loops.append(range(start, index + 1))
    products = [index for index, opcode in enumerate(opcodes) if re.match(r"\w*MMA\b", opcode)]
    if not products:
        products = [
            i for i, opcode in enumerate(opcodes) if opcode.startswith("FFMA") and any(i in loop for loop in loops)
        ]
    around = {min((loop for loop in loops if index in loop), key=len, default=range(len(sass))) for index in products}
    innermost = (loop for loop in around if not any(other[0] in loop and other != loop for other in around))
    return any(opcodes[index].startswith(("STL", "LDL")) for loop in innermost for index in loop)


def _opcode(line: str) -> str | None:
    """Return the opcode with its modifiers of a line of SASS, if it is an instruction."""
    instruction = re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line)
    return instruction and instruction[1]


def disassemble(cubin: bytes) -> list[str]:
    """Return the lines of SASS: instructions, and labels such as ".L_x_3:"."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
