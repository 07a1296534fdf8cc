"""safetensors files: the library reads the ones written here, and broken ones are named."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from turbo_rcm_patch.patching.weights.tensor_files import Kind, read_header, write_tensors

TENSORS = {
    "matrix": torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(2.5),
    "strided": torch.arange(12, dtype=torch.bfloat16).view(3, 4).t(),
    "integers": torch.tensor([-127, 3], dtype=torch.int8),
    "empty": torch.zeros(0, 4, dtype=torch.float16),
}
KINDS = {name: Kind(tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()}


def test_the_library_reads_what_is_written(tmp_path):
    write_tensors(tmp_path / "a.safetensors", KINDS, iter(TENSORS.items()), {"version": "7"})
    kinds, metadata = read_header(tmp_path / "a.safetensors")
    assert list(kinds.items()) == list(KINDS.items())  # in the order of the file
    assert metadata == {"version": "7"}
    loaded = load_file(tmp_path / "a.safetensors")
    assert set(loaded) == set(TENSORS)
    assert all(torch.equal(loaded[name].float(), tensor.float()) for name, tensor in TENSORS.items())


def test_headers_of_the_library_are_read(tmp_path):
    save_file({name: tensor.contiguous() for name, tensor in TENSORS.items()}, tmp_path / "a.safetensors")
    assert read_header(tmp_path / "a.safetensors") == (KINDS, {})
    save_file({"long": torch.arange(3)}, tmp_path / "b.safetensors")
    assert read_header(tmp_path / "b.safetensors")[0] == {"long": Kind(None, (3,))}


def test_another_tensor_than_the_header_says_is_refused(tmp_path):
    for tensors in ([("matrix", torch.zeros(5, 3))], [("other", TENSORS["matrix"])]):
        with pytest.raises(ValueError, match=r"the header says matrix, float8_e4m3fn \[5, 3\]"):
            write_tensors(tmp_path / "a", {"matrix": KINDS["matrix"]}, tensors, {})
    with pytest.raises(ValueError, match="shorter"):
        write_tensors(tmp_path / "a", KINDS, [], {})


def test_broken_files_are_named(tmp_path):
    path = tmp_path / "a.safetensors"
    write_tensors(path, KINDS, TENSORS.items(), {})
    whole = path.read_bytes()
    for content in (b"", b"text", whole[:40], b"\xff" * 64, b"\x02" + bytes(7) + b"[]", whole[:-1], whole + b"."):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"cannot read \S+a\.safetensors \(.*\); download or convert it again"):
            read_header(path)
