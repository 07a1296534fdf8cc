"""The sm_90 attention: refusals, division of the work, joining of parts, and results on the GPU."""

import itertools
import math

import pytest
import torch

from tests.oracle import assert_no_worse, torch_device
from turbo_rcm_patch.kernels import dispatch, reference
from turbo_rcm_patch.kernels.attention import attention_sm90
from turbo_rcm_patch.kernels.attention.attention_sm90 import ITEM_COST, TILE_QUERIES, Schedule, make_schedule

H200 = 132  # multiprocessors


@pytest.fixture
def sm90(monkeypatch):
    """CPU tensors count as tensors on an H200."""
    monkeypatch.setattr(dispatch, "is_sm90", lambda device: True)
    monkeypatch.setattr(attention_sm90, "device_properties", lambda device: ((9, 0), H200))


def _qkv(dtype=torch.bfloat16, head_dim=128, device="cpu", batch=2, tokens=9, kv_tokens=5, heads=3):
    shapes = [(batch, tokens, heads, head_dim), *[(batch, kv_tokens, heads, head_dim)] * 2]
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def _projections(dtype=torch.bfloat16, device="cpu", tokens=21):
    """q, k, v as views of one fused projection, as diffusers makes them."""
    fused = torch.randn(2, tokens, 3 * 2 * 128, device=device).to(dtype)
    return [chunk.unflatten(2, (2, 128)) for chunk in fused.chunk(3, dim=-1)]


def why_not(q, k, v):
    """The reason why the kernel does not run, asked when it is chosen and when it is launched."""
    reason = attention_sm90.why_not(q.device, q.dtype, q.shape[-1])
    return reason or (None if attention_sm90.fits_tma(q, k, v) else "TMA")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_takes_packed_and_strided_rows(sm90, dtype, head_dim):
    q, k, v = _qkv(dtype, head_dim)
    assert why_not(q, k, v) is None
    assert why_not(*_projections(dtype)) is None
    heads_first = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert why_not(heads_first, k, v) is None


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (_qkv(torch.float32), "float32"),
        (_qkv(head_dim=96), "head_dim 96"),
        ([x[..., ::2] for x in _qkv(head_dim=256)], "TMA"),
        ([x[..., :64] for x in _qkv(head_dim=68)], "TMA"),
        ([x.flatten()[1 : 1 + 8 * 128].view(1, 8, 1, 128) for x in _qkv()], "TMA"),
        ([x[:1].expand(2, -1, -1, -1) for x in _qkv()], "TMA"),
    ],
    ids=["dtype", "head_dim", "columns apart", "rows misaligned", "base misaligned", "batch expanded"],
)
def test_refuses(sm90, inputs, reason):
    assert reason in why_not(*inputs)


def test_refuses_other_devices_and_tritons(monkeypatch):
    assert "sm_90" in why_not(*_qkv())
    monkeypatch.setattr(dispatch, "is_sm90", lambda device: True)
    monkeypatch.setattr(attention_sm90, "GLUON_ERROR", "cannot import name 'tma'")
    assert "'tma'" in why_not(*_qkv())


