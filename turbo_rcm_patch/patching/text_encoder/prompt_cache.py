"""The embeddings of the last prompts, kept so that the same prompt again is not encoded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import torch
from torch import nn


class PromptCache:
    """The embeddings of the prompts that were used last.

    count: how many calls are kept, or 0. A generation with guidance makes two, for its negative prompt too.
    """

    def __init__(self, count: int):
        self.count, self.hits = count, 0
        self._results: OrderedDict[Hashable, torch.Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._results)

    def key(self, encoder: nn.Module, input_ids: torch.Tensor, lengths: Sequence[int]) -> Hashable | None:
        """Return what the embeddings of tokens [B, T] depend on, or None if they are neither kept nor reused.

        Under autograd an encoder whose weights require a gradient has none kept, because kept embeddings have no
        derivative. Weights count by identity, dtype and the count of writes that PyTorch keeps. Changes made through
        ``.data`` are not detected.
        """
        if self.count == 0 or (torch.is_grad_enabled() and any(p.requires_grad for p in encoder.parameters())):
            return None
        rows = input_ids[:, : max(lengths)].tolist()
        tokens = tuple(tuple(row[:length]) for row, length in zip(rows, lengths, strict=True))
        weights = tuple((id(p), p.dtype, 0 if p.is_inference() else p._version) for p in encoder.parameters())
        return tokens, input_ids.device, hash(weights)

    def get(self, key: Hashable | None) -> torch.Tensor | None:
        """Return the kept embeddings, which the caller must not change, or None."""
        found = None if key is None else self._results.pop(key, None)
        if found is not None:
            self._results[key] = found
            self.hits += 1
        return found

    def put(self, key: Hashable | None, hidden: torch.Tensor) -> None:
        """Keep embeddings, and drop those that were used longest ago. Embeddings with a derivative are not kept."""
        if key is None or hidden.requires_grad:
            return
        self._results[key] = hidden
        while len(self._results) > self.count:
            self._results.popitem(last=False)

    def clear(self) -> None:
        """Forget all embeddings."""
        self._results.clear()
