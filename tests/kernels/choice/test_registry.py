"""An op takes the first of its kernels that can run, and says why the earlier ones cannot."""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from turbo_rcm_patch import kernels
from turbo_rcm_patch.kernels import FP8, dispatch
from turbo_rcm_patch.kernels.choice.registry import (
    AUTOGRAD,
    Kernel,
    Op,
    Spec,
    check_operands,
    derivative_of,
    why_not_ours,
    why_not_reference,
)
from turbo_rcm_patch.kernels.choice.registry import spec_of as spec_of_operands

CPU, META = torch.device("cpu"), torch.device("meta")
BF16 = torch.bfloat16


def op_of(*kernels):
    return Op("an_op", tuple(Kernel(name, lambda spec, reason=reason: reason, print) for name, reason in kernels))


class WithBackward(Spec):
    has_backward = True


def spec_of(**options):
    return Spec(**{"device": META, "dtype": BF16, **options})


def test_the_first_kernel_that_can_run_is_picked_with_the_reasons_of_those_before():
    op = op_of(("one", "no GPU of sm_90"), ("two", "float64 tensors"), ("three", None), ("four", None))
    pick = op.pick(spec_of())
    assert pick.name == "three"
    assert pick.launch is op.named("three").launch
    assert pick.reasons == (("one", "no GPU of sm_90"), ("two", "float64 tensors"))


FEW, ELSEWHERE = ("one", "few tiles"), ("two", "no GPU of sm_90")


@pytest.mark.parametrize(
    ("before", "label", "reason"),
    [
        ([], "last", None),
        ([ELSEWHERE], "last", "no GPU of sm_90"),
        ([("one", "not chosen by turbo-rcm tune")], "last", "not chosen by turbo-rcm tune"),
        ([FEW, ELSEWHERE], "last (few tiles)", "few tiles"),
        ([FEW, ("two", "autograd")], "last (autograd)", "autograd"),
    ],
)
def test_the_reason_to_show_is_the_nearest_that_is_news(before, label, reason):
    op = op_of(*before, ("last", None))
    pick = op.pick(spec_of())
    assert (pick.label, pick.reason) == (label, None)
    by_pytorch = pick._replace(kernel=replace(pick.kernel, is_fused=False))
    assert (by_pytorch.label, by_pytorch.reason) == ("last", reason)


def test_no_kernel_that_can_run_is_an_error_with_every_reason():
    with pytest.raises(ValueError, match=r"an_op: no kernel can run \(one: few tiles; two: autograd\)"):
        op_of(("one", "few tiles"), ("two", "autograd")).pick(spec_of())


def test_a_kernel_by_its_name():
    op = op_of(("one", None), ("two", None))
    assert op.named("two") is op.kernels[1]
    with pytest.raises(ValueError, match="an_op has no kernel 'three'; it has one, two"):
        op.named("three")


def test_a_spec_can_be_a_key_and_cannot_change():
    assert len({spec_of(), spec_of(), spec_of(dtype=torch.float16)}) == 2
    with pytest.raises(FrozenInstanceError):
        spec_of().dtype = torch.float16


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"implementation": "torch"}, "implementation='torch'"),
        ({"derivative": "backward"}, AUTOGRAD),
        ({"derivative": "forward"}, AUTOGRAD),
        ({"dtype": torch.float64}, "float64 tensors"),
        ({"others": (torch.float32, torch.int64)}, "int64 tensors"),
        ({"dtype": FP8}, "float8_e4m3fn tensors"),
        ({"dtype": FP8, "eight_bits": (FP8,)}, None),
        ({"result": FP8}, None),
    ],
)
def test_why_no_triton_kernel_runs_on_a_gpu(options, reason):
    with dispatch.meta_is_gpu((9, 0), 132):
        assert why_not_ours(spec_of(**options)) == reason


@pytest.mark.parametrize("position", range(4))
def test_the_dtype_of_every_operand_is_asked(position):
    operands = [torch.empty(2, dtype=BF16, device=META) for _ in range(4)]
    operands[position] = operands[position].double()
    with dispatch.meta_is_gpu((9, 0), 132):
        assert why_not_ours(spec_of_operands("auto", *operands, None)) == "float64 tensors"


def _rows(*shape):
    return torch.zeros(*shape)


# op: its operands, each of which is tried in fp64
OPERANDS = {
    "skip": {"residual": _rows(1, 3, 8), "output": _rows(1, 3, 8), "c_skip": _rows(1, 1, 8)},
    "layer_norm_modulate": {"x": _rows(1, 3, 8), "weight": _rows(8), "scale": _rows(1, 8), "shift": _rows(1, 8)},
    "rms_norm_rope": {"x": _rows(1, 3, 8), "weight": _rows(8), "cos": _rows(3, 4), "sin": _rows(3, 4)},
    "linear_skip": {"a": _rows(1, 3, 8), "weight": _rows(8, 8), "bias": _rows(8), "residual": _rows(1, 3, 8)},
}


