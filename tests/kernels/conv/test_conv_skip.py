import sys

import pytest
import torch

from tests.kernels.turns import dtypes_in_turns
from tests.oracle import DTYPES, assert_no_worse, relative_error, torch_device
from turbo_rcm_patch.kernels import conv_skip, reference
from turbo_rcm_patch.kernels.choice.registry import PORTABLE
from turbo_rcm_patch.kernels.conv import conv_portable

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")

packer = sys.modules["turbo_rcm_patch.kernels.conv.conv_weight"]

# B, T, H, W, C, N, kt, kh. C = 3 and 12 are read through pointers, multiples of 8 by TMA if the GPU has it.
SIZES = {
    "one pixel": (1, 1, 1, 1, 3, 3, 3, 3),
    "one pixel, aligned": (1, 1, 1, 1, 16, 12, 3, 3),
    "odd": (2, 2, 5, 7, 16, 12, 3, 3),
    "wide": (1, 1, 3, 131, 16, 3, 3, 3),
    "high": (1, 1, 67, 2, 16, 12, 1, 3),
    "96": (1, 1, 3, 9, 96, 96, 3, 3),
    "160": (1, 1, 4, 9, 160, 96, 1, 3),
    "frames alone": (2, 3, 3, 5, 24, 40, 3, 1),
    "frames alone, unaligned": (2, 3, 3, 5, 12, 7, 3, 1),
    "pixels alone": (2, 2, 9, 15, 40, 24, 1, 1),
    "one channel each": (1, 2, 3, 4, 1, 1, 3, 3),
    "few channels": (1, 4, 5, 7, 64, 3, 3, 3),
    "few channels, two samples": (2, 3, 9, 31, 100, 5, 3, 3),
    "few channels, no window in time": (1, 2, 17, 19, 128, 7, 1, 3),
    "few channels of few": (1, 2, 5, 7, 16, 3, 3, 3),
    "few channels, no window in the plane": (2, 8, 3, 5, 16, 5, 3, 1),
}
CHANGES = {"plain": (False, 1), "upsampled and interleaved": (True, 2)}


def operands(B, T, H, W, C, N, kt, kh, device="cpu", dtype=torch.float32, upsample=False, interleave=1):
    scale = 2 if upsample else 1
    x = torch.randn(B, T + kt - 1, H, W, C)
    weight = torch.randn(interleave * N, kt, kh, kh, C) * (kt * kh * kh * C) ** -0.5
    bias, residual = torch.randn(interleave * N), torch.randn(B, T * interleave, H * scale, W * scale, N)
    return [tensor.to(device, dtype) for tensor in (x, weight, bias, residual)]


def wide(tensors):
    return [None if tensor is None else tensor.double() for tensor in tensors]


def check(tensors, upsample=False, interleave=1):
    """Check the op with the frames before in x and, if the window covers any, in a front of their own."""
    low = reference.conv_skip(*tensors, None, upsample, interleave)
    oracle = reference.conv_skip(*wide(tensors), None, upsample, interleave)
    has_front = tensors[1].shape[1] > 1
    for given, options in ((tensors, {}), with_front(tensors))[: 1 + has_front]:
        actual = conv_skip(*given, **options, upsample=upsample, interleave=interleave, implementation="triton")
        assert (actual.shape, actual.dtype) == (low.shape, low.dtype)
        assert actual.is_contiguous()
        assert_no_worse(actual, low, oracle)


def with_front(tensors):
    """The tensors with the first frames of x as front."""
    x, weight, *others = tensors
    before = weight.shape[1] - 1
    return (x[:, before:], weight, *others), {"front": x[:, :before]}


@pytest.mark.parametrize("name", SIZES)
def test_matches_the_oracle(name, device):
    for dtype in dtypes_in_turns(device, (name, SIZES)):
        tensors = operands(*SIZES[name], torch_device(device), dtype)
        check(tensors)
        if name in ("one pixel", "odd", "few channels"):
            check([*tensors[:2], None, None])


