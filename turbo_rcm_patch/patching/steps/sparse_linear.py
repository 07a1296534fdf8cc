"""Sparse-linear attention (SLA) in a self-attention: its projection, its processor for diffusers, and a plan's step.

    attn.proj_l           nn.Linear(D, D), a submodule that diffusers' model does not have; weights trained with SLA
                          bring it
    attn.processor        SparseAttnProcessor, which runs if the whole module is called

In a family that needs proj_l, a self-attention without it attends to all keys. In others it has no linear part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from ... import kernels
from ...checkpoints.lazy import LazyTensor
from ...checkpoints.names import PROJ_L
from ...config import SLA_TOPK, PatchConfig, Sparse
from ...kernels import FP8
from ...kernels.sparse_linear.sparse_linear_reference import linear_attention
from ...plain import is_autocast, why_not_plain
from ..journal import Journal
from .context_parallel import (
    Activation,
    OwnTokens,
    check_heads,
    ulysses_attention,
    why_not_between_all_to_alls,
)
from .in_8_bits import formats_label, tokens_after_exchange
from .plan import Call, Step, Stream

_Tensor = TypeVar("_Tensor", torch.Tensor, LazyTensor)
BlockSizes = tuple[int, int]  # tokens of a block of queries and of a block of keys


class SparseForm(NamedTuple):
    """The facts about a family's self-attention that sparse-linear attention needs.

    processor: the class of the processor that SparseAttnProcessor replaces. rotate: (attn, x [B, S, H, D], rotary) -> x
    rotated by the self-attention's RoPE argument. topk: the published share of key blocks. needs_projection: False if
    the family's weights run sparse without a linear part too.
    """

    processor: type
    rotate: Callable[[nn.Module, torch.Tensor, object], torch.Tensor]
    topk: float = SLA_TOPK
    needs_projection: bool = True


class SelfAttention(NamedTuple):
    """A self-attention and its path in a transformer. form: None if it cannot be sparse-linear."""

    path: str
    module: nn.Module
    form: SparseForm | None


SelfAttentions = Iterable[SelfAttention]


class SparseAttnProcessor:
    """A processor that runs sparse-linear attention. A self-attention without proj_l has no linear part.

    The softmax runs in the inputs' dtype.

    Attributes:
        original: the processor that it replaces.
        rotate: rotates queries and keys by the attention's RoPE argument (`SparseForm`).
        topk: the share of key blocks that each block of queries keeps.
        blocks: (queries, keys), the tokens in a block, or None for the published sizes.
        quantized: True if those are the published sizes for 8-bit attention.
        implementation: "auto", "triton" or "torch" (kernels/dispatch.py).
        block_map: the key blocks to keep, as kernels.sparse_linear_attention takes them, or None to choose by topk.
            Comparisons of two computations set it, so that near ties are not chosen differently.
    """

    def __init__(
        self,
        original: object,
        rotate: Callable,
        topk: float,
        blocks: BlockSizes | None,
        implementation: str,
        quantized: bool = False,
    ):
        self.original, self.rotate = original, rotate
        self.topk, self.blocks, self.implementation = topk, blocks, implementation
        self.quantized = quantized
        self.block_map: torch.Tensor | None = None

    # Settings that diffusers makes on processors go to the original. They were there before, and outlive the patch.

    @property
    def _attention_backend(self) -> object:
        return self.original._attention_backend

    @_attention_backend.setter
    def _attention_backend(self, value: object) -> None:
        self.original._attention_backend = value  # it counts after restore; no backend knows SLA

    @property
    def _parallel_config(self) -> object:
        return self.original._parallel_config

    @_parallel_config.setter
    def _parallel_config(self, value: object) -> None:
        self.original._parallel_config = value

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: object = None,
        key_rotary_emb: object = None,
    ) -> torch.Tensor:
        """Run hidden_states [B, S, C] -> [B, S, C].

        Raises ValueError for a mask, encoder_hidden_states, or RoPE of keys alone. Helios passes a number of tokens in
        the last place, which does not matter here.
        """
        key_rotary_emb = None if isinstance(key_rotary_emb, int) else key_rotary_emb
        if any(given is not None for given in (attention_mask, encoder_hidden_states, key_rotary_emb)):
            raise ValueError(
                "sparse-linear attention is a self-attention without a mask; for such a call patch with another "
                "preset: 'exact', 'quantized' or 'block_sparse'."
            )
        q, k, v = _project(attn, hidden_states)
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (attn.norm_q(q), attn.norm_k(k), v))
        if rotary_emb is not None:
            q, k = (self.rotate(attn, x, rotary_emb) for x in (q, k))
        if is_autocast(q.device):  # as scaled_dot_product_attention under it
            q, k, v = (x.to(torch.get_autocast_dtype(x.device.type)) for x in (q, k, v))
        block_q, block_k = block_sizes(self, q.device)
        options = {"block_q": block_q, "block_k": block_k, "implementation": self.implementation}
        attended = attend(attn, partial(kernels.sparse_linear_attention, **options), q, k, v)
        if getattr(attn, "to_gate_logits", None) is not None:  # LTX-2.3's factors of heads
            attended = attended * (2.0 * torch.sigmoid(attn.to_gate_logits(hidden_states)))[..., None]
        attended = attended.flatten(2, 3).type_as(q)
        for layer in list(attn.to_out)[:2]:  # diffusers' processors call no more
            attended = layer(attended)
        return attended


def _project(attn: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return attn.to_qkv(x).chunk(3, dim=-1) if attn.fused_projections else (attn.to_q(x), attn.to_k(x), attn.to_v(x))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs of channels of x [B, S, H, D] by the angles of cos and sin [B|1, S, H|1, D/2]."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).type_as(x)


def add_projections(
    journal: Journal, attentions: SelfAttentions, proj_l: Mapping[str, Mapping[str, torch.Tensor]]
) -> None:
    """Give self-attentions a proj_l. proj_l: for each path the weights, {"weight", "bias"}."""
    for path, attn, _ in attentions:
        if path in proj_l:
            like = attn.to_out[0].weight
            linear = nn.utils.skip_init(nn.Linear, *proj_l[path]["weight"].shape, device=like.device, dtype=like.dtype)
            with torch.no_grad():
                for name, tensor in proj_l[path].items():
                    getattr(linear, name).copy_(tensor)
            linear.requires_grad_(like.requires_grad).train(attn.training)
            journal.set_module(attn, PROJ_L, linear)


def is_projection(name: str) -> bool:
    """True if a parameter belongs to an SLA projection, such as blocks.0.attn1.proj_l.weight."""
    return f".{PROJ_L}." in name


def by_attention(tensors: Mapping[str, _Tensor]) -> dict[str, dict[str, _Tensor]]:
    """Return SLA's projections among some tensors, by the paths of their self-attentions and by part."""
    found: dict[str, dict[str, _Tensor]] = {}
    for name in filter(is_projection, tensors):
        found.setdefault(attention_of(name), {})[name.rpartition(".")[2]] = tensors[name]
    return found


