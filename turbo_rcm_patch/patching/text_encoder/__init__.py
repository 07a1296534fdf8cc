"""Wan's text encoder, transformers' UMT5EncoderModel: real tokens only, weights in 8 bits, prompts kept.

apply.py      `patch_text_encoder`, and how to undo it
forward.py    the encoder's forward
kept.py       the embeddings of the last prompts
"""

from .apply import TextEncoderPatch, patch_text_encoder

__all__ = ["TextEncoderPatch", "patch_text_encoder"]
