"""fingerprint: a 64-bit checksum over the bits and the order of many tensors, in one launch at memory speed.

Each tensor is cut into blocks of ROWS × LANES 64-bit words. A word w in row r (counted over all tensors) and lane l has
the odd multiplier m = (key(r) xor key(l)) | 1 and adds (y xor y >> 32) · m with y = w · m, modulo 2**64. Every step is
invertible, so a change of any single word always changes the sum. That several changes cancel is a coincidence of at
most 2**-32: the keys are scrambled, and the xor brings the highest bits, as sign flips change them, down to where the
last multiplication spreads them. Integer sums have no order.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from . import reference
from .dispatch import kernel_op, use_triton

WORD_BYTES = 8
ROWS, LANES = 8, 512
BLOCK_BYTES = ROWS * LANES * WORD_BYTES
NUM_WARPS = 4


def fingerprint(tensors: list[torch.Tensor], *, implementation: str = "auto") -> torch.Tensor:
    """A 64-bit checksum (int64, 0-d, on the tensors' device) that changes with any single bit and with the order.

    tensors: at least one, of any dtypes and shapes, on one device. Shapes and dtypes themselves do not count.
    The kernel and the reference return different numbers; compare only fingerprints of one implementation.
    implementation: "auto", "triton" or "torch" (see dispatch.py).
    """
    if not tensors:
        raise ValueError("fingerprint: the list of tensors is empty; give at least one.")
    # Bits have no dtype: the choice depends on the devices only.
    probes = [torch.empty(0, device=device) for device in sorted({tensor.device for tensor in tensors}, key=str)]
    op = _fingerprint if use_triton(implementation, *probes, has_gradient=True) else reference.fingerprint
    return op([tensor.detach() for tensor in tensors])


@kernel_op("fingerprint")
def _fingerprint(tensors: list[torch.Tensor]) -> torch.Tensor:
    aligned = [_aligned(tensor) for tensor in tensors]
    table, blocks = _block_table(aligned[0].device, tuple((t.data_ptr(), t.nbytes) for t in aligned))
    total = torch.zeros((), dtype=torch.int64, device=aligned[0].device)
    if blocks > 0:
        with torch.cuda.device_of(total):
            _fingerprint_kernel[(blocks,)](table, total, len(aligned), ROWS=ROWS, LANES=LANES, num_warps=NUM_WARPS)
    return total


@_fingerprint.register_fake
def _(tensors):
    return tensors[0].new_empty((), dtype=torch.int64)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where its bytes are scattered or do not begin at a word."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % WORD_BYTES else tensor


@functools.lru_cache(maxsize=64)
def _block_table(device: torch.device, extents: tuple[tuple[int, int], ...]) -> tuple[torch.Tensor, int]:
    """Rows of (address, bytes, first block) per tensor on the device, and the number of blocks of them all."""
    rows, blocks = [], 0
    for address, size in extents:
        rows.append((address, size, blocks))
        blocks += triton.cdiv(size, BLOCK_BYTES)
    return torch.tensor(rows, dtype=torch.int64, device=device), blocks


@triton.jit
def _fingerprint_kernel(table, total, tensors, ROWS: tl.constexpr, LANES: tl.constexpr):
    block = tl.program_id(0)
    tensor = _tensor_of_block(table, tensors, block)
    address = tl.load(table + tensor * 3)
    size = tl.load(table + tensor * 3 + 1)
    first_block = tl.load(table + tensor * 3 + 2)
    whole_words = size // 8

    rows = tl.arange(0, ROWS)
    lanes = tl.arange(0, LANES)
    words = ((block - first_block) * ROWS + rows)[:, None] * LANES + lanes[None, :]
    values = tl.load(address.to(tl.pointer_type(tl.uint64)) + words, mask=words < whole_words, other=0)
    checksum = tl.sum(tl.sum(_term(values, (block * ROWS + rows)[:, None], lanes[None, :]), 0), 0)

    # The last size % 8 bytes make one more word, of the block in whose range it lies.
    row = whole_words // LANES
    if row // ROWS == block - first_block:
        tail = tl.arange(0, 8)
        offsets = whole_words * 8 + tail
        tail_bytes = tl.load(address.to(tl.pointer_type(tl.uint8)) + offsets, mask=offsets < size, other=0)
        word = tl.sum(tail_bytes.to(tl.uint64) << (8 * tail).to(tl.uint64), 0)
        checksum += _term(word, first_block * ROWS + row, whole_words % LANES)
    tl.atomic_add(total, checksum.to(tl.int64), sem="relaxed")


@triton.jit
def _tensor_of_block(table, tensors, block):
    """The last row of the table whose first block is not after this one, by bisection."""
    low = 0
    high = tensors - 1
    while low < high:
        middle = (low + high + 1) // 2
        starts_before = tl.load(table + middle * 3 + 2) <= block
        low = tl.where(starts_before, middle, low)
        high = tl.where(starts_before, high, middle - 1)
    return low


@triton.jit
def _term(word, row, lane):
    multiplier = (_key(row) ^ _key(-1 - lane)) | 1
    y = word * multiplier
    return (y ^ (y >> 32)) * multiplier


@triton.jit
def _key(x):
    """64 scrambled bits of an integer: the output function of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = x.to(tl.int64).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)
