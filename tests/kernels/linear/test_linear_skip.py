import sys

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.eight_bit import FORMATS, assert_sums_are_right, oracle_of, quantized, quantized_weight
from tests.kernels.runs import LENGTHS, expand, runs_of
from tests.kernels.turns import dtypes_in_turns
from tests.oracle import DTYPES, assert_no_worse, relative_error, torch_device
from turbo_rcm_patch.kernels import INT8, Runs, linear_skip, reference
from turbo_rcm_patch.kernels.choice.registry import PORTABLE
from turbo_rcm_patch.kernels.coefficient import canonical_coefficient

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")

gemm = sys.modules["turbo_rcm_patch.kernels.linear.gemm_portable"]

# (B, S, C, K): K = 24 is read through descriptors where the GPU has TMA, an odd K through pointers.
SHAPES = [(1, 1, 5, 3), (2, 7, 40, 24), (3, 63, 130, 33), (2, 129, 96, 72), (1, 600, 70, 8)]
SHAPES_8BIT = [(1, 1, 5, 3), (2, 70, 136, 48), (3, 63, 130, 33)]
SKIPS = {
    "one": lambda B, S, C: (1.0, 1.0),
    "numbers": lambda B, S, C: (0.5, -2),
    "gate": lambda B, S, C: (1.0, torch.randn(C)),
    "sample": lambda B, S, C: (torch.randn(B, 1, 1), torch.randn(B, 1, 1)),
    "sample and channel": lambda B, S, C: (torch.randn(B, 1, C), torch.randn(B, 1, C)),
    "row": lambda B, S, C: (torch.randn(1, S, 1), torch.randn(B, S, 1)),
    "token": lambda B, S, C: (torch.randn(B, S, C), torch.randn(B, S, C)),
}


def operands(B, S, C, K, device="cpu", dtype=torch.float32):
    shapes = (B, S, K), (C, K), (C,), (B, S, C)
    return [torch.randn(shape).to(device, dtype) for shape in shapes]


def skips(kind, B, S, C, device):
    return [c.to(device) if isinstance(c, torch.Tensor) else c for c in SKIPS[kind](B, S, C)]


def expected(a, weight, bias, residual, c_skip, c_out, dtype=None):
    """The reference in the tensors' own dtype, or in a wider one."""
    tensors = [None if t is None else t.to(dtype or t.dtype) for t in (a, weight, bias, residual)]
    coefficients = [canonical_coefficient("c", c, *residual.shape, residual.device) for c in (c_skip, c_out)]
    return reference.linear_skip(*tensors, *coefficients)


@pytest.mark.parametrize("kind", SKIPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_oracle(shape, kind, device):
    B, S, C, K = shape
    for dtype in dtypes_in_turns(device, (shape, SHAPES), (kind, SKIPS)):
        tensors = operands(B, S, C, K, torch_device(device), dtype)
        c_skip, c_out = skips(kind, B, S, C, torch_device(device))
        actual = linear_skip(*tensors, c_skip=c_skip, c_out=c_out, implementation="triton")
        low = expected(*tensors, c_skip, c_out)
        assert_no_worse(actual, low, expected(*tensors, c_skip, c_out, torch.float64))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", LENGTHS)
def test_runs_are_the_same_by_token(name, batch, device):
    tensors = operands(batch, 30 // batch, 40, 24, torch_device(device))
    runs = runs_of(LENGTHS[name], 40, torch_device(device))
    for c_skip in (1.0, torch.randn(batch, device=tensors[0].device)):
        for implementation in ("triton", "torch"):
            options = {"c_skip": c_skip, "implementation": implementation}
            by_run = linear_skip(*tensors, c_out=runs, **options)
            by_token = linear_skip(*tensors, c_out=expand(runs, batch), **options)
            # With one sample, tiles may be others: sums of another order.
            assert relative_error(by_run, by_token) <= 1e-6


def test_runs_over_many_tiles(device):
    """Their borders lie within the tiles' rows; the last is long."""
    tensors = operands(2, 300, 70, 24, torch_device(device))
    runs = runs_of([100, 1, 99, 130, 270], 70, torch_device(device))
    actual = linear_skip(*tensors, c_out=runs, implementation="triton")
    assert relative_error(actual, expected(*tensors, 1.0, expand(runs, 2), torch.float64)) <= 1e-6
    alone = [t[0] if t.dim() == 3 else t for t in tensors]
    runs = runs_of([299, 1], 70, torch_device(device))
    actual = linear_skip(*alone, c_out=runs, implementation="triton")
    by_token = expected(*(t[:1] if t.dim() == 3 else t for t in tensors), 1.0, expand(runs, 1), torch.float64)
    assert relative_error(actual, by_token[0]) <= 1e-6


def test_runs_compile_to_one_graph(device):
    device = torch_device(device)
    tensors, runs = operands(2, 7, 12, 10, device), runs_of([4, 10], 12, device)

    def function(*tensors):
        return linear_skip(*tensors[:4], c_out=Runs(*tensors[4:]), implementation="triton")

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*tensors, *runs), function(*tensors, *runs))


