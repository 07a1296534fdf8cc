"""Every op in plain torch: its definition, the oracle of the tests, and the path taken when no kernel can run.

Shapes: B samples, S tokens, H heads, D head_dim, C = channels, K = input channels. Reductions and the skip are computed
in fp32 (fp64 for fp64 inputs) and rounded once to the input's dtype.
Coefficients are canonical: [B|1, S|1, C|1], or None for 1. With starts [R + 1] they are [R, 1, C] (see coefficient.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .quantized import FP8, LARGEST, TINY, Quantized, QuantizedWeight, round_to
from .saturation import saturate_reference, saturates


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def skip(
    residual: torch.Tensor,
    output: torch.Tensor,
    c_skip: torch.Tensor | None,
    c_out: torch.Tensor | None,
    dtype: torch.dtype | None = None,
    residual_scale: float = 1.0,
    result_scale: float = 1.0,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """``c_skip * residual + c_out * output`` for residual, output [B, S, C]; result in dtype, or the residual's.

    residual_scale: the residual is given divided by it. result_scale: the result is divided by it; an fp16 result
    saturates unless result_scale is 1. starts: the starts of c_out's runs, or None.
    """
    wide = _wide(residual.dtype)
    c_out = by_token(c_out, starts, *residual.shape[:2])
    kept, added = residual.to(wide), output.to(wide)
    kept = kept if c_skip is None else kept * c_skip.to(wide)
    added = added if c_out is None else added * c_out.to(wide)
    kept = kept if residual_scale == 1 else kept * residual_scale
    result = kept + added
    result = result if result_scale == 1 else result / result_scale
    dtype = dtype or residual.dtype
    return (saturate_reference(result) if saturates(dtype, result_scale) else result).to(dtype)


def by_token(values: torch.Tensor | None, starts: torch.Tensor | None, batch: int, tokens: int) -> torch.Tensor | None:
    """Expand values by run, [R, 1, C] with starts [R + 1], to values by token, [B, S, C]. Without starts, return the
    values unchanged.

    Run r has the tokens from starts[r] up to, but not including, starts[r + 1], counted over all samples.
    """
    if starts is None:
        return values
    positions = torch.arange(batch * tokens, dtype=starts.dtype, device=starts.device)
    runs = torch.bucketize(positions, starts[1:-1], right=True)
    return values[runs].view(batch, tokens, -1)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    residual: torch.Tensor | None,
    c_skip: torch.Tensor | None,
    c_out: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Return ``softmax(scale · q kᵀ) v``, [B, S, H, D], followed by the skip if there is a residual.

    q, residual: [B, S, H, D]. k, v: [B, Skv, H, D]. The coefficients vary over the C = H·D channels. Attention Is All
    You Need, eq. 1.
    """
    output = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale=scale
    ).transpose(1, 2)
    if residual is None:
        return output
    return skip(residual.flatten(2), output.flatten(2), c_skip, c_out).view(residual.shape)


def linear(
    a: torch.Tensor | Quantized,
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None,
    low: torch.Tensor | None = None,
    up: torch.Tensor | None = None,
) -> torch.Tensor:
    """``a Wᵀ + low upᵀ + b`` for a [..., K], weight [C, K], bias [C], low [..., R] and up [C, R], both optional.

    With a and weight in 8 bits the sums are fp32, and low and up are in units of their rows' scales (low_rank.py).
    """
    if isinstance(a, Quantized):
        if low is not None:
            low, up = low.float() * a.scale[..., None], up.float() * weight.scale[:, None]
        a, weight, bias = a.dequantize(), weight.dequantize(), None if bias is None else bias.float()
    sums = F.linear(a, weight, bias)
    if low is None:
        return sums
    rows = torch.addmm(sums.reshape(-1, sums.shape[-1]), low.reshape(-1, low.shape[-1]), up.T)
    return rows.view(sums.shape)


