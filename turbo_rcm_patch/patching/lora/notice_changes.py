"""Methods that the patch binds on a transformer to notice changes of its LoRAs that tensors do not show."""

from __future__ import annotations

from torch import nn

from ..steps.plan import SHARED


def load_lora_adapter(self: nn.Module, *args: object, **options: object) -> None:
    """Load a LoRA as diffusers does, then prepare LoRA products again.

    A hot swap writes through the matrices' ``.data``, and PyTorch does not count such writes.
    """
    try:
        type(self).load_lora_adapter(self, *args, **options)
    finally:
        getattr(self, SHARED).products.forget()


def apply_to_tensors(self: nn.Module, *args: object, **options: object) -> nn.Module:
    """Move the model as nn.Module's ``_apply`` does, then free LoRA products that were left on the old device."""
    type(self)._apply(self, *args, **options)
    getattr(self, SHARED).products.release_moved()
    return self