def test_a_window_of_one_frame_has_a_front_of_none(device):
    tensors = operands(2, 2, 5, 7, 16, 12, 1, 3, torch_device(device))
    given, options = with_front(tensors)
    assert options["front"].shape[1] == 0
    expected = conv_skip(*tensors, implementation="triton")
    assert torch.equal(conv_skip(*given, **options, implementation="triton"), expected)


UPSAMPLED = [(2, 2, 5, 7, 16, 12, 1, 3), (1, 1, 1, 1, 12, 3, 1, 3), (1, 1, 3, 9, 40, 96, 1, 3)]


@pytest.mark.parametrize("sizes", UPSAMPLED)
def test_upsampled(sizes, device):
    for dtype in dtypes_in_turns(device, (sizes, UPSAMPLED)):
        check(operands(*sizes, torch_device(device), dtype, upsample=True), upsample=True)


INTERLEAVED = [(2, 3, 5, 7, 16, 12, 3, 1), (1, 1, 1, 1, 12, 3, 3, 3), (1, 2, 5, 9, 40, 48, 3, 1)]


@pytest.mark.parametrize("sizes", INTERLEAVED)
def test_interleaved(sizes, device):
    """Tiles have columns of both frames."""
    for dtype in dtypes_in_turns(device, (sizes, INTERLEAVED)):
        check(operands(*sizes, torch_device(device), dtype, interleave=2), interleave=2)


def test_upsampled_and_interleaved(device):
    tensors = operands(2, 2, 5, 7, 16, 12, 1, 3, torch_device(device), upsample=True, interleave=2)
    check(tensors, upsample=True, interleave=2)