def test_gradients_by_run(device):
    """No kernel has them: the reference does."""
    tensors, runs = operands(2, 7, 12, 10, torch_device(device)), runs_of([4, 10], 12, torch_device(device))
    ours, theirs = ([t.clone().requires_grad_() for t in (*tensors, runs.values)] for _ in range(2))
    linear_skip(*ours[:4], c_out=Runs(ours[4], runs.starts), implementation="triton").square().sum().backward()
    expected(*theirs[:4], 1.0, expand(Runs(theirs[4], runs.starts), 2)).square().sum().backward()
    for actual, wanted in zip(ours, theirs, strict=True):
        assert relative_error(actual.grad, wanted.grad) <= 1e-5


def test_residual_and_result_may_be_of_other_dtypes(device):
    a, weight, bias, residual = operands(2, 7, 40, 24, torch_device(device))
    low = torch.bfloat16 if device == "cuda" else torch.float16
    gate = torch.randn(40, device=a.device)
    for given, kept, dtype in ((low, low, torch.float32), (low, torch.float32, low), (torch.float32, low, low)):
        tensors = [*(t.to(given) for t in (a, weight, bias)), residual.to(kept)]
        actual = linear_skip(*tensors, c_out=gate, dtype=dtype, implementation="triton")
        assert actual.dtype == dtype
        expected = linear_skip(*tensors, c_out=gate, dtype=dtype, implementation="torch")
        wide = [t.double() for t in tensors]
        assert_no_worse(actual, expected, linear_skip(*wide, c_out=gate, implementation="torch"))


@pytest.mark.parametrize("c_skip", [None, 1.0, 0.5])
def test_gradients_of_other_dtypes_and_scales(c_skip, device):
    ours = operands(2, 7, 40, 24, torch_device(device))
    ours[3] = ours[3].half()
    theirs = [t.clone().requires_grad_() for t in ours]
    ours = [t.requires_grad_() for t in ours]
    # Without a tensor the residual's gradient takes a way of its own.
    gate = [
        1.0 if c_skip is None else torch.tensor(c_skip, device=t[0].device, requires_grad=True) for t in (ours, theirs)
    ]
    weight = torch.randn(2, 7, 40, device=ours[0].device)
    for tensors, skip, implementation in ((ours, gate[0], "triton"), (theirs, gate[1], "torch")):
        options = {"residual_scale": 4.0, "result_scale": 0.5, "dtype": torch.float32}
        (linear_skip(*tensors, c_skip=skip, implementation=implementation, **options) * weight).sum().backward()
    gates = [] if c_skip is None else gate
    for actual, expected in zip([*ours, *gates[:1]], [*theirs, *gates[1:]], strict=True):
        assert actual.grad.dtype == actual.dtype
        assert relative_error(actual.grad, expected.grad) <= (1e-5 if actual.dtype == torch.float32 else 1e-3)


