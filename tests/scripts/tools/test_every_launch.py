"""The calls for the compile gate reach every kernel and tile, and launches are on their tensors' device."""

import ast
import functools
from itertools import product
from pathlib import Path

import pytest
import torch

from scripts.tools import every_launch
from scripts.tools.compile_without_gpu import record_launches
from scripts.tools.every_launch import KERNEL_DTYPES, LAUNCHES, without_gluon
from turbo_rcm_patch import kernels
from turbo_rcm_patch.kernels import dispatch
from turbo_rcm_patch.kernels.attention import attention_tiles
from turbo_rcm_patch.kernels.coefficient import ONE, PER_CHANNEL, PER_RUN, PER_SAMPLE, PER_TOKEN
from turbo_rcm_patch.kernels.launch import compile_ahead, recorded
from turbo_rcm_patch.kernels.linear import gemm_portable as gemm
from turbo_rcm_patch.kernels.quantized import FP8, INT8

CAPABILITIES = [(8, 0), (8, 9), (9, 0), (12, 0)]
FILES = list(Path(kernels.__file__).parent.rglob("*.py"))


@functools.cache
def launches(capability):
    everything = [launch for call in LAUNCHES.values() for launch in record_launches(call, capability)]
    with without_gluon():
        return everything + [launch for call in LAUNCHES.values() for launch in record_launches(call, capability)]


def kernels_in(path):
    """Functions that Triton compiles and that no other function of the package calls: they are for a launch."""
    tree = ast.parse(path.read_text())
    jitted = {n.name for n in tree.body if isinstance(n, ast.FunctionDef) and any(map(_is_jit, n.decorator_list))}
    return {f"{path.stem}.{name}" for name in jitted if name.endswith("_kernel")}


def _is_jit(decorator):
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return getattr(function, "attr", getattr(function, "id", None)) == "jit"  # triton.jit, and the package's for Gluon


def started_in(path):
    """Return how often a file starts a kernel by launch_kernel, and by Triton's brackets."""
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    by_name = sum(isinstance(function, ast.Name) and function.id == "launch_kernel" for function in calls)
    by_brackets = [function.value for function in calls if isinstance(function, ast.Subscript)]
    return by_name, sum(not ast.unparse(value).startswith("self.") for value in by_brackets)


def test_every_kernel_is_launched():
    written = set().union(*map(kernels_in, FILES))
    assert {"skip._skip_kernel", "gemm_sm90_kernel.gemm_of_three_kernel"} < written
    launched = {_name(launch.kernel) for launch in launches((9, 0))}
    assert launched == written


def _name(kernel):
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"


def test_kernels_are_started_by_launch_kernel_alone():
    started = {path.stem: started_in(path) for path in FILES}
    assert started["skip"] == (1, 0)
    assert {name for name, (_, by_brackets) in started.items() if by_brackets} == {"launch"}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_tile_is_launched(capability):
    seen = {tuple(sorted(launch.options.items())) for launch in launches(capability) if "ROWS" in launch.options}
    formats = (INT8, FP8) if capability >= (8, 9) else (INT8,)
    for dtype in (*KERNEL_DTYPES, *formats):
        has_tma = capability >= (9, 0) and dtype != torch.float32
        for descriptors in {has_tma if dtype.itemsize == 1 else False, has_tma}:  # 8 bits are always aligned
            for tiles in gemm.tile_candidates(capability, dtype, descriptors):
                wanted = {**tiles.options, "DESCRIPTORS": descriptors}.items()
                assert any(wanted <= dict(options).items() for options in seen), tiles
    attention = [x for x in launches(capability) if x.kernel.fn.__name__.startswith("_attention")]
    for name, kernel in (
        ("attention", "_attention"),
        ("grad_kv", "_attention_grad_kv"),
        ("grad_q", "_attention_grad_q"),
    ):
        for dtype, head_dim in product((torch.float32, torch.bfloat16), (64, 128, 256)):
            tile = attention_tiles.choose_tile(name, capability, dtype, head_dim)
            wanted = tile._asdict().items() | {("HEAD_DIM", head_dim)}
            assert any(x.kernel.fn.__name__ == f"{kernel}_kernel" and wanted <= x.options.items() for x in attention)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kind_of_coefficient_and_every_dtype_reach_every_skip(capability):
    skips = [x for x in launches(capability) if x.kernel.fn.__name__ in ("_skip_kernel", "_linear_skip_kernel")]
    kinds = {(x.kernel.fn.__name__, x.options.get("KINDS") or (x.options["SKIP"], x.options["OUT"])) for x in skips}
    for name, place in product(("_skip_kernel", "_linear_skip_kernel"), (0, 1)):
        by_run = {PER_RUN} if place else set()
        wanted = {ONE, PER_SAMPLE, PER_CHANNEL, PER_TOKEN} | by_run
        assert {pair[place] for kernel, pair in kinds if kernel == name} == wanted
    named = [dict(zip(x.kernel.arg_names, x.arguments, strict=False)) for x in skips]
    dtypes = {(x.kernel.fn.__name__, y["residual"].dtype, y["out"].dtype) for x, y in zip(skips, named, strict=True)}
    assert len(dtypes) == 2 * 3 * 3


