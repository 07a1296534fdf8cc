import pytest
import torch

from tests.kernels.eight_bit import assert_same
from tests.kernels.rows.test_quantize_rows import formats
from tests.kernels.runs import LENGTHS, expand, runs_of
from tests.kernels.turns import dtypes_in_turns
from tests.oracle import DTYPES, assert_no_worse, relative_error, torch_device
from turbo_rcm_patch.kernels import INT8, Runs, layer_norm_modulate, reference
from turbo_rcm_patch.kernels.quantized import quantize_reference

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")

SHAPES = [(1, 1, 5), (2, 7, 24), (3, 63, 33), (1, 129, 96), (2, 2, 5120)]
MODULATIONS = {
    "none": None,
    "sample": lambda B, S, C: (B, C),
    "shared": lambda B, S, C: (1, 1, C),
    "sample, kept dimension": lambda B, S, C: (B, 1, C),
    "token": lambda B, S, C: (B, S, C),
}


def check(x, weight=None, bias=None, scale=None, shift=None, eps=1e-6, centred=True):
    parameters = {"weight": weight, "bias": bias, "scale": scale, "shift": shift}
    options = {"eps": eps, "centred": centred}
    actual = layer_norm_modulate(x, **parameters, **options, implementation="triton")
    low = layer_norm_modulate(x, **parameters, **options, implementation="torch")
    wide = {name: None if p is None else p.double() for name, p in parameters.items()}
    assert_no_worse(actual, low, layer_norm_modulate(x.double(), **wide, **options, implementation="torch"))


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("modulation", MODULATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_oracle(shape, modulation, affine, centred, device):
    B, S, C = shape
    switches = ((affine, (False, True)), (centred, (False, True)))
    for dtype in dtypes_in_turns(device, (shape, SHAPES), (modulation, MODULATIONS), *switches):
        x = torch.randn(shape).to(torch_device(device), dtype)
        weight, bias = torch.randn(2, C).to(x.device) if affine else (None, None)
        scale = shift = None
        if MODULATIONS[modulation] is not None:
            scale, shift = torch.randn(2, *MODULATIONS[modulation](B, S, C)).to(x.device)
        check(x, weight, bias, scale, shift, centred=centred)


def test_uncentred_is_rms_norm(device):
    x, weight = 3 + torch.randn(2, 5, 33, device=torch_device(device)), torch.randn(33, device=torch_device(device))
    scale, shift = torch.randn(2, 2, 1, 33, device=x.device)
    actual = layer_norm_modulate(x, weight=weight, scale=scale, shift=shift, centred=False, implementation="triton")
    expected = torch.nn.functional.rms_norm(x, (33,), weight, 1e-6) * (1 + scale) + shift
    assert relative_error(actual, expected) <= 1e-6


@pytest.mark.parametrize("modulation", ["sample", "shared", "token"])
def test_programs_walk_several_tiles_of_rows(modulation, device):
    device = torch_device(device)
    B, S, C = (2, 21, 5120) if device.type == "cpu" else (2, 4000, 5120)
    x = torch.randn(B, S, C, device=device)
    check(x, scale=(s := torch.randn(2, *MODULATIONS[modulation](B, S, C), device=device))[0], shift=s[1])


@pytest.mark.gpu
@pytest.mark.parametrize("C", [16384, 32768])
def test_rows_too_wide_to_be_in_flight(C):
    check(torch.randn(1, 3, C, device="cuda"), weight=torch.randn(C, device="cuda"))


def scale_and_shift_of(lengths, C, device):
    scale = runs_of(lengths, C, device)
    return scale, Runs(torch.randn_like(scale.values), scale.starts)


def check_runs(x, lengths, centred=True, **parameters):
    runs = scale_and_shift_of(lengths, x.shape[2], x.device)
    scale, shift = (expand(r, x.shape[0]) for r in runs)
    wide = {name: p.double() for name, p in parameters.items()}
    wide |= {"centred": centred, "implementation": "torch"}
    oracle = layer_norm_modulate(x.double(), scale=scale.double(), shift=shift.double(), **wide)
    parameters |= {"centred": centred}
    low = layer_norm_modulate(x, scale=scale, shift=shift, **parameters, implementation="torch")
    by_run = {"scale": runs[0], "shift": runs[1], **parameters}
    assert_no_worse(layer_norm_modulate(x, **by_run, implementation="triton"), low, oracle)
    assert torch.equal(layer_norm_modulate(x, **by_run, implementation="torch"), low)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", LENGTHS)
def test_runs_match_the_oracle_by_token(name, batch, device):
    for dtype in DTYPES[device]:
        x = torch.randn(batch, 30 // batch, 33).to(torch_device(device), dtype)
        check_runs(x, LENGTHS[name])
        check_runs(x, LENGTHS[name], centred=False)
        check_runs(x, LENGTHS[name], weight=torch.randn(33).to(x), bias=torch.randn(33).to(x))


def test_programs_walk_tiles_of_several_runs(device):
    device = torch_device(device)
    rows = 61 if device.type == "cpu" else 8001
    x = torch.randn(2, rows, 3072, device=device)
    check_runs(x, [rows // 9, 1, rows, 2 * rows - rows // 9 - 1 - rows])
    check_runs(torch.randn(2, 3072, 7, device=device).transpose(1, 2), [3, 11])
    check_runs(torch.randn(2, 401, 200, device=device)[..., 8:41], [20] * 30 + [201, 1])


def test_parameters_of_other_dtypes_and_shapes(device):
    device = torch_device(device)
    x = torch.randn(2, 5, 24, device=device).half()
    check(x, weight=torch.randn(24, device=device).half())
    check(x, bias=torch.randn(24, device=device))
    check(x, scale=torch.randn(2, 24, device=device).half(), shift=torch.randn(1, 5, 24, device=device))


def test_the_result_may_be_of_another_dtype(device):
    x = torch.randn(2, 5, 24, device=torch_device(device))
    low = torch.bfloat16 if device == "cuda" else torch.float16
    for given, dtype in ((x, low), (x.half(), torch.float32), (x.half(), low)):
        actual, expected = (layer_norm_modulate(given, dtype=dtype, implementation=i) for i in ("triton", "torch"))
        assert actual.dtype == dtype
        assert_no_worse(actual, expected, layer_norm_modulate(given.double(), implementation="torch"))


@pytest.mark.parametrize("modulation", MODULATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_result_may_have_8_bits(shape, modulation, device):
    B, S, C = shape
    for dtype in dtypes_in_turns(device, (shape, SHAPES), (modulation, MODULATIONS)):
        x = torch.randn(shape).to(torch_device(device), dtype)
        options = {"weight": torch.randn(C).to(x.device), "bias": torch.randn(C).to(x.device)}
        if MODULATIONS[modulation] is not None:
            options["scale"], options["shift"] = torch.randn(2, *MODULATIONS[modulation](B, S, C)).to(x.device)
        check_quantized(x, device, **options)
        check_quantized(x, device, **options, centred=False)


def test_programs_walk_8_bits_of_several_runs(device):
    rows = 61 if device == "interpreter" else 8001
    x = torch.randn(2, rows, 3072, device=torch_device(device))
    scale, shift = scale_and_shift_of([rows // 9, 1, rows, rows - rows // 9 - 1], 3072, x.device)
    check_quantized(x, device, scale=scale, shift=shift)


def check_quantized(x, device, **options):
    """The kernel quantises its own fp32 result, so quantising adds nothing to the norm's error."""
    for format in formats(device):
        actual = layer_norm_modulate(x, **options, quantized=format, implementation="triton")
        wide = layer_norm_modulate(x, **options, dtype=torch.float32, implementation="triton")
        assert_same(actual, quantize_reference(wide, format, with_norm=True), wide)


def test_8_bits_compile_to_one_graph(device):
    x = torch.randn(2, 5, 24, device=torch_device(device))
    compiled = torch.compile(layer_norm_modulate, fullgraph=True, backend="eager")
    wanted = layer_norm_modulate(x, quantized=INT8, implementation="triton")
    actual = compiled(x, quantized=INT8, implementation="triton")
    assert all(torch.equal(one, other) for one, other in zip(actual, wanted, strict=True))


def test_autograd_of_8_bits_takes_the_reference(device):
    x = torch.randn(2, 5, 24, device=torch_device(device), requires_grad=True)
    result = layer_norm_modulate(x, quantized=INT8, implementation="triton")
    wide = layer_norm_modulate(x, dtype=torch.float32, implementation="torch")
    assert_same(result, layer_norm_modulate(x, quantized=INT8, implementation="torch"), wide)
    assert result.scale.requires_grad


def test_a_large_mean_does_not_cancel(device):
    x = 1000 + torch.randn(1, 3, 100, device=torch_device(device))
    actual = layer_norm_modulate(x, implementation="triton")
    oracle = layer_norm_modulate(x.double(), implementation="torch")
    # The fp32 rounding of x - mean at 1000 is 2**-14 per element; E[x²] - E[x]² would lose three more digits.
    assert relative_error(actual, oracle) <= 2e-4


def test_eps_counts(device):
    x = 1e-3 * torch.randn(1, 3, 24, device=torch_device(device))
    check(x, eps=1e-4)


def test_non_contiguous(device):
    device = torch_device(device)
    qkv = torch.randn(2, 5, 72, device=device)
    check(qkv[..., 24:48])
    check(torch.randn(2, 24, 5, device=device).transpose(1, 2))
    modulation = torch.randn(2, 6, 24, device=device)
    shift, scale, *_ = modulation.chunk(6, dim=1)
    check(qkv[..., :24], scale=scale, shift=shift, weight=torch.randn(48, device=device)[::2])
    shift, scale, *_ = torch.randn(2, 5, 6, 24, device=device).unbind(2)
    check(qkv[..., :24], scale=scale, shift=shift)


def test_rows_do_not_mix(device):
    device = torch_device(device)
    x = torch.randn(3, 5, 24, device=device)
    scale, shift = torch.randn(2, 3, 24, device=device)
    alone = layer_norm_modulate(x[1:2], scale=scale[1:2], shift=shift[1:2])
    x[0::2] = torch.nan
    x[1, 0] = torch.nan
    actual = layer_norm_modulate(x, scale=scale, shift=shift, implementation="triton")
    assert relative_error(actual[1, 1:], alone[0, 1:]) <= 1e-6
    assert actual[0::2].isnan().all()


def test_autograd_takes_the_reference(device):
    x = torch.randn(2, 5, 24, device=torch_device(device))
    scale, shift = torch.randn(2, 2, 24, device=x.device)
    leaves = [t.requires_grad_() for t in (x, scale, shift)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    layer_norm_modulate(x, scale=scale, shift=shift, implementation="triton").square().sum().backward()
    x, scale, shift = wide[0], wide[1][:, None], wide[2][:, None]
    reference.layer_norm_modulate(x, None, None, scale, shift, 1e-6).square().sum().backward()
    for ours, oracle in zip(leaves, wide, strict=True):
        assert relative_error(ours.grad, oracle.grad) <= 1e-5


def test_autograd_by_run_takes_the_reference(device):
    x = torch.randn(2, 5, 24, device=torch_device(device))
    runs = scale_and_shift_of([3, 7], 24, x.device)
    ours, theirs = ([r.values.clone().requires_grad_() for r in runs] for _ in range(2))
    scale, shift = (Runs(values, runs[0].starts) for values in ours)
    layer_norm_modulate(x, scale=scale, shift=shift, implementation="triton").square().sum().backward()
    scale, shift = (expand(Runs(values, runs[0].starts), 2) for values in theirs)
    layer_norm_modulate(x, scale=scale, shift=shift, implementation="torch").square().sum().backward()
    for actual, wanted in zip(ours, theirs, strict=True):
        assert relative_error(actual.grad, wanted.grad) <= 1e-6


def test_compiles_to_one_graph(device):
    x = torch.randn(2, 5, 24, device=torch_device(device))
    scale, shift = torch.randn(2, 2, 24, device=x.device)
    compiled = torch.compile(layer_norm_modulate, fullgraph=True, backend="eager")
    wanted = layer_norm_modulate(x, scale=scale, shift=shift, implementation="triton")
    assert torch.equal(compiled(x, scale=scale, shift=shift, implementation="triton"), wanted)


def test_custom_op_contract(device):
    x = torch.randn(2, 3, 8, device=torch_device(device))
    scale, shift = torch.randn(2, 2, 1, 8, device=x.device)
    for dtype in (torch.float32, torch.float16):
        arguments = (x, None, None, scale, shift, 1e-6, dtype)
        torch.library.opcheck(torch.ops.turbo_rcm_patch.layer_norm_modulate.default, arguments)
    scale, shift = scale_and_shift_of([2, 4], 8, x.device)
    arguments = (x, None, None, scale.values[:, None], shift.values[:, None], 1e-6, torch.float32, scale.starts)
    torch.library.opcheck(torch.ops.turbo_rcm_patch.layer_norm_modulate.default, arguments)
    arguments = (x, None, None, None, None, 1e-6, torch.float32, None, False)
    torch.library.opcheck(torch.ops.turbo_rcm_patch.layer_norm_modulate.default, arguments)
    arguments = (x, None, None, None, None, 1e-6, INT8)
    torch.library.opcheck(torch.ops.turbo_rcm_patch.layer_norm_modulate_quantized.default, arguments)


def test_errors():
    x, scale = torch.zeros(2, 3, 8), torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"x has shape \[3, 8\]; it must be \[B, S, C\]"):
        layer_norm_modulate(x[0])
    with pytest.raises(ValueError, match=r"dtype=torch\.int32; accepted are float32, float16, bfloat16"):
        layer_norm_modulate(x, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"format=torch.uint8; accepted are torch.int8, torch.float8_e4m3fn"):
        layer_norm_modulate(x, quantized=torch.uint8)
    with pytest.raises(ValueError, match="scale and shift together"):
        layer_norm_modulate(x, scale=scale)
    with pytest.raises(ValueError, match=r"weight has shape \[3\], not \[C=8\]"):
        layer_norm_modulate(x, weight=torch.ones(3))
    with pytest.raises(ValueError, match=r"shift has shape \[3, 8\]; accepted are"):
        layer_norm_modulate(x, scale=scale, shift=torch.zeros(3, 8))
    with pytest.raises(ValueError, match=r"scale has shape \[8\]"):
        layer_norm_modulate(x, scale=scale[0], shift=scale[0])
    runs = runs_of([4, 2], 8)
    for other in (scale, None, runs_of([4, 2], 8)):
        with pytest.raises(ValueError, match=r"scale and shift (both as Runs that share one starts tensor|together)"):
            layer_norm_modulate(x, scale=runs, shift=other)
    with pytest.raises(ValueError, match=r"layer_norm_modulate: scale has values \[2, 7\]"):
        layer_norm_modulate(x, scale=Runs(runs.values[:, 1:], runs.starts), shift=runs)
