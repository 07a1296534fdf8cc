"""The masks of prompts. diffusers' connectors fill a prompt up with learned tokens, so that its mask hides nothing.

diffusers would add a mask of zeros to the scores, which few attention kernels can do. The patched model leaves it out.
If a mask hides the same tokens of every sample, it leaves these tokens out instead. Both results are the same, because
exp(-10000) is 0.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict

import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformer3DModel

MASKS = "_turbo_rcm_patch_masks"  # the attribute of a patched transformer that holds its SeenMasks
# The masks, and the prompts that they are of.
PROMPT_MASKS = {
    "encoder_attention_mask": "encoder_hidden_states",
    "audio_encoder_attention_mask": "audio_encoder_hidden_states",
}
ALL = "all"
Kept = str | torch.Tensor | None  # ALL, the indices of tokens, or None
MOST = 8  # masks that are remembered; a step of guidance has two


class SeenMasks:
    """Tells which tokens masks keep.

    A mask is read once, which waits for the GPU, and again if it was written to. An inference tensor does not count
    writes, and is read in every call.
    """

    def __init__(self):
        self._seen: OrderedDict[int, tuple[weakref.ref, int, Kept]] = OrderedDict()

    def kept(self, mask: torch.Tensor) -> Kept:
        """Return the tokens that a multiplicative mask [B, L] keeps: all, these, or None if samples differ in them."""
        if mask.is_inference():
            return _kept(mask)
        reference, version, answer = self._seen.get(id(mask), (lambda: None, 0, None))
        if reference() is mask and version == mask._version:
            return answer
        answer = _kept(mask)
        self._seen[id(mask)] = weakref.ref(mask), mask._version, answer
        while len(self._seen) > MOST:
            self._seen.popitem(last=False)
        return answer

    def __reduce__(self) -> tuple:
        """Copy and pickle as empty: masks belong to a generation."""
        return SeenMasks, ()


def _kept(mask: torch.Tensor) -> Kept:
    first = mask[:1]
    same, hides, any_left = torch.stack(
        [((mask == first) & ((mask == 0) | (mask == 1))).all(), (first == 0).any(), (first == 1).any()]
    ).tolist()
    if not same or not any_left:
        return None
    return first[0].nonzero().flatten() if hides else ALL


def leave_out_masks(transformer: LTX2VideoTransformer3DModel, arguments: dict[str, object]) -> None:
    """Take masks of prompts out of the arguments of the transformer's forward, with the tokens that they hide."""
    for name, prompt in PROMPT_MASKS.items():
        mask, tokens = arguments.get(name), arguments.get(prompt)
        if mask is None or not _may_read(transformer, mask) or tokens is None or tokens.shape[1] != mask.shape[1]:
            continue
        kept = getattr(transformer, MASKS).kept(mask)
        if kept is None:
            continue
        arguments[name] = None
        if kept is not ALL:
            arguments[prompt] = tokens.index_select(1, kept.to(tokens.device))


def _may_read(transformer: LTX2VideoTransformer3DModel, mask: torch.Tensor) -> bool:
    """True if a mask's values may be read now, and every GPU that shares the tokens would see the same."""
    if torch.compiler.is_compiling() or type(mask) is not torch.Tensor or mask.ndim != 2 or mask.is_meta:
        return False
    if transformer._parallel_config is not None:
        return False
    return not (mask.is_cuda and torch.cuda.is_current_stream_capturing())
