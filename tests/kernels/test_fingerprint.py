import sys

import pytest
import torch

from tests.oracle import torch_device
from turbo_rcm_patch.kernels import fingerprint, reference

BLOCK_BYTES = sys.modules["turbo_rcm_patch.kernels.fingerprint"].BLOCK_BYTES

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # the interpreter's arithmetic modulo 2**64

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
)


@pytest.fixture(params=["triton", "torch"])
def value(request):
    """The fingerprint of tensors as an int, by each implementation."""
    return lambda *tensors: fingerprint(list(tensors), implementation=request.param).item()


def of_bytes(count, device, dtype=torch.uint8):
    return torch.randint(0, 2, (count,), dtype=torch.uint8).to(device).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_counts(dtype, value, device):
    tensor = of_bytes(16, torch_device(device), dtype)
    bits = tensor.view(torch.uint8)
    flips = [(byte, bit) for byte in range(16) for bit in ((0, 7) if byte % 7 else range(8))]
    seen = {value(tensor)}
    for byte, bit in flips:
        bits[byte] ^= 1 << bit
        seen.add(value(tensor))
        bits[byte] ^= 1 << bit
    assert len(seen) == 1 + len(flips)
    assert value(tensor) in seen
    assert value(tensor) == value(tensor.clone())


@pytest.mark.parametrize("size", [*range(1, 18), BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 13])
def test_first_and_last_byte_of_every_length(size, value, device):
    tensor = of_bytes(size, torch_device(device))
    neighbour = of_bytes(5, torch_device(device))
    seen = {value(tensor, neighbour)}
    for byte in {0, size // 2, size - 1}:
        tensor[byte] += 1
        seen.add(value(tensor, neighbour))
        tensor[byte] -= 1
    assert len(seen) == 1 + len({0, size // 2, size - 1})


def test_bytes_beyond_the_end_do_not_count(value, device):
    memory = of_bytes(40, torch_device(device))
    before = value(memory[:13])
    memory[13:] += 1
    assert value(memory[:13]) == before


def test_order_and_position_count(value, device):
    a, b, c = (of_bytes(32, torch_device(device)) for _ in range(3))
    values = [value(a, b, c), value(b, a, c), value(a, c, b), value(c, b, a), value(a, b), value(torch.cat([b, a]), c)]
    assert len(set(values)) == len(values)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sign_flips_do_not_cancel(dtype, value, device):
    x = 1 + torch.rand(64).to(torch_device(device), dtype)
    odd, pair = x.clone(), x.clone()
    odd[1::2].neg_()
    pair[[3, 7]] *= -1
    assert len({value(x), value(-x), value(odd), value(pair)}) == 4


def test_many_tensors_of_many_sizes(value, device):
    sizes = [0, 1, 3, 0, BLOCK_BYTES, 8, 5 * BLOCK_BYTES + 1, 0, 7, BLOCK_BYTES - 8, 0]
    tensors = [of_bytes(size, torch_device(device)) for size in sizes]
    seen = {value(*tensors)}
    for tensor in tensors:
        if tensor.numel() > 0:
            tensor[-1] += 1
            seen.add(value(*tensors))
    assert len(seen) == 1 + sum(size > 0 for size in sizes)
    assert value(*tensors) in seen


def test_only_the_values_count(value, device):
    x = torch.randn(6, 10, device=torch_device(device)).bfloat16()
    padded = torch.zeros(61, device=x.device, dtype=x.dtype)
    padded[1:] = x.flatten()
    expected = value(x)
    assert value(x.T.contiguous().T) == expected
    assert value(padded[1:]) == expected  # begins in the middle of a word
    assert value(torch.nn.Parameter(x)) == expected


def test_writes_in_place_are_seen(value, device):
    x = torch.zeros(100, device=torch_device(device))
    before = value(x)
    x[50] = 1e-45
    assert value(x) != before


def test_kernel_and_reference_are_used_as_asked(device):
    tensors = [of_bytes(100, torch_device(device))]
    assert torch.equal(fingerprint(tensors, implementation="torch"), reference.fingerprint(tensors))
    kernel = fingerprint(tensors, implementation="triton")
    assert (kernel.dtype, kernel.shape, kernel.device) == (torch.int64, (), tensors[0].device)
    assert not torch.equal(kernel, reference.fingerprint(tensors))


def test_compiles_to_one_graph(device):
    tensors = [of_bytes(100, torch_device(device)), torch.ones(3, device=torch_device(device))]
    compiled = torch.compile(fingerprint, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(tensors, implementation="triton"), fingerprint(tensors, implementation="triton"))


def test_custom_op_contract(device):
    tensors = [of_bytes(100, torch_device(device)), torch.ones(3, device=torch_device(device))]
    torch.library.opcheck(torch.ops.turbo_rcm_patch.fingerprint.default, (tensors,))


def test_errors():
    with pytest.raises(ValueError, match="the list of tensors is empty"):
        fingerprint([])
    with pytest.raises(ValueError, match="different devices: cpu, meta"):
        fingerprint([torch.zeros(1), torch.zeros(1, device="meta")])
