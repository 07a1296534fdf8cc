"""WanTransformer3DModel.forward as a CUDA graph, for calls whose kernels take longer to launch than to run.

Every replay computes everything from the current inputs and weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.transformer_wan import WanAttention, WanTransformer3DModel
from torch import nn

from ....config import SLA_TOPK, PatchConfig, Sparse
from ....plain import function_bound_to
from ...changes import WhileUnchanged
from ...cuda_graphs import Graphs, Inputs, call_key, why_not_recorded
from ...lora.inside_projections import LIVE
from ...steps.plan import Shared
from ..family import graph_of
from .block import wan_block
from .forward import warn_of_saturation
from .repeatable import why_not_repeatable

# Launching a block takes an H200's host 2.6 ms, and 3.7 in 8 bits (results page, host time). In this time the GPU does
# 1.6e12 FLOP of a bf16 block, or 3.3e12 of one in 8 bits, which count half. The rest is for slower hosts.
MOST_FLOPS_PER_BLOCK = 2e12

WAN_BLOCK = wan_block(WanAttention)


def transformer_forward(
    self: WanTransformer3DModel,
    hidden_states: torch.Tensor,
    timestep: torch.LongTensor,
    encoder_hidden_states: torch.Tensor,
    encoder_hidden_states_image: torch.Tensor | None = None,
    return_dict: bool = True,
    attention_kwargs: dict[str, Any] | None = None,
) -> Transformer2DModelOutput | tuple[torch.Tensor]:
    """Replay WanTransformer3DModel.forward from a CUDA graph if that is safe and faster. Bound on instances.

    hidden_states [B, C, F, H, W], timestep [B] or per token [B, S], encoder_hidden_states [B, L, text_dim],
    encoder_hidden_states_image [B, L', image_dim] or None; the sample is [B, C_out, F, H, W].
    """
    inputs = (hidden_states, timestep, encoder_hidden_states, encoder_hidden_states_image)
    if torch.compiler.is_compiling() or not (graph := graph_of(self)).takes(self, inputs, attention_kwargs):
        # Pass keywords: diffusers' decorator around the class's forward reads a LoRA's scale only from keywords.
        return type(self).forward(self, *inputs, return_dict=return_dict, attention_kwargs=attention_kwargs)
    sample = graph.sample(inputs)
    return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)


class WanGraph:
    """The CUDA graphs of one patched transformer, and the reasons for calls without them.

    forwards: the forwards that the patch binds, by module. Any other forward on an instance is a hook.
    """

    def __init__(self, transformer: WanTransformer3DModel, shared: Shared, forwards: dict[nn.Module, Callable]):
        self._transformer, self._shared = transformer, shared
        self._forwards = {module: function_bound_to(module, forward) for module, forward in forwards.items()}
        self._graphs = Graphs()
        self._lora_layers: list[nn.Module] = []  # found when the transformer's modules last changed
        # The recordings hold LoRAs' addresses of prepared products, and the scales of layers that are called.
        self._lora_recorded: tuple[tuple[int, ...], dict[nn.Module, dict]] = (), {}
        self._why_not_recordable = WhileUnchanged(self._objects_read, self._look_again, live=LIVE)

    def takes(self, called: nn.Module, inputs: Inputs, attention_kwargs: dict[str, Any] | None) -> bool:
        """True if `sample` may replace this call. If not, count the reason for the summary."""
        is_own = called is self._transformer
        reason = self._why_not_call(inputs, attention_kwargs) if is_own else "a shallow copy of the model"
        if reason is not None:
            self._graphs.eager[reason] += 1
        return reason is None

    def sample(self, inputs: Inputs) -> torch.Tensor:
        """Return the transformer's sample: computed when inputs of these shapes first come, replayed later."""
        self._follow_lora()
        key = *call_key(inputs), self._shared.why_exact_attention()
        sample = self._graphs.run(key, self._compute, inputs)
        warn_of_saturation(self._shared)
        return sample

    def release(self) -> None:
        """Give the memory of all graphs back."""
        self._graphs.clear()

    @property
    def kept(self) -> int:
        """The number of graphs."""
        return self._graphs.kept

    @property
    def reserved_bytes(self) -> int | None:
        """Memory that only the graphs can use, or None if the allocator does not tell."""
        return self._graphs.reserved_bytes

    def note(self) -> str:
        """Return a line for the summary: the number of graphs, of replayed calls, and of other calls by reason."""
        graphs = self._graphs
        reason = self._why_not_now()
        state = f"none now: {reason}" if reason else f"{graphs.kept} kept{_in_mib(graphs.reserved_bytes)}"
        eager = ", ".join(f"{reason} ({count})" for reason, count in graphs.eager.copy().items())
        parts = [state, f"{graphs.replays} calls replayed", f"run without: {eager}" if eager else ""]
        return f"CUDA graphs ({self._shared.config.cuda_graph}): {'; '.join(filter(None, parts))}"

    def _compute(self, *inputs: torch.Tensor | None) -> torch.Tensor:
        return type(self._transformer).forward(self._transformer, *inputs, return_dict=False)[0]

    def _why_not_call(self, inputs: Inputs, attention_kwargs: dict[str, Any] | None) -> str | None:
        """Return why this call runs without a graph, or None. Cheap checks come first."""
        reason = why_not_recorded(inputs)
        if reason is not None:
            return reason
        if attention_kwargs is not None:
            return "attention_kwargs"
        if inputs[0].device != self._device:
            return f"inputs on {inputs[0].device}"
        if inputs[0].ndim != 5:
            return "latents without five dimensions"
        config = self._shared.config
        too_large = flops_per_block(self._transformer, inputs[0], config) > MOST_FLOPS_PER_BLOCK
        if too_large and config.cuda_graph == "auto":
            return "too large to gain"
        return self._why_not_now()

    def _why_not_now(self) -> str | None:
        """Return why no call of the model in its present state can run as a graph, or None."""
        if self._shared.config.cuda_graph == "off":
            return "cuda_graph='off'"
        if self._transformer not in self._forwards:
            return "the model had a hook when it was patched"
        if self._graphs.failure:
            return self._graphs.failure
        backend = _AttentionBackendRegistry.get_active_backend()[0]
        if backend != AttentionBackendName.NATIVE:
            return f"attention backend {AttentionBackendName(backend).value}"
        return self._why_not_recordable.get(self._device)

    def _follow_lora(self) -> None:
        """Update the products of LoRAs in the memory that recordings read. Forget recordings if that does not do."""
        products = self._shared.products
        lora = products.bring_up_to_date(), products.scales_not_read(self._lora_layers)
        if lora != self._lora_recorded:
            self._graphs.clear()
        self._lora_recorded = lora

    @property
    def _device(self) -> torch.device:
        return self._transformer.patch_embedding.weight.device

    def _own_forward(self, module: nn.Module) -> Callable | None:
        """Return the forward on a module if the patch, or a copy of it, put it there. Otherwise return None."""
        forward, known = vars(module).get("forward"), self._forwards.get(module)
        return forward if known is not None and function_bound_to(module, forward) is known else None

    def _objects_read(self) -> list[object]:
        """Return all objects whose class and attributes a forward depends on."""
        modules = list(self._transformer.modules())
        return modules + [module.processor for module in modules if isinstance(module, WanAttention)]

    def _look_again(self, device: torch.device) -> str | None:
        """Drop the graphs, because the modules are new or changed. Return why a graph cannot be recorded, or None."""
        self._graphs.clear()
        self._lora_layers = [module for module in self._transformer.modules() if not LIVE.isdisjoint(vars(module))]
        if device.type != self._graphs.device_type:
            return f"{device.type} tensors"
        reasons = (why_not_repeatable(m, device, WAN_BLOCK, self._own_forward(m)) for m in self._transformer.modules())
        return next(filter(None, reasons), None)


def _in_mib(size: int | None) -> str:
    return "" if size is None else f" in {size / 2**20:.0f} MiB"


def flops_per_block(transformer: WanTransformer3DModel, latents: torch.Tensor, config: PatchConfig) -> float:
    """Return the floating-point operations of one block's linears and self-attention for latents [B, C, F, H, W].

    Operations in 8 bits count half, because they are twice as fast. Key blocks that SLA skips do not count.
    """
    widths = transformer.config
    batch, _, *sizes = latents.shape
    tokens = math.prod(size // patch for size, patch in zip(sizes, widths.patch_size, strict=True))
    dim = widths.num_attention_heads * widths.attention_head_dim
    # Per token: q, k, v and out of self-attention, q and out of cross-attention, two linears of the feed-forward.
    linears = 2 * (6 * dim * dim + 2 * dim * widths.ffn_dim)
    kept = config.topk or SLA_TOPK if isinstance(config, Sparse) else 1.0
    costs = {"linears": linears, "attention": 4 * tokens * dim * kept}
    return batch * tokens * sum(flops * (0.5 if config.in_8_bits(part) else 1.0) for part, flops in costs.items())
