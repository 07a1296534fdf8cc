"""What the patch binds on a transformer besides forwards, to hear of changes of its LoRAs that tensors do not show."""

from __future__ import annotations

from torch import nn

from ..steps.plan import SHARED


def load_lora_adapter(self: nn.Module, *args: object, **options: object) -> None:
    """The method of diffusers' class. A hot swap writes through the matrices' ``.data``, which nothing counts."""
    try:
        type(self).load_lora_adapter(self, *args, **options)
    finally:
        getattr(self, SHARED).products.forget()


def apply_to_tensors(self: nn.Module, *args: object, **options: object) -> nn.Module:
    """nn.Module's ``_apply``, by which a model moves, as offloading does it: nothing prepared stays behind."""
    type(self)._apply(self, *args, **options)
    getattr(self, SHARED).products.release_moved()
    return self
