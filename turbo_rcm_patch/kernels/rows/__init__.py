"""Ops that walk rows: norms, RoPE, GELU, the skip on its own, and rounding to 8 bits."""