def test_scales_move_the_range_alone(device):
    a, weight, bias, residual = operands(2, 7, 40, 24, torch_device(device))
    expected = linear_skip(a, weight, bias, residual, c_out=0.5, implementation="triton")
    options = {"c_out": 0.5, "residual_scale": 8.0, "result_scale": 32.0, "implementation": "triton"}
    assert relative_error(32 * linear_skip(a, weight, bias, residual / 8, **options), expected) <= 1e-6
    options = {"dtype": torch.float16, "result_scale": 32.0, "implementation": "triton"}
    wide = [t.double() for t in (a, weight, bias, 1e5 * residual)]  # up to 4e5
    large = 32 * linear_skip(a, weight, bias, 1e5 * residual, **options).double()
    assert relative_error(large, linear_skip(*wide, implementation="torch")) <= torch.finfo(torch.float16).eps


# --- operands in 8 bits


def check_8bit(a, weight, bias, residual, c_skip, c_out, dtype=None):
    actual = linear_skip(a, weight, bias, residual, c_skip=c_skip, c_out=c_out, dtype=dtype, implementation="triton")
    coefficients = [canonical_coefficient("c", c, *residual.shape, residual.device) for c in (c_skip, c_out)]
    low = reference.linear_skip(a, weight, bias, residual, *coefficients, dtype)
    oracle = reference.skip(residual.double(), oracle_of(a, weight, bias), *coefficients)
    assert (actual.shape, actual.dtype) == (low.shape, low.dtype)
    assert_sums_are_right(actual, low, oracle, a.format, a.values.shape[-1])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", SKIPS)
@pytest.mark.parametrize("shape", SHAPES_8BIT)
def test_8_bits_match_the_oracle(shape, kind, format, device):
    B, S, C, K = shape
    device_ = torch_device(device)
    a, weight = quantized(B, S, K, format=format, device=device_), quantized_weight(C, K, format, device_)
    for dtype in dtypes_in_turns(device, (kind, SKIPS), (format, FORMATS)):
        bias, residual = torch.randn(C, device=device_), torch.randn(B, S, C).to(device_, dtype)
        check_8bit(a, weight, bias, residual, *skips(kind, B, S, C, device_))


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", ["one", "gate", "sample", "row"])
@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("result", [torch.bfloat16, torch.float16])
def test_8_bits_on_many_tiles(result, kept, kind, format):
    """Two or three tiles for a program of sm_90's kernel."""
    B, S, C, K = 2, 6000, 392, 144
    a, weight = quantized(B, S, K, format=format, device="cuda"), quantized_weight(C, K, format, "cuda")
    residual = torch.randn(B, S, C, device="cuda", dtype=kept)
    check_8bit(a, weight, torch.randn(C, device="cuda"), residual, *skips(kind, B, S, C, "cuda"), result)