def test_attention_on_sm90_with_and_without_parts_and_logsumexp():
    seen = [x for x in record_launches(LAUNCHES["attention"], (9, 0)) if x.kernel.fn.__name__ == "attention_kernel"]
    named = [dict(zip(x.kernel.arg_names, x.arguments, strict=False)) for x in seen]
    assert len({(x["partial_out"] is None, x["lse"] is None) for x in named}) == 4
    assert {(x["q"].base.dtype, x["q"].block_shape[-1]) for x in named} > {(torch.bfloat16, 64), (torch.float16, 128)}


def test_meta_tensors_are_on_a_gpu_within_alone():
    device = torch.device("meta")
    assert dispatch.why_not_triton_on(device, torch.float32) == "meta tensors"
    with dispatch.meta_is_gpu((9, 0), 7):
        assert dispatch.why_not_triton_on(device, torch.float32) is None
        assert dispatch.is_sm90(device)
        assert dispatch.device_properties(device) == ((9, 0), 7)
        assert dispatch.why_not_triton_on(torch.device("cpu"), torch.float64) is not None
    with dispatch.meta_is_gpu((7, 5), 7):
        assert dispatch.why_not_triton_on(device, torch.float32) == "GPU older than sm_80"
    assert dispatch.why_not_triton_on(device, torch.float32) == "meta tensors"
    assert not dispatch.is_sm90(device)


@pytest.mark.parametrize("op", LAUNCHES)
def test_every_launch_is_on_its_tensors_device(op, monkeypatch):
    within = []

    class DeviceOf:
        def __init__(self, tensor):
            self.tensor = tensor

        def __enter__(self):
            within.append(self.tensor)

        def __exit__(self, *_):
            within.pop()

    current = []
    monkeypatch.setattr(torch.cuda, "device_of", DeviceOf)
    with (
        dispatch.meta_is_gpu((9, 0), 100),
        recorded(lambda launch: current.append((launch, bool(within) and within[-1].device.type == "meta"))),
    ):
        LAUNCHES[op]()
    assert current
    assert all(guarded for _, guarded in current), [x.kernel.fn.__name__ for x, guarded in current if not guarded]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("op", LAUNCHES)
def test_a_launch_on_a_device_that_is_not_the_current_one(op, monkeypatch):
    """The calls of the gate, on a second GPU while the first is current: each kernel runs where its tensors are."""
    gpu = torch.device("cuda", 1)

    def ones(*shape, dtype=torch.bfloat16):
        return torch.ones(shape, dtype=dtype, device=gpu)

    monkeypatch.setattr(every_launch, "DEVICE", gpu)
    monkeypatch.setattr(every_launch, "meta", ones)
    assert every_launch.formats()  # some ops launch nothing else
    assert torch.cuda.current_device() == 0
    compile_ahead(LAUNCHES[op])  # compiled one after the other, the kernels of some ops take minutes
    LAUNCHES[op]()
    torch.cuda.synchronize(1)
    assert torch.cuda.current_device() == 0
