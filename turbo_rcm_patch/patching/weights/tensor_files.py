"""safetensors files written one tensor at a time, and their headers.

A file is the length of its header (8 bytes, little endian), the header as JSON, and the tensors' bytes in its order.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Kind(NamedTuple):
    """A tensor's dtype and shape in a header. dtype: None if no model here has it."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


def read_header(path: Path) -> tuple[dict[str, Kind], dict[str, str]]:
    """Return the kind of each tensor in a safetensors file by its name, and the file's metadata.

    The tensors are in the order of the file. Raises ValueError if it is not a safetensors file, or incomplete.
    """
    try:
        with safe_open(path, framework="pt") as file:
            described = {name: file.get_slice(name) for name in file.offset_keys()}
            kinds = {name: Kind(DTYPES.get(d.get_dtype()), tuple(d.get_shape())) for name, d in described.items()}
            return kinds, file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"cannot read {path} ({error}); download or convert it again.") from None


def write_tensors(
    path: Path, kinds: Mapping[str, Kind], tensors: Iterable[tuple[str, torch.Tensor]], metadata: Mapping[str, str]
) -> None:
    """Write tensors in the order of `kinds`, holding one at a time.

    Raises ValueError if a tensor differs from its entry in `kinds`.
    """
    header, offset = {"__metadata__": dict(metadata)}, 0
    for name, kind in kinds.items():
        offsets = [offset, offset := offset + kind.nbytes]
        header[name] = {"dtype": _NAMES[kind.dtype], "shape": list(kind.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for (name, kind), (given, tensor) in zip(kinds.items(), tensors, strict=True):
            if (given, tensor.dtype, tuple(tensor.shape)) != (name, *kind):
                raise ValueError(f"{given} is {tensor.dtype} {list(tensor.shape)}; the header says {name}, {kind}.")
            file.write(memoryview(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
