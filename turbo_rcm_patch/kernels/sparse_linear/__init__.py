"""Sparse-linear attention (SLA): softmax attention to the key blocks that matter, linear attention to all tokens."""
