"""Skip coefficients against their formulas in fp64, at the ends of their domains, and in every accepted type of t."""

import math

import pytest
import torch

from turbo_rcm_patch import coefficients

FORMS = {
    "edm": coefficients.edm,
    "trigflow": coefficients.trigflow,
    "rcm_boundary": coefficients.rcm_boundary,
    "rectified_flow": coefficients.rectified_flow,
    "user": coefficients.user(lambda t: 1 / (1 + t), lambda t: t * 2),
}
FORMULAS = {
    "edm": lambda t: (1 / (t * t + 1), t / math.sqrt(t * t + 1)),
    "trigflow": lambda t: (math.cos(t), -math.sin(t)),
    "rcm_boundary": lambda t: (1 / (math.cos(t) + math.sin(t)), -math.sin(t) / (math.cos(t) + math.sin(t))),
    "rectified_flow": lambda t: (1.0, -t),
    "user": lambda t: (1 / (1 + t), t * 2),
}
TIMES = (0.0, 1e-3, 0.25, 0.7, 1.0)
forms = pytest.mark.parametrize("form", FORMS)


@forms
def test_floats_follow_the_formula(form):
    for t in TIMES:
        values = FORMS[form](t)
        assert all(type(value) is float for value in values)
        assert values == pytest.approx(FORMULAS[form](t), rel=1e-15)


@forms
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tensors_follow_the_formula_in_fp32_or_better(form, dtype):
    t = torch.tensor(TIMES, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    expected = torch.tensor([FORMULAS[form](x) for x in t.tolist()], dtype=torch.float64)
    for value, wanted in zip(FORMS[form](t), expected.unbind(1), strict=True):
        assert value.dtype == wide
        assert value.shape == t.shape
        torch.testing.assert_close(value.double(), wanted, rtol=4 * torch.finfo(wide).eps, atol=0)


@forms
def test_scalar_and_integer_tensors(form):
    for t in (torch.tensor(1.0), torch.tensor(1), 1):
        values = FORMS[form](t)
        if isinstance(t, torch.Tensor):
            assert all(value.shape == () and value.dtype == torch.float32 for value in values)
        assert [float(value) for value in values] == pytest.approx(FORMULAS[form](1.0), rel=1e-6)


@forms
def test_identity_at_zero_is_exact(form):
    for zero in (0.0, torch.zeros(3), torch.zeros((), dtype=torch.bfloat16)):
        c_skip, c_out = FORMS[form](zero)
        assert torch.equal(torch.as_tensor(c_skip), torch.ones_like(torch.as_tensor(c_skip)))
        assert torch.equal(torch.as_tensor(c_out), torch.zeros_like(torch.as_tensor(c_out)))


@pytest.mark.parametrize("sigma_data", [1.0, 0.5, 3.0])
def test_edm_limits_and_no_overflow(sigma_data):
    assert coefficients.edm(math.inf, sigma_data) == (0.0, sigma_data)
    assert coefficients.edm(1e300, sigma_data) == pytest.approx((0.0, sigma_data))
    t = torch.tensor([math.inf, 1e38, 1e20])
    c_skip, c_out = coefficients.edm(t, sigma_data)
    assert c_skip[0] == 0
    torch.testing.assert_close(c_skip, torch.zeros(3), rtol=0, atol=1e-37)
    assert torch.equal(c_out, torch.full((3,), sigma_data))


def test_sigma_data():
    c_skip, c_out = coefficients.edm(2.0, sigma_data=0.5)
    assert (c_skip, c_out) == pytest.approx((0.25 / 4.25, 1.0 / math.sqrt(4.25)))
    assert coefficients.trigflow(0.3, sigma_data=0.5) == pytest.approx((math.cos(0.3), -0.5 * math.sin(0.3)))


def test_trigflow_ends_at_noise_in_both_precisions():
    for t in (math.pi / 2, torch.tensor(math.pi / 2), torch.tensor(math.pi / 2, dtype=torch.float64)):
        assert [float(value) for value in coefficients.trigflow(t)] == pytest.approx([0, -1], abs=1e-7)
        assert [float(value) for value in coefficients.rcm_boundary(t)] == pytest.approx([1, -1], abs=1e-6)


def test_edm_gradient_is_finite_over_the_domain():
    t = torch.tensor([0.0, 1e-3, 2.0, 1e10], dtype=torch.float64, requires_grad=True)
    for index in (0, 1):
        (gradient,) = torch.autograd.grad(coefficients.edm(t)[index].sum(), t)
        assert gradient.isfinite().all()
    assert torch.autograd.gradcheck(coefficients.edm, torch.tensor([0.1, 2.0], dtype=torch.float64, requires_grad=True))


def test_gated_residual_passes_the_gate_through():
    gate = torch.randn(2, 1, 5, dtype=torch.bfloat16)
    c_skip, c_out = coefficients.gated_residual(gate)
    assert c_skip == 1.0
    assert c_out is gate


@forms
@pytest.mark.parametrize("bad", [-1e-6, math.nan, -math.inf])
def test_negative_and_nan_times_are_errors(form, bad):
    with pytest.raises(ValueError, match="outside"):
        FORMS[form](bad)
    with pytest.raises(ValueError, match="outside"):
        FORMS[form](torch.tensor([0.5, bad]))


@pytest.mark.parametrize(("form", "bad"), [("trigflow", 1.58), ("rcm_boundary", 1.58), ("rectified_flow", 1.001)])
def test_times_above_the_domain_are_errors(form, bad):
    with pytest.raises(ValueError, match=rf"{form}.*outside"):
        FORMS[form](bad)
    with pytest.raises(ValueError, match=rf"{form}.*outside"):
        FORMS[form](torch.tensor(bad))


@pytest.mark.parametrize("sigma_data", [0, -1.0, math.nan, math.inf])
def test_bad_sigma_data(sigma_data):
    for form in (coefficients.edm, coefficients.trigflow):
        with pytest.raises(ValueError, match="sigma_data"):
            form(0.5, sigma_data)


def test_bad_types_and_shapes():
    with pytest.raises(TypeError, match="t is a str"):
        coefficients.edm("0.5")
    with pytest.raises(ValueError, match=r"shape \[2, 1\]"):
        coefficients.edm(torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"torch\.bool"):
        coefficients.edm(torch.ones(2, dtype=torch.bool))
    with pytest.raises(TypeError, match="c_out is None"):
        coefficients.user(lambda t: t, None)


@forms
def test_traces_in_one_graph(form):
    compiled = torch.compile(FORMS[form], fullgraph=True, backend="eager")
    t = torch.tensor(TIMES)
    for value, wanted in zip(compiled(t), FORMS[form](t), strict=True):
        assert torch.equal(value, wanted)


@pytest.mark.gpu
@forms
def test_captures_in_a_cuda_graph(form):
    t = torch.tensor(TIMES, device="cuda")
    expected = FORMS[form](t)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = FORMS[form](t)
    graph.replay()
    for value, wanted in zip(captured, expected, strict=True):
        assert torch.equal(value, wanted)