def _tiles_of(schedule, key_tiles):
    """The (tile of queries, tile of keys) of every item, as the kernel finds them."""
    for item in range(schedule.items):
        split = max(item - schedule.whole, 0)
        tile, first, end = item, 0, key_tiles
        if item >= schedule.whole:
            per_part = -(-key_tiles // schedule.parts)
            tile, first = schedule.whole + split // schedule.parts, split % schedule.parts * per_part
            end = min(key_tiles, first + per_part)
        yield [(tile, key) for key in range(first, end)]


@pytest.mark.parametrize("tiles", [1, 2, 7, 36, 131, 132, 133, 300])
def test_every_pair_of_tiles_is_visited_once(tiles):
    for key_tiles in (*range(1, 50), 256):
        items = list(_tiles_of(make_schedule(tiles, key_tiles, H200), key_tiles))
        assert all(items)
        visited = sorted(itertools.chain(*items))
        assert visited == list(itertools.product(range(tiles), range(key_tiles)))


def _time(schedule, key_tiles):
    """Return the time of the program with the most work, in tiles of keys."""
    costs = [len(item) + ITEM_COST for item in _tiles_of(schedule, key_tiles)]
    return max(sum(costs[program::H200]) for program in range(H200))


def test_work_of_wan():
    tiles = 12 * 171  # of 192 of 32760 queries
    split = make_schedule(tiles, 256, H200)
    assert split.whole == 15 * H200
    assert split.parts > 1
    ideal = tiles * 256 / H200
    assert _time(Schedule(tiles, tiles, 1), 256) > 1.04 * ideal
    assert _time(split, 256) < 1.025 * ideal
    cross = make_schedule(tiles, 4, H200)
    assert cross.parts == 1  # joining would take longer than it saves


def _parts(device, rows, kv_tokens, parts):
    """Softmaxes over parts of the keys, [parts, rows, 64] and their logsumexps [parts, rows], and over all keys."""
    scores = 3 * torch.randn(rows, kv_tokens, device=device, dtype=torch.float64)
    values = torch.randn(kv_tokens, 64, device=device, dtype=torch.float64)
    outputs, sums = [], []
    for part in torch.arange(kv_tokens, device=device).tensor_split(parts):
        outputs.append(scores[:, part].softmax(1) @ values[part])
        sums.append(scores[:, part].logsumexp(1) / math.log(2))
    return torch.stack(outputs), torch.stack(sums), scores.softmax(1) @ values, scores.logsumexp(1) / math.log(2)


def test_parts_are_joined(device):
    """Two samples of 3 heads and 210 queries make tiles of 192. All but the first 9 tiles are in 5 parts."""
    on = torch_device(device)
    batch, tokens, heads, rows, parts, whole = 2, 210, 3, TILE_QUERIES, 5, 9
    tiles = batch * heads * 2
    schedule = Schedule(whole + (tiles - whole) * parts, whole, parts)
    partial_out, partial_lse, expected, expected_lse = [], [], {}, {}
    for tile in range(whole, tiles):
        outputs, sums, expected[tile], expected_lse[tile] = _parts(on, rows, 40, parts)
        partial_out.append(outputs)
        partial_lse.append(sums)
    out = torch.full((batch, tokens, heads, 64), 7.0, device=on, dtype=torch.float32)
    lse = torch.full((batch, heads, tokens), 7.0, device=on, dtype=torch.float32)
    partials = [torch.cat(x).float().contiguous() for x in (partial_out, partial_lse)]
    scalar = torch.tensor(2.0, device=on)
    attention_sm90.join_parts(*partials, out, lse, schedule, only_if=(scalar, 2.5))
    assert (out == 7).all()
    assert (lse == 7).all()
    attention_sm90.join_parts(*partials, out, lse, schedule, only_if=(scalar, 2.0))
    for tile in range(tiles):
        sample, head, start = tile // 2 // heads, tile // 2 % heads, tile % 2 * rows
        got, got_lse = out[sample, start : start + rows, head], lse[sample, head, start : start + rows]
        if tile < whole:
            assert (got == 7).all()
            assert (got_lse == 7).all()
        else:
            torch.testing.assert_close(got, expected[tile][: len(got)].float())
            torch.testing.assert_close(got_lse, expected_lse[tile][: len(got)].float())


def _attend(q, k, v, scale, lse=None):
    """The result, after a check that nothing was written behind it."""
    memory = torch.full((*q.shape[:2], 2 * q.shape[2], q.shape[3]), 7.0, dtype=q.dtype, device=q.device).flatten()
    out, guard = memory[: q.numel()].view(q.shape), memory[q.numel() :]
    attention_sm90.attention_forward(q, k, v, scale, out, lse)
    assert (guard == 7).all()
    return out


# B, S, Skv, H, D: one token, lengths around the tiles, more than one tile per program, few queries and many keys.
SHAPES = [
    (2, 1, 1, 1, 128),
    (1, 77, 512, 3, 128),
    (2, 129, 257, 2, 64),
    (1, 1000, 1000, 2, 128),
    (2, 4000, 300, 7, 128),
    (1, 40, 9000, 2, 128),
]


def _attention(q, k, v, scale, dtype=None):
    q, k, v = (x.to(dtype or x.dtype) for x in (q, k, v))
    return reference.attention(q, k, v, None, None, None, scale)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matches_the_reference(shape, dtype, sm_90):
    batch, tokens, kv_tokens, heads, head_dim = shape
    q, k, v = _qkv(dtype, head_dim, "cuda", batch, tokens, kv_tokens, heads)
    for scale in (head_dim**-0.5, 0.5):
        lse = torch.empty(batch, heads, tokens, device="cuda")
        out = _attend(q, k, v, scale, lse)
        assert_no_worse(out, _attention(q, k, v, scale), _attention(q, k, v, scale, torch.float64))
        scores = torch.einsum("bshd,bthd->bhst", q.double(), k.double()) * scale
        torch.testing.assert_close(lse.double(), scores.logsumexp(-1) / math.log(2), rtol=1e-5, atol=1e-4)
        assert torch.equal(_attend(q, k, v, scale), out)


@pytest.mark.gpu
def test_reads_strided_rows(sm_90):
    for q, k, v in (
        _projections(device="cuda", tokens=300),
        [x.transpose(1, 2) for x in _qkv(device="cuda", tokens=5)],
    ):
        expected = _attend(*(x.contiguous() for x in (q, k, v)), 0.1)
        assert torch.equal(_attend(q, k, v, 0.1), expected)


@pytest.mark.gpu
def test_neighbours_do_not_leak(sm_90):
    """NaN in the next sample's and the next head's rows stays there."""
    inputs = _qkv(device="cuda", tokens=200, kv_tokens=150)
    clean = _attend(*(x[:1, :, :1].contiguous() for x in inputs), 0.1)
    for x in inputs:
        x[1] = float("nan")
        x[0, :, 1] = float("nan")
    poisoned = _attend(*inputs, 0.1)
    assert clean.isfinite().all()
    assert torch.equal(poisoned[:1, :, :1], clean)


@pytest.mark.gpu
def test_scores_far_from_zero(sm_90):
    """Padding keys score 0: with all others near -100 they would win the softmax."""
    q, k, v = _qkv(device="cuda", tokens=200, kv_tokens=150)
    q[..., 0], k[..., 0] = 20, -20
    out = _attend(q, k, v, 0.25)
    assert_no_worse(out, _attention(q, k, v, 0.25), _attention(q, k, v, 0.25, torch.float64))
