"""The masks of prompts. diffusers' connectors fill a prompt up with learned tokens, so that its mask hides nothing.

diffusers would add a mask of zeros to the scores, which few attention kernels can do. The patched model leaves it out.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict

import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformer3DModel

MASKS = "_turbo_rcm_patch_masks"  # the attribute of a patched transformer that holds its SeenMasks
PROMPT_MASKS = ("encoder_attention_mask", "audio_encoder_attention_mask")
MOST = 8  # masks that are remembered; a step of guidance has two


class SeenMasks:
    """Tells which masks hide nothing.

    A mask is read once, which waits for the GPU, and again if it was written to. An inference tensor does not count
    writes, and is read in every call.
    """

    def __init__(self):
        self._seen: OrderedDict[int, tuple[weakref.ref, int, bool]] = OrderedDict()

    def hides_nothing(self, mask: torch.Tensor) -> bool:
        """True if a multiplicative mask [B, L] is all ones."""
        if mask.is_inference():
            return bool((mask == 1).all())
        reference, version, answer = self._seen.get(id(mask), (lambda: None, 0, False))
        if reference() is mask and version == mask._version:
            return answer
        answer = bool((mask == 1).all())
        self._seen[id(mask)] = weakref.ref(mask), mask._version, answer
        while len(self._seen) > MOST:
            self._seen.popitem(last=False)
        return answer

    def __deepcopy__(self, memo: dict[int, object]) -> SeenMasks:
        """Return an empty one, because masks belong to a generation."""
        return SeenMasks()

    def __reduce__(self) -> tuple:
        return SeenMasks, ()


def leave_out_masks(transformer: LTX2VideoTransformer3DModel, arguments: dict[str, object]) -> None:
    """Take the masks of prompts that hide nothing out of the arguments of the transformer's forward."""
    for name in PROMPT_MASKS:
        mask = arguments.get(name)
        if mask is not None and _may_read(transformer, mask) and getattr(transformer, MASKS).hides_nothing(mask):
            arguments[name] = None


def _may_read(transformer: LTX2VideoTransformer3DModel, mask: torch.Tensor) -> bool:
    """True if a mask's values may be read now, and every GPU that shares the tokens would see the same."""
    if torch.compiler.is_compiling() or type(mask) is not torch.Tensor or mask.ndim != 2 or mask.is_meta:
        return False
    if transformer._parallel_config is not None:
        return False
    return not (mask.is_cuda and torch.cuda.is_current_stream_capturing())
