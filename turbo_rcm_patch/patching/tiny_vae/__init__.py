"""A tiny VAE that decodes in place of a pipeline's own: TAEHV's networks for Wan and Qwen-Image (taew2_1, taew2_2).

network.py     the decoder, and which of its layouts a file has
decoding.py    `use_tiny_vae`, and how to undo it
"""

from .decoding import TinyVae, has_tiny_vae, use_tiny_vae

__all__ = ["TinyVae", "has_tiny_vae", "use_tiny_vae"]
