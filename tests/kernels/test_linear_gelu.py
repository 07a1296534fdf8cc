import pytest
import torch

from tests.oracle import DTYPES, assert_no_worse, relative_error, torch_device
from turbo_rcm_patch.kernels import linear_gelu, reference

# The interpreter says that exp overflowed; the kernel divides by the infinity on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def operands(*lead, C, K, device="cpu", dtype=torch.float32):
    return [torch.randn(shape).to(device, dtype) for shape in ((*lead, K), (C, K), (C,))]


def check(a, weight, bias):
    actual = linear_gelu(a, weight, bias, implementation="triton")
    wide = [None if t is None else t.double() for t in (a, weight, bias)]
    assert_no_worse(actual, reference.linear_gelu(a, weight, bias), reference.linear_gelu(*wide))


@pytest.mark.parametrize(
    ("lead", "C", "K"), [((1, 1), 5, 3), ((2, 7), 40, 24), ((63,), 130, 33), ((2, 1, 65), 96, 72), ((), 8, 8)]
)
def test_matches_the_oracle(lead, C, K, device):
    for dtype in DTYPES[device]:
        a, weight, bias = operands(*lead, C=C, K=K, device=torch_device(device), dtype=dtype)
        check(a, weight, bias)
        check(a, weight, None)


def test_non_contiguous(device):
    device = torch_device(device)
    a = torch.randn(2, 16, 9, device=device).transpose(1, 2)
    weight = torch.randn(16, 24, device=device).T
    bias = torch.randn(48, device=device)[::2]
    check(a, weight, bias)
    check(a[..., 1:], weight[:, 1:], bias)


def test_tails_of_the_gelu(device):
    device = torch_device(device)
    x = torch.tensor([-1e30, -1e10, -50.0, -8.0, -5.0, -1.0, 0.0, 1.0, 5.0, 50.0, 1e10, 1e30], device=device)
    actual = linear_gelu(x[:, None], torch.ones(1, 1, device=device), None, implementation="triton")[:, 0]
    assert torch.equal(actual[x >= 50], x[x >= 50])
    assert torch.equal(actual[x <= -50], torch.zeros_like(actual[x <= -50]))
    middle = x.abs() < 50
    wide = x[middle].double()
    # tanh itself rounds to -1 at x = -8, in fp64 too; the sigmoid keeps the digits.
    oracle = wide * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3))
    torch.testing.assert_close(actual[middle].double(), oracle, rtol=1e-4, atol=0)


def test_autograd_takes_the_reference(device):
    tensors = [t.requires_grad_() for t in operands(2, 7, C=12, K=10, device=torch_device(device))]
    linear_gelu(*tensors, implementation="triton").sum().backward()
    wide = [t.detach().double().requires_grad_() for t in tensors]
    reference.linear_gelu(*wide).sum().backward()
    for ours, oracle in zip(tensors, wide, strict=True):
        assert relative_error(ours.grad, oracle.grad) <= 1e-6


def test_compiles_to_one_graph(device):
    tensors = operands(2, 7, C=12, K=10, device=torch_device(device))
    compiled = torch.compile(linear_gelu, fullgraph=True, backend="aot_eager")
    wanted = linear_gelu(*tensors, implementation="triton")
    assert torch.equal(compiled(*tensors, implementation="triton"), wanted)


def test_custom_op_contract(device):
    torch.library.opcheck(
        torch.ops.turbo_rcm_patch.linear_gelu.default, operands(2, 3, C=8, K=4, device=torch_device(device))
    )


def test_errors():
    a, weight, bias = operands(2, 3, C=4, K=5)
    with pytest.raises(ValueError, match=r"linear_gelu: a has shape \[2, 3, 4\] and weight \[4, 5\]"):
        linear_gelu(a[..., :4], weight, bias)
    with pytest.raises(ValueError, match=r"bias has shape \[3\]"):
        linear_gelu(a, weight, bias[:3])
    with pytest.raises(ValueError, match="cast them to one"):
        linear_gelu(a, weight.half(), bias)
