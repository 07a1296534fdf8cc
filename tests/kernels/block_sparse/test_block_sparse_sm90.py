"""Block-sparse attention in 8 bits on sm_90: refusals, the kernel's roles in threads on the CPU, results on the GPU."""

import collections
import functools
import threading

import pytest
import torch

from scripts.tools import compile_without_gpu, every_launch
from tests.kernels import gluon_on_cpu
from tests.kernels.block_sparse.test_block_sparse_reference import inputs as structured
from tests.kernels.eight_bit import assert_rounded_once
from tests.oracle import relative_error
from turbo_rcm_patch.kernels import attention_8bit, block_sparse_attention_8bit, block_sparse_sizes, dispatch
from turbo_rcm_patch.kernels.attention import attention_sm90
from turbo_rcm_patch.kernels.attention_8bit import attention_8bit_sm90
from turbo_rcm_patch.kernels.attention_8bit.attention_8bit_reference import output_scale
from turbo_rcm_patch.kernels.attention_8bit.quantize_qkv import QuantizedQKV, quantize_qkv
from turbo_rcm_patch.kernels.block_sparse import block_sparse_reference as definition
from turbo_rcm_patch.kernels.block_sparse import block_sparse_sm90 as sm90
from turbo_rcm_patch.kernels.block_sparse.block_sparse_reference import LN_2, Lists
from turbo_rcm_patch.kernels.quantized import FP8
from turbo_rcm_patch.kernels.sparse_linear.sparse_linear_portable import Blocks

kernel_module = pytest.importorskip("turbo_rcm_patch.kernels.attention_8bit.attention_8bit_sm90_kernel")
shared_module = pytest.importorskip("turbo_rcm_patch.kernels.attention.attention_sm90_kernel")

BLOCK_Q, BLOCK_K = sm90.BLOCKS
# B, S, H, D. "cut blocks": the last block of queries and of keys. "many keys": longer lists than stages.
SHAPES = {
    "one token": (1, 1, 1, 64),
    "cut blocks": (2, 200, 2, 128),
    "whole blocks": (1, 384, 1, 64),
    "many keys": (1, 900, 2, 128),
}


def in_8_bits(B, S, H, D, dtype, device="cpu"):
    qkv = (x.to(device, dtype).flatten(2) for x in structured(B, S, H, D, torch.float32))
    return quantize_qkv(*qkv, heads=H, v_format=FP8, implementation="torch")


def drawn_lists(qkv: QuantizedQKV) -> Lists:
    """Return lists of one block up to all, with shares as if p were even. Most lists have the last block (cut)."""
    B, S, H, _ = qkv.q.shape
    rows, key_blocks = (B, H, -(-S // BLOCK_Q)), -(-S // BLOCK_K)
    counts = torch.randint(1, key_blocks + 1, rows, dtype=torch.int32)
    order = torch.rand(*rows, key_blocks).argsort(-1)
    kept = torch.zeros(*rows, key_blocks, dtype=torch.bool)
    kept.scatter_(-1, order, torch.arange(key_blocks) < counts[..., None])
    block_map = (~kept).int().sort(stable=True, dim=-1).indices.int()
    left = (~kept).float() / key_blocks
    return Lists(block_map, counts, left, 1 - left.sum(-1))


def defined(qkv: QuantizedQKV, found: Lists, *, exactly: bool) -> torch.Tensor:
    """Return the definition's result for these lists. exactly: True to leave the softmax's weights unrounded."""
    q, k = qkv.dequantize_qk()
    q, k, v = (x.double() if exactly else x for x in (q, k, qkv.dequantize_v()))
    of_exact = found._replace(left=found.left.to(q.dtype), kept_share=found.kept_share.to(q.dtype))

    def attend(queries, keys, values, is_kept):
        if exactly:
            return (queries @ keys.mT).masked_fill(~is_kept, -torch.inf).softmax(-1) @ values
        scale = qkv.v_scale[:, :, None]
        return definition.attend_8bit(queries / LN_2, keys, values / scale, FP8, is_kept) * scale

    return definition._attend(q, k, v, of_exact, BLOCK_Q, BLOCK_K, attend)


def assert_as_good(actual: torch.Tensor, qkv: QuantizedQKV, found: Lists):
    """Allow 1.1 times the definition's error: weights are rounded relative to a row's maximum so far."""
    exact, rounded = (defined(qkv, found, exactly=exactly) for exactly in (True, False))
    limit = 1.1 * relative_error(rounded, exact) + torch.finfo(actual.dtype).eps
    assert relative_error(actual, exact) <= limit


# Without a GPU


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"dtype": torch.float32}, "float32"),
        ({"head_dim": 96}, "head_dim 96"),
        ({"block_k": 64}, "blocks of 192 queries and 64 keys"),
        ({"block_q": 128}, "blocks of 128 queries and 128 keys"),
    ],
)
def test_refuses(monkeypatch, changes, reason):
    """And what attention in 8 bits refuses."""
    options = {"dtype": torch.bfloat16, "v_format": FP8, "head_dim": 128, "block_q": BLOCK_Q, "block_k": BLOCK_K}
    monkeypatch.setattr(dispatch, "is_sm90", lambda device: True)
    found = sm90.why_not(torch.device("cpu"), **options | changes)
    assert found is reason is None or reason in found


