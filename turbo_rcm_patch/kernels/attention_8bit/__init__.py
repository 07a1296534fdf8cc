"""Attention in 8 bits, and the kernels that quantise Q, K and V for it."""
