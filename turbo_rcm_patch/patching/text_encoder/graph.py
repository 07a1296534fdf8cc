"""The encoder as CUDA graphs: a prompt then takes no longer than its kernels do.

A graph is of one number of tokens, so that prompts are padded to multiples of TOKENS. It is recorded when a number
comes for the second time, and keeps the memory that its kernels compute with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from transformers import UMT5EncoderModel
from transformers.activations import NewGELUActivation
from transformers.models.umt5.modeling_umt5 import UMT5Block, UMT5Stack

from ...plain import function_bound_to, why_not_read
from ..changes import WhileUnchanged
from ..cuda_graphs import Graphs, Inputs, call_key, why_not_recorded
from ..weights.weight_only import WeightOnlyLinear
from .lean import ENTERED, gives_more, why_not_lean

TOKENS = 64  # prompts are padded to multiples of it
# Classes whose results depend on their inputs, tensors and attributes alone (dropout draws only in training).
_CALLED = (nn.Dropout, nn.Linear, nn.ModuleList, NewGELUActivation, UMT5Block, UMT5Stack, WeightOnlyLinear)


class EncoderGraphs:
    """The CUDA graphs of one patched encoder, and the reasons for calls without them.

    forwards: the forwards that the patch binds, by module. Any other forward on an instance is a hook.
    """

    def __init__(self, encoder: UMT5EncoderModel, forwards: Mapping[nn.Module, Callable]):
        self._encoder, self._forwards, self._graphs = encoder, dict(forwards), Graphs()
        self._why_not_recordable = WhileUnchanged(self._modules, self._look_again)

    def takes(self, called: nn.Module, inputs: Inputs) -> bool:
        """True if `run` may replace this call. If not, count the reason."""
        reason = self._why_not(inputs) if called is self._encoder else "a shallow copy of the encoder"
        if reason is not None:
            self._graphs.eager[reason] += 1
        return reason is None

    def run(self, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens [B, T]: computed when inputs of this shape first come, replayed later."""
        return self._graphs.run(call_key((input_ids, mask)), self._compute, (input_ids, mask))

    def release(self) -> None:
        """Give the memory of all graphs back."""
        self._graphs.clear()

    def __str__(self) -> str:
        graphs = self._graphs
        eager = ", ".join(f"{reason} ({count})" for reason, count in graphs.eager.copy().items())
        memory = f" in {graphs.reserved_bytes / 2**20:.0f} MiB" if graphs.reserved_bytes is not None else ""
        text = f"CUDA graphs: {graphs.kept} kept{memory}; {graphs.replays} calls replayed"
        return f"{text}; run without: {eager}" if eager else text

    def _compute(self, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return type(self._encoder).forward(self._encoder, input_ids=input_ids, attention_mask=mask)[0]

    def _why_not(self, inputs: Inputs) -> str | None:
        if (reason := why_not_recorded(inputs) or self._graphs.failure) is not None:
            return reason
        if gives_more(self._encoder.encoder.config):
            return "other outputs"
        return self._why_not_recordable.get(inputs[0].device)

    def _modules(self) -> list[nn.Module]:
        return list(self._encoder.modules())

    def _look_again(self, device: torch.device) -> str | None:
        """Drop the graphs, because the modules are new or changed. Return why none can be recorded, or None."""
        self._graphs.clear()
        if device.type != self._graphs.device_type:
            return f"{device.type} tensors"
        known = (type(self._encoder), *ENTERED, *_CALLED)
        reasons = (why_not_read(m, known, device, self._own_forward(m)) for m in self._encoder.modules())
        return why_not_lean(self._encoder.encoder) or next(filter(None, reasons), None)

    def _own_forward(self, module: nn.Module) -> object | None:
        """Return the forward on a module if the patch, or a copy of it, put it there."""
        forward, known = vars(module).get("forward"), self._forwards.get(module)
        return forward if known is not None and function_bound_to(module, forward) is known else None
