"""8-bit attention in plain torch: quantize_qkv and attention_8bit, with rounding in the same places.

This is the definition of both, the oracle of their tests, and the path taken when no kernel can run.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .. import reference
from ..quantized import FP8, INT8, LARGEST, Quantized, round_to

KEY_GROUP = 128  # tokens of k that share a scale
SCALE_FLOOR = 1e-18  # keeps products of two scales normal fp32 numbers
V_FORMATS = (FP8, torch.float16)
V_LARGEST = LARGEST[FP8]
# Rounding a softmax weight to e4m3 adds at most 1/16 of it.
BOUND_SLACK = 1 + 1 / 16
QUERIES_AT_A_TIME = 256


def quantize_qkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    norm_q: torch.Tensor | None,
    norm_k: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    heads: int,
    eps: float,
    scale_log2: float,
    v_format: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tensors of a QuantizedQKV for q, k, v [B, S, H·D]; scale_log2: the softmax's scale times log2 e."""
    q, k = _norm_rope(q, norm_q, cos, sin, heads, eps), _norm_rope(k, norm_k, cos, sin, heads, eps)
    q_step = _step(q.abs().amax(-1), LARGEST[INT8])
    k = k - k.mean(1, keepdim=True)
    groups = _pad_tokens(k).unflatten(1, (-1, KEY_GROUP))
    k_step = _step(groups.abs().amax((2, 4)), LARGEST[INT8])  # [B, groups, H]
    k_values = round_to(groups / k_step[:, :, None, :, None], INT8).flatten(1, 2)[:, : k.shape[1]]
    v = v.float().unflatten(-1, (heads, -1))
    v_scale = _step(v.abs().amax(1) if v.shape[1] else v.sum(1), V_LARGEST)
    v_values = v / v_scale[:, None]
    v_values = _transpose(v_values) if v_format == FP8 else v_values.to(v_format)
    q_values = round_to(q / q_step[..., None], INT8)
    q_scale = (q_step * scale_log2).clamp_min(SCALE_FLOOR)
    return q_values, q_scale, k_values.contiguous(), k_step.mT.contiguous(), v_values, v_scale


def attention_8bit(
    q: torch.Tensor,
    q_scale: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    v: torch.Tensor,
    v_scale: torch.Tensor,
    residual: torch.Tensor | None,
    c_skip: torch.Tensor | None,
    c_out: torch.Tensor | None,
    dtype: torch.dtype,
    out_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``softmax(q kᵀ) v`` of a QuantizedQKV's tensors, with the skip if there is a residual: [B, S, H, D] in
    dtype.

    The softmax's weights are scaled so that their row's maximum is 448, and rounded to v's format. With out_scale [B]
    the result is divided by it and rounded to e4m3.
    """
    tokens = q.shape[1]
    keys = (k.float() * per_token(k_scale, tokens)[..., None]).transpose(1, 2)
    queries = (q.float() * q_scale[..., None]).transpose(1, 2)
    values = untranspose(v, tokens) if v.dtype == FP8 else v.float()
    values = values.transpose(1, 2)
    output = torch.cat([attend(part, keys, values, v.dtype) for part in queries.split(QUERIES_AT_A_TIME, 2)], 2)
    output = output.transpose(1, 2) * v_scale[:, None]
    if out_scale is not None:
        return round_to(output / out_scale[:, None, None, None], FP8)
    if residual is None:
        return output.to(dtype).contiguous()
    return reference.skip(residual.flatten(2), output.flatten(2), c_skip, c_out, dtype).view(residual.shape)


def output_scale(v_scale: torch.Tensor) -> torch.Tensor:
    """Return the scale [B] with which every possible attention output fits e4m3. A weighted mean of values does not
    exceed the largest value."""
    return v_scale.amax((1, 2)) * (V_LARGEST / LARGEST[FP8] * BOUND_SLACK)


def key_order(tokens: int, device: torch.device | None = None) -> torch.Tensor:
    """Return [tokens]: the token whose value each position of a transposed v holds. tokens is a multiple of 32.

    Position 16a + 4c + 2b + e holds token 16a + 8b + 2c + e. With this order the softmax weights that a thread has
    after QKᵀ are the ones it needs for PV, so that no weight moves between threads.
    """
    i = torch.arange(tokens, device=device)
    return (i & ~14) | ((i & 2) << 2) | ((i & 12) >> 1)


def untranspose(v: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return an e4m3 v [B, H, D, T] as fp32 [B, tokens, H, D]."""
    order = key_order(v.shape[3], v.device)
    return v.float().permute(0, 3, 1, 2)[:, order.argsort()][:, :tokens]


def quantized_values(quantized: torch.Tensor, scale: torch.Tensor) -> Quantized:
    """Return an e4m3 result [B, S, H, D] and its scale [B] as the next linear takes them: [B, S, H·D] and [B, S]."""
    return Quantized(quantized.flatten(2), scale[:, None].expand(quantized.shape[:2]))


def _norm_rope(x, weight, cos, sin, heads, eps):
    """Apply the norm and rotation, if given, to x [B, S, H·D]. Return fp32 [B, S, H, D]."""
    if weight is not None:
        return reference.rms_norm_rope(x.float(), weight, cos, sin, heads, eps)
    y = x.float().unflatten(-1, (heads, -1))
    return y if cos is None else reference.rotate(y, cos, sin)


def _step(largest: torch.Tensor, limit: float) -> torch.Tensor:
    return (largest / limit).clamp_min(SCALE_FLOOR)


def _pad_tokens(x: torch.Tensor) -> torch.Tensor:
    """Pad x [B, S, H, D] with zeros to a multiple of KEY_GROUP tokens."""
    return F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % KEY_GROUP))


def per_token(scale: torch.Tensor, tokens: int) -> torch.Tensor:
    """Expand k's scale [B, H, groups] to [B, tokens, H]."""
    return scale.repeat_interleave(KEY_GROUP, 2)[..., :tokens].mT


def _transpose(v: torch.Tensor) -> torch.Tensor:
    padded = _pad_tokens(v)
    return round_to(padded[:, key_order(padded.shape[1], v.device)].permute(0, 2, 3, 1), FP8).contiguous()


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    v_format: torch.dtype,
    is_key: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return softmax(queries keysᵀ) values in base 2 for queries [..., M, D], keys and values [..., S, D].

    The weights are rounded to v_format, scaled so that their row's maximum is 448. is_key: bool [..., 1, S] of the keys
    to attend to, or None for all.
    """
    scores = queries @ keys.mT
    if is_key is not None:
        scores = scores.masked_fill(~is_key, -torch.inf)
    weights = torch.exp2(scores - scores.amax(-1, keepdim=True)) * V_LARGEST
    rounded = straight_through(weights, weights.to(v_format).float())
    return rounded @ values / weights.sum(-1, keepdim=True)


def straight_through(exact: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Return rounded, with its gradient passed to exact, the values before rounding (Bengio et al. 2013, section 4)."""
    if torch.is_grad_enabled() and exact.requires_grad:
        return exact + (rounded - exact).detach()
    return rounded