def test_the_blocks_are_those_of_the_kernel(monkeypatch):
    kernel = kernel_module.CONSUMERS.value * kernel_module.QUERIES.value, kernel_module.KEYS.value
    assert kernel == sm90.BLOCKS
    cpu, others = torch.device("cpu"), (128, 64)
    assert block_sparse_sizes(cpu, torch.bfloat16, quantized=True) == others
    monkeypatch.setattr(dispatch, "is_sm90", lambda device: True)
    assert block_sparse_sizes(cpu, torch.bfloat16, quantized=True) == sm90.BLOCKS
    assert block_sparse_sizes(cpu, torch.bfloat16, quantized=False) == others
    assert block_sparse_sizes(cpu, torch.float32, quantized=True) == others
    monkeypatch.setattr(attention_sm90, "GLUON_ERROR", "cannot import name 'tma'")
    assert block_sparse_sizes(cpu, torch.bfloat16, quantized=True) == others


def test_values_in_fp16_take_the_portable_kernels_blocks():
    """This tests the op itself. The patch quantises values to e4m3 on sm_90."""
    qkv = every_launch.quantized_qkv(torch.float16, 64)
    launched = compile_without_gpu.record_launches(lambda: block_sparse_attention_8bit(qkv, mass=0.5), (9, 0))
    assert launched[-1].kernel.fn.__name__ == "_sparse_attention_8bit_kernel"


class NamedBarriers:
    """Barriers between the producer, which waits at them, and all consumers, which do not wait."""

    def __init__(self):
        self.arrivals = collections.defaultdict(lambda: threading.Semaphore(0))

    def release(self, barrier):
        self.arrivals[barrier].release()

    def wait_until_empty(self, barrier):
        for _ in range(kernel_module.CONSUMERS):
            if not self.arrivals[barrier].acquire(timeout=gluon_on_cpu.SECONDS):
                raise gluon_on_cpu.Deadlock


@pytest.fixture
def on_cpu(monkeypatch):
    """Runs a module's launcher and kernel on the CPU, as on a GPU with ``programs`` multiprocessors."""

    def run(module, launcher, *given, programs=1, seed=0):
        launched, barriers = [], NamedBarriers()
        with monkeypatch.context() as patch:
            patch.setattr(module, "launch_kernel", lambda *given, **options: launched.append(given))
            patch.setattr(module, "device_properties", lambda device: ((9, 0), programs), raising=False)
            getattr(module, launcher)(*given)
        ((kernel, (count,), *arguments),) = launched
        stand_ins = {
            "opaque": lambda x: x,
            "release": barriers.release,
            "wait_until_empty": barriers.wait_until_empty,
        }
        with gluon_on_cpu.on_cpu(monkeypatch, [kernel_module, shared_module], count, seed, **stand_ins) as machine:
            constants = {"SKIP_KIND": arguments.pop(-2), "OUT_KIND": arguments.pop(-1)}
            gluon_on_cpu.run(machine, kernel.fn, *map(gluon_on_cpu.argument, arguments), **constants)
        assert not any(arrivals.acquire(blocking=False) for arrivals in barriers.arrivals.values())

    return run


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", SHAPES)
def test_hand_overs(name, seed, on_cpu):
    qkv = in_8_bits(*SHAPES[name], torch.float16)
    found = drawn_lists(qkv)
    out = torch.full(qkv.q.shape, torch.nan, dtype=torch.float16)
    out_scale = 1 / torch.arange(3.0, 3 + len(out)) if seed == 1 else None
    on_cpu(sm90, "attention_forward", qkv, blocks_of(found, qkv), out, out_scale, 0.5, seed=seed)
    if out_scale is not None:
        out = (out.float() * out_scale[:, None, None, None]).half()
    assert_as_good(out, qkv, found)


