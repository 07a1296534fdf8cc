"""What the parameter of a weight in 8 bits becomes, for those who hold it from before: one whose ``.data`` is counted.

PyTorch counts what is written to a parameter, so that the 8-bit weight is converted anew, but nothing that is written
through its ``.data``, which is what much code does to write without autograd. A class that watches views and tensors of
`state_dict` too, by ``__torch_function__``, was tried: torch.compile and function transforms then refuse them.
"""

from __future__ import annotations

import torch
from torch import nn

from .read_only import EightBitWeight, check_shape


class OriginalParameter(nn.Parameter):
    """A parameter whose ``.data`` shares its count of writes, as what ``detach()`` returns does."""

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        check_shape(self, value)
        if value.is_inference() or isinstance(value, EightBitWeight):
            with torch.inference_mode(False):  # a tensor whose writes are counted, and whose memory is its own
                value = value.clone()
        torch.Tensor.data.__set__(self, value)
        torch.autograd.graph.increment_version(self)

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        """Of PyTorch's own class, as what pickle gives back is."""
        memo[id(self)] = nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
        return memo[id(self)]
