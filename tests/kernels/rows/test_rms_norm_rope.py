import pytest
import torch
from diffusers.models.transformers.transformer_ltx2 import apply_interleaved_rotary_emb, apply_split_rotary_emb

from tests.kernels.turns import dtypes_in_turns
from tests.oracle import DTYPES, assert_no_worse, relative_error, torch_device
from turbo_rcm_patch.kernels import reference, rms_norm_rope

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")

# (B, S, heads, head_dim)
SHAPES = [(1, 1, 1, 2), (2, 7, 3, 12), (1, 129, 2, 32), (2, 3, 12, 128), (1, 2, 40, 128)]


def angles(S, head_dim, device="cpu"):
    angle = torch.randn(S, head_dim // 2)
    return angle.cos().to(device), angle.sin().to(device)


def check(x, weight, heads, cos=None, sin=None, eps=1e-6, halves=False):
    options = {"heads": heads, "eps": eps, "halves": halves}
    actual = rms_norm_rope(x, weight, cos=cos, sin=sin, implementation="triton", **options)
    low = reference.rms_norm_rope(x, weight, cos, sin, **options)
    wide = [None if t is None else t.double() for t in (x, weight, cos, sin)]
    assert actual.is_contiguous()
    assert_no_worse(actual, low, reference.rms_norm_rope(*wide, **options))


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_oracle(shape, rotated, device):
    B, S, heads, head_dim = shape
    for dtype in DTYPES[device]:
        x = torch.randn(B, S, heads * head_dim).to(torch_device(device), dtype)
        weight = torch.randn(heads * head_dim).to(x)
        check(x, weight, heads, *(angles(S, head_dim, x.device) if rotated else ()))


SHAPES_OF_TABLES = [(1, 1, 1, 2), (2, 7, 3, 12), (3, 9, 2, 36), (2, 33, 32, 64), (1, 3, 40, 128)]
TABLES_BY = ["token", "head", "sample", "sample and head"]


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("by", TABLES_BY)
@pytest.mark.parametrize("shape", SHAPES_OF_TABLES)
def test_tables_of_every_shape_match_the_oracle(shape, by, halves, device):
    B, S, heads, head_dim = shape
    of = (B if "sample" in by else 1, S, heads if "head" in by else 1, head_dim // 2)
    for dtype in dtypes_in_turns(device, (shape, SHAPES_OF_TABLES), (by, TABLES_BY), (halves, (False, True))):
        x = torch.randn(B, S, heads * head_dim).to(torch_device(device), dtype)
        angle = torch.randn(of, device=x.device)
        check(x, torch.randn(heads * head_dim).to(x), heads, angle.cos(), angle.sin(), halves=halves)


def diffusers_tables(rope_type, B, S, heads, head_dim, device):
    """The tables of LTX-2's model: interleaved [B, S, H·D] in pairs, or split [B, H, S, D/2]."""
    angle = torch.randn(B, S, heads * head_dim // 2, device=device)
    if rope_type == "interleaved":
        return tuple(t.repeat_interleave(2, dim=-1) for t in (angle.cos(), angle.sin()))
    return tuple(t.unflatten(2, (heads, -1)).swapaxes(1, 2) for t in (angle.cos(), angle.sin()))


@pytest.mark.parametrize("rope_type", ["interleaved", "split"])
def test_rotates_as_ltx_2_in_diffusers(rope_type, device):
    x = torch.randn(2, 33, 3 * 12, device=torch_device(device))
    tables = diffusers_tables(rope_type, 2, 33, 3, 12, x.device)
    weight = torch.randn(36, device=x.device)
    normed = torch.nn.functional.rms_norm(x, (36,), weight, 1e-6)
    if rope_type == "interleaved":
        expected = apply_interleaved_rotary_emb(normed, tables)
        views = [t.unflatten(2, (3, 12))[..., 0::2] for t in tables]
    else:
        expected = apply_split_rotary_emb(normed, tables)
        views = [t.transpose(1, 2) for t in tables]
    options = {"heads": 3, "eps": 1e-6, "halves": rope_type == "split", "implementation": "triton"}
    actual = rms_norm_rope(x, weight, cos=views[0], sin=views[1], **options)
    assert relative_error(actual.flatten(2), expected) <= 1e-6


@pytest.mark.parametrize("halves", [True, False])
def test_programs_walk_several_tiles_of_rows_with_tables_by_head(halves, device):
    device = torch_device(device)
    S = 41 if device.type == "cpu" else 8001
    angle = torch.randn(2, S, 32, 64, device=device)
    x, weight = torch.randn(2, S, 32 * 128, device=device), torch.randn(32 * 128, device=device)
    check(x, weight, 32, angle.cos(), angle.sin(), halves=halves)


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("heads", [12, 40])
def test_programs_walk_several_tiles_of_rows(heads, rotated, device):
    device = torch_device(device)
    S = 41 if device.type == "cpu" else 8001
    x = torch.randn(2, S, heads * 128, device=device)
    check(x, torch.randn(heads * 128, device=device), heads, *(angles(S, 128, device) if rotated else ()))


@pytest.mark.gpu
def test_rows_too_wide_to_be_in_flight():
    x = torch.randn(1, 3, 128 * 128, device="cuda")
    check(x, torch.randn(128 * 128, device="cuda"), 128, *angles(3, 128, "cuda"))


def test_heads_of_one_channel(device):
    x = torch.randn(2, 3, 5, device=torch_device(device))
    check(x, torch.randn(5, device=x.device), heads=5)


def test_the_norm_is_over_all_heads_together(device):
    x = torch.ones(1, 1, 8, device=torch_device(device))
    x[..., 4:] = 0
    actual = rms_norm_rope(x, torch.ones(8, device=x.device), heads=2, eps=1e-12, implementation="triton")
    torch.testing.assert_close(actual[0, 0, 0], torch.full((4,), 2**0.5, device=x.device))


def test_pairs_are_interleaved(device):
    device = torch_device(device)
    x = torch.tensor([[[1.0, 0.0, 0.0, 1.0]]], device=device)
    cos, sin = torch.tensor([[0.0, 1.0]], device=device), torch.tensor([[1.0, 0.0]], device=device)
    ones = torch.ones(4, device=device)
    actual = rms_norm_rope(x, ones, heads=1, eps=1e-12, cos=cos, sin=sin, implementation="triton")
    # A quarter turn of the first pair, none of the second.
    torch.testing.assert_close(actual.flatten(), 2**0.5 * torch.tensor([0.0, 1.0, 0.0, 1.0], device=device))


def test_head_dim_without_pairs(device):
    x = torch.randn(2, 3, 15, device=torch_device(device))
    check(x, torch.randn(15, device=x.device), heads=3)


def test_non_contiguous(device):
    device = torch_device(device)
    q, k, v = torch.randn(2, 5, 72, device=device).chunk(3, dim=-1)
    cos, sin = angles(5, 8, device)
    for part in (q, k, v, torch.randn(2, 24, 5, device=device).transpose(1, 2)):
        check(part, torch.randn(24, device=device), 3, cos, sin)
    table = torch.randn(5, 8, device=device)
    check(q, torch.randn(48, device=device)[::2], 3, table[:, ::2], table[:, 1::2])


@pytest.mark.parametrize("rotary", ["diffusers", "transposed", "one for all tokens", "of the last tokens"])
def test_tables_are_read_where_they_are(rotary, device, monkeypatch):
    """Views of diffusers' tables, which have every value twice, and of other tables are read without a copy."""
    device = torch_device(device)
    x, weight = torch.randn(2, 33, 3 * 12, device=device), torch.randn(36, device=device)
    cos, sin = (t.repeat_interleave(2, 1)[None, :, None] for t in angles(33, 12, device))
    tables = {
        "diffusers": (cos[0, :, 0, 0::2], sin[0, :, 0, 1::2]),
        "transposed": (cos[0, :, 0, 0::2].T.contiguous().T, sin[0, :, 0, 1::2]),
        "one for all tokens": (cos[0, :1, 0, 0::2].expand(33, 6), sin[0, :1, 0, 0::2].expand(33, 6)),
        "of the last tokens": (cos[0, 3:, 0, 0::2], sin[0, :30, 0, 0::2]),
    }[rotary]
    copied = []
    contiguous = torch.Tensor.contiguous
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda t: copied.append(t.shape) or contiguous(t))
    rms_norm_rope(
        x[:, : len(tables[0])], weight, heads=3, eps=1e-6, cos=tables[0], sin=tables[1], implementation="triton"
    )
    assert copied == [weight.shape]
    check(x[:, : len(tables[0])], weight, 3, *tables)


def test_eps_counts(device):
    x = 1e-3 * torch.randn(1, 3, 24, device=torch_device(device))
    check(x, torch.ones(24, device=x.device), 3, eps=1e-4)


def test_rows_do_not_mix(device):
    x = torch.randn(2, 5, 24, device=torch_device(device))
    weight = torch.randn(24, device=x.device)
    cos, sin = angles(5, 8, x.device)
    alone = rms_norm_rope(x, weight, heads=3, eps=1e-6, cos=cos, sin=sin)
    x[0, 4] = x[1, 0] = torch.nan
    actual = rms_norm_rope(x, weight, heads=3, eps=1e-6, cos=cos, sin=sin, implementation="triton")
    assert relative_error(actual[0, :4], alone[0, :4]) <= 1e-6
    assert relative_error(actual[1, 1:], alone[1, 1:]) <= 1e-6


def test_autograd_takes_the_reference(device):
    x = torch.randn(2, 5, 24, device=torch_device(device))
    leaves = [x.requires_grad_(), torch.randn(24, device=x.device).requires_grad_()]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    (rms_norm_rope(*leaves, heads=3, eps=1e-6, implementation="triton") ** 3).sum().backward()
    (reference.rms_norm_rope(*wide, None, None, 3, 1e-6) ** 3).sum().backward()
    for ours, oracle in zip(leaves, wide, strict=True):
        assert relative_error(ours.grad, oracle.grad) <= 1e-5


def test_compiles_to_one_graph(device):
    x = torch.randn(2, 5, 24, device=torch_device(device))
    weight = torch.randn(24, device=x.device)
    cos, sin = angles(5, 8, x.device)
    options = {"heads": 3, "eps": 1e-6, "cos": cos, "sin": sin, "implementation": "triton"}
    compiled = torch.compile(rms_norm_rope, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, weight, **options), rms_norm_rope(x, weight, **options))


def test_custom_op_contract(device):
    x = torch.randn(2, 3, 8, device=torch_device(device))
    weight = torch.randn(8, device=x.device)
    by_head = torch.randn(2, 3, 2, 2, device=x.device)
    for more in ((*angles(3, 4, x.device), 2, 1e-6), (by_head.cos(), by_head.sin(), 2, 1e-6, True)):
        torch.library.opcheck(torch.ops.turbo_rcm_patch.rms_norm_rope.default, (x, weight, *more))


def test_errors():
    x, weight = torch.zeros(2, 3, 24), torch.zeros(24)
    cos, sin = angles(3, 8)
    with pytest.raises(ValueError, match=r"x has shape \[2, 3, 24\], not \[B, S, H·D\] with H=5 heads"):
        rms_norm_rope(x, weight, heads=5, eps=1e-6)
    with pytest.raises(ValueError, match=r"weight has shape \[8\], not \[H·D=24\]"):
        rms_norm_rope(x, weight[:8], heads=3, eps=1e-6)
    with pytest.raises(ValueError, match="cos and sin together"):
        rms_norm_rope(x, weight, heads=3, eps=1e-6, cos=cos)
    with pytest.raises(ValueError, match=r"sin has shape \[2, 4\]; it must be \[S=3, D/2\]"):
        rms_norm_rope(x, weight, heads=3, eps=1e-6, cos=cos, sin=sin[:2])
    for shape in ((3, 3, 3, 4), (2, 3, 2, 4), (2, 3, 3, 8), (2, 4, 3, 4), (2, 3, 4)):
        table = torch.zeros(shape)
        with pytest.raises(ValueError, match="cos has shape"):
            rms_norm_rope(x, weight, heads=3, eps=1e-6, cos=table, sin=table)
    with pytest.raises(ValueError, match=r"sin has shape .* as the other table"):
        rms_norm_rope(x, weight, heads=3, eps=1e-6, cos=cos, sin=torch.zeros(2, 3, 3, 4))
    with pytest.raises(ValueError, match=r"even head_dim \(here D=3\)"):
        rms_norm_rope(x, weight, heads=8, eps=1e-6, cos=cos[:, :1], sin=sin[:, :1])
