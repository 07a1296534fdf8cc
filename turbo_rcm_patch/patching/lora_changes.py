"""What the patch binds on a transformer besides forwards, to hear of changes of its LoRAs that tensors do not show."""

from __future__ import annotations

from torch import nn

from .plan import shared_of


def load_lora_adapter(self: nn.Module, *args: object, **options: object) -> None:
    """The method of diffusers' class. A hot swap writes through the matrices' ``.data``, which nothing counts."""
    try:
        type(self).load_lora_adapter(self, *args, **options)
    finally:
        shared_of(self).products.forget()
