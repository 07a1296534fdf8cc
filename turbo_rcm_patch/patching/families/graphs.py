"""A transformer's forward as a CUDA graph, for calls whose kernels take longer to launch than to run.

Every replay computes everything from the current inputs and weights.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from torch import nn

from ...config import PatchConfig
from ...plain import function_bound_to
from ..changes import WhileUnchanged
from ..cuda_graphs import Graphs, Inputs, Output, alone, call_key, why_not_recorded
from ..journal import forward_below_hooks
from ..lora.inside_projections import LIVE
from ..steps.context_parallel import forget_graphs, least_of_all, only_shares_tokens, prepare_graphs, ranks_of
from ..steps.plan import Shared, active_backend
from ..steps.residual import warn_of_saturation


class Graphed(NamedTuple):
    """A family's part in its transformer's graphs.

    first_layer: the path of the module whose weight is where inputs must be.
    compute: (transformer, options, inputs) -> the result of the class's own forward.
    is_large: (transformer, inputs, config) -> True if the kernels of such a call take longer to run than to launch.
    why_not_repeatable: (module, device, forward) -> why a module may not be replayed, or None. forward: the patch's.
    """

    first_layer: str
    compute: Callable[..., Output]
    is_large: Callable[[nn.Module, Inputs, PatchConfig], bool]
    why_not_repeatable: Callable[[nn.Module, torch.device, Callable | None], str | None]


class TransformerGraphs:
    """The CUDA graphs of one patched transformer, and the reasons for calls without them.

    forwards: the forwards that the patch binds, by module. Any other forward on an instance is a hook.
    """

    def __init__(self, graphed: Graphed, transformer: nn.Module, shared: Shared, forwards: dict[nn.Module, Callable]):
        self._graphed, self._transformer, self._shared = graphed, transformer, shared
        self._forwards = {module: function_bound_to(module, forward) for module, forward in forwards.items()}
        self._graphs = Graphs()
        self._lora_layers: list[nn.Module] = []  # found when the transformer's modules last changed
        # The recordings hold LoRAs' addresses of prepared products, and the scales of layers that are called.
        self._lora_recorded: tuple[tuple[int, ...], dict[nn.Module, dict]] = (), {}
        self._why_not_recordable = WhileUnchanged(self._objects_read, self._look_again, live=LIVE)

    def takes(self, called: nn.Module, inputs: Inputs, reason: str | None) -> bool:
        """True if `run` may replace this call. If not, count the reason for the summary.

        reason: why the family's own arguments need an ordinary call, or None.
        """
        is_own = called is self._transformer
        reason = self._why_not_call(inputs, reason) if is_own else "a shallow copy of the model"
        if reason is None and not self._is_parallel:
            reason = self._why_not_here(inputs[0].device)  # other GPUs must learn of it: see `run`
        if reason is not None:
            self._graphs.eager[reason] += 1
        return reason is None

    def run(self, inputs: Inputs, options: Hashable = (), reason: str | None = None) -> Output:
        """Return the transformer's result: computed when inputs of these shapes first come, replayed later.

        Under context parallelism every GPU calls this, even if it can only run eagerly: they tell each other.

        options: the arguments of the call that are no tensors. reason: why this call must run eagerly, or None.
        """
        agree, device = alone, inputs[0].device
        if self._is_parallel:
            agree = partial(least_of_all, self._transformer._parallel_config, device)
            reason = self._why_not_here(device) or reason
            if reason is None:
                prepare_graphs(self._graphs)
        if reason is None:
            self._follow_lora()
        key = *call_key(inputs), options, self._shared.why_exact_attention()
        compute = partial(self._graphed.compute, self._transformer, options)
        result = self._graphs.run(key, compute, inputs, agree, reason)
        warn_of_saturation(self._shared)
        return result

    def release(self) -> None:
        """Give the memory of all graphs back."""
        self._graphs.clear()
        forget_graphs(self._graphs)

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

    def _why_not_call(self, inputs: Inputs, given: str | None) -> str | None:
        """Return why this call runs without a graph, or None. All GPUs that share the tokens find the same reason."""
        reason = why_not_recorded(inputs) or given
        if reason is not None:
            return reason
        config = self._shared.config
        if config.cuda_graph == "auto" and self._graphed.is_large(self._transformer, inputs, config):
            return "too large to gain"
        return self._why_off()

    def _why_off(self) -> str | None:
        return "cuda_graph='off'" if self._shared.config.cuda_graph == "off" else None

    def _why_not_here(self, device: torch.device) -> str | None:
        """Return why a call with inputs on a device cannot run as a graph in this process, or None."""
        return f"inputs on {device}" if device != self._device else self._why_not_now()

    def _why_not_now(self) -> str | None:
        """Return why no call of the model in its present state can run as a graph, or None."""
        if (reason := self._why_off() or self._graphs.failure) is not None:
            return reason
        if self._transformer not in self._forwards:
            return "the model had a hook when it was patched"
        backend = active_backend()
        if backend != AttentionBackendName.NATIVE:
            return f"attention backend {AttentionBackendName(backend).value}"
        return self._why_not_recordable.get(self._device)

    @property
    def _is_parallel(self) -> bool:
        return ranks_of(self._transformer._parallel_config) > 1

    def _follow_lora(self) -> None:
        """Update the products of LoRAs in the memory that recordings read. Forget recordings if that does not do."""
        products = self._shared.products
        lora = products.bring_up_to_date(), products.scales_not_read(self._lora_layers)
        if lora != self._lora_recorded:
            self._graphs.clear()
        self._lora_recorded = lora

    @property
    def _device(self) -> torch.device:
        return self._transformer.get_submodule(self._graphed.first_layer).weight.device

    def _own_forward(self, module: nn.Module) -> Callable | None:
        """Return the forward on a module if the patch, or a copy of it, put it there. Otherwise return None."""
        forward = forward_below_hooks(module) if only_shares_tokens(module) else vars(module).get("forward")
        known = self._forwards.get(module)
        return forward if known is not None and function_bound_to(module, forward) is known else None

    def _objects_read(self) -> list[object]:
        """Return all objects whose class and attributes a forward depends on."""
        modules = list(self._transformer.modules())
        return modules + [module.processor for module in modules if "processor" in vars(module)]

    def _look_again(self, device: torch.device) -> str | None:
        """Drop the graphs, because the modules are new or changed. Return why a graph cannot be recorded, or None."""
        self._graphs.clear()
        self._lora_layers = [module for module in self._transformer.modules() if not LIVE.isdisjoint(vars(module))]
        if device.type != self._graphs.device_type:
            return f"{device.type} tensors"
        return next(filter(None, self._reasons(device)), None)

    def _reasons(self, device: torch.device) -> Iterator[str | None]:
        for module in self._transformer.modules():
            yield self._graphed.why_not_repeatable(module, device, self._own_forward(module))


def _in_mib(size: int | None) -> str:
    return "" if size is None else f" in {size / 2**20:.0f} MiB"