@pytest.mark.parametrize("format", FORMATS)
def test_8_bits_by_run_and_at_other_scales(format, device):
    device_ = torch_device(device)
    S = 30 if device == "interpreter" else 3000
    a, weight = quantized(2, S, 48, format=format, device=device_), quantized_weight(40, 48, format, device_)
    residual, runs = torch.randn(2, S, 40, device=device_).half(), runs_of([S // 3, 1, 2 * S - S // 3 - 1], 40, device_)
    options = {"residual_scale": 4.0, "result_scale": 0.5, "dtype": torch.float16}
    actual = linear_skip(a, weight, None, residual, c_out=runs, **options, implementation="triton")
    low = linear_skip(a, weight, None, residual, c_out=runs, **options, implementation="torch")
    gates = expand(runs, 2).double()
    oracle = (4 * residual.double() + gates * oracle_of(a, weight, None)) / 0.5
    assert_sums_are_right(actual, low, oracle, format, 48)


def test_8_bits_of_one_sample_and_compiled(device):
    device = torch_device(device)
    a, weight = quantized(7, 16, format=INT8, device=device), quantized_weight(12, 16, INT8, device)
    residual, gate = torch.randn(7, 12, device=device), torch.randn(12, device=device)

    def function(a, weight, residual, gate):
        return linear_skip(a, weight, None, residual, c_out=gate, implementation="triton")

    expected = linear_skip(a, weight, None, residual, c_out=gate, implementation="torch")
    torch.testing.assert_close(function(a, weight, residual, gate), expected)
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    assert torch.equal(compiled(a, weight, residual, gate), function(a, weight, residual, gate))


def test_8_bits_take_the_reference_under_autograd(device):
    device = torch_device(device)
    a, weight = quantized(2, 7, 16, format=INT8, device=device), quantized_weight(12, 16, INT8, device)
    leaves = [torch.randn(shape, device=device, requires_grad=True) for shape in ((12,), (2, 7, 12), (2, 1, 12))]
    bias, residual, gate = leaves
    linear_skip(a, weight, bias, residual, c_out=gate, implementation="triton").sum().backward()
    linear = oracle_of(a, weight, bias).detach()
    assert relative_error(bias.grad, (7 * gate).double().sum((0, 1))) <= 1e-6
    assert relative_error(gate.grad, linear.sum(1, keepdim=True)) <= 1e-5
    assert torch.equal(residual.grad, torch.ones_like(residual))


# --- tiles


def tiles_of_this_gpu(*dtypes):
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    for dtype in dtypes:
        for descriptors in (True, False):
            for tiles in gemm.tile_candidates(capability, dtype, descriptors):
                yield pytest.param(dtype, descriptors, tiles, id=f"{dtype}-{descriptors}-{tiles.rows}x{tiles.columns}")


@pytest.mark.parametrize(("dtype", "descriptors", "tiles"), list(tiles_of_this_gpu(torch.float32, torch.float16)))
def test_every_tile(dtype, descriptors, tiles, device, monkeypatch):
    monkeypatch.setattr(gemm, "choose_tiles", lambda *_: tiles)
    B, S, C, K = 2, tiles.rows + 2, tiles.columns + 8, tiles.depth + (8 if descriptors else 7)
    tensors = operands(B, S, C, K, torch_device(device), dtype)
    c_skip, c_out = skips("sample and channel", B, S, C, torch_device(device))
    actual = linear_skip(*tensors, c_skip=c_skip, c_out=c_out, implementation="triton")
    low = expected(*tensors, c_skip, c_out)
    assert_no_worse(actual, low, expected(*tensors, c_skip, c_out, torch.float64))


@pytest.mark.parametrize("column_tiles", [5, 17])
@pytest.mark.parametrize("row_tiles", [3, 30])
@pytest.mark.parametrize("rows_in_l2", [1, 20])
def test_every_tile_is_visited_once(row_tiles, column_tiles, rows_in_l2, device):
    """Two samples, in groups of 1, 14 or 20 row tiles. The last group may be smaller."""
    seen = torch.zeros(2, row_tiles, column_tiles, dtype=torch.int32, device=torch_device(device))
    tile_bytes = gemm.L2_BYTES.value // rows_in_l2
    _visit[seen.numel(),](seen, row_tiles, column_tiles, tile_bytes)
    assert (seen == 1).all()


@triton.jit
def _visit(seen, row_tiles, column_tiles, tile_bytes):
    sample, row, column = gemm.locate_tile(tl.program_id(0), row_tiles, column_tiles, tile_bytes, tile_bytes)
    tl.atomic_add(seen + (sample * row_tiles + row) * column_tiles + column, 1)


def test_tiles_fill_the_gpu():
    candidates = gemm.tile_candidates((9, 0), torch.bfloat16, descriptors=True)
    sizes = [(tiles.rows, tiles.columns) for tiles in candidates]
    assert sizes == sorted(sizes, reverse=True)
    assert gemm.choose_tiles(candidates, 1, 32760, 1536, 132) == candidates[0]
    assert gemm.choose_tiles(candidates, 1, 1560, 1536, 132) == candidates[1]
    assert gemm.choose_tiles(candidates, 1, 1, 1536, 132) == candidates[-1]
    assert gemm.choose_tiles(candidates, 64, 77, 5120, 132) == candidates[0]


def test_samples_do_not_mix(device):
    device = torch_device(device)
    B, S, C, K = 3, 33, 24, 40
    a, weight, bias, residual = operands(B, S, C, K, device)
    c_skip, c_out = torch.randn(2, B, 1, C, device=device)
    alone = linear_skip(a[1:2], weight, bias, residual[1:2], c_skip=c_skip[1:2], c_out=c_out[1:2])
    for tensor in (a, residual, c_skip, c_out):
        tensor[0::2] = torch.nan
    actual = linear_skip(a, weight, bias, residual, c_skip=c_skip, c_out=c_out, implementation="triton")
    assert actual[0::2].isnan().all()
    assert relative_error(actual[1:2], alone) <= 1e-6


def test_non_contiguous(device):
    device = torch_device(device)
    B, S, C, K = 2, 9, 24, 16
    a = torch.randn(B, K, S, device=device).transpose(1, 2)
    weight = torch.randn(K, C, device=device).T
    bias = torch.randn(2 * C, device=device)[::2]
    residual = torch.randn(S, B, C, device=device).transpose(0, 1)
    gate = torch.randn(B, 6, C, device=device)[:, 2:3]
    for linear in (
        (a, weight, bias),
        (a[..., 1:], weight[:, 1:], bias),
        (a[:, :1].expand(2, 9, 16), weight, None),
    ):
        tensors = (*linear, residual)
        actual = linear_skip(*tensors, c_out=gate, implementation="triton")
        assert relative_error(actual, expected(*tensors, 1.0, gate, torch.float64)) <= 1e-6


def test_one_sample_without_a_batch_dimension(device):
    a, weight, bias, residual = (t.to(torch_device(device)) for t in operands(1, 7, 24, 16))
    gate = torch.randn(24, device=a.device)
    actual = linear_skip(a[0], weight, bias, residual[0], c_out=gate, implementation="triton")
    assert relative_error(actual, expected(a, weight, bias, residual, 1.0, gate, torch.float64)[0]) <= 1e-6


def test_residual_of_another_dtype(device):
    device = torch_device(device)
    a, weight, bias, residual = operands(2, 5, 24, 16, device)
    a, weight, bias = a.half(), weight.half(), bias.half()
    actual = linear_skip(a, weight, bias, residual, implementation="triton")
    assert actual.dtype == torch.float32
    assert relative_error(actual, expected(a, weight, bias, residual, 1.0, 1.0, torch.float64)) <= 1e-6


def test_nothing_in_nothing_out(device):
    a, weight, bias, residual = operands(2, 0, 24, 16, torch_device(device))
    assert linear_skip(a, weight, bias, residual, implementation="triton").shape == (2, 0, 24)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_identity_is_exact(as_tensor, device):
    for dtype in DTYPES[device]:
        tensors = operands(2, 9, 24, 16, torch_device(device), dtype)
        c_skip, c_out = 1.0, 0.0
        if as_tensor:
            c_skip, c_out = torch.ones(2, device=tensors[0].device), torch.zeros(2, device=tensors[0].device)
        assert torch.equal(linear_skip(*tensors, c_skip=c_skip, c_out=c_out, implementation="triton"), tensors[3])


@pytest.mark.parametrize("kind", ["sample", "sample and channel", "token"])
def test_gradients_match_the_oracle(kind, device):
    B, S, C, K = 2, 7, 12, 10
    names = ("a", "weight", "bias", "residual", "c_skip", "c_out")
    for dtype in DTYPES[device]:
        tensors = operands(B, S, C, K, torch_device(device), dtype) + skips(kind, B, S, C, torch_device(device))
        g = torch.randn(B, S, C).to(tensors[0])
        grads = []
        for function, copies in (
            (lambda *t: linear_skip(*t[:4], c_skip=t[4], c_out=t[5], implementation="triton"), tensors),
            (expected, tensors),
            (expected, [t.double() for t in tensors]),
        ):
            leaves = [t.detach().clone().requires_grad_() for t in copies]
            function(*leaves).backward(g.to(leaves[0].dtype))
            grads.append([leaf.grad for leaf in leaves])
        for name, ours, low, oracle in zip(names, *grads, strict=True):
            assert ours.dtype == low.dtype, name
            assert_no_worse(ours, low, oracle)


def test_gradient_of_what_needs_it_only(device):
    a, weight, bias, residual = operands(2, 7, 12, 10, torch_device(device))
    weight.requires_grad_()
    out = linear_skip(a, weight, bias, residual, c_out=2.0, implementation="triton")
    residual.zero_()  # not saved: writing to it must not invalidate the graph
    out.sum().backward()
    assert relative_error(weight.grad, 2 * a.double().sum((0, 1)).expand(12, 10)) <= 1e-6
    assert a.grad is None
    assert residual.grad is None


def test_compiles_to_one_graph(device):
    device = torch_device(device)
    *tensors, gate = *operands(2, 7, 12, 10, device), torch.randn(2, 1, 12, device=device)

    def run(*tensors):
        leaves = [t.clone().requires_grad_() for t in tensors]
        function(*leaves).sum().backward()
        return [leaf.grad for leaf in leaves]

    def eager(a, weight, bias, residual, gate):
        return linear_skip(a, weight, bias, residual, c_skip=0.5, c_out=gate, implementation="triton")

    function = eager
    wanted = run(*tensors, gate)
    function = torch.compile(eager, fullgraph=True, backend="eager")
    for ours, theirs in zip(run(*tensors, gate), wanted, strict=True):
        assert torch.equal(ours, theirs)


def test_custom_op_contract(device):
    device = torch_device(device)
    tensors = operands(2, 3, 8, 4, device)
    coefficients = [None, torch.randn(2, 1, 8, device=device)]
    for dtype in (torch.float32, torch.float16):
        arguments = [*(t.requires_grad_() for t in tensors), *coefficients, dtype, 2.0, 4.0]
        torch.library.opcheck(torch.ops.turbo_rcm_patch.linear_skip.default, (PORTABLE, *arguments))
    a, weight = quantized(2, 3, 16, format=INT8, device=device), quantized_weight(8, 16, INT8, device)
    arguments = [a.values, weight.values, *(t.detach() for t in tensors[2:]), None, None, torch.float32, 1.0, 1.0, None]
    torch.library.opcheck(torch.ops.turbo_rcm_patch.linear_skip.default, (PORTABLE, *arguments, a.scale, weight.scale))


def test_errors():
    a, weight, bias, residual = operands(2, 3, 4, 5)
    with pytest.raises(ValueError, match=r"a has shape \[2, 3, 4\] and weight \[4, 5\]"):
        linear_skip(a[..., :4], weight, bias, residual)
    with pytest.raises(ValueError, match=r"a has shape \[1, 2, 3, 5\]; accepted are \[B, S, K\]"):
        linear_skip(a[None], weight, bias, residual[None])
    with pytest.raises(ValueError, match=r"bias has shape \[3\]; it must be \[C=4\]"):
        linear_skip(a, weight, bias[:3], residual)
    with pytest.raises(ValueError, match=r"residual has shape \[2, 2, 4\] but the output is \[2, 3, 4\]"):
        linear_skip(a, weight, bias, residual[:, :2])
    with pytest.raises(ValueError, match=r"dtypes torch.float16, torch.float32; cast them to one"):
        linear_skip(a.half(), weight, bias, residual)
    with pytest.raises(ValueError, match=r"dtype=torch\.int32; accepted are float32, float16, bfloat16 and None for"):
        linear_skip(a, weight, bias, residual, dtype=torch.int32)
    for name, scale in (("residual_scale", -1.0), ("result_scale", 0.0), ("result_scale", float("nan"))):
        with pytest.raises(ValueError, match=f"{name}={scale}; it must be positive and finite"):
            linear_skip(a, weight, bias, residual, **{name: scale})
    with pytest.raises(ValueError, match=r"c_out has shape \[3\]"):
        linear_skip(a, weight, bias, residual, c_out=torch.ones(3))
    with pytest.raises(ValueError, match="both the batch and the channel count"):
        linear_skip(*operands(4, 3, 4, 5), c_skip=torch.ones(4))
    with pytest.raises(ValueError, match=r"no kernel can run \(sm_90 Gluon: float64"):
        linear_skip(*(t.double() for t in (a, weight, bias, residual)), implementation="triton")
    with pytest.raises(ValueError, match="a is a Quantized and weight a Tensor"):
        linear_skip(quantized(2, 3, 5, format=INT8), weight, bias, residual)
    with pytest.raises(ValueError, match=r"a has shape \[6, 5\]; accepted|residual has shape"):
        linear_skip(quantized(6, 5, format=INT8), quantized_weight(4, 5, INT8), bias, residual)
