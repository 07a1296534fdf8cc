"""safetensors files written one tensor at a time, and their headers read without any tensor.

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

    Raises ValueError if the file is not a safetensors file, or if its length is not what its header says.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length) if length < path.stat().st_size else b"")
        metadata = header.pop("__metadata__", {})
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        kinds = {name: Kind(DTYPES.get(entry["dtype"]), tuple(entry["shape"])) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, struct.error):
        raise ValueError(f"{path} is not a safetensors file; download or convert it again.") from None
    if path.stat().st_size != 8 + length + end:
        raise ValueError(f"{path} is not as long as its header says: it is incomplete; download or convert it again.")
    return kinds, metadata


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
            if given != name or Kind(tensor.dtype, tuple(tensor.shape)) != kind:
                raise ValueError(f"{given} is {tensor.dtype} {list(tensor.shape)}; the header says {name}, {kind}.")
            file.write(memoryview(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