def attention_of(name: str) -> str:
    """Return the path of the self-attention whose projection a tensor's name is."""
    return name.partition(f".{PROJ_L}.")[0]


def use_processors(journal: Journal, attentions: SelfAttentions, config: PatchConfig) -> None:
    """Make the self-attentions that have a proj_l sparse, or all in a family that does not need it."""
    for _, attn, form in attentions:
        if has_projection(attn) or not form.needs_projection:
            options = (config.topk or form.topk, config.blocks, config.implementation, config.in_8_bits("attention"))
            journal.set(attn, "processor", SparseAttnProcessor(attn.processor, form.rotate, *options))


def why_not_sparse(name: str, attentions: SelfAttentions) -> str | None:
    """Return why a model with these self-attentions cannot run the sparse tier, as a sentence, or None."""
    attentions = list(attentions)
    if reason := why_not_replaceable(name, attentions):
        return reason  # such a model has no use for weights with a proj_l
    if not needs_projections(attentions) or any(has_projection(attn) for _, attn, _ in attentions):
        return None
    return (
        f"{name} has no proj_l, a part of weights that were trained with sparse-linear attention (SLA); load them "
        "with trp.load_turbodiffusion, or take another preset: 'block_sparse', whose sparse attention needs no "
        "training, 'exact' or 'quantized'."
    )


