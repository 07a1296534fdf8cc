"""The definition of block-sparse attention against its formulas written out with whole matrices, in fp64."""

import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.oracle import relative_error
from turbo_rcm_patch.kernels import block_sparse_attention, kept_share, quantize_qkv
from turbo_rcm_patch.kernels.block_sparse import block_sparse_reference as definition
from turbo_rcm_patch.kernels.quantized import FP8

# B, S, H, D, queries and keys of a block. There are one token, lengths that no block divides and that both divide, an
# empty part, and blocks of one, two, four and six parts.
SHAPES = [(1, 1, 1, 8, 16, 16), (2, 77, 3, 16, 32, 16), (1, 200, 2, 8, 64, 128), (2, 128, 1, 16, 64, 32)]
SHAPES += [(1, 70, 2, 8, 64, 32), (1, 50, 1, 8, 5, 7), (1, 90, 1, 8, 48, 16), (1, 500, 1, 8, 192, 128)]
MASS = 0.6


def inputs(B, S, H, D, dtype=torch.float64):
    """q, k, v with scores that tell blocks apart; k has a mean."""
    q, k, v = torch.randn(3, B, S, H, D, dtype=dtype)
    wave = torch.sin(torch.arange(S, dtype=dtype) / 9)[:, None, None]
    return 2 * (q + wave), 2 * (k + wave + torch.randn(H, D, dtype=dtype)), v


