"""Wan's text encoder, transformers' UMT5EncoderModel: real tokens only, weights in 8 bits, prompts kept.

apply.py         `patch_text_encoder`, and how to undo it
forward.py       the encoder's forward
lean.py          checks that it can run without calling each module
graph.py         the forward as CUDA graphs
prompt_cache.py  the embeddings of the last prompts
"""

from .apply import TextEncoderPatch, has_graphs, patch_text_encoder, runs_lean

__all__ = ["TextEncoderPatch", "has_graphs", "patch_text_encoder", "runs_lean"]
