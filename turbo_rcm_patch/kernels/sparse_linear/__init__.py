"""Sparse-linear attention (SLA): the key blocks that matter exactly, all tokens linearly."""
