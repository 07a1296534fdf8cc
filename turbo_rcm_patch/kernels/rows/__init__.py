"""Ops on rows or elements: norms, RoPE, GELU, the skip on its own, and quantising to 8 bits."""
