"""Each op picks a kernel by GPU, dtype and sizes, and launches the one that it picked."""

import pytest
import torch

from scripts.tools import compile_without_gpu, every_launch
from turbo_rcm_patch import kernels
from turbo_rcm_patch.kernels import dispatch
from turbo_rcm_patch.kernels.attention import attention as attention_op
from turbo_rcm_patch.kernels.attention import attention_portable, attention_sm90
from turbo_rcm_patch.kernels.choice import measured
from turbo_rcm_patch.kernels.choice.registry import GLUON, PORTABLE
from turbo_rcm_patch.kernels.conv import conv_pairs_sm90, conv_portable, conv_rows_sm90, conv_sm90
from turbo_rcm_patch.kernels.conv.conv_pairs import CONV_PAIRS, PAIRS
from turbo_rcm_patch.kernels.conv.conv_rows_sm90 import ROWS_ONCE

CUDA, CPU, META = torch.device("cuda"), torch.device("cpu"), torch.device("meta")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GPUS = {"sm_80": (8, 0), "sm_89": (8, 9), "sm_90": (9, 0), "sm_100": (10, 0), "sm_120": (12, 0)}
NO_TMA = "cannot import name 'tma'"


@pytest.fixture(params=GPUS)
def gpu(request):
    """The name of a GPU; meta tensors are on it."""
    with dispatch.meta_is_gpu(GPUS[request.param], 132):
        yield request.param


@pytest.fixture
def cuda(monkeypatch):
    """A device "cuda" of sm_90, or of the capability that the function is called with."""

    def has(capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    monkeypatch.setattr(torch.version, "hip", None)
    has((9, 0))
    return has


# attention


def attention_label(device, dtype, head_dim, **options):
    spec = kernels.AttentionSpec(device=device, dtype=dtype, head_dim=head_dim, **options)
    return kernels.attention_label(kernels.ATTENTION.pick(spec), spec)


def attention_reason(device, dtype, head_dim, **options):
    spec = kernels.AttentionSpec(device=device, dtype=dtype, head_dim=head_dim, attention="auto", **options)
    return kernels.ATTENTION.pick(spec).reason


ATTENTIONS = {
    (BF16, 64): GLUON,
    (FP16, 128): GLUON,
    (BF16, 96): PORTABLE + " (head_dim 96)",
    (FP32, 128): PORTABLE + " (float32 tensors)",
}


@pytest.mark.parametrize("result", [None, kernels.FP8])
@pytest.mark.parametrize(("dtype", "head_dim"), ATTENTIONS)
def test_attentions(gpu, dtype, head_dim, result):
    on_sm_90 = ATTENTIONS[dtype, head_dim]
    if result is None:
        assert attention_label(META, dtype, head_dim) == (on_sm_90 if gpu == "sm_90" else PORTABLE)
        assert attention_label(META, dtype, head_dim, has_residual=True).startswith(PORTABLE)
        backward = attention_label(META, dtype, head_dim, derivative="backward")
        assert backward == (on_sm_90 if gpu == "sm_90" else PORTABLE)
    else:
        spec = kernels.AttentionSpec(device=META, dtype=dtype, head_dim=head_dim, result=result)
        expected = "torch reference" if gpu == "sm_80" else on_sm_90 if gpu == "sm_90" else PORTABLE
        assert kernels.ATTENTION_TO_E4M3.pick(spec).label == expected


def test_attentions_on_the_cpu_and_of_large_heads():
    assert attention_label(CPU, FP32, 64, implementation="triton") == PORTABLE
    assert attention_label(CPU, FP32, 64).startswith("PyTorch SDPA")
    assert attention_reason(CPU, FP32, 64) == "cpu tensors"
    assert attention_reason(CPU, FP32, 384, implementation="triton") == "head_dim 384"
    assert attention_reason(CPU, FP32, 64, implementation="torch") == "implementation='torch'"
    assert attention_reason(CPU, FP32, 64, implementation="triton", derivative="forward") == "autograd"
    with pytest.raises(ValueError, match=r"no kernel can run .*float64 tensors"):
        attention_label(CPU, torch.float64, 64, implementation="triton")


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "options", "expected"),
    [
        ((9, 0), BF16, 128, {}, None),
        ((9, 0), FP16, 64, {}, None),
        ((9, 0), BF16, 128, {"derivative": "backward"}, "not measured with a backward"),
        ((9, 0), BF16, 96, {}, "head_dim 96"),
        ((9, 0), FP32, 128, {}, "not measured in float32"),
        ((10, 0), FP16, 128, {}, "not measured on sm_100"),
        ((8, 9), BF16, 128, {}, "not measured on sm_89"),
    ],
)
def test_where_pytorchs_attention_is_taken(cuda, capability, dtype, head_dim, options, expected):
    cuda(capability)
    assert attention_reason(CUDA, dtype, head_dim, **options) == expected
    spec = {"device": CUDA, "dtype": dtype, "head_dim": head_dim, **options}
    for asked in ({"attention": None}, {"attention": "triton"}, {"attention": "auto", "implementation": "triton"}):
        assert kernels.ATTENTION.pick(kernels.AttentionSpec(**spec, **asked)).kernel.is_fused
    pick = kernels.ATTENTION.pick(kernels.AttentionSpec(**spec, attention="sdpa", implementation="triton"))
    assert (pick.name, pick.reason) == ("PyTorch SDPA", "attention='sdpa'")


