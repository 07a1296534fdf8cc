"""Linears fused into one GEMM: with the skip, with GELU, or the projections of Q, K and V together."""