def why_not_replaceable(name: str, attentions: SelfAttentions) -> str | None:
    """Return why sparse-linear attention cannot replace these self-attentions, as a sentence, or None."""
    others = {type(attn.processor) for _, attn, form in attentions if not _is_replaceable(attn, form)}
    if not others:
        return None
    # Name the modules too, because several families have a WanAttnProcessor.
    named = ", ".join(sorted(f"{other.__module__}.{other.__qualname__}" for other in others))
    return (
        f"{name} cannot have sparse-linear attention (SLA), which this package does not know for such a model: its "
        f"self-attentions have a {named}. Take another preset: 'exact', 'quantized' or 'block_sparse'."
    )


def _is_replaceable(attn: nn.Module, form: SparseForm | None) -> bool:
    # Helios can multiply the keys of its history, which SparseAttnProcessor does not do.
    multiplies_keys = getattr(attn, "is_amplify_history", False)
    return form is not None and type(attn.processor) is form.processor and not multiplies_keys


def why_other_tier(
    source: str | Path, has_projections: bool, attentions: SelfAttentions, config: PatchConfig
) -> str | None:
    """Return why weights do not suit a tier, as a sentence, or None.

    has_projections: True if the weights have proj_l, so that they were trained with sparse-linear attention.
    """
    is_sparse = isinstance(config, Sparse)
    holds = f"{source} holds weights that were trained"
    if has_projections and not is_sparse:
        return f"{holds} with sparse-linear attention (with proj_l); give the preset 'sparse'."
    if is_sparse and not has_projections and needs_projections(attentions):
        return f"{holds} without sparse-linear attention (no proj_l); give another preset, such as 'quantized'."
    return None


def used_projections(
    stored: Mapping[str, Mapping[str, LazyTensor]], attentions: SelfAttentions
) -> dict[str, dict[str, torch.Tensor]]:
    """Read a file's projections, by the path of the self-attention and by part. If the family needs none, leave out
    those that are zero."""
    loaded = {path: {part: tensor.load() for part, tensor in parts.items()} for path, parts in stored.items()}
    if needs_projections(attentions):
        return loaded
    return {path: parts for path, parts in loaded.items() if any(bool(tensor.any()) for tensor in parts.values())}


def needs_projections(attentions: SelfAttentions) -> bool:
    """True if sparse-linear attention in these self-attentions needs proj_l."""
    return any(form is None or form.needs_projection for _, _, form in attentions)


def has_projection(attn: nn.Module) -> bool:
    """True if a self-attention has the projection of SLA's linear branch."""
    return isinstance(getattr(attn, PROJ_L, None), nn.Module)


def is_sparse(attn: nn.Module) -> bool:
    """True if a self-attention is sparse-linear, perhaps without a linear part."""
    return type(attn.processor) is SparseAttnProcessor