@pytest.mark.parametrize(("repeats", "T"), [((2, 2, 2), 3), ((2, 1, 1), 2), ((1, 1, 2), 1), ((1, 2, 1), 1)])
def test_a_residual_that_counts_twice(repeats, T, device):
    """Each value counts for two frames, rows or columns. The first of three frames has its own."""
    sizes = torch_device(device), DTYPES[device][0]
    samples = 2 if repeats == (2, 2, 2) else 1
    x, weight, bias, residual = operands(samples, T, 5, 7, 16, 12, 1, 3, *sizes, upsample=True)
    frames, rows, columns = repeats
    small = residual[:, : (T + frames - 1) // frames, ::rows, ::columns]
    frame, row, column = ((torch.arange(n) + n % r) // r for n, r in zip((T, 10, 14), repeats, strict=True))
    large = small[:, frame][:, :, row][:, :, :, column]
    assert large.shape == residual.shape
    expected = conv_skip(x, weight, bias, large, upsample=True, implementation="triton")
    assert torch.equal(conv_skip(x, weight, bias, small, upsample=True, implementation="triton"), expected)
    assert torch.equal(reference.repeat_residual(small, large.shape), large)


@pytest.mark.parametrize(
    ("C", "N", "kh", "columns"), [(32, 3, 3, 32), (144, 16, 3, 144), (31, 3, 3, 3), (143, 16, 3, 16), (32, 3, 1, 3)]
)
def test_narrow_results_read_each_pixel_once(C, N, kh, columns, monkeypatch):
    """Positions in the window are columns of one product, which a second kernel adds, if it is no larger than x."""
    launched = []
    monkeypatch.setattr(conv_portable, "launch_kernel", lambda *given, **options: launched.append((given, options)))
    tensors = operands(2, 3, 5, 7, C, N, 3, kh)
    for given, options in ((tensors, {}), with_front(tensors)):
        launched.clear()
        conv_skip(*given, **options, implementation="triton")
        (arguments, first), *others = launched
        assert arguments[-1] == columns
        assert (first["KT"], first["KH"]) == (3, kh if columns == N else 1)
        assert [o["KH"] for _, o in others] == ([] if columns == N else [3])


@pytest.mark.parametrize("N", [12, 24])
def test_a_chunk_continues_the_one_before(N, device):
    """Chunks with the previous chunk's last frames in front give the same result as all frames at once.

    Values are whole numbers, whose sums have no rounding.
    """
    tensors = operands(1, 8, 5, 7, 16, N, 3, 1, torch_device(device))
    x, weight, bias, residual = (tensor.mul(32).round() for tensor in tensors)
    whole = conv_skip(x, weight, bias, residual, implementation="triton")
    for in_front in (False, True):
        parts = []
        for first, last in ((0, 2), (2, 3), (3, 8)):
            tensors = x[:, first : last + 2], weight, bias, residual[:, first:last]
            given, options = with_front(tensors) if in_front else (tensors, {})
            parts.append(conv_skip(*given, **options, implementation="triton"))
        assert torch.equal(torch.cat(parts, dim=1), whole)


def test_samples_and_frames_do_not_mix(device):
    x, weight, bias, residual = operands(3, 2, 5, 7, 16, 12, 3, 3, torch_device(device))
    alone = conv_skip(x[1:2], weight, bias, residual[1:2], implementation="triton")
    x[0::2], residual[0::2] = torch.nan, torch.nan
    actual = conv_skip(x, weight, bias, residual, implementation="triton")
    assert actual[0::2].isnan().all()
    assert torch.equal(actual[1:2], alone)
    x[1, 0] = torch.nan  # seen by the first frame alone
    for given, options in (((x, weight, bias, residual), {}), with_front((x, weight, bias, residual))):
        actual = conv_skip(*given, **options, implementation="triton")[1:2]
        assert actual[:, 0].isnan().all()
        assert torch.equal(actual[:, 1:], alone[:, 1:])


@pytest.mark.parametrize("C", [16, 12])
def test_what_lies_around_is_not_read(C, device):
    """Tensors surrounded by NaN in memory, because tiles reach beyond them."""

    def within_nan(tensor):
        memory = torch.full((tensor.numel() + 4096,), torch.nan, dtype=tensor.dtype, device=tensor.device)
        return memory[2048:-2048].view(tensor.shape).copy_(tensor)

    tensors = operands(1, 1, 3, 5, C, 12, 3, 3, torch_device(device), torch.float16)
    check([*map(within_nan, tensors)])
    check([*map(within_nan, tensors[:2]), None, None])
    expected = conv_skip(*tensors, implementation="triton")
    given, options = with_front(tensors)
    actual = conv_skip(*map(within_nan, given), front=within_nan(options["front"]), implementation="triton")
    assert torch.equal(actual, expected)


def test_strided_operands_are_copied(device):
    x, weight, bias, residual = operands(2, 1, 5, 7, 16, 12, 3, 3, torch_device(device))
    expected = conv_skip(x, weight, bias, residual, implementation="triton")
    strided = [
        x.permute(0, 4, 1, 2, 3).contiguous().permute(0, 2, 3, 4, 1),  # channels first in memory
        weight.permute(0, 4, 1, 2, 3).contiguous().permute(0, 2, 3, 4, 1),
        bias.repeat_interleave(2)[::2],
        torch.cat((residual, residual), dim=-1)[..., :12],
    ]
    assert not any(tensor.is_contiguous() for tensor in strided)
    assert torch.equal(conv_skip(*strided, implementation="triton"), expected)
    given, options = with_front(strided)
    assert torch.equal(conv_skip(*given, **options, implementation="triton"), expected)
    # Packed, but at an address that TMA cannot read.
    x, *others = (tensor.half() for tensor in (x, weight, bias, residual))
    check([at_odd_address(x), *others])
    given, options = with_front((x, *others))
    actual = conv_skip(*given, front=at_odd_address(options["front"]), implementation="triton")
    assert_no_worse(actual, reference.conv_skip(x, *others), reference.conv_skip(*wide((x, *others))))


def at_odd_address(tensor):
    shifted = torch.cat((tensor.flatten()[:1], tensor.flatten()))[1:].view(tensor.shape)
    assert shifted.data_ptr() % 16
    return shifted


@pytest.mark.parametrize("sizes", [(5, 130, 3, 3, 3), (3, 128, 1, 3, 3), (2, 7, 3, 1, 1), (2, 1, 3, 3, 3)])
def test_a_modules_weight_is_packed(sizes, device, monkeypatch):
    """Packing takes one launch. A weight that is packed already takes none."""
    launched, launch = [], packer.launch_kernel
    monkeypatch.setattr(packer, "launch_kernel", lambda *given, **named: launched.append(1) or launch(*given, **named))
    for dtype in DTYPES[device]:
        weight = torch.randn(sizes, device=torch_device(device)).to(dtype).permute(0, 2, 3, 4, 1)
        launched.clear()
        packed = packer.pack_weight(weight)
        assert packed.is_contiguous()
        assert torch.equal(packed, weight)
        assert packer.pack_weight(packed).data_ptr() == packed.data_ptr()
        assert len(launched) == (sizes[1] > 1)  # one channel is packed either way


def test_a_modules_channels_last_weight_needs_no_copy():
    convolution = torch.nn.Conv3d(8, 4, 3).to(memory_format=torch.channels_last_3d)
    assert convolution.weight.permute(0, 2, 3, 4, 1).is_contiguous()


def test_nothing_in_nothing_out(device):
    x, weight, bias, residual = operands(2, 2, 5, 7, 16, 12, 3, 3, torch_device(device))
    for implementation in ("triton", "torch"):
        assert conv_skip(x[:0], weight, bias, residual[:0], implementation=implementation).shape == (0, 2, 5, 7, 12)
    empty = x[:, :2], weight, bias, residual[:, :0]
    for given, options in ((empty, {}), with_front(empty)):
        for implementation in ("triton", "torch"):
            assert conv_skip(*given, **options, implementation=implementation).shape == (2, 0, 5, 7, 12)
    for implementation in ("triton", "torch"):
        result = conv_skip(x[:, :, :0], weight, bias, residual[:, :, :0], implementation=implementation)
        assert result.shape == (2, 2, 0, 7, 12)


@pytest.mark.parametrize("implementation", ["triton", "torch"])
@pytest.mark.parametrize(("N", "C"), [(0, 8), (6, 0)])
def test_a_weight_without_elements_is_an_error(N, C, implementation):
    with pytest.raises(ValueError, match=rf"weight \[{N}, 3, 3, 3, {C}\] has no elements"):
        conv_skip(torch.ones(1, 4, 5, 7, C), torch.ones(N, 3, 3, 3, C), None, implementation=implementation)


def test_zero_weights_keep_the_residual(device):
    for dtype in DTYPES[device]:
        x, weight, bias, residual = operands(1, 2, 5, 7, 16, 12, 3, 3, torch_device(device), dtype)
        actual = conv_skip(x, weight * 0, bias * 0, residual, implementation="triton")
        assert torch.equal(actual, residual)


def test_the_sum_is_rounded_once(device):
    """Beside a large residual, which rounding of the convolution alone would have shifted."""
    dtype = DTYPES[device][-1]
    eps = torch.finfo(dtype).eps
    x = torch.ones(1, 1, 1, 1, 16).to(torch_device(device), dtype)
    weight = torch.zeros(1, 1, 1, 1, 16).to(x)
    weight[..., 0], weight[..., 1] = 1.0, eps / 2  # 1 + eps / 2 alone rounds to 1
    residual = torch.full((1, 1, 1, 1, 1), eps / 2).to(x)
    assert conv_skip(x, weight, None, residual, implementation="triton").item() == 1 + eps


# --- autograd, compilation, errors


def test_autograd_takes_the_reference(device):
    """The frames before x get a gradient too."""
    x, *others = operands(1, 2, 3, 4, 8, 6, 3, 3, torch_device(device))
    ours, theirs = ([t.requires_grad_() for t in tensors] for tensors in twice([x[:, 2:], *others, x[:, :2]]))
    for (*tensors, front), implementation in ((ours, "triton"), (theirs, "torch")):
        conv_skip(*tensors, front=front, implementation=implementation).square().sum().backward()
    for actual, expected in zip(ours, theirs, strict=True):
        assert torch.equal(actual.grad, expected.grad)


def twice(tensors):
    return [tensor.clone() for tensor in tensors], [tensor.clone() for tensor in tensors]


def test_gradients_of_the_upsampled_and_interleaved_reference():
    tensors = wide(operands(1, 1, 2, 3, 3, 2, 1, 3, upsample=True, interleave=2))
    leaves = [tensor.requires_grad_() for tensor in tensors]
    assert torch.autograd.gradcheck(lambda *t: conv_skip(*t, upsample=True, interleave=2), leaves)


def test_compiles_to_one_graph(device):
    """Upsampled, and with the frames before."""
    tensors = operands(1, 1, 3, 4, 8, 6, 1, 3, torch_device(device), upsample=True)
    x, weight, bias, residual = operands(1, 2, 3, 4, 8, 6, 3, 3, torch_device(device))

    def function(tensors, x, front):
        upsampled = conv_skip(*tensors, upsample=True, implementation="triton")
        return upsampled, conv_skip(x, weight, bias, residual, front=front, implementation="triton")

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    given = tensors, x[:, 2:], x[:, :2]
    for actual, expected in zip(compiled(*given), function(*given), strict=True):
        assert torch.equal(actual, expected)


def test_custom_op_contract_with_the_frames_before(device):
    x, *others = operands(1, 1, 3, 4, 8, 6, 3, 3, torch_device(device))
    arguments = (x[:, 2:], *others, x[:, :2], False, 1)
    torch.library.opcheck(torch.ops.turbo_rcm_patch.conv_skip.default, (PORTABLE, *arguments))


@pytest.mark.parametrize("change", CHANGES)
def test_custom_op_contract(change, device):
    upsample, interleave = CHANGES[change]
    x, weight, bias, residual = operands(
        1, 1, 3, 4, 8, 6, 1, 3, torch_device(device), upsample=upsample, interleave=interleave
    )
    for optional in ((bias, residual, x[:, :0]), (None, None, None))[: 1 + (change == "plain")]:
        arguments = (x, weight, *optional, upsample, interleave)
        torch.library.opcheck(torch.ops.turbo_rcm_patch.conv_skip.default, (PORTABLE, *arguments))


def test_auto_is_the_reference_on_the_cpu(monkeypatch):
    tensors = operands(1, 2, 3, 4, 8, 6, 3, 3)
    monkeypatch.setattr(conv_portable, "launch", None)
    assert torch.equal(conv_skip(*tensors), reference.conv_skip(*tensors))


def test_errors():
    x, weight, bias, residual = operands(1, 2, 3, 4, 8, 6, 3, 3)
    with pytest.raises(ValueError, match=r"x has shape \[4, 3, 4, 8\] and weight \[6, 3, 3, 3, 8\]; they must be"):
        conv_skip(x[0], weight, bias)
    with pytest.raises(ValueError, match=r"weight \[6, 8, 3, 3, 3\]; they must be .* weight\.permute\(0, 2, 3, 4, 1\)"):
        conv_skip(x, weight.permute(0, 4, 1, 2, 3), bias)
    for window in (weight[:, :2], weight[:, :, :2], weight[:, :, :1]):
        with pytest.raises(ValueError, match=r"the window is \[.*\]; accepted are kt 1 or 3 and kh = kw 1 or 3"):
            conv_skip(x, window, bias)
    with pytest.raises(ValueError, match=r"upsample=True with the window \[3, 3, 3\]; it goes with \[1, 3, 3\] only"):
        conv_skip(x, weight, bias, upsample=True)
    for rows, interleave in ((weight, 3), (weight[:5], 2), (weight, 0)):
        with pytest.raises(ValueError, match=rf"interleave={interleave} with {len(rows)} rows of weight"):
            conv_skip(x, rows, None, interleave=interleave)
    with pytest.raises(ValueError, match=r"x has 1 frames; a window of 3 needs 2 before the first"):
        conv_skip(x[:, :1], weight, bias)
    for front in (x[:, :1], x[:, :2, 1:], x[:, :3]):
        with pytest.raises(ValueError, match=r"front has shape \[.*\]; it must be \[1, 2, 3, 4, 8\]"):
            conv_skip(x, weight, bias, front=front)
    with pytest.raises(ValueError, match=r"dtypes torch.float16, torch.float32; cast them to one"):
        conv_skip(x, weight, bias, front=x[:, :2].half())
    with pytest.raises(ValueError, match=r"bias has shape \[5\]; it must be \[6\]"):
        conv_skip(x, weight, bias[:5])
    with pytest.raises(ValueError, match=r"residual has shape \[1, 1, 3, 4, 6\] but the result has \[1, 2, 3, 4, 6\]"):
        conv_skip(x, weight, bias, residual[:, :1])
    # One that counts twice goes with upsampled results, that are not interleaved.
    half = torch.cat((residual, residual), 1)
    for options, small in (({}, half[:, :, :, :2]), ({"upsample": True, "interleave": 2}, half[..., :3])):
        with pytest.raises(ValueError, match=r"residual has shape \[1, 4, 3, ., .\] but the result has"):
            conv_skip(x, weight[:, :1], bias, small, **options)
    with pytest.raises(ValueError, match=r"dtypes torch.float16, torch.float32; cast them to one"):
        conv_skip(x, weight, bias, residual.half())
    with pytest.raises(ValueError, match=r"no kernel can run \(.*portable Triton: float64"):
        conv_skip(*wide((x, weight, bias, residual)), implementation="triton")
    with pytest.raises(ValueError, match="implementation='cudnn' is unknown"):
        conv_skip(x, weight, bias, residual, implementation="cudnn")


@pytest.mark.gpu
def test_many_tiles_of_a_decoders_sizes():
    """Against cuDNN in fp32."""
    for sizes, upsample, interleave in (
        ((1, 4, 60, 104, 384, 384, 3, 3), False, 1),
        ((1, 4, 240, 416, 96, 96, 3, 3), False, 1),
        ((1, 4, 240, 416, 96, 3, 3, 3), False, 1),
        ((1, 4, 60, 104, 384, 192, 1, 3), True, 1),
        ((1, 4, 60, 104, 384, 384, 3, 1), False, 2),
        ((1, 2, 44, 80, 1024, 1024, 3, 3), False, 1),
    ):
        tensors = operands(*sizes, "cuda", torch.bfloat16, upsample=upsample, interleave=interleave)
        actual = conv_skip(*tensors, upsample=upsample, interleave=interleave, implementation="triton")
        low = reference.conv_skip(*tensors, None, upsample, interleave)
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            oracle = reference.conv_skip(*(tensor.float() for tensor in tensors), None, upsample, interleave)
        assert_no_worse(actual, low, oracle)
        given, options = with_front(tensors)
        options |= {"upsample": upsample, "interleave": interleave}
        assert torch.equal(conv_skip(*given, **options, implementation="triton"), actual)


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    """The last frame of many is that of the frame alone."""
    frames = 57  # × 480 × 832 × 96 elements: 2.1e9
    x = torch.randn(1, frames + 2, 480, 832, 96, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(96, 3, 3, 3, 96, device="cuda", dtype=torch.bfloat16) * (27 * 96) ** -0.5
    assert frames * 480 * 832 * 96 > 2**31
    whole = conv_skip(x, weight, None, x[:, 2:], implementation="triton")
    last = conv_skip(x[:, -3:], weight, None, x[:, -1:], implementation="triton")
    assert torch.equal(whole[:, -1:], last)
    given, options = with_front((x, weight, None, x[:, 2:]))
    assert torch.equal(conv_skip(*given, **options, implementation="triton"), whole)
    assert relative_error(last, reference.conv_skip(x[:, -3:], weight, None, x[:, -1:])) < 1e-2