def blocks_of(found: Lists, qkv: QuantizedQKV) -> Blocks:
    left_value = found.left @ definition.pool(qkv.dequantize_v(), BLOCK_K, BLOCK_K)
    return Blocks(found.block_map, BLOCK_Q, BLOCK_K, found.counts, found.kept_share, left_value)


@pytest.mark.parametrize(("programs", "seed"), [(1, 0), (3, 1)])
@pytest.mark.parametrize("name", SHAPES)
def test_hand_overs_without_lists(name, programs, seed, on_cpu, monkeypatch):
    whole = functools.partial(attention_sm90.Schedule, parts=1)
    monkeypatch.setattr(attention_8bit_sm90, "make_schedule", lambda tiles, *_: whole(tiles, tiles))
    qkv = in_8_bits(*SHAPES[name], torch.float16)
    out = torch.full(qkv.q.shape, torch.nan, dtype=torch.float16)
    arguments = (*qkv[:6], None, None, None, out, None)
    on_cpu(attention_8bit_sm90, "attention_forward", *arguments, programs=programs, seed=seed)
    assert_as_good(out, qkv, all_blocks_of(qkv))


def all_blocks_of(qkv: QuantizedQKV) -> Lists:
    B, S, H, _ = qkv.q.shape
    rows, key_blocks = (B, H, -(-S // BLOCK_Q)), -(-S // BLOCK_K)
    all_blocks = torch.arange(key_blocks, dtype=torch.int32).expand(*rows, key_blocks)
    counts = torch.full(rows, key_blocks, dtype=torch.int32)
    return Lists(all_blocks, counts, torch.zeros(*rows, key_blocks), torch.ones(rows))


@pytest.mark.parametrize("above", [False, True])
def test_the_mean_count_chooses_one_of_two_launches(above, on_cpu, monkeypatch):
    whole = functools.partial(attention_sm90.Schedule, parts=1)
    monkeypatch.setattr(attention_8bit_sm90, "make_schedule", lambda tiles, *_: whole(tiles, tiles))
    qkv = in_8_bits(*SHAPES["cut blocks"], torch.float16)
    found = drawn_lists(qkv)
    mean_share = found.counts.float().mean().item() / found.block_map.shape[3]
    monkeypatch.setattr(sm90, "dense_share", lambda *_: mean_share - 0.01 if above else mean_share + 0.01)
    launched = []
    dense, sparse = torch.full((2, *qkv.q.shape), torch.nan, dtype=torch.float16)
    with monkeypatch.context() as patch:
        patch.setattr(attention_8bit_sm90, "attention_forward", lambda *given: launched.append(given))
        on_cpu(sm90, "attention_forward", qkv, blocks_of(found, qkv), sparse, None, 1.0)
    ((*operands, out, out_scale, dense_if),) = launched
    assert out is sparse
    on_cpu(attention_8bit_sm90, "attention_forward", *operands, dense, out_scale, dense_if, programs=3)
    written, untouched = (dense, sparse) if above else (sparse, dense)
    assert untouched.isnan().all()
    assert_as_good(written, qkv, all_blocks_of(qkv) if above else found)


@pytest.mark.parametrize("result", [None, FP8])
def test_dense_attention_its_join_and_the_lists_get_one_number_and_one_scale(result):
    qkv = every_launch.quantized_qkv(FP8, 128, tokens=4000)  # the last tiles of queries are split along the keys
    call = functools.partial(block_sparse_attention_8bit, qkv, mass=1, result=result)
    launched = compile_without_gpu.record_launches(call, (9, 0))[-3:]
    given = [dict(zip(launch.kernel.arg_names, launch.arguments, strict=False)) for launch in launched]
    dense, join, lists = given
    assert (dense["block_map"], lists["block_map"] is None) == (None, False)
    assert dense["mean_count"] is join["scalar"] is lists["mean_count"] is not None
    assert dense["dense_from"] == join["least"] == lists["dense_from"] > 0
    assert dense["out"].base is join["out"] is lists["out"].base
    assert dense["out_scale"] is lists["out_scale"]
    assert (dense["out_scale"] is None) == (result is None)


def test_there_is_one_launch_if_mass_is_too_low_for_so_many_blocks(on_cpu, monkeypatch):
    monkeypatch.setattr(attention_8bit_sm90, "attention_forward", None)
    qkv = in_8_bits(*SHAPES["whole blocks"], torch.float16)
    found = all_blocks_of(qkv)
    out = torch.full(qkv.q.shape, torch.nan, dtype=torch.float16)
    on_cpu(sm90, "attention_forward", qkv, blocks_of(found, qkv), out, None, 0.9)
    assert_as_good(out, qkv, found)


@pytest.mark.parametrize(
    ("heads", "tokens", "least", "most"),
    [(12, 32760, 0.93, 0.95), (40, 75600, 0.97, 0.99), (12, 7800, 0.9, 0.9), (1, 1, 0.9, 0.9)],
)
def test_longer_sequences_are_dense_from_a_larger_share_on(heads, tokens, least, most):
    share = sm90.dense_share(heads * -(-tokens // BLOCK_Q), -(-tokens // BLOCK_K), 132)
    assert least <= share <= most


# On a GPU

LARGE = {"more tiles than multiprocessors": (2, 5000, 4, 128)}


@pytest.fixture
def taken(monkeypatch):
    """Collect the op's launches of the kernel."""
    launched = []
    forward = sm90.attention_forward
    monkeypatch.setattr(sm90, "attention_forward", lambda *given: launched.append(given) or forward(*given))
    return launched


@pytest.mark.gpu
@pytest.mark.parametrize("mass", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SHAPES | LARGE)
def test_matches_the_oracle_as_well_as_the_definition(name, dtype, mass, sm_90, taken):
    qkv = in_8_bits(*(SHAPES | LARGE)[name], dtype, "cuda")
    out = block_sparse_attention_8bit(qkv, mass=mass)  # with the fastest blocks
    ((_, blocks, *_),) = taken
    assert_as_good(out, qkv, checked_lists(blocks, qkv, mass))
    assert torch.equal(block_sparse_attention_8bit(qkv, mass=mass, block_q=BLOCK_Q, block_k=BLOCK_K), out)


@pytest.mark.gpu
@pytest.mark.parametrize("mass", [0.5, 1.0])
@pytest.mark.parametrize("name", SHAPES | LARGE)
def test_e4m3_results(name, mass, sm_90, taken):
    qkv = in_8_bits(*(SHAPES | LARGE)[name], torch.float16, "cuda")
    wide, result = (block_sparse_attention_8bit(qkv, mass=mass, result=dtype) for dtype in (None, FP8))
    assert len(taken) == 2
    assert_rounded_once(result, wide)


def checked_lists(blocks: Blocks, qkv: QuantizedQKV, mass: float) -> Lists:
    """Return the kernels' lists of kept blocks, with the definition's p of the others from the same means.

    The lists agree with the definition's, except for near ties."""
    key_blocks = blocks.block_map.shape[3]
    listed = torch.arange(key_blocks, device=blocks.counts.device) < blocks.counts[..., None]
    place = blocks.block_map.long().where(listed, key_blocks)  # nothing is written behind a list
    kept = listed.new_zeros(*listed.shape[:3], key_blocks + 1).scatter(-1, place, True)[..., :key_blocks]
    q, k = qkv.q.float() * qkv.q_scale[..., None], qkv.dequantize_qk()[1]
    # The kernel rounds the means, but no scores.
    pooled = (definition.pool(x, block, 32).to(qkv.dtype).float() for x, block in ((q, BLOCK_Q), (k, BLOCK_K)))
    shares = definition.estimate(*pooled, LN_2, q.shape[1], BLOCK_Q, BLOCK_K)
    expected = definition.keep(shares, mass, BLOCK_Q, BLOCK_K)
    assert (blocks.counts - expected.counts).abs().float().mean() <= 0.02 * key_blocks
    block_map = (~kept).int().sort(stable=True, dim=-1).indices.int()
    return Lists(block_map, blocks.counts, shares.masked_fill(kept, 0), blocks.kept_share)


@pytest.mark.gpu
def test_dense_attention_takes_over_where_nearly_all_blocks_are_kept(sm_90, taken):
    """A CUDA graph decides anew each time. Mass 0.98 keeps 98 % of the blocks of random values."""
    shape = LARGE["more tiles than multiprocessors"]
    calls = {mass: functools.partial(block_sparse_attention_8bit, mass=mass) for mass in (0.98, 1.0)}
    spread = [3 * x if i == 0 else x for i, x in enumerate(structured(*shape, torch.float32))]
    even = [*torch.randn(3, *shape)]
    sharp, flat = (
        quantize_qkv(*(x.to("cuda", torch.bfloat16).flatten(2) for x in qkv), heads=shape[2], v_format=FP8)
        for qkv in (spread, even)
    )
    of_lists = calls[0.98](sharp)
    ((_, blocks, *_),) = taken
    assert_as_good(of_lists, sharp, checked_lists(blocks, sharp, 0.98))  # dense attention writes nothing here
    given = QuantizedQKV(*(x.clone() for x in sharp[:6]), sharp.dtype)
    for call in calls.values():
        call(given)
    graphs = {mass: torch.cuda.CUDAGraph() for mass in calls}
    outs = {}
    for mass, graph in graphs.items():
        with torch.cuda.graph(graph):
            outs[mass] = calls[mass](given)
    for qkv in (sharp, flat, sharp):
        for target, source in zip(given[:6], qkv[:6], strict=True):
            target.copy_(source)
        dense = attention_8bit(given)
        for mass, graph in graphs.items():
            graph.replay()
            assert torch.equal(outs[mass], calls[mass](given))
            assert torch.equal(outs[mass], dense) == (mass == 1 or qkv is flat)


@pytest.mark.gpu
def test_writes_nothing_behind_the_result(sm_90):
    qkv = in_8_bits(2, 200, 2, 128, torch.bfloat16, "cuda")
    found = Lists(*(x.cuda() for x in drawn_lists(qkv)))
    memory = torch.full((2, *qkv.q.shape), 7.0, dtype=torch.bfloat16, device="cuda")
    sm90.attention_forward(qkv, blocks_of(found, qkv), memory[0], None, 0.5)
    assert (memory[1] == 7).all()
    assert_as_good(memory[0], qkv, found)
    in_e4m3 = torch.full_like(memory, 7.0).to(FP8)
    out_scale = output_scale(qkv.v_scale)
    sm90.attention_forward(qkv, blocks_of(found, qkv), in_e4m3[0], out_scale, 0.5)
    assert (in_e4m3[1].float() == 7).all()
    out = in_e4m3[0].float() * out_scale[:, None, None, None]
    assert (out - memory[0].float()).abs().max() <= out.abs().max() / 15  # e4m3 rounds by 1/16 at most


@pytest.mark.gpu
def test_neighbours_do_not_leak(sm_90):
    """NaN in the next sample and the next head stays there."""
    qkv = in_8_bits(2, 500, 2, 128, torch.bfloat16, "cuda")
    clean = block_sparse_attention_8bit(qkv, mass=0.5)
    for scale in (qkv.q_scale.transpose(1, 2), qkv.k_scale, qkv.v_scale):  # [B, H, ...]
        scale[1] = scale[0, 1] = torch.nan
    poisoned = block_sparse_attention_8bit(qkv, mass=0.5)
    assert clean.isfinite().all()
    assert torch.equal(poisoned[0, :, 0], clean[0, :, 0])
