import pytest
import torch

from tests.kernels.eight_bit import FORMATS, assert_same
from tests.oracle import DTYPES, torch_device
from turbo_rcm_patch.kernels import INT8, quantize_rows
from turbo_rcm_patch.kernels.quantized import LARGEST, quantize_reference

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")

SHAPES = [(1, 1), (5,), (2, 7, 24), (63, 33), (129, 1536), (3, 5120)]


def formats(device):
    """The interpreter rounds fp32 to fp8 wrongly."""
    return FORMATS if device == "cuda" else (INT8,)


@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_is_the_reference(shape, with_norm, device):
    for dtype in DTYPES[device]:
        x = 3 * torch.randn(shape).to(torch_device(device), dtype)
        for format in formats(device):
            actual = quantize_rows(x, format, with_norm, implementation="triton")
            assert (actual.norm is not None) == with_norm
            assert_same(actual, quantize_reference(x, format, with_norm), x)


@pytest.mark.gpu
@pytest.mark.parametrize("K", [8960, 13824, 16384])
def test_wide_rows_and_many(K):
    x = torch.randn(3000, K, device="cuda").bfloat16()
    for format in FORMATS:
        assert_same(quantize_rows(x, format, with_norm=True), quantize_reference(x, format, with_norm=True), x)


def test_rows_of_any_size(device):
    x = (
        torch.randn(7, 48, device=torch_device(device))
        * torch.logspace(-25, 25, 7, device=torch_device(device))[:, None]
    )
    for format in formats(device):
        actual = quantize_rows(x, format, implementation="triton")
        assert_same(actual, quantize_reference(x, format), x)
        assert torch.equal(actual.values.float().abs().amax(-1), torch.full((7,), LARGEST[format], device=x.device))


def test_zeros_stay_zeros(device):
    x = torch.zeros(3, 24, device=torch_device(device))
    for format in formats(device):
        actual = quantize_rows(x, format, with_norm=True, implementation="triton")
        assert not actual.dequantize().any()
        assert not actual.norm.any()
        assert (actual.scale > 0).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_nan_and_infinity_are_not_lost(device):
    x = torch.randn(4, 24, device=torch_device(device))
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    for format in formats(device):
        result = quantize_rows(x, format, implementation="triton").dequantize()
        assert result[[0, 3]].isfinite().all()
        assert result[1].isnan().any()
        assert not result[2].isfinite().all()


def test_non_contiguous(device):
    x = torch.randn(2, 24, 5, device=torch_device(device))
    for view in (x.transpose(1, 2), x[..., 1:4], x[:, ::2], x[:, :1].expand(2, 9, 5)):
        assert_same(quantize_rows(view, INT8, implementation="triton"), quantize_reference(view, INT8), view)


@pytest.mark.parametrize("shape", [(2, 7, 24), (3, 63, 11), (4, 5, 384), (1, 9, 40), (2, 1, 1)])
def test_rows_whose_parts_lie_apart(shape, device):
    """Tokens that arrive from several GPUs are [parts, rows, columns of a part]. Some other layouts run too."""
    message = torch.randn(shape).to(torch_device(device), torch.float16)
    for format in formats(device):
        for x in (message.transpose(0, 1), message, message[:, :, None].transpose(0, 2), message[..., ::2]):
            actual = quantize_rows(x, format, with_norm=True, implementation="triton", in_parts=True)
            assert_same(actual, quantize_reference(x.flatten(-2), format, with_norm=True), x.flatten(-2))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0)])
def test_nothing_in_nothing_out(shape, device):
    actual = quantize_rows(torch.zeros(shape, device=torch_device(device)), INT8, True, implementation="triton")
    assert actual.values.shape == shape
    assert actual.scale.shape == actual.norm.shape == shape[:1]
    assert (actual.scale > 0).all()
    x = torch.zeros(2, 3, 0, device=torch_device(device))
    assert quantize_rows(x, INT8, implementation="triton", in_parts=True).values.shape == (2, 0)


def test_compiles_to_one_graph(device):
    x = torch.randn(2, 7, 16, device=torch_device(device))
    compiled = torch.compile(quantize_rows, fullgraph=True, backend="eager")
    for with_norm in (True, False):
        actual = compiled(x, INT8, with_norm, implementation="triton")
        expected = quantize_rows(x, INT8, with_norm, implementation="triton")
        assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True) if other is not None)


@pytest.mark.parametrize("with_norm", [True, False])
def test_custom_op_contract(with_norm, device):
    x = torch.randn(2, 3, 16, device=torch_device(device))
    torch.library.opcheck(torch.ops.turbo_rcm_patch.quantize_rows.default, (x, INT8, with_norm))


def test_errors():
    with pytest.raises(ValueError, match=r"format=torch.uint8; accepted are torch.int8, torch.float8_e4m3fn"):
        quantize_rows(torch.zeros(2, 8), torch.uint8)