def test_on_sm_90_without_gluon_pytorchs_attention_is_taken(cuda, monkeypatch):
    monkeypatch.setattr(attention_sm90, "GLUON_ERROR", NO_TMA)
    assert NO_TMA in attention_reason(CUDA, BF16, 128)
    with dispatch.meta_is_gpu((9, 0), 132):
        label = attention_label(META, BF16, 128)
    assert label.startswith(PORTABLE)
    assert NO_TMA in label


def test_a_slower_kernel_is_not_taken(cuda, monkeypatch):
    cuda((8, 9))
    slow = measured.Verdict(("NVIDIA L40",), 2.0, 1.0)
    monkeypatch.setattr(measured, "_verdict_on", lambda op, device: slow)
    assert attention_reason(CUDA, BF16, 128) == "PyTorch's was faster on NVIDIA L40"


def test_the_backend_that_tune_found_is_asked_first(monkeypatch):
    monkeypatch.setattr(attention_op, "tuned_sdpa", lambda device, dtype, *, crossing: "cuDNN" if crossing else None)
    spec = {"device": CPU, "dtype": BF16, "head_dim": 64, "attention": "auto"}
    names = [
        kernels.ATTENTION.pick(kernels.AttentionSpec(**spec, **options)).name
        for options in (
            {"crossing": True},
            {},
            {"crossing": True, "implementation": "torch"},
            {"crossing": True, "derivative": "backward"},
            {"sdpa": "math"},
        )
    ]
    plain = "PyTorch SDPA"
    assert names == ["PyTorch SDPA, cuDNN first", plain, plain, plain, "PyTorch SDPA, math first"]


