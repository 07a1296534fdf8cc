import pytest
import torch
import torch.nn.functional as F

from tests.oracle import DTYPES, assert_no_worse, torch_device
from turbo_rcm_patch.kernels import gelu, reference
from turbo_rcm_patch.kernels.choice.registry import spec_of
from turbo_rcm_patch.kernels.rows.gelu import BLOCK, GELU_OVER_X

# The interpreter says that exp overflowed; the kernel divides by the infinity on purpose.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.usefixtures("uninitialised_memory_is_nan"),
]


@pytest.mark.parametrize("shape", [(1,), (2, 63, 67), (BLOCK,), (1, BLOCK + 1), ()])
def test_matches_the_oracle(shape, device):
    for dtype in DTYPES[device]:
        x = (3 * torch.randn(shape)).to(torch_device(device), dtype)
        assert_no_worse(gelu(x, implementation="triton"), reference.gelu(x), reference.gelu(x.double()))


def test_large_values_and_infinities(device):
    x = torch.tensor([-1e4, -60.0, -0.0, 0.0, 60.0, 1e4, torch.inf], device=torch_device(device))
    actual = gelu(x, implementation="triton").tolist()
    assert actual == [0.0, 0.0, 0.0, 0.0, 60.0, 1e4, torch.inf]


def test_a_nan_stays(device):
    x = torch.tensor([1.0, torch.nan, -1.0], device=torch_device(device))
    assert gelu(x, implementation="triton").isnan().tolist() == [False, True, False]


def test_non_contiguous_and_empty(device):
    x = torch.randn(2, 16, 9, device=torch_device(device)).transpose(1, 2)
    actual = gelu(x, implementation="triton")
    assert actual.is_contiguous()
    assert_no_worse(actual, reference.gelu(x), reference.gelu(x.double()))
    assert gelu(x[:, :0], implementation="triton").shape == (2, 0, 16)


def test_the_input_stays_as_it_is(device):
    x = torch.randn(7, 5, device=torch_device(device))
    before = x.clone()
    gelu(x, implementation="triton")
    assert torch.equal(x, before)


def test_over_x_the_values_are_the_same(device):
    launch = GELU_OVER_X.pick(spec_of("triton", torch.empty(0, device=torch_device(device)))).launch
    x = torch.randn(2, BLOCK + 3, device=torch_device(device))
    expected, columns = gelu(x, implementation="triton"), x.T.clone().T
    actual = launch(x)
    assert actual is x
    assert torch.equal(actual, expected)
    assert torch.equal(launch(columns), expected)  # not contiguous: in a tensor of its own
    assert launch(x[:0]).shape == (0, BLOCK + 3)


def test_autograd_takes_the_reference(device):
    x = torch.randn(3, 5, device=torch_device(device), requires_grad=True)
    expected = torch.autograd.grad(F.gelu(x, approximate="tanh").square().sum(), x)
    actual = torch.autograd.grad(gelu(x, implementation="triton").square().sum(), x)
    assert torch.equal(actual[0], expected[0])


def test_opcheck():
    op = torch.ops.turbo_rcm_patch.gelu
    torch.library.opcheck(op, (torch.randn(2, 3, 5),))
    torch.library.opcheck(op, (torch.randn(3, 2).T,))
    torch.library.opcheck(torch.ops.turbo_rcm_patch.gelu_in_place, (torch.randn(2, 3),))


def test_other_dtypes_take_the_reference():
    x = torch.randn(4, dtype=torch.float64)
    assert torch.equal(gelu(x), F.gelu(x, approximate="tanh"))
    with pytest.raises(ValueError, match="float64 tensors"):
        gelu(x, implementation="triton")
