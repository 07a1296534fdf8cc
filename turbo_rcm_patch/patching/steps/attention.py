"""The step of attention in the model's dtype: our kernels, or diffusers' dispatch, with the reason."""

from __future__ import annotations

from functools import partial

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from torch import nn

from ... import kernels
from ...kernels import FP8, Quantized, reference
from ...kernels.attention.sdpa import name_if_replaced
from . import in_8_bits
from .context_parallel import check_heads, ulysses_attention, why_not_between_all_to_alls
from .layers import skip_after, why_not_head_norm
from .plan import Call, Step
from .residual import Storage


def attention(
    attn: nn.Module, call: Call, *, crossing: bool = False, added: bool = False, result: torch.dtype | None = None
) -> Step:
    """Return attention of q [B, S, H, D] over k, v [B|1, L, H, D] in their dtype.

    Step: (q, k, v) -> [B, S, H, D]. added: True for a step (q, k, v, to) -> to + the attention's result.
    crossing: True for cross-attention, which context parallelism does not change.
    result: the format that the next step takes, or None. For e4m3 our kernel for cross-attention gives a Quantized
    [B, S, C], and after an exchange between GPUs self-attention gives one in any format.
    """
    reason = why_not_own_attention(attn, call.backend, crossing=crossing, derivative=call.derivative)
    if reason is not None:
        return Step(partial(_attention_of_backend, attn.processor, crossing), "diffusers' attention", reason)
    width = attn.inner_dim if hasattr(attn, "inner_dim") else attn.to_q.out_features  # Wan-Animate-2's has none
    head_dim = width // attn.heads
    if crossing and result == FP8:
        step = _attention_in_e4m3(call, head_dim)
        if step is not None:
            return step
    pick, kernel = pick_attention(call, head_dim, crossing=crossing)
    reason, attend = pick.reason, partial(_attention, pick.launch)
    if added:  # the sum is a pass of its own: the sm_90 kernel has no sum in its epilogue
        add = skip_after(Storage(call.dtype), Storage(call.dtype), call)
        return Step(partial(_attention_then_add, attend, add.run), f"{kernel}, {add.kernel} sum", reason)
    if attn.processor._parallel_config is not None and not crossing:
        gather = in_8_bits.tokens_after_exchange(result, call)
        between = partial(ulysses_attention, attn.processor._parallel_config, attend, gather=gather)
        return Step(between, f"{kernel} between all-to-alls", reason, gives=result)
    return Step(attend, kernel, reason)


def _attention_in_e4m3(call: Call, head_dim: int) -> Step | None:
    """Return cross-attention with its result in e4m3, or None if no kernel of ours runs."""
    fields = {**_fields(call, head_dim, crossing=True), "result": FP8}
    if kernels.ATTENTION_TO_E4M3.why_not_fused(call.spec(kernels.AttentionSpec, **fields)) is not None:
        return None
    pick = call.pick(kernels.ATTENTION_TO_E4M3, kernels.AttentionSpec, **fields)
    return Step(partial(_attention_to_e4m3, pick.launch), f"{pick.label}, e4m3", gives=FP8)


def _fields(call: Call, head_dim: int, *, crossing: bool) -> dict[str, object]:
    """Return the fields of an AttentionSpec that a model decides."""
    choice = {"attention": call.config.attention, "replaced": name_if_replaced(call.sdpa)}
    return {"head_dim": head_dim, "crossing": crossing, **choice}


def pick_attention(call: Call, head_dim: int, *, crossing: bool = False) -> tuple[kernels.Pick, str]:
    """Return the kernel of a model's attention, and its label."""
    fields = _fields(call, head_dim, crossing=crossing)
    pick = call.pick(kernels.ATTENTION, kernels.AttentionSpec, **fields)
    return pick, kernels.attention_label(pick, call.spec(kernels.AttentionSpec, **fields))


def why_not_own_attention(
    attn: nn.Module, active_backend: AttentionBackendName, *, crossing: bool = False, derivative: str | None = None
) -> str | None:
    """Return the reason why an attention goes through diffusers' dispatch, or None.

    The reason is a backend or a parallel layout that the user chose.
    """
    processor = attn.processor
    backend = processor._attention_backend or active_backend
    if processor._attention_backend is not None or backend != AttentionBackendName.NATIVE:
        return f"attention backend {AttentionBackendName(backend).value}"
    if processor._parallel_config is None or crossing:
        return None
    return why_not_between_all_to_alls(processor._parallel_config, attn.heads, differentiated=derivative is not None)


def why_not_quantized_attention(attn: nn.Module, norm_class: type[nn.Module], call: Call) -> str | None:
    """Return the reason why a self-attention and its QK-norm do not run in 8 bits, or None if they do."""
    reason = why_not_own_attention(attn, call.backend, derivative=call.derivative)
    norms = (attn.norm_q, attn.norm_k)
    reason = reason or next(filter(None, (why_not_head_norm(norm, norm_class, call.device) for norm in norms)), None)
    return reason or in_8_bits.why_not_attention(attn, call)


def _attention(launch, q, k, v):
    batch = q.shape[0]
    if k.shape[0] < batch:  # one prompt for all samples: treat all queries as one sample's
        q = q.flatten(0, 1)[None]
    scale = q.shape[3] ** -0.5
    if k.shape[1] > 0:
        attended = launch(q, k, v, None, None, None, scale)
    else:  # no keys, for example without an image: the result is 0, and our kernels refuse such inputs
        attended = reference.attention(q, k, v, None, None, None, scale)
    return attended.view(batch, -1, *attended.shape[2:])


def _attention_to_e4m3(launch, q, k, v):
    batch = q.shape[0]
    if k.shape[0] < batch:  # as above
        q = q.flatten(0, 1)[None]
    scale = q.shape[3] ** -0.5
    if k.shape[1] > 0:
        attended = launch(q, k, v, scale)
    else:
        attended = kernels.quantize_rows(reference.attention(q, k, v, None, None, None, scale).flatten(2), FP8)
    return Quantized(attended.values.view(batch, -1, attended.values.shape[2]), attended.scale.reshape(batch, -1))


def _attention_then_add(attend, add, q, k, v, to):
    return add(to.flatten(2), attend(q, k, v).flatten(2)).view(to.shape)


def _attention_of_backend(processor, crossing, q, k, v, to=None):
    parallel_config = None if crossing else processor._parallel_config
    if parallel_config is not None:
        check_heads(parallel_config, q.shape[2])
    output = dispatch_attention_fn(q, k, v, backend=processor._attention_backend, parallel_config=parallel_config)
    return output.type_as(q) if to is None else to + output.type_as(q)