@pytest.mark.parametrize("op", OPERANDS)
def test_ops_refuse_any_operand_that_triton_does_not_take(op):
    options = {"heads": 1, "eps": 1e-6} if op == "rms_norm_rope" else {}
    for name, operand in OPERANDS[op].items():
        given = {**OPERANDS[op], name: operand.double()}
        with pytest.raises(ValueError, match=r"float64|dtype"):
            getattr(kernels, op)(**given, **options, implementation="triton")


def test_a_kernel_with_a_backward_runs_under_autograd_but_not_in_forward_mode():
    with dispatch.meta_is_gpu((9, 0), 132):
        assert why_not_ours(WithBackward(device=META, dtype=BF16, derivative="backward")) is None
        assert why_not_ours(WithBackward(device=META, dtype=BF16, derivative="forward")) == AUTOGRAD


def test_old_gpus_have_their_reasons():
    with dispatch.meta_is_gpu((7, 5), 40):
        assert why_not_ours(spec_of()) == "GPU older than sm_80"
    with dispatch.meta_is_gpu((8, 0), 108):
        assert why_not_ours(spec_of(eight_bits=(FP8,))) == "fp8 on a GPU older than sm_89"
        assert why_not_ours(spec_of(result=FP8)) == "fp8 on a GPU older than sm_89"


def test_the_interpreter_runs_only_where_it_is_asked_for():
    spec = spec_of(device=CPU, dtype=torch.float16)
    assert why_not_ours(spec) == "cpu tensors"
    assert why_not_reference(spec) is None
    asked = replace(spec, implementation="triton")
    assert why_not_ours(asked) is None
    assert "rounds it wrongly" in why_not_ours(replace(asked, result=FP8))


@pytest.mark.parametrize("of", [{"dtype": BF16}, {"result": BF16}, {"others": (torch.float32, BF16)}])
def test_the_interpreter_refuses_bf16(of):
    spec = spec_of(**{"device": CPU, "dtype": torch.float32, **of})
    assert why_not_ours(spec) == "cpu tensors"
    reason = "bfloat16 in Triton's interpreter, which computes it wrongly"
    assert why_not_ours(replace(spec, implementation="triton")) == reason
    assert (dispatch.why_not_triton_on(CPU, BF16), dispatch.why_not_triton_on(CPU, torch.float16)) == (reason, None)


def test_an_op_in_bf16_in_the_interpreter_is_an_error_with_the_reason():
    a, weight, residual = (torch.ones(shape, dtype=BF16) for shape in ((1, 4, 16), (16, 16), (1, 4, 16)))
    with pytest.raises(ValueError, match="bfloat16 in Triton's interpreter, which computes it wrongly"):
        kernels.linear_skip(a, weight, None, residual, implementation="triton")


def test_the_reference_gives_way_to_kernels_that_were_asked_for_but_not_under_autograd():
    asked = spec_of(implementation="triton")
    assert "'triton' was asked for" in why_not_reference(asked)
    with dispatch.meta_is_gpu((9, 0), 132):
        with_backward = WithBackward(device=META, dtype=BF16, implementation="triton", derivative="backward")
        assert "'triton' was asked for" in why_not_reference(with_backward)
        assert why_not_reference(replace(asked, derivative="backward")) is None


def test_operands_on_two_devices_and_unknown_implementations_are_errors():
    with pytest.raises(ValueError, match="different devices: cpu, meta"):
        check_operands("auto", [torch.empty(1), torch.empty(1, device="meta")])
    with pytest.raises(ValueError, match="implementation='cuda' is unknown"):
        check_operands("cuda", [])


def test_the_derivative_of_a_call():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    assert derivative_of([x, y]) == "backward"
    assert derivative_of([y]) is None
    with torch.no_grad():
        assert derivative_of([x, y]) is None
    with torch.autograd.forward_ad.dual_level():
        assert derivative_of([y]) is None
        assert derivative_of([torch.autograd.forward_ad.make_dual(y, y)]) == "forward"


def test_torch_compile_traces_a_pick():
    op = Op(
        "an_op",
        (
            Kernel("doubled", lambda spec: None if spec.dtype == torch.float32 else "dtype", lambda x: 2 * x),
            Kernel("tripled", lambda spec: None, lambda x: 3 * x),
        ),
    )

    @torch.compile(fullgraph=True, backend="eager")
    def run(x):
        return op.pick(Spec(device=x.device, dtype=x.dtype)).launch(x)

    assert run(torch.ones(2)).tolist() == [2, 2]
    assert run(torch.ones(2, dtype=torch.float64)).tolist() == [3, 3]