def linear_skip(
    a: torch.Tensor | Quantized,
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    c_skip: torch.Tensor | None,
    c_out: torch.Tensor | None,
    dtype: torch.dtype | None = None,
    residual_scale: float = 1.0,
    result_scale: float = 1.0,
    starts: torch.Tensor | None = None,
    low: torch.Tensor | None = None,
    up: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``c_skip ⊙ residual + c_out ⊙ (a Wᵀ + low upᵀ + b)``, [B, S, C]: `linear`, then `skip`.

    a: [B, S, K]. weight: [C, K]. bias: [C]. residual: [B, S, C]. low: [B, S, R]. up: [C, R].
    """
    sums = linear(a, weight, bias, low, up)
    return skip(residual, sums, c_skip, c_out, dtype, residual_scale, result_scale, starts)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """``gelu_tanh(x)`` for x of any shape."""
    return F.gelu(x, approximate="tanh").contiguous()


def linear_gelu(
    a: torch.Tensor | Quantized,
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype | None = None,
    low: torch.Tensor | None = None,
    up: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``gelu_tanh(a Wᵀ + low upᵀ + b)``, [..., C], in dtype, or in the sum's dtype for None.

    a: [..., K]. weight: [C, K]. bias: [C]. low: [..., R]. up: [C, R].
    """
    result = gelu(linear(a, weight, bias, low, up))
    return result if dtype is None else result.to(dtype)


def linear_gelu_quantized(
    a: Quantized,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    bias_bound: torch.Tensor,
    low: torch.Tensor | None = None,
    up: torch.Tensor | None = None,
) -> Quantized:
    """`linear_gelu` in e4m3. Each row's scale comes from the bound ``‖a‖ max‖w‖ + max|b|`` on its values.

    The bound follows from Cauchy-Schwarz and ``|gelu(z)| ≤ |z|``. bias_bound is ``max|b|``, 0-d. The error of e4m3 is
    relative, so a bound far above the values costs nothing until they reach e4m3's subnormal numbers, at 2⁻¹⁵ of the
    bound. With low and up, weight.norm bounds the rows of the sum of both products.
    """
    scale = ((a.norm * weight.norm + bias_bound) / LARGEST[FP8]).clamp_min(TINY)
    return Quantized(round_to(linear_gelu(a, weight, bias, None, low, up) / scale[..., None], FP8), scale)


def linear_qkv(
    a: torch.Tensor | Quantized,
    weights: Sequence[torch.Tensor | QuantizedWeight],
    biases: Sequence[torch.Tensor | None],
    dtype: torch.dtype | None = None,
    low: torch.Tensor | None = None,
    up: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """``a Wᵀ + low upᵀ + b`` for a [..., K] and each of G weights [N, K] with its bias [N] or None.

    low [..., G·R] and up [G·N, R] hold one part for each weight. The results are in dtype, or in the sums' dtype for
    None.
    """
    parts = parts_of_weights(low, up, len(weights))
    results = [linear(a, *each, *part) for *each, part in zip(weights, biases, parts, strict=True)]
    return tuple(results if dtype is None else [result.to(dtype) for result in results])


def parts_of_weights(
    low: torch.Tensor | None, up: torch.Tensor | None, weights: int
) -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Split low [..., G·R] and up [G·N, R] into the parts of G weights. Without low, every part is None."""
    if low is None:
        return [(None, None)] * weights
    return list(zip(low.chunk(weights, -1), up.chunk(weights), strict=True))


def layer_norm_modulate(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype | None = None,
    starts: torch.Tensor | None = None,
    centred: bool = True,
) -> torch.Tensor:
    """Return ``(LayerNorm(x) · weight + bias) · (1 + scale) + shift``, [B, S, C].

    x: [B, S, C]. weight, bias: [C]. scale, shift: [B|1, S|1, C], or [R, 1, C] with the starts of runs. Each pair may be
    None. centred: False for RMSNorm in place of LayerNorm. The adaptive layer norm of DiT, section 3.2.
    """
    wide = _wide(x.dtype)
    scale, shift = (by_token(value, starts, *x.shape[:2]) for value in (scale, shift))
    affine = [None if p is None else p.to(wide) for p in (weight, bias)]
    if centred:
        y = F.layer_norm(x.to(wide), x.shape[-1:], *affine, eps)
    else:
        y = F.rms_norm(x.to(wide), x.shape[-1:], affine[0], eps)
        y = y if affine[1] is None else y + affine[1]
    if scale is not None:
        y = y * (1 + scale.to(wide)) + shift.to(wide)
    return y.to(dtype or x.dtype)


def rms_norm_rope(
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    heads: int,
    eps: float,
    halves: bool = False,
) -> torch.Tensor:
    """RMSNorm of x [B, S, H·D] over all heads together, then rotary embedding (`rotate`); returns [B, S, H, D].

    cos, sin: [S, D/2] or [B|1, S, H|1, D/2]. None: no rotation.
    """
    wide = _wide(x.dtype)
    y = x.to(wide)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.to(wide)
    y = y.unflatten(-1, (heads, -1))
    return (y if cos is None else rotate(y, cos, sin, halves)).to(x.dtype)


def rms_norm_silu(x: torch.Tensor, weight: torch.Tensor, silu: bool = True) -> torch.Tensor:
    """``silu(√C · weight · x / max(‖x‖, 1e-12))`` for x [..., C], with the norm over C. silu=False omits the SiLU."""
    wide = _wide(x.dtype)
    y = F.normalize(x.to(wide), dim=-1, eps=1e-12) * (x.shape[-1] ** 0.5 * weight.to(wide))
    return (F.silu(y) if silu else y).to(x.dtype).contiguous()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, halves: bool = False) -> torch.Tensor:
    """Rotary embedding of x [B, S, H, D] by cos, sin [S, D/2] or [B|1, S, H|1, D/2]. RoFormer, eq. 34.

    Pair i of a head is (x[2i], x[2i+1]), or (x[i], x[i + D/2]) with halves. It turns by the angle of column i.
    """
    wide = _wide(x.dtype)
    cos, sin = (table.to(wide) if table.dim() == 4 else table.to(wide)[:, None, :] for table in (cos, sin))
    first, second = x.to(wide).chunk(2, -1) if halves else (x[..., 0::2].to(wide), x[..., 1::2].to(wide))
    turned = first * cos - second * sin, first * sin + second * cos
    return (torch.cat(turned, -1) if halves else torch.stack(turned, dim=-1).flatten(-2)).to(x.dtype)


def conv_skip(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    front: torch.Tensor | None = None,
    upsample: bool = False,
    interleave: int = 1,
) -> torch.Tensor:
    """``residual + (x ∗ W + b)``, a causal 3D convolution and a residual.

    x: [B, T, H, W, C] that follows front [B, kt − 1, H, W, C], or without front [B, T + kt − 1, H, W, C].
    weight: [N · interleave, kt, kh, kw, C]. bias: [N · interleave].
    residual: [B, T · interleave, H', W', N], a smaller one that `repeat_residual` enlarges, or None.
    upsample: True to enlarge x first by nearest neighbour: H' = 2H and W' = 2W.
    interleave: row i · N + n of the weight gives channel n of frame interleave · t + i.
    Height and width are padded with zeros; time is not padded.
    """
    if front is not None:
        x = torch.cat((front, x), 1)
    if upsample:
        x = x[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 2, -1).flatten(4, 5).flatten(2, 3)
    padding = 0, weight.shape[2] // 2, weight.shape[3] // 2
    # Views in the order of F.conv3d: memory stays channels-last.
    sums = F.conv3d(x.permute(0, 4, 1, 2, 3), weight.permute(0, 4, 1, 2, 3), bias, padding=padding)
    sums = sums.permute(0, 2, 3, 4, 1).contiguous()
    if interleave > 1:
        sums = sums.unflatten(-1, (interleave, -1)).movedim(-2, 2).flatten(1, 2)
    if residual is None:
        return sums
    wide = _wide(x.dtype)
    return (repeat_residual(residual, sums.shape).to(wide) + sums.to(wide)).to(x.dtype)


def repeat_residual(residual: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Enlarge a residual to this shape [B, T', H', W', N]: repeat its frames, rows or columns if it has fewer.

    If T' is odd, the first frame is not repeated.
    """
    for dim in (1, 2, 3):
        if residual.shape[dim] < shape[dim]:
            residual = residual.repeat_interleave(2, dim)
    return residual[:, residual.shape[1] - shape[1] :]
