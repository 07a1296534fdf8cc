"""Captions as WanPipeline hands them to the transformer: the encoder's output, zeros after the last token."""

from __future__ import annotations

import torch
from transformers import UMT5EncoderModel

from .models import MAX_TEXT_TOKENS


def embed(text_encoder: UMT5EncoderModel, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the embeddings [B, MAX_TEXT_TOKENS, TEXT_DIM] of token ids [B, L]."""
    mask = token_ids != text_encoder.config.pad_token_id
    hidden = text_encoder(token_ids, mask.long()).last_hidden_state
    return torch.nn.functional.pad(hidden * mask[..., None], (0, 0, 0, MAX_TEXT_TOKENS - token_ids.shape[1]))