def attention(attn: nn.Module, stream: Stream, call: Call, result: torch.dtype | None) -> Step:
    """Return sparse-linear attention: (q, k, v [B, S, H, D]) -> [B, S, H, D].

    result: the format that the next step takes, or None. For e4m3, attention in 8 bits gives a Quantized [B, S, C] if
    nothing comes between. After an exchange between GPUs the step gives one in any format.
    """
    quantized = call.config.in_8_bits("attention") and call.derivative is None and call.exactly is None
    block_q, block_k = block_sizes(attn.processor, call.device)
    v_format = kernels.default_v_format(call.device) if quantized else None
    gives = FP8 if quantized and result == FP8 and _is_last(attn) else None
    sizes = {"head_dim": attn.inner_dim // attn.heads, "block_q": block_q, "block_k": block_k, "v_format": v_format}
    pick = call.pick(kernels.SPARSE_LINEAR_ATTENTION, kernels.SparseSpec, **sizes, result=gives)
    run = partial(attend, attn, partial(_picked, pick.launch, block_q, block_k, v_format, gives))
    reason = _why_refused(attn, differentiated=call.derivative is not None)
    if reason is not None:
        return Step(run, "no kernel", reason)
    label = formats_label(pick, v_format) if quantized else pick.label
    if attn.processor._parallel_config is not None:
        run, gives = partial(run, gather=tokens_after_exchange(result, call)), result
    return Step(run, f"{label}, {_share(attn, stream, block_k)}", pick.reason, gives=gives)


def _why_refused(attn: nn.Module, *, differentiated: bool) -> str | None:
    """Return the reason why `attend` raises an error on several GPUs, or None."""
    parallel_config = attn.processor._parallel_config
    if parallel_config is None:
        return None
    return why_not_between_all_to_alls(parallel_config, attn.heads, differentiated=differentiated)


def _is_last(attn: nn.Module) -> bool:
    """True if no all-to-all and no call of proj_l comes after the kernel."""
    proj_l = getattr(attn, PROJ_L, None)
    is_alone = proj_l is None or why_not_plain(proj_l, nn.Linear) is None
    return is_alone and attn.processor._parallel_config is None


def _picked(launch, block_q, block_k, v_format, result, q, k, v, weight, bias, *, topk=None, block_map=None):
    block_map = None if block_map is None else block_map.sort(-1).values.int()
    return launch(q, k, v, weight, bias, block_map, topk, block_q, block_k, v_format, result)


def _share(attn: nn.Module, stream: Stream, block_k: int) -> str:
    tokens, processor = stream.tokens_per_sample, attn.processor
    if processor._parallel_config is not None:
        tokens *= processor._parallel_config.context_parallel_config.ulysses_degree
    kept = kernels.kept_blocks(tokens, block_k, processor.topk)
    total = -(-tokens // block_k)
    # TurboT2AV, which has no linear part, keeps one block too.
    note = (
        "no linear part" if not has_projection(attn) else "where the published rule keeps none" if kept.raised else ""
    )
    return f"SLA {kept.count}/{total} blocks" + (f", {note}" if note else "")


def block_sizes(processor: SparseAttnProcessor, device: torch.device) -> BlockSizes:
    """Return the tokens in a block of queries and in a block of keys. A call's softmax format does not change them."""
    return processor.blocks or kernels.sparse_block_sizes(device, quantized=processor.quantized)


def attend(
    attn: nn.Module,
    run: Callable,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gather: OwnTokens | None = None,
) -> Activation:
    """Run sparse-linear attention on q, k, v [B, S, H, D], with the module's present processor and proj_l.

    run: (q, k, v, weight, bias, topk= or block_map=) -> [B, S, H, D], or a Quantized [B, S, C]. gather: as
    `ulysses_attention` takes it.
    """
    parallel_config = attn.processor._parallel_config
    run = partial(_attend_whole, attn, run)
    if parallel_config is None:
        return run(q, k, v)
    check_heads(parallel_config, attn.heads, takes_any_share=False)
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    reason = _why_refused(attn, differentiated=differentiated)
    if reason is not None:
        raise ValueError(f"sparse-linear attention does not run under {reason}; take Ulysses, without gradients.")
    return ulysses_attention(parallel_config, run, q, k, v, gather)


def _attend_whole(attn, run, q, k, v):
    block_map = attn.processor.block_map
    kept = {"topk": attn.processor.topk} if block_map is None else {"block_map": block_map}
    proj_l = getattr(attn, PROJ_L, None)
    if proj_l is None:
        return run(q, k, v, None, None, **kept)
    if why_not_plain(proj_l, nn.Linear) is None:
        # proj_l is small. Offloading may not know it, so it is copied to the inputs' device here.
        weight, bias = (x if x is None else x.to(q.device, q.dtype) for x in (proj_l.weight, proj_l.bias))
        return run(q, k, v, weight, bias, **kept)
    # The module is not plain: it has a LoRA or a hook. So its own call projects the linear branch.
    return run(q, k, v, None, None, **kept) + proj_l(linear_attention(q, k, v))