def estimate_written_out(q, k, block_q, block_k):
    """p of one sample and head, q and k [S, D], part by part of the blocks."""
    S, D = q.shape
    k = k - k.mean(0)

    def parts(x, block):
        size = {16: 8, 32: 16, 48: 24, 64: 32, 128: 32, 192: 32}.get(block, block)
        return [(first // block, x[first : first + size]) for first in range(0, S, size)]

    p = torch.zeros(-(-S // block_q), -(-S // block_k), dtype=q.dtype)
    keys = parts(k, block_k)
    for i, queries in parts(q, block_q):
        weights = [len(part) * torch.exp(queries.mean(0) @ part.mean(0) * D**-0.5) for _, part in keys]
        in_block = min(block_q, S - i * block_q)
        for (j, _), weight in zip(keys, weights, strict=True):
            p[i, j] += weight / sum(weights) * len(queries) / in_block
    return p


def output_written_out(q, k, v, p, kept, block_q, block_k):
    """Return the output for one sample and head. kept [QB, KB]."""
    token = torch.arange(len(q))
    allowed = kept[token // block_q][:, token // block_k]
    scores = (q @ k.T * q.shape[1] ** -0.5).masked_fill(~allowed, -torch.inf)
    left = torch.where(kept, 0, p)
    means = torch.stack([part.mean(0) for part in v.split(block_k)])
    return (1 - left.sum(1))[token // block_q, None] * (scores.softmax(1) @ v) + (left @ means)[token // block_q]


def kept_written_out(p, mass, block_q, block_k):
    kept = torch.zeros_like(p, dtype=torch.bool)
    for i, row in enumerate(p):
        held = 0.0
        for j in row.argsort(descending=True).tolist():
            if held < mass * row.sum():
                kept[i, j] = True
            held += row[j]
        for j in range(len(row)):
            kept[i, j] |= bool(set(range(i * block_q, (i + 1) * block_q)) & set(range(j * block_k, (j + 1) * block_k)))
    return kept


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_formulas(shape):
    *sizes, block_q, block_k = shape
    q, k, v = inputs(*sizes)
    actual = definition.block_sparse_attention(q, k, v, MASS, block_q, block_k)
    found = definition.lists(q, k, MASS, block_q, block_k)
    for b, h in torch.cartesian_prod(torch.arange(sizes[0]), torch.arange(sizes[2])):
        one = [x[b, :, h] for x in (q, k, v)]
        p = estimate_written_out(*one[:2], block_q, block_k)
        kept = kept_written_out(p, MASS, block_q, block_k)
        torch.testing.assert_close(actual[b, :, h], output_written_out(*one, p, kept, block_q, block_k))
        for i, blocks in enumerate(kept):
            expected = blocks.nonzero()[:, 0].int()
            assert found.counts[b, h, i] == len(expected)
            assert torch.equal(found.block_map[b, h, i, : len(expected)], expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_with_all_of_the_mass_it_is_dense(shape):
    *sizes, block_q, block_k = shape
    q, k, v = inputs(*sizes)
    q[:, :, :, 0] += 40  # shares of next to nothing count too
    dense = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    actual = definition.block_sparse_attention(q, k, v, 1.0, block_q, block_k)
    torch.testing.assert_close(actual, dense)
    assert kept_share(q, k, mass=1.0, block_q=block_q, block_k=block_k) == 1


def test_more_mass_keeps_more_blocks_and_errs_less():
    q, k, v = inputs(2, 500, 2, 16)
    dense = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    masses = (0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0)
    found = [definition.lists(q, k, mass, 32, 16) for mass in masses]
    for fewer, more in itertools.pairwise(found):
        assert (more.counts >= fewer.counts).all()
        assert (more.kept_share >= fewer.kept_share - 1e-9).all()
    assert all((one.kept_share >= mass - 1e-9).all() for one, mass in zip(found, masses, strict=True))
    errors = [relative_error(definition.block_sparse_attention(q, k, v, mass, 32, 16), dense) for mass in masses]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.1


def test_the_left_out_blocks_stand_for_themselves():
    """If keys are equal, every block has its exact share, and the result is dense whichever blocks are kept."""
    q, k, v = inputs(1, 128, 2, 16)
    k = k[:, :1].expand_as(k)
    out = definition.block_sparse_attention(
        q, k, v.unflatten(1, (-1, 16))[:, :, :1].expand(-1, -1, 16, -1, -1).flatten(1, 2), 0.3, 16, 16
    )
    assert definition.lists(q, k, 0.3, 16, 16).counts.max() == 8  # of equal shares all are kept
    k = k + torch.linspace(0, 1e-9, 128, dtype=k.dtype)[:, None, None]  # which tells blocks apart
    v = v.unflatten(1, (-1, 16))[:, :, :1].expand(-1, -1, 16, -1, -1).flatten(1, 2)
    assert definition.lists(q, k, 0.3, 16, 16).counts.max() < 8
    torch.testing.assert_close(definition.block_sparse_attention(q, k, v, 0.3, 16, 16), out, atol=1e-6, rtol=0)


@pytest.mark.parametrize("v_format", [torch.float16, FP8])
def test_8_bits_cost_what_they_cost_dense_attention(v_format):
    """The rounding of 8-bit attention on normal data: 4.1e-2 with e4m3."""
    q, k, v = inputs(2, 333, 2, 64, torch.float32)
    qkv = quantize_qkv(*(x.flatten(2) for x in (q, k, v)), heads=2, v_format=v_format)
    exact = definition.block_sparse_attention(*(x.double() for x in (q, k, v)), 1.0, 64, 64)
    actual = definition.block_sparse_attention_8bit(*qkv, 1.0, 64, 64)
    assert actual.dtype == torch.float32
    assert 1e-4 < relative_error(actual, exact) <= 4.1e-2
    # With rounded q and k other blocks may be kept, and the output then differs by those that are left out.
    sparse = definition.block_sparse_attention_8bit(*qkv, 0.9, 64, 64)
    exact = definition.block_sparse_attention(*(x.double() for x in (q, k, v)), 0.9, 64, 64)
    assert relative_error(sparse, exact) <= 0.1


def test_gradients_are_those_of_the_formulas():
    q, k, v = (x.requires_grad_() for x in inputs(1, 77, 2, 16))
    out = block_sparse_attention(q, k, v, mass=MASS, block_q=32, block_k=16)
    written = []
    for h in range(2):
        one = [x[0, :, h] for x in (q, k, v)]
        with torch.no_grad():
            p = estimate_written_out(*one[:2], 32, 16)
        written.append(output_written_out(*one, p, kept_written_out(p, MASS, 32, 16), 32, 16))
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    expected = torch.autograd.grad((torch.stack(written, 1)[None] * weight).sum(), (q, k, v))
    for ours, wanted in zip(torch.autograd.grad((out * weight).sum(), (q, k, v)), expected, strict=True):
        torch.testing.assert_close(ours, wanted)


def test_some_queries_at_a_time(monkeypatch):
    q, k, v = inputs(2, 300, 2, 16)
    expected = definition.block_sparse_attention(q, k, v, MASS, 32, 16)
    monkeypatch.setattr(definition, "SCORES", 1)
    torch.testing.assert_close(definition.block_sparse_attention(q, k, v, MASS, 32, 16), expected)


class PeakMemory(TorchDispatchMode):
    """Bytes of the memory that ops gave results in and that somebody still held, at the worst."""

    def __init__(self):
        super().__init__()
        self.peak, self._held = 0, {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        output = op(*args, **kwargs or {})
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._held[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._held.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self._held.values()))
        return output


def test_the_estimate_keeps_two_matrices_at_a_time():
    pooled_q, pooled_k = (torch.empty(1, 40, 2364, 128, dtype=torch.bfloat16, device="meta") for _ in range(2))
    with PeakMemory() as memory:
        definition.estimate(pooled_q, pooled_k, 0.1, 75600, 128, 128)
    assert 1.9 <= memory.peak / (40 * 2364**2 * 2) <= 2.2


def test_what_keys_have_in_common_costs_the_estimate_no_digits():
    """The keys share 200, which no softmax notices. With it their means would all be rounded to the same in bf16."""
    q, k, _ = (x.bfloat16() for x in inputs(1, 300, 1, 16, torch.float32))
    k = k + 200
    actual, exact = (definition.lists(x, y, 1e-9, 32, 16) for x, y in ((q, k), (q.double(), k.double())))
    assert (actual.kept_share - exact.kept_share).abs().max() <= 0.05
    assert relative_error(actual.left, exact.left) <= 0.1


@pytest.mark.parametrize("mass", [MASS, 1.0])
@pytest.mark.parametrize("spoiled", ["q", "q k v"])
def test_nan_comes_out_where_dense_attention_gives_it(mass, spoiled):
    """NaN in a query spoils its row, here with its whole block. NaN in a key spoils every row of its head."""
    tensors = dict(zip("qkv", inputs(1, 77, 2, 16), strict=True))
    for name in spoiled.split():
        tensors[name][0, 40, 0] = torch.nan
    dense = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in tensors.values())).transpose(1, 2)
    actual = definition.block_sparse_attention(**tensors, mass=mass, block_q=32, block_k=16)
    assert actual.isnan()[dense.isnan()].all()
    spared = actual[:, :, 1] if spoiled == "q k v" else actual[:, :32]
    assert not spared.isnan().any()
