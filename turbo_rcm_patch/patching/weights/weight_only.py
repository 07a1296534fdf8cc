"""A linear whose weight is stored in 8 bits, and which multiplies in the model's dtype: its inputs are not rounded.

    values [N, K] int8, scale [N, K / GROUP] bf16        weight ≈ values · scale, one scale for GROUP values of a row

It costs 9 bits for each value. Larger groups take 8.1 to 8.5 bits, but the embeddings of a UMT5 encoder then err more
than twice as much as in bf16 (docs/designs.md). In each call the whole weight is brought to the model's dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels.quantized import INT8, LARGEST, TINY, QuantizedWeight
from .linear_8bit import SCALE, VALUES, QuantizedLinear, fastest, linears_are_replaced, rows_at_once

GROUP = 16  # values of a row with one scale


class WeightOnlyLinear(QuantizedLinear):
    """An nn.Linear with its weight in 8 bits, whose inputs and results stay in the model's dtype.

    The original is on the CPU or freed, and can only be read, as in QuantizedLinear.
    """

    parts = (VALUES, SCALE)

    def parameters_in_8_bits(self) -> list[nn.Parameter]:
        """Return the values and the scale, on the device where they are."""
        return [self._parameters[name] for name in self.parts]

    def quantized(self) -> QuantizedWeight:
        """Raise TypeError: kernels that round the inputs to 8 bits do not take this weight."""
        raise TypeError("this linear only stores its weight in 8 bits; call it.")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute what nn.Linear does. The 8-bit weight comes to the input's device, and there to the model's dtype."""
        if not isinstance(self, WeightOnlyLinear):  # a hook kept this method beyond `end`
            return F.linear(input, self.weight, self.bias)
        if linears_are_replaced():
            return nn.Linear.forward(self, input)
        # Only copies to a GPU are in order with what runs there.
        parts = (part.to(input.device, non_blocking=input.is_cuda) for part in self.parameters_in_8_bits())
        return F.linear(input, bring_back(*parts, self.weight_dtype), self.bias)


@torch.inference_mode(False)
@torch.no_grad()
def convert_in_groups(weight: torch.Tensor, device: torch.device) -> QuantizedWeight:
    """Return a weight [N, K] in int8 on a device, with scales [N, K / GROUP]; it is converted some rows at a time."""
    rows, width = weight.shape
    where = device if weight.is_meta else fastest(device)
    values = torch.empty(rows, width, dtype=INT8, device=where)
    scale = torch.empty(rows, width // GROUP, dtype=torch.bfloat16, device=where)
    for part in () if weight.is_meta else rows_at_once(weight):
        groups = weight[part].to(where, torch.float32).unflatten(1, (-1, GROUP))
        largest = groups.abs().amax(-1)
        # Rounding the scale to bf16 leaves the largest value below 127.5 scales.
        scale[part] = (largest / largest.new_full((), LARGEST[INT8])).clamp_min(TINY)
        values[part] = (groups / scale[part].float()[..., None]).round().flatten(1)
    return QuantizedWeight(values.to(device), scale.to(device))


def bring_back(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``values · scale`` [N, K], rounded once to a dtype. In bf16 it is one pass over the weight."""
    factor = scale if dtype == torch.bfloat16 else scale.float()
    return (values.unflatten(1, (-1, GROUP)) * factor[..., None]).flatten(1).to(dtype)
