"""Tiles for programs that walk rows. Short rows are taken several at a time; the next rows load while these compute."""

from __future__ import annotations

import torch

from ..dispatch import device_properties

ELEMENTS_PER_THREAD = 32
WIDE = 16384  # rows this wide get twice the threads: one row would not fit the registers
MINIMUM_ELEMENTS = 4096  # per program at a time; shorter rows are taken together
PROGRAMS = 4  # per multiprocessor
STAGES = 3  # pipeline stages per program, if their rows fit the shared memory of every GPU
SHARED_MEMORY = 96 << 10


def row_tile(block: int, row_bytes: int, *, in_flight: bool = True, spread: bool = False) -> dict[str, int]:
    """Return ROWS (rows at a time), STAGES and num_warps for rows of `block` elements, a power of two.

    row_bytes: the bytes loaded for each row. in_flight: True if rows may be loaded ahead. spread: True to use twice the
    threads, for kernels whose elements take many registers.
    """
    rows = max(1, MINIMUM_ELEMENTS // block)
    fits = in_flight and (STAGES - 1) * rows * row_bytes < SHARED_MEMORY
    per_thread = ELEMENTS_PER_THREAD // 2 if spread or block >= WIDE else ELEMENTS_PER_THREAD
    num_warps = min(32, rows * block // 32 // per_thread)
    return {"ROWS": rows, "STAGES": STAGES if fits else 1, "num_warps": num_warps}


def row_grid(device: torch.device, rows_at_a_time: int, S: int, B: int, programs: int = PROGRAMS) -> tuple[int, int]:
    """Return the grid of programs that walk the S rows of each of B samples. programs: of a multiprocessor."""
    programs = max(1, device_properties(device)[1] * programs // B)
    return min(-(-S // rows_at_a_time), programs), B