def test_sdpas_backend_is_pytorchs_own_choice(monkeypatch):
    assert attention_label(CPU, FP32, 64) in ("PyTorch SDPA (FlashAttention)", "PyTorch SDPA (math)")
    asked = []
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda q, k, v: asked.append(q) or 3)
    assert attention_label(CPU, BF16, 64, derivative="backward") == "PyTorch SDPA (cuDNN)"
    assert (asked[0].dtype, asked[0].shape[-1], asked[0].requires_grad) == (BF16, 64, True)
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda q, k, v: 7)
    assert attention_label(CPU, BF16, 64) == "PyTorch SDPA"
    monkeypatch.delattr(torch, "_fused_sdp_choice")
    assert attention_label(CPU, BF16, 64) == "PyTorch SDPA"


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that ops launch, on a CPU that counts as a GPU of sm_90 with four multiprocessors."""
    names = []
    for module in (attention_portable, attention_sm90, conv_portable, conv_rows_sm90, conv_sm90):
        monkeypatch.setattr(module, "launch_kernel", lambda kernel, *_, **__: names.append(kernel.__name__))
    monkeypatch.setattr(dispatch, "is_sm90", lambda device: True)
    monkeypatch.setattr(dispatch, "is_computed_wrongly", lambda *_: False)
    return names


@pytest.mark.parametrize(("dtype", "head_dim"), ATTENTIONS)
@pytest.mark.parametrize("with_backward", [False, True])
def test_the_attention_that_is_picked_is_launched(launched, dtype, head_dim, with_backward):
    q = torch.zeros(1, 256, 2, head_dim, dtype=dtype, requires_grad=with_backward)
    kernels.attention(q, q, q, implementation="triton")
    name = "attention_kernel" if ATTENTIONS[dtype, head_dim] == GLUON else "_attention_kernel"
    assert [n for n in launched if n != "_join_kernel"] == [name]


def test_an_attention_whose_rows_tma_cannot_read_is_the_portable_kernels(launched):
    q = torch.zeros(2, 256, 2, 128, dtype=BF16)
    kernels.attention(q, q, q[:1].expand(2, -1, -1, -1), implementation="triton")
    assert launched == ["_attention_kernel"]


# 8 bits


@pytest.mark.parametrize(
    ("result", "head_dim", "on_sm_90"),
    [
        (BF16, 128, GLUON),
        (FP16, 64, GLUON),
        (kernels.FP8, 128, GLUON),
        (FP32, 128, PORTABLE + " (float32 tensors)"),
        (BF16, 96, "torch reference"),
    ],
)
def test_8_bit_attentions(gpu, result, head_dim, on_sm_90):
    spec = {"device": META, "dtype": BF16, "head_dim": head_dim}
    v_format = kernels.default_v_format(META)
    assert v_format == (FP16 if gpu == "sm_80" else kernels.FP8)
    pick = kernels.ATTENTION_8BIT.pick(kernels.Attention8BitSpec(**spec, v_format=v_format, result=result))
    if gpu == "sm_80" and result == kernels.FP8:
        assert pick.reason == "fp8 on a GPU older than sm_89"
    else:
        elsewhere = PORTABLE if on_sm_90 != "torch reference" else on_sm_90
        assert pick.label == (on_sm_90 if gpu == "sm_90" else elsewhere)
    quantize = kernels.QUANTIZE_QKV.pick(kernels.Attention8BitSpec(**spec, v_format=v_format))
    assert quantize.label == ("Triton" if head_dim != 96 else "torch reference")


def test_values_in_fp16_are_the_portable_kernels():
    with dispatch.meta_is_gpu((9, 0), 132):
        spec = kernels.Attention8BitSpec(device=META, dtype=BF16, head_dim=128, v_format=FP16, result=BF16)
        assert kernels.ATTENTION_8BIT.pick(spec).label == PORTABLE + " (v in fp16)"


def test_the_interpreter_gets_values_in_fp16():
    formats = [kernels.default_v_format(CPU, implementation) for implementation in ("auto", "triton", "torch")]
    assert formats == [kernels.FP8, FP16, kernels.FP8]


# Sparse attention


def sparse_picks(dtype, head_dim, blocks, v_format):
    """The picks of sparse-linear and of block-sparse attention."""
    sizes = {"head_dim": head_dim, "block_q": blocks[0], "block_k": blocks[1], "v_format": v_format}
    spec = kernels.SparseSpec(device=META, dtype=dtype, result=dtype, **sizes)
    block_sparse = kernels.BLOCK_SPARSE_ATTENTION if v_format is None else kernels.BLOCK_SPARSE_ATTENTION_8BIT
    return kernels.SPARSE_LINEAR_ATTENTION.pick(spec), block_sparse.pick(spec)


UNFIT, WIDE = "blocks of 128 queries and 64 keys", "blocks of 64 queries and 128 keys"
SPARSE = {  # dtype, head_dim, blocks: of sparse-linear and of block-sparse attention in 8 bits on sm_90
    (BF16, 128, (64, 128)): (GLUON, f"{PORTABLE} ({WIDE})"),
    (FP16, 64, (128, 64)): (f"{PORTABLE} ({UNFIT})", f"{PORTABLE} ({UNFIT})"),
    (FP32, 64, (64, 128)): (f"{PORTABLE} (float32 tensors)", f"{PORTABLE} (float32 tensors)"),
    (BF16, 128, (192, 128)): ("torch reference", GLUON),
    (BF16, 96, (64, 128)): ("torch reference", "torch reference"),
    (BF16, 128, (32, 64)): ("torch reference", "torch reference"),
}


@pytest.mark.parametrize(("dtype", "head_dim", "blocks"), SPARSE)
def test_sparse_attentions(gpu, dtype, head_dim, blocks):
    fits = head_dim != 96 and set(blocks) <= {64, 128}
    labels = [pick.label for pick in sparse_picks(dtype, head_dim, blocks, None)]
    assert labels == 2 * [PORTABLE if fits else "torch reference"]
    labels = tuple(pick.label for pick in sparse_picks(dtype, head_dim, blocks, kernels.default_v_format(META)))
    elsewhere = (PORTABLE if fits else "torch reference",) * 2
    assert labels == (SPARSE[dtype, head_dim, blocks] if gpu == "sm_90" else elsewhere)


@pytest.mark.parametrize("gluon", [True, False])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "blocks"), [(BF16, 128, (64, 128)), (BF16, 64, (128, 64)), (FP32, 64, (64, 128))]
)
def test_the_sparse_attention_that_is_picked_is_launched(dtype, head_dim, blocks, gluon, monkeypatch):
    if not gluon:
        monkeypatch.setattr(attention_sm90, "GLUON_ERROR", NO_TMA)
    x, weight = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((1, 300, 2, head_dim), (head_dim,) * 2))
    options = {"topk": 0.5, "block_q": blocks[0], "block_k": blocks[1], "quantized": True}
    seen = compile_without_gpu.record_launches(
        lambda: kernels.sparse_linear_attention(x, x, x, weight, **options), (9, 0)
    )
    with dispatch.meta_is_gpu((9, 0), 4):
        pick, _ = sparse_picks(dtype, head_dim, blocks, kernels.FP8)
    is_gluon = seen[-1].kernel.fn.__name__ == "sparse_linear_attention_8bit_kernel"
    assert pick.name == (GLUON if is_gluon else PORTABLE)
    assert is_gluon == (gluon and dtype == BF16 and blocks == (64, 128))


@pytest.mark.parametrize("gluon", [True, False])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "blocks"),
    [(BF16, 128, None), (BF16, 64, (128, 64)), (FP32, 64, None), (BF16, 64, (192, 128))],
)
def test_the_block_sparse_attention_that_is_picked_is_launched(dtype, head_dim, blocks, gluon, monkeypatch):
    if not gluon:
        monkeypatch.setattr(attention_sm90, "GLUON_ERROR", NO_TMA)
    qkv = every_launch.quantized_qkv(kernels.FP8, head_dim)._replace(dtype=dtype)
    sizes = {} if blocks is None else {"block_q": blocks[0], "block_k": blocks[1]}
    seen = compile_without_gpu.record_launches(
        lambda: kernels.block_sparse_attention_8bit(qkv, mass=0.5, **sizes), (9, 0)
    )
    with dispatch.meta_is_gpu((9, 0), 4):
        blocks = blocks or kernels.block_sparse_sizes(META, dtype, quantized=True)
        _, pick = sparse_picks(dtype, head_dim, blocks, kernels.FP8)
    if blocks == (192, 128) and not gluon:
        assert (seen, pick.name) == ([], "torch reference")
        assert NO_TMA in pick.reason
        return
    is_gluon = seen[-1].kernel.fn.__name__ == "attention_8bit_kernel"
    assert pick.name == (GLUON if is_gluon else PORTABLE)
    assert is_gluon == (blocks == (192, 128))


# conv_skip

NARROW = f"{PORTABLE} (fewer than 64 channels of the result, or no multiple of 8)"
CONVOLUTIONS = {  # T, H, W, C, N, kt, kh, upsample, interleave
    "96 channels": (BF16, (2, 9, 17, 96, 96, 3, 3, False, 1), ROWS_ONCE),
    "96 channels of an image": (FP16, (4, 6, 64, 32, 96, 1, 3, False, 1), ROWS_ONCE),
    "96 channels, few rows": (BF16, (1, 6, 100, 96, 96, 3, 3, False, 1), GLUON),
    "3×3×3": (BF16, (2, 9, 17, 96, 192, 3, 3, False, 1), GLUON),
    "upsampled": (FP16, (1, 9, 17, 64, 192, 1, 3, True, 1), GLUON),
    "interleaved": (BF16, (4, 9, 17, 64, 192, 3, 1, False, 2), GLUON),
    "pixels": (BF16, (4, 16, 16, 32, 64, 1, 1, False, 1), GLUON),
    "fp32": (FP32, (2, 9, 17, 96, 96, 3, 3, False, 1), PORTABLE + " (float32 tensors)"),
    "channels": (BF16, (2, 9, 17, 16, 96, 3, 3, False, 1), PORTABLE + " (channels that are no multiple of 32)"),
    "last": (BF16, (2, 9, 17, 96, 3, 3, 3, False, 1), NARROW),
    "odd": (BF16, (2, 9, 17, 96, 100, 3, 3, False, 1), NARROW),
    "two phases": (BF16, (1, 9, 17, 64, 72, 1, 3, True, 1), PORTABLE + " (tiles with columns of two pixels or frames)"),
    "few tiles": (BF16, (1, 9, 12, 96, 96, 3, 3, False, 1), PORTABLE + " (fewer tiles than multiprocessors)"),
}


def convolution(device, dtype, sizes, **options):
    T, H, W, C, N, kt, kh, upsample, interleave = sizes
    shapes = {"shape": (1, T, H, W, C), "weight_shape": (N * interleave, kt, kh, kh, C)}
    options |= {"upsample": upsample, "interleave": interleave}
    return kernels.CONV_SKIP.pick(kernels.ConvSpec(device=device, dtype=dtype, **shapes, **options))


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions(case):
    dtype, sizes, on_sm_90 = CONVOLUTIONS[case]
    for name, capability in GPUS.items():
        with dispatch.meta_is_gpu(capability, 4):
            label = convolution(META, dtype, sizes).label
        assert label == (on_sm_90 if name == "sm_90" else PORTABLE)
    assert convolution(CPU, dtype, sizes, implementation="torch").name == "torch reference"
    assert convolution(CPU, dtype, sizes, implementation="torch", in_model=True).name == "PyTorch convolution"


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_the_convolution_that_is_picked_is_launched(launched, case):
    dtype, (T, H, W, C, N, kt, kh, upsample, interleave), expected = CONVOLUTIONS[case]
    x, front = (torch.zeros(1, frames, H, W, C, dtype=dtype) for frames in (T, kt - 1))
    weight = torch.zeros(N * interleave, kt, kh, kh, C, dtype=dtype)
    options = {"upsample": upsample, "interleave": interleave}
    kernels.conv_skip(x, weight, None, front=front, implementation="triton", **options)
    then = ["_add_window_kernel"] if case == "last" else []  # of a result of few channels
    names = {ROWS_ONCE: "conv_rows_kernel", GLUON: "conv_kernel"}
    assert launched == [names.get(expected, "_conv_skip_kernel"), *then]


OTHERS_IN_PAIRS = "not for other windows than 3×3×3 or other channels"
IN_PAIRS = {  # dtype; T, H, W, C, N, kt; why not on sm_90, with Triton before 3.8 and from then on
    "192 channels": (BF16, (4, 16, 16, 64, 192, 3), None, "not for these channels with Triton 3.8 and later"),
    "384 channels": (BF16, (5, 16, 16, 128, 384, 3), None, None),
    "fp16": (FP16, (2, 16, 16, 64, 384, 3), "not for a model in fp16, whose sums of frames would need more bits"),
    "an odd frame": (BF16, (3, 16, 16, 64, 384, 3), "not for so few frames"),
    "96 channels": (BF16, (2, 16, 16, 96, 384, 3), OTHERS_IN_PAIRS),
    "images": (BF16, (2, 16, 16, 64, 384, 1), OTHERS_IN_PAIRS),
    "few tiles": (BF16, (2, 8, 16, 64, 384, 3), "not for fewer tiles than multiprocessors"),
}


@pytest.mark.parametrize("has_wide", [True, False])
@pytest.mark.parametrize("case", IN_PAIRS)
def test_convolutions_of_pairs_of_frames(case, has_wide, monkeypatch):
    """On other GPUs, and where a reason is given, the op has its reference alone, which the patch does not run."""
    dtype, (T, H, W, C, N, kt), *reasons = IN_PAIRS[case]
    monkeypatch.setattr(conv_pairs_sm90, "HAS_WIDE", has_wide)
    shapes = {"shape": (1, T, H, W, C), "weight_shape": (N, kt, 3, 3, C)}
    for name, capability in GPUS.items():
        with dispatch.meta_is_gpu(capability, 4):
            pick = CONV_PAIRS.pick(kernels.ConvSpec(device=META, dtype=dtype, **shapes))
        reason = reasons[0 if has_wide else -1] if name == "sm_90" else "no GPU of sm_90"
        assert pick.reasons == (() if reason is None else ((PAIRS, reason),))
        assert pick.name == (PAIRS if reason is None else "torch reference")


@pytest.mark.parametrize("odd", ["x", "front"])
def test_a_convolution_at_an_odd_address_is_not_the_gluon_kernels(odd, launched):
    memory = torch.zeros(8 + 2 * 9 * 17 * 96, dtype=BF16)
    x, front = (memory[name == odd :][: 2 * 9 * 17 * 96].view(1, 2, 9, 17, 96) for name in ("x", "front"))
    kernels.conv_skip(x, torch.zeros(96, 3, 3, 3, 96, dtype=BF16), None, front=front, implementation="triton")
    assert launched == ["_conv_skip_kernel"]


def test_pytorchs_convolution_is_taken_until_ours_is_measured(cuda, monkeypatch):
    def reason():
        pick = convolution(CUDA, BF16, (4, 60, 104, 96, 96, 3, 3, False, 1), in_model=True)
        assert pick.kernel.is_fused == (pick.reason is None)
        return pick.reason

    for module in (conv_rows_sm90, conv_sm90):
        monkeypatch.setattr(module, "device_properties", lambda device: ((9, 0), 132))
    assert reason() is None
    monkeypatch.setattr(conv_sm90, "GLUON_ERROR", NO_TMA)
    assert NO_TMA in reason()
    monkeypatch.setattr(measured, "_verdict_on", lambda op, device: None)
    assert reason() == "not measured on sm_90"
